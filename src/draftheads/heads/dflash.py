"""DFlash: one pass of a small body over a block of masks predicts all its tokens at once (arXiv 2602.06036).

The block behind a text x_0 … x_t is [x_{t+1}, mask, …, mask] at positions t+1, t+2, …. Its rows see each other, both
ways, and the text. Of the text each layer sees keys and values of c_s = norm(fc([a_s; b_s; …])), s ≤ t, where a, b, …
are what enters some layers of the target; c is the same for all layers. The target's lm_head makes logits of the rows.

In DFlash the row of a mask predicts the token in its own place. In a shifted block, as DSpark has, the row at each
place predicts the token behind it, so that a block for K tokens has K rows in place of K+1.

Published heads differ in three more ways, each an option: layers that see the last W tokens only, rows that see the
rows before them only, and an embedding of its own for the masks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.errors import InvalidSettings
from draftheads.heads.attention import MaskedConfig, RmsNorm, TransformerLayer, through_blocks
from draftheads.heads.base import AllAtOnceHead, Root
from draftheads.heads.history import HeadKVCache, KeysValues
from draftheads.heads.layers import first_texts, fusion, linear_fit, low_rank_fit
from draftheads.heads.stateful import StatefulHead
from draftheads.speculation.draft import Context

_NEARNESS = 32.0  # of a new head: the largest logit of attention. Of these 0.88 then go to the last place at once
_RANDOM_PART = 0.1  # of a new head's queries and keys
_SCALED_BY = 8  # texts


@dataclass(frozen=True)
class BlockConfig(MaskedConfig):
    """Options of heads that predict a block of ``num_heads`` tokens in one pass of ``num_layers`` layers."""

    is_shifted: bool = False
    """Whether the row at each place predicts the token behind it, not the one in it. DSpark's blocks are shifted."""
    windows: list[int] = field(default_factory=list)
    """Of each layer, how many tokens a row sees, itself included; 0 is the whole text, as is an empty list."""
    causal_layers: list[int] = field(default_factory=list)
    """Layers, from 0, whose rows see no later rows of the block."""
    own_mask: bool = False
    """Whether masks have an embedding of the head's own in place of the target's of mask_token_id."""

    one_lm_head: ClassVar[bool] = True
    scales_embedding: ClassVar[bool] = False  # masks would hide what attention adds to them
    optional = MaskedConfig.optional | {"is_shifted", "windows", "causal_layers", "own_mask"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise InvalidSettings(f"windows is {self.windows}; it must have num_layers ({self.num_layers}) of them")
        if unknown := set(self.causal_layers) - set(range(self.num_layers)):
            raise InvalidSettings(
                f"causal_layers has {sorted(unknown)}; give numbers in 0 … num_layers - 1 ({self.num_layers - 1})"
            )

    @property
    def block_size(self) -> int:
        """Rows of a block, its first token included."""
        return self.num_heads + (not self.is_shifted)


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """DFlash: all tokens of a block in one pass, each by itself."""

    method: ClassVar[str] = "dflash"
    description: ClassVar[str] = "one pass of a small body over a block of masks predicts all tokens at once"
    paper: ClassVar[str] = "DFlash, 2026"


class DFlashHead(AllAtOnceHead, StatefulHead):
    """p_i = softmax(lm_head(norm(body([x_{t+1}, mask, …], c_0 … c_t)_i)))."""

    predicts_hidden_states: ClassVar[bool] = False

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, num_layers=config.num_layers)
        size, epsilon = config.hidden_size, config.norm_epsilon
        # c starts as the last of the hidden states; see :meth:`start_near`
        self.fc = fusion(size, num_inputs=max(1, len(config.layers)), state_first=False, bias=False)
        self.hidden_norm = RmsNorm(size, epsilon)
        self.layers: Any = nn.ModuleList(self.new_layer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(size, epsilon)
        self.block_size = config.block_size
        self.first = config.block_size - config.num_heads  # the row that makes the first prediction
        self.mask_token_id = config.mask_token_id
        self.windows = [*config.windows] or [0] * config.num_layers
        self.causal_layers = frozenset(config.causal_layers)
        self.own_mask = config.own_mask
        if self.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size))  # as rows of the target's embedding are

    @property
    def place_shares(self) -> Sequence[float]:
        """A quarter, as DFlash's code has 512 of 2,048."""
        return [0.25] * self.config.num_heads

    def new_layer(self, config: BlockConfig) -> TransformerLayer:
        """One of the body."""
        return TransformerLayer(config, norm_heads=True)

    def new_history(self) -> HeadKVCache:
        return HeadKVCache(self.num_history_layers, self.windows)

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Starts as a linear head: rows read the last place of the text and x_{t+1}, and make of them the next h.

        From random queries and keys a body needs far more text to find these than most users have.
        """
        size = self.config.hidden_size
        taken = [(*self.split(h), ids) for h, ids in first_texts(texts, self.fc.in_features) if len(ids) > 1]
        if not taken:
            return
        mask = taken[0][2].new_tensor(self.mask_token_id)
        if self.own_mask:
            self.mask_embedding.copy_(self.scaled_embedding(mask) / self.embedding_scale)
        if self.hidden_layers:
            self.fc.weight.copy_(linear_fit((states, last) for states, last, _ in taken))
        self._start_attention(
            torch.cat([self.context(states)[:-1] for states, _, _ in taken]),
            torch.cat([ids[1:] for _, _, ids in taken]),
            torch.cat([last[1:] for _, last, _ in taken]),
        )
        self.norm.weight.fill_(1.0)
        rows = torch.cat([self(states[None], ids[None])[0, 0, :-1, :size] for states, _, ids in taken[:_SCALED_BY]])
        wanted = torch.cat([last[1:] for _, last, _ in taken[:_SCALED_BY]])
        self.norm.weight.fill_(float((rows * wanted).sum() / rows.square().sum()))

    def _start_attention(self, seen: Tensor, root_ids: Tensor, ahead: Tensor) -> None:
        """Makes most groups of the first layer read the last place of the text, and a third of them x_{t+1}.

        All queries are one vector. So are the keys of what a group reads; its other keys are the opposite vector. RoPE
        then favours the nearest place. Values are the parts of c and of x_{t+1} that tell most of the next h.
        """
        config: Any = self.config
        layer = self.layers[0]
        groups, head_size = config.num_key_value_heads, config.head_size
        step = -(-config.vocab_size // len(seen))
        mask = root_ids.new_tensor([self.mask_token_id])
        tokens = self._normed(torch.arange(0, config.vocab_size, step, device=seen.device))
        masks = self._normed(mask).expand_as(tokens)
        constant = tokens.new_ones(len(tokens), 1)
        query = linear_fit([(tokens, constant), (masks, constant)])
        per_group = config.num_attention_heads // groups
        queries = layer.q_proj.weight.view(groups, per_group, head_size, -1)[:, 0]  # of the first head of each group
        keys, values = (part.weight.view(groups, head_size, -1) for part in (layer.k_proj, layer.v_proj))
        queries.mul_(_RANDOM_PART).add_(query.to(queries))
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.fill_((_NEARNESS * head_size**-0.5) ** 0.5)
        near = groups - (groups + 1) // 3
        parts = [(slice(near), seen, 1.0)]
        if near < groups:
            parts.append((slice(near, None), self._normed(root_ids), -1.0))
        inputs = torch.cat([read for _, read, _ in parts], 1)
        fit = linear_fit([(inputs, ahead - self.scaled_embedding(mask))])
        out = fit.new_zeros(len(fit), groups, per_group, head_size)
        for (part, read, sign), matrix in zip(parts, fit.split(seen.shape[1], 1), strict=True):
            ones = seen.new_ones(len(seen), 1)
            key = linear_fit([(seen, sign * ones), (tokens, -sign * constant), (masks, -constant)])
            keys[part] = _RANDOM_PART * keys[part] + key.to(keys)
            up, down = low_rank_fit(matrix, read, keys[part].shape[0] * head_size)
            values[part] = down.view_as(values[part]).to(values)
            out[:, part, 0] = up.unflatten(1, (-1, head_size))
        layer.o_proj.weight.copy_(out.flatten(1))

    def _normed(self, token_ids: Tensor) -> Tensor:
        """What the first layer's attention reads of tokens in a block, (S,) -> (S, D)."""
        return self.layers[0].input_norm(self.scaled_embedding(token_ids))

    def context(self, hidden: Tensor) -> Tensor:
        """c, (…, n·D) -> (…, D)."""
        return self.hidden_norm(self.fc(hidden))

    def blocks(self, root_ids: Tensor) -> Tensor:
        """What the body reads of blocks that begin with these tokens: (…) -> (…, S, D)."""
        masks = root_ids.new_full((*root_ids.shape, self.block_size - 1), self.mask_token_id)
        rows = self.scaled_embedding(torch.cat([root_ids[..., None], masks], -1))
        if not self.own_mask:
            return rows
        own = (self.mask_embedding * self.embedding_scale).expand_as(rows[..., 1:, :])
        return torch.cat([rows[..., :1, :], own.to(rows.dtype)], -2)

    def body(self, x: Tensor, starts: Tensor, seen: Sequence[KeysValues], places: Sequence[Tensor]) -> Tensor:
        """The last layer's outputs in the rows that predict.

        Args:
            x: (B, A, S, D) blocks behind A places of each text.
            starts: as of :func:`through_blocks`, like the rest.
            seen: of the text.
            places: of the text.

        Returns:
            (K, B, A, D).
        """
        out = through_blocks(self.layers, x, starts, seen, places, windows=self.windows, causal=self.causal_layers)[
            :, :, self.first :
        ]
        normed: Tensor = self.norm(out)
        return normed.permute(2, 0, 1, 3)

    def forward(self, hidden: Tensor, token_ids: Tensor, places: Tensor | None = None) -> Tensor:
        """(B, T, D or n·D), (B, T) -> (K, B, T, F).

        With ``places`` (B, A) only blocks behind these positions are computed; the others' features are 0.
        """
        batch, length = token_ids.shape
        steps = torch.arange(length, device=token_ids.device)
        at = steps[None].expand(batch, -1) if places is None else places  # t of each block
        context = self.context(hidden)
        seen = [layer.keys_values(context, steps[None]) for layer in self.layers]
        roots = token_ids.roll(-1, dims=1).gather(1, at)
        found = self.body(self.blocks(roots), at + 1, seen, [steps[None]] * len(seen))
        features = self.features(found, token_ids, at)
        if places is None:
            return features
        index = at[None, ..., None].expand_as(features)
        return features.new_zeros(len(features), batch, length, features.shape[-1]).scatter(2, index, features)

    def features(self, found: Tensor, token_ids: Tensor, at: Tensor) -> Tensor:
        """What logits are made of, (K, B, A, F), of the body's outputs (K, B, A, D) behind positions ``at``."""
        return found

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        hidden, ends = context.hidden, history.counts[rows] + context.num_accepted
        positions, longest = history.span(rows, hidden.shape[1])
        most = max(self.windows) if all(self.windows) else hidden.shape[1]
        if most < hidden.shape[1]:  # what no window sees is not computed
            index = context.num_accepted[:, None] - most + torch.arange(most, device=hidden.device)
            positions = torch.where(index < 0, -1, history.counts[rows, None] + index)
            hidden = hidden[torch.arange(len(index), device=hidden.device)[:, None], index.clamp(min=0)]
        made = self.context(hidden)
        for number, layer in enumerate(self.layers):
            history.write(number, rows, layer.keys_values(made, positions), positions, longest, ends=ends)
        return made[:, :0].flatten(1)  # a block reads nothing of the text but its keys and values

    def block_features(self, root: Root) -> Tensor:
        """(K, B, D) behind every row's text."""
        blocks = self.blocks(root.token_ids[:, None])
        return self.body(blocks, root.history.counts[:, None], *root.history.placed())[:, :, 0]

    def begin(self, root: Root, depth: int) -> Any:
        """Logits of all places, (depth, B, V'): one pass, whatever the tree."""
        return self.lm_head_logits(self.block_features(root)[:depth])
