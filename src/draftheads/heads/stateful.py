"""Heads that read the whole text: what a session of theirs keeps, and the state of heads that read the path, too.

B rows, P tokens of a context, W nodes of a depth, C slots of a history, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.cpu.native_step import NativeStep
from draftheads.heads.attention import LayerConfig, TransformerLayer, native_layers
from draftheads.heads.base import DraftHead, HeadConfig, HeadSession, Root
from draftheads.heads.history import BLOCK_SLOTS, HeadKVCache, NativeKVCache
from draftheads.speculation.draft import Context, TargetWeights

_MOST_PENDING = 512  # tokens of a row that are put aside: they take memory, and reading them delays other rows


class StatefulHead(DraftHead):
    """A head that reads all accepted tokens. Its session keeps a :class:`HeadKVCache`, so each token is read once."""

    needs_history = True
    reads_whole_text = True
    native: NativeStep | None = None  # the layers, where the native library has them

    def __init__(self, config: HeadConfig, num_layers: int) -> None:
        super().__init__(config)
        self.num_history_layers = num_layers

    def ordered_layers(self) -> Sequence[TransformerLayer]:
        """The layers of :meth:`step`, as many as the history has."""
        return ()

    def bind(self, weights: TargetWeights) -> None:
        """As any head's; the native layers are made anew by :meth:`speed_up`."""
        super().bind(weights)
        self.native = None

    def speed_up(self) -> None:
        """Also by one call of the native library for all layers, unless a class has a :meth:`step` of its own."""
        super().speed_up()
        self.native = native_layers(self.ordered_layers()) if type(self).step is StatefulHead.step else None

    def new_history(self) -> HeadKVCache:
        """An empty one."""
        return HeadKVCache(self.num_history_layers) if self.native is None else NativeKVCache(self.native)

    def start(self) -> "StatefulSession":
        """A session with an empty history."""
        return StatefulSession(self)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of the keys and values of one token."""
        if self.native is not None:
            return self.native.bytes_per_token
        config: LayerConfig = self.config  # type: ignore[assignment]
        numbers = 2 * self.num_history_layers * config.num_key_value_heads * config.head_size
        return numbers * self.dtype.itemsize

    def step(
        self, x: Tensor, rows: slice, history: HeadKVCache, *, depth: int = 0, seen: Tensor | None = None
    ) -> Tensor:
        """Tokens of some rows through all layers.

        Args:
            x: (rows, P, D or 2·D) what the first layer reads.
            rows: which ones.
            history: of all rows, to which keys and values go.
            depth: for draft tokens as in :meth:`HeadKVCache.places`.
            seen: (rows, P, N) the same.

        Returns:
            (rows, P, D).
        """
        if isinstance(history, NativeKVCache):
            return history.run(x, rows, depth=depth, seen=seen)
        places = history.places(rows, x.shape[1], depth=depth, seen=seen)
        for number, layer in enumerate(self.ordered_layers()):
            x = layer.step(x, history, number, rows, places)
        return x

    @abstractmethod
    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        """Reads the tokens of some rows' contexts with the layers, whose history is ready for them.

        Args:
            context: of those rows.
            rows: which of the history's they are.
            history: of all rows. The caller adds to its counts.

        Returns:
            The ``states`` of :class:`Root`, (rows, …).
        """


class PathState(NamedTuple):
    """W nodes of a depth of a :class:`PathHead`. All N nodes so far have slots of the history, behind the text's."""

    features: Tensor  # (B, W, D) the last layer's outputs there
    seen: Tensor  # (B, W, N) which of the nodes so far each of them sees: those on its path
    history: HeadKVCache


class PathHead(StatefulHead):
    """A head whose layers attend to the text and to the draft tokens above each node; all depths are the same layers.

    Its :meth:`read` returns the last layer's outputs, (rows, D).
    """

    shares_layers: ClassVar[bool] = True

    def bytes_of_rows(self, num_rows: int) -> int:
        """Memory of draft tokens, which have slots behind the texts: a block for each row."""
        return num_rows * BLOCK_SLOTS * self.bytes_per_slot

    @abstractmethod
    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """What the first layer reads, (…, D or 2·D), of tokens (…) and states s of the tokens before them, (…, D)."""

    def fed_back(self, features: Tensor) -> Tensor:
        """States s (…, D) of draft tokens, from the last layer's outputs there, (…, D)."""
        return features

    def outputs(self, features: Tensor) -> Tensor:
        """What the lm_head reads, of the last layer's outputs: (…, D) -> (…, D)."""
        return features

    def begin(self, root: Root, depth: int) -> PathState:
        """The roots, which the history has."""
        features = root.states[:, None]
        return PathState(features, features.new_zeros(len(features), 1, 0, dtype=torch.bool), root.history)

    def predict(self, state: PathState, depth: int) -> Tensor:
        """(B, W, V')."""
        return self.logits(self.outputs(state.features), depth)

    def descend(self, state: PathState, depth: int, parents: Tensor, token_ids: Tensor) -> PathState:
        """One pass for all chosen children, each with its own path."""
        batch, width = parents.shape
        rows = torch.arange(batch, device=parents.device)[:, None]
        itself = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        seen = torch.cat([state.seen[rows, parents], itself], 2)  # (B, W', N + W')
        x = self.inputs(token_ids, self.fed_back(state.features[rows, parents]))  # (B, W', D or 2·D)
        return PathState(self.step(x, slice(0, batch), state.history, depth=depth, seen=seen), seen, state.history)


class StatefulSession(HeadSession):
    """The history of one batch.

    On a CPU the tokens of steps without a draft are put aside. They are read before the next draft, so a head that is
    not used costs nothing; or when a row has very many of them.
    """

    head: StatefulHead

    def __init__(self, head: StatefulHead) -> None:
        super().__init__(head)
        self.history = head.new_history()
        self.pending: list[list[tuple[Tensor, Tensor]]] = []  # for each row: hidden state (D,) and id () of each token

    def root(self, context: Context) -> Root:
        """The roots, once the new tokens are read."""
        return Root(context.root_ids, self.advance(context), self.history)

    def advance(self, context: Context) -> Tensor:
        """What drafting begins with, (B, …), once the new tokens of all rows are read.

        Rows that have just joined bring whole prompts: they are read apart from the others, which bring a few tokens.

        Raises:
            ValueError: the context has fewer rows than the session: some left and ``keep`` was not called.
        """
        batch = self.num_rows + context.num_new_rows(self.num_rows)
        context = self._with_unread(context)
        known = self.history.num_rows
        self.history.join(batch, context.root_ids.device)
        parts = []
        for rows in (slice(start, stop) for start, stop in ((0, known), (known, batch)) if start < stop):
            counts = context.counts[rows]
            width = max(counts) if 0 < known < batch else context.hidden.shape[1]
            hidden, tokens = (values[rows, :width] for values in (context.hidden, context.token_ids))
            part = Context(hidden, tokens, context.num_accepted[rows], context.root_ids[rows])
            parts.append(self._read(part, rows, counts))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def observe(self, context: Context) -> None:
        """Puts the new tokens aside, and reads those of a row that has many; on other devices it reads them at once."""
        if context.root_ids.device.type != "cpu":
            self.advance(context)
            return
        self.pending += [[] for _ in range(len(context.root_ids) - len(self.pending))]
        for row, count in enumerate(context.counts):
            hidden, tokens = context.hidden[row, :count].clone(), context.token_ids[row, :count].clone()
            self.pending[row] += zip(hidden, tokens, strict=True)
            if len(self.pending[row]) > _MOST_PENDING:
                self._read_row(row, context.root_ids[row : row + 1])

    def _read_row(self, row: int, root_id: Tensor) -> None:
        """Reads what was put aside of one row; ``root_id`` (1,) is the token after it."""
        hidden, tokens = (torch.stack(parts)[None] for parts in zip(*self.pending[row], strict=True))
        self.pending[row] = []
        self.history.join(len(self.pending), root_id.device)
        count = tokens.shape[1]
        self._read(Context(hidden, tokens, torch.tensor([count]), root_id), slice(row, row + 1), [count])

    def _read(self, context: Context, rows: slice, counts: Sequence[int]) -> Tensor:
        """What the head makes of some rows' tokens, (rows, …); the history keeps so many of them."""
        states = self.head.read(replace(context, hidden=context.hidden.to(self.head.dtype)), rows, self.history)
        self.history.accept(rows, context.num_accepted, counts)
        return states

    @property
    def num_rows(self) -> int:
        """Rows at work, read or not."""
        return max(self.history.num_rows, len(self.pending))

    def _with_unread(self, context: Context) -> Context:
        """The tokens that were put aside, and behind them those of the context."""
        if not self.pending:
            return context
        self.pending += [[] for _ in range(len(context.root_ids) - len(self.pending))]
        hidden, tokens = (
            [
                torch.stack([*(old[part] for old in row), *new[:count]])
                for row, new, count in zip(self.pending, values, context.counts, strict=True)
            ]
            for part, values in enumerate((context.hidden, context.token_ids))
        )
        self.pending = []
        return replace(
            context,
            hidden=pad_sequence(hidden, batch_first=True),
            token_ids=pad_sequence(tokens, batch_first=True),
            num_accepted=torch.tensor([len(row) for row in tokens]),
            known_ids=None,
        )

    def keep(self, rows: Tensor) -> None:
        """What is kept of the rows moves with them."""
        if self.history.num_rows:
            self.history.join(self.num_rows, self.history.counts.device)
            self.history.keep(rows)
        if self.pending:
            self.pending = [self.pending[row] for row in rows.tolist()]


def next_tokens(context: Context) -> Tensor:
    """(B, P) x_{s+1} of each accepted token x_s: the tokens moved up by one, the root behind the last."""
    tokens = torch.cat([context.token_ids[:, 1:], context.root_ids[:, None]], 1)
    return tokens.scatter(1, context.num_accepted[:, None] - 1, context.root_ids[:, None])


def last_of(states: Tensor, num_accepted: Tensor) -> Tensor:
    """(B, P, D) -> (B, D) at each row's last accepted token."""
    return states[torch.arange(len(states), device=states.device), num_accepted - 1]
