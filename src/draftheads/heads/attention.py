"""Transformer layers for draft heads, and the history they attend to; sized as the target's, weights their own.

Knows nothing of models. Alphabet: B rows, S queries, C slots of a history, H query heads, G key-value heads,
d their size, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from draftheads.draft import Context
from draftheads.errors import InvalidSettings
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.kernels import PackedLinear, stacked

_FIRST_CAPACITY = 64  # slots of a new history; it doubles
_MOST_UNREAD = 256  # tokens of a row that a head puts aside: reading more at once would hold up the others


@dataclass(frozen=True)
class LayerConfig(HeadConfig):
    """Options of heads with transformer layers, which training takes from the target."""

    num_attention_heads: int = 4
    """H, query heads of a transformer layer."""
    num_key_value_heads: int = 4
    """G, its key-value heads; each serves H/G query heads."""
    head_size: int = 16
    """d, numbers in a query, key or value."""
    intermediate_size: int = 128
    """Numbers in the middle of a transformer layer's feed-forward part."""
    rope_theta: float = 10000.0
    """Base of the rotary positions."""
    norm_epsilon: float = 1e-5
    """Added to mean squares by RMS norms."""

    has_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_attention_heads", "num_key_value_heads", "head_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidSettings(
                f"num_attention_heads is {self.num_attention_heads}; "
                f"it must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_size % 2:
            raise InvalidSettings(f"head_size is {self.head_size}; rotary positions need an even number")
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be above 0")


class KeysValues(NamedTuple):
    """What is attended to; the leading dimensions say of what."""

    keys: Tensor  # (…, G, d)
    values: Tensor  # (…, G, d)

    def of(self, rows: Tensor) -> "KeysValues":
        """Those of some rows."""
        return KeysValues(self.keys[rows], self.values[rows])


class History:
    """Keys and values of all accepted tokens of the rows at work, for each of some layers.

    Slots are positions. What is written beyond a row's count is not kept: the next write begins there.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: list[KeysValues | None] = [None] * num_layers
        self.counts = torch.zeros(0, dtype=torch.long, device="cpu")  # (B,) tokens of each row

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.counts)

    def join(self, batch: int, device: torch.device) -> None:
        """New rows stand behind the old ones, with nothing kept."""
        counts = self.counts.to(device)
        self.counts = torch.cat([counts, counts.new_zeros(batch - len(counts))])

    def span(self, rows: slice, length: int) -> tuple[Tensor, int]:
        """Positions of the next ``length`` tokens of some rows, (rows, length), and how many slots they make."""
        positions = self.counts[rows, None] + torch.arange(length, device=self.counts.device)
        return positions, int(positions[:, -1].max()) + 1

    def write(self, layer: int, rows: slice, new: KeysValues, positions: Tensor, longest: int) -> KeysValues:
        """Puts keys and values of some rows at positions (rows, P); returns those rows' slots up to ``longest``."""
        kept = self._with_room(layer, new, longest)
        index = torch.arange(rows.start, rows.stop, device=positions.device)[:, None]
        for old, values in zip(kept, new, strict=True):
            old[index, positions] = values
        return KeysValues(*(part[rows, :longest] for part in kept))

    def accepted(self, layer: int) -> tuple[KeysValues, Tensor]:
        """What is kept of a layer: slots (B, C, G, d), and a mask (B, C) of those that count."""
        kept = self.layers[layer]
        assert kept is not None, "a history is read after it was written"
        longest = int(self.counts.max())
        seen = KeysValues(*(part[: self.num_rows, :longest] for part in kept))
        return seen, torch.arange(longest, device=self.counts.device) < self.counts[:, None]

    def accept(self, rows: slice, counts: Tensor) -> None:
        """So many of the tokens written last are kept, (rows,)."""
        self.counts[rows] += counts

    def keep(self, rows: Tensor) -> None:
        """Rows left or moved: row ``rows[i]`` is row i from now on."""
        if len(rows) == 0:
            self.layers = [None] * len(self.layers)
            self.counts = self.counts[:0]
            return
        rows = rows.to(self.counts.device)
        self.counts = self.counts[rows]
        self.layers = [None if kept is None else kept.of(rows) for kept in self.layers]

    def _with_room(self, layer: int, new: KeysValues, longest: int) -> KeysValues:
        """The layer's buffers, for all rows and ``longest`` slots at least."""
        kept = self.layers[layer]
        if kept is not None and kept.keys.shape[0] >= self.num_rows and kept.keys.shape[1] >= longest:
            return kept
        capacity = _FIRST_CAPACITY if kept is None else kept.keys.shape[1]
        while capacity < longest:
            capacity *= 2
        grown = KeysValues(*(part.new_zeros(self.num_rows, capacity, *part.shape[2:]) for part in new))
        if kept is not None:
            for old, part in zip(kept, grown, strict=True):
                part[: old.shape[0], : old.shape[1]] = old
        self.layers[layer] = grown
        return grown


class RmsNorm(nn.Module):
    """x / rms(x) · w, computed in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.epsilon).to(x.dtype) * self.weight


class FeedForward(nn.Module):
    """W_down (SiLU(W_gate x) · W_up x)."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)
        self.both: PackedLinear | None = None
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self.both is None else self.both(x).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out

    def fuse(self) -> None:
        """One product for gate and up."""
        self.both = stacked([self.gate_proj, self.up_proj])
        del self.gate_proj, self.up_proj


class TransformerLayer(nn.Module):
    """Attention, then a feed-forward part, each on RMS-normed inputs and added to them, as Llama's layers are.

    What is added starts as zero, so that a new layer is the identity: a head that reads through it starts as one that
    does not have it.

    Args:
        config: sizes.
        rotary: turn queries and keys by their positions; off where positions are added to the inputs.
        input_norm: norm the inputs of attention; off where they come normed (EAGLE).
    """

    def __init__(self, config: LayerConfig, *, rotary: bool = True, input_norm: bool = True) -> None:
        super().__init__()
        size, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.heads, self.groups = heads, groups
        self.head_size, self.theta = config.head_size, config.rope_theta
        self.rotary = rotary
        self.input_norm = RmsNorm(size, config.norm_epsilon) if input_norm else nn.Identity()
        self.q_proj = nn.Linear(size, heads * config.head_size, bias=False)
        self.k_proj = nn.Linear(size, groups * config.head_size, bias=False)
        self.v_proj = nn.Linear(size, groups * config.head_size, bias=False)
        self.o_proj = nn.Linear(heads * config.head_size, size, bias=False)
        self.middle_norm = RmsNorm(size, config.norm_epsilon)
        self.feed_forward = FeedForward(size, config.intermediate_size)
        self.qkv: PackedLinear | None = None
        nn.init.zeros_(self.o_proj.weight)

    def fuse(self) -> None:
        """One product for queries, keys and values."""
        self.qkv = stacked([self.q_proj, self.k_proj, self.v_proj])
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, KeysValues]:
        """Queries (B, S, H, d), keys and values (B, S, G, d) of inputs (B, S, D) at positions (1 or B, S)."""
        normed = self.input_norm(x)
        if self.qkv is None:
            every = torch.cat([self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)], -1)
        else:
            every = self.qkv(normed)
        heads = every.view(*x.shape[:2], -1, self.head_size)
        q, k, v = heads.split([self.heads, self.groups, self.groups], 2)
        if self.rotary:
            q, k = _rotated(q, positions, self.theta), _rotated(k, positions, self.theta)
        return q, KeysValues(k, v)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (B, S, D) from its inputs and what attention gave, (B, S, H, d)."""
        x = x + self.o_proj(attended.flatten(2))
        out: Tensor = x + self.feed_forward(self.middle_norm(x))
        return out

    def step(self, x: Tensor, history: History, layer: int, rows: slice) -> Tensor:
        """(B, P, D) -> (B, P, D), the next tokens of some rows; their keys and values go into the history."""
        positions, longest = history.span(rows, x.shape[1])
        q, new = self.project(x, positions)
        seen = history.write(layer, rows, new, positions, longest)
        return self.finish(x, attend(q, seen, causal_mask(positions, longest)))

    def forward(self, x: Tensor, *, causal: bool = True) -> Tensor:
        """(B, S, D) -> (B, S, D), whole texts from position 0 on; ``causal`` off lets all see all."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        q, seen = self.project(x, positions)
        return self.finish(x, attend(q, seen, causal=causal))


def attend(queries: Tensor, seen: KeysValues, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """Attention of queries (B, S, H, d) over (B, C, G, d) keys and values, by a mask (B, S, C), True where seen.

    The query heads of a key-value head stand as queries side by side: what kernels with grouped heads do slowly.
    """
    batch, length, heads, size = queries.shape
    groups = seen.keys.shape[2]
    if causal:  # kernels know this mask
        q, k, v = (part.transpose(1, 2) for part in (queries, seen.keys, seen.values))
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    grouped = queries.view(batch, length, groups, heads // groups, size)
    q = grouped.permute(0, 2, 1, 3, 4).flatten(2, 3)  # (B, G, S·H/G, d)
    k, v = (part.transpose(1, 2) for part in seen)  # (B, G, C, d)
    if mask is not None:
        mask = mask.repeat_interleave(heads // groups, dim=1)[:, None]  # (B, 1, S·H/G, C)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return found.view(batch, groups, length, heads // groups, size).permute(0, 2, 1, 3, 4).flatten(2, 3)


def attend_with_path(queries: Tensor, seen: KeysValues, mask: Tensor, path: KeysValues) -> Tensor:
    """Attention where each query has some keys and values of its own besides those that all of its row see.

    Args:
        queries: (B, S, H, d).
        seen: (B, C, G, d), by the mask (1 or B, S or 1, C).
        mask: True where seen.
        path: (B, S, L, G, d).
    """
    batch, length, heads, size = queries.shape
    groups = seen.keys.shape[2]
    q = queries.view(batch, length, groups, heads // groups, size) * size**-0.5
    common = torch.einsum("bsgrd,bcgd->bgsrc", q, seen.keys)
    own = torch.einsum("bsgrd,bslgd->bgsrl", q, path.keys)
    common = common.masked_fill(~mask[:, None, :, None], -torch.inf)
    weights = torch.cat([common, own], -1).float().softmax(-1).to(q.dtype)
    shared, private = weights.split([common.shape[-1], own.shape[-1]], -1)
    found = torch.einsum("bgsrc,bcgd->bsgrd", shared, seen.values)
    found = found + torch.einsum("bgsrl,bslgd->bsgrd", private, path.values)
    return found.flatten(2, 3)


class StatefulHead(DraftHead):
    """A head that reads all accepted tokens: it keeps a :class:`History` of its rows and reads each token once.

    On a CPU the tokens of steps without a draft are put aside. They are read before the next draft, or together when a
    row has many of them, which costs less than to read them step by step.
    """

    needs_history: ClassVar[bool] = True

    def __init__(self, config: LayerConfig, num_layers: int) -> None:
        super().__init__(config)
        self.history = History(num_layers)
        self.unread: list[list[tuple[Tensor, Tensor]]] = []  # for each row: hidden state (D,) and id () of each token

    @abstractmethod
    def read(self, context: Context, rows: slice) -> Tensor:
        """Reads the tokens of some rows' contexts with the layers, whose history is ready for them.

        Args:
            context: of those rows.
            rows: which of the history's they are. It takes care of the counts.

        Returns:
            What guesses begin with, (rows, …).
        """

    def advance(self, context: Context) -> Tensor:
        """What guesses begin with, (B, …), once the new tokens of all rows are read.

        Rows that have just joined bring whole prompts: they are read apart from the others, which bring a few tokens.

        Raises:
            ValueError: the context has fewer rows than there are: some left, and ``keep`` was not told.
        """
        batch = self.num_rows + context.num_new_rows(self.num_rows)
        context = self.in_own_type(self._with_unread(context))
        known = self.history.num_rows
        self.history.join(batch, context.root_ids.device)
        parts = []
        for rows in (slice(0, known), slice(known, batch)):
            if rows.start == rows.stop:
                continue
            width = int(context.num_accepted[rows].max()) if 0 < known < batch else context.hidden.shape[1]
            part = Context(
                context.hidden[rows, :width],
                context.token_ids[rows, :width],
                context.num_accepted[rows],
                context.root_ids[rows],
            )
            parts.append(self.read(part, rows))
            self.history.accept(rows, part.num_accepted)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def follow(self, context: Context) -> None:
        """Puts the new tokens aside, or reads them where that is no use or they have become many."""
        joins_others = context.num_new_rows(self.num_rows) > 0 and self.history.num_rows > 0
        if (
            context.root_ids.device.type != "cpu"
            or joins_others
            or max(map(len, self.unread), default=0) > _MOST_UNREAD
        ):
            self.advance(context)
            return
        self.unread += [[] for _ in range(len(context.root_ids) - len(self.unread))]
        for row, count in enumerate(context.num_accepted.tolist()):
            hidden, tokens = context.hidden[row, :count].clone(), context.token_ids[row, :count].clone()
            self.unread[row] += zip(hidden, tokens, strict=True)

    @property
    def num_rows(self) -> int:
        """Rows at work, read or not."""
        return max(self.history.num_rows, len(self.unread))

    def _with_unread(self, context: Context) -> Context:
        """The tokens that were put aside, and behind them those of the context."""
        if not self.unread:
            return context
        self.unread += [[] for _ in range(len(context.root_ids) - len(self.unread))]
        counts = context.num_accepted.tolist()
        hidden, tokens = (
            [
                torch.stack([*(old[part] for old in row), *new[:count]])
                for row, new, count in zip(self.unread, values, counts, strict=True)
            ]
            for part, values in enumerate((context.hidden, context.token_ids))
        )
        self.unread = []
        return replace(
            context,
            hidden=pad_sequence(hidden, batch_first=True),
            token_ids=pad_sequence(tokens, batch_first=True),
            num_accepted=torch.tensor([len(row) for row in tokens]),
        )

    def keep(self, rows: Tensor) -> None:
        """What is kept of the rows moves with them."""
        if self.history.num_rows:
            self.history.keep(rows)
        if self.unread:
            self.unread = [self.unread[row] for row in rows.tolist()]

    def fresh(self) -> Self:
        """The same head for other rows: weights are shared, the history is empty."""
        other = super().fresh()
        other.history = History(len(self.history.layers))
        other.unread = []
        return other


def next_tokens(context: Context) -> Tensor:
    """(B, P) x_{s+1} of each accepted token x_s: the tokens moved up by one, the root behind the last."""
    tokens = torch.cat([context.token_ids[:, 1:], context.root_ids[:, None]], 1)
    return tokens.scatter(1, context.num_accepted[:, None] - 1, context.root_ids[:, None])


def last_of(states: Tensor, num_accepted: Tensor) -> Tensor:
    """(B, P, D) -> (B, D) at each row's last accepted token."""
    return states[torch.arange(len(states), device=states.device), num_accepted - 1]


def rotation(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, 1, size/2) by which two halves of queries and keys are turned, fp32."""
    speeds = theta ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angles = positions[..., None, None].float() * speeds
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """(B, S, heads, d) at positions (1 or B, S)."""
    cos, sin = rotation(positions, x.shape[-1], theta)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def causal_mask(positions: Tensor, longest: int) -> Tensor:
    """(B, S, longest) True where a slot is not behind a position (B, S)."""
    return torch.arange(longest, device=positions.device) <= positions[:, :, None]


def run_layers(layers: Sequence[TransformerLayer], x: Tensor) -> Tensor:
    """Layers one after the other where all see all: (B, S, D) -> (B, S, D)."""
    for layer in layers:
        x = layer(x, causal=False)
    return x
