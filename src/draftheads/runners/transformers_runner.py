"""Passes by the model's own modules: a mask for each pass, and one cache for all rows.

A tree is a part of a text whose tokens do not all see each other: a mask tells who sees whom, and positions are given.
Row b has ``lengths[b]`` tokens in the cache at slots 0 …; node n of its tree has slot lengths[b]+n and position
lengths[b]+depth(n). A node attends to the text and to its ancestors, itself included.

With static steps the shapes of a pass depend only on the numbers of rows and nodes and on the capacity of the cache: a
pass reads all slots, and a mask hides the unused ones. On CUDA such passes can be captured.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from draftheads.models.model import TargetModel
from draftheads.runners.graphs import StepGraphs, capture_for
from draftheads.runners.kv_cache import SlotCache
from draftheads.runners.mixers import running
from draftheads.runners.recurrence import Pass, StateCache, text_pass, tree_pass
from draftheads.runners.runner import CHUNK_TOKENS, PASS_TOKENS, Entries, Row, Runner, States, whole_blocks
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.utils.counts import rounded_up
from draftheads.utils.transfer import to_device

STATIC_SLOTS = 256  # static steps grow the cache by this many slots; each growth captures all steps again


class TransformersRunner(Runner):
    """The rows of the cache are in ``order``; a row's memory is in the cache."""

    def __init__(self, model: TargetModel, layers: Sequence[int] = ()) -> None:
        super().__init__(model, layers)
        self.cache = (StateCache if model.is_recurrent else SlotCache)(len(model.layer_kinds))
        self._last: Pass | None = None  # of trees, in a model with recurrent layers
        self.order: list[Row] = []
        self.graphs = StepGraphs(capture_for(model.device))  # of static steps

    @torch.inference_mode()
    def open(self, most_tokens: int, known: Entries | None = None, states: States | None = None) -> Row:
        row = Row(is_long=self.model.is_long(most_tokens))
        self.order.append(row)
        self.cache.clear(len(self.order) - 1)
        if known is not None:
            row.length = known[0].shape[1]
            self._reserve(row.length)
            self.cache.write(len(self.order) - 1, known)
        self.cache.write_states(len(self.order) - 1, states or {})
        return row

    @torch.inference_mode()
    def read(self, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        places = self._neighbours(rows, are_first=False)
        results: list[tuple[Tensor, Tensor]] = []
        with self.cache.undone(places):
            for group in _groups(list(map(len, token_ids))):
                results += self._read(rows[group], token_ids[group])
        for row, ids in zip(rows, token_ids, strict=True):
            row.length += len(ids)
        return results

    @torch.inference_mode()
    def verify(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        places = self._neighbours(rows, are_first=True)
        if self.model.has_static_steps:
            return self._verify_static(rows, draft)
        run = self._last = None
        if isinstance(self.cache, StateCache):
            run = self._last = tree_pass(self.cache, places, draft.parents, draft.depths)
        last, hidden = self._forward(places, rows, draft.token_ids, draft.depths, draft.ancestors, run=run)
        return self.model.logits(last), hidden

    @torch.inference_mode()
    def commit(self, rows: Sequence[Row], result: AcceptResult, num_accepted: Sequence[int]) -> None:
        if max(num_accepted) > 1:  # the entry of the root is at its place already
            lengths = to_device([row.length for row in rows], result.path.device)
            if self.model.has_static_steps:
                self._run_static("commit", self.move_static, result.path, result.num_accepted, lengths)
            else:
                source, target = _moves(result.path, result.num_accepted, lengths)
                # often all entries are at their places already; only on a CPU is this cheap to check
                if source.device.type != "cpu" or not torch.equal(source, target):
                    self.cache.move(self.cache.view.row_index, source, target)
        if self._last is not None:
            paths = result.path.tolist()
            self._last.commit([path[:count] for path, count in zip(paths, num_accepted, strict=True)])
            self._last = None
        for row, count in zip(rows, num_accepted, strict=True):
            row.length += count

    @torch.inference_mode()
    def drop(self, rows: Sequence[Row]) -> None:
        gone = set(rows)
        kept = [place for place, row in enumerate(self.order) if row not in gone]
        if len(kept) < len(self.order):
            self.cache.order(kept)
            self.order = [self.order[place] for place in kept]
            needed = max((row.length for row in self.order), default=0)
            self.cache.resize(held_rows(len(kept)), min(self.cache.shape[1], self._slots(needed)))

    def entries(self, row: Row, num_tokens: int) -> Entries:
        return self.cache.entries(self.order.index(row), num_tokens)

    def states(self, row: Row) -> States:
        return self.cache.states_of(self.order.index(row))

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.cache.of_rows)

    @property
    def state_bytes(self) -> int:
        """Of these, memory of states."""
        return self.num_bytes - sum(buffer.nbytes for buffer in self.cache.buffers)

    def verify_static(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, lengths: Tensor, are_long: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`verify` as a static step: all is on the device, and the host reads no value. All nodes have a slot.

        Takes tokens (B, N), depths (B, N), ancestors (B, N, N), the lengths of the texts (B,), and which are long (B,).
        """
        self._set_view(slice(0, len(tokens)), lengths, tokens.shape[1], span=self.cache.shape[1])
        last, hidden = self._pass(tokens, self._positions(lengths, depths, are_long), depths, ancestors, lengths)
        return self.model.logits(last), hidden

    def move_static(self, path: Tensor, num_accepted: Tensor, lengths: Tensor) -> tuple[()]:
        """The computation of :meth:`commit`: paths (B, P), counts (B,), lengths (B,)."""
        rows = torch.arange(len(path), device=path.device)[:, None]
        self.cache.move(rows, *_moves(path, num_accepted, lengths))
        return ()

    def _verify_static(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        batch, nodes = draft.token_ids.shape
        filling = padded_nodes(nodes) - nodes
        self._reserve(max(row.length for row in rows), nodes)
        inputs: tuple[Tensor, ...] = (
            F.pad(draft.token_ids, (0, filling)),
            F.pad(draft.depths.expand_as(draft.token_ids), (0, filling)),
            # padding nodes attend to the text only, and no node attends to them
            F.pad(draft.ancestors.expand(batch, nodes, nodes), (0, filling, 0, filling)),
            to_device([row.length for row in rows], draft.token_ids.device),
        )
        if (are_long := self._long_rows(rows, draft.token_ids.device)) is not None:
            inputs = (*inputs, are_long)
        logits, hidden = self._run_static("verify", self.verify_static, *inputs)
        return logits[:, :nodes], hidden[:, :nodes]

    def _run_static(
        self, name: str, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Runs a captured graph if there is one. After a failed capture the model has no static steps any more."""
        key = (name, *inputs[0].shape, self.cache.shape)  # rows, nodes or places of a path, the cache
        outputs = self.graphs.run(key, self.cache.generation, function, *inputs)
        if self.graphs.failure is not None:
            self.model.step_mode.graphs = False
        return outputs

    def _neighbours(self, rows: Sequence[Row], *, are_first: bool) -> slice:
        """The places of some rows in the cache, side by side: those of steps first, those that are read last."""
        start = self.order.index(rows[0])
        if self.order[start : start + len(rows)] != [*rows] or (are_first and start):
            chosen = set(rows)
            others = [row for row in self.order if row not in chosen]
            order = [*rows, *others] if are_first else [*others, *rows]
            places = {row: place for place, row in enumerate(self.order)}
            self._reserve(0)
            self.cache.order([places[row] for row in order])
            self.order, start = order, 0 if are_first else len(others)
        return slice(start, start + len(rows))

    def _slots(self, num_tokens: int, num_nodes: int = 0) -> int:
        return slots_for(num_tokens, num_nodes, is_static=self.model.has_static_steps)

    def _reserve(self, num_tokens: int, num_nodes: int = 0) -> None:
        rows, slots = self.cache.shape
        self.cache.resize(max(rows, held_rows(len(self.order))), max(slots, self._slots(num_tokens, num_nodes)))

    def _read(self, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Reads the next tokens of neighbouring rows in chunks."""
        tokens = to_device(pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True), self.model.device)
        start = self.order.index(rows[0])
        places = slice(start, start + len(rows))
        parts = []
        for first in range(0, tokens.shape[1], CHUNK_TOKENS):
            chunk = tokens[:, first : first + CHUNK_TOKENS]
            steps = torch.arange(chunk.shape[1], device=tokens.device)
            # a text is a tree, too: a chain, in which every token attends to those before it
            chain = (steps[:, None] >= steps)[None]
            run = None
            if isinstance(self.cache, StateCache):
                counts = [min(max(len(ids) - first, 0), len(steps)) for ids in token_ids]
                run = text_pass(self.cache, places, counts, steps)
            parts.append(self._forward(places, rows, chunk, steps[None], chain, first=first, run=run))
            if run is not None:
                run.commit([range(count) for count in counts])
        last, hidden = (torch.cat(states, 1) for states in zip(*parts, strict=True))
        return [(last[i, : len(ids)], hidden[i, : len(ids)]) for i, ids in enumerate(token_ids)]

    def _forward(
        self,
        places: slice,
        rows: Sequence[Row],
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        *,
        first: int = 0,
        run: Pass | None = None,
    ) -> tuple[Tensor, Tensor]:
        """h_t (b, N, D) and hidden states (b, N, D or n·D) of tokens (b, N), ``first`` tokens behind the texts."""
        starts = [row.length + first for row in rows]
        span = max(starts) + tokens.shape[1]
        self._reserve(span)
        lengths = to_device(starts, tokens.device)
        start = starts[0] if len(set(starts)) == 1 else None
        self._set_view(places, lengths, tokens.shape[1], span=span, start=start)
        positions = self._positions(lengths, depths, self._long_rows(rows, tokens.device))
        with nullcontext() if run is None else running(run, self.model.recurrent_modules):
            return self._pass(tokens, positions, depths, ancestors, lengths)

    def _set_view(self, places: slice, lengths: Tensor, nodes: int, *, span: int, start: int | None = None) -> None:
        """The slots that a pass writes, N after each text (b,), and those that it reads, the first ``span``.

        ``start`` is the common length of all texts, or None if their lengths differ.
        """
        view = self.cache.view
        view.rows, view.span, view.start = places, span, start
        view.row_index = torch.arange(places.start, places.stop, device=lengths.device)[:, None]
        view.slots = lengths[:, None] + torch.arange(nodes, device=lengths.device)

    def _pass(
        self, tokens: Tensor, positions: Tensor, depths: Tensor, ancestors: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.model.run(
            self.layers,
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._masks(lengths, depths, ancestors),
            use_cache=True,
            **{self.model.cache_name: self.cache},
        )

    def _long_rows(self, rows: Sequence[Row], device: torch.device) -> Tensor | None:
        """Which rows have the long factors of LongRoPE, (b,); None for models without it."""
        return None if self.model.long_rope is None else to_device([row.is_long for row in rows], device, torch.bool)

    def _positions(self, lengths: Tensor, depths: Tensor, are_long: Tensor | None) -> Tensor:
        """Positions (b, N). Nodes beyond the last position are never accepted, so any value is valid for them."""
        positions = (lengths[:, None] + depths).clamp(max=self.positions())
        rope = self.model.long_rope
        return positions if rope is None or are_long is None else rope.marked(positions, are_long[:, None])

    def _masks(self, lengths: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor | dict[str, Tensor] | None:
        """One mask over the view's slots, or one per kind of attention if the model has several kinds; None if none."""
        span = self.cache.view.span
        visible = tree_visibility(lengths, ancestors, span)
        kinds = sorted(self.model.attention_kinds)
        masks = {}
        for kind in kinds:
            window = self.model.sliding_window if kind == "sliding_attention" else None
            seen = visible if window is None else visible & within_window(lengths, depths, span, window)
            masks[kind] = as_float_mask(seen, self.model.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()), None)


def tree_visibility(lengths: Tensor, ancestors: Tensor, span: int) -> Tensor:
    """Boolean (B, N, span): whether node n of row b attends to slot s.

    Args:
        lengths: (B,) int64 tokens of text in the cache.
        ancestors: (1 or B, N, N) bool, [n, m]: m is on n's path.
        span: number of slots that are read, at least max(lengths) + N.

    >>> ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    >>> tree_visibility(torch.tensor([2, 1]), ancestors, 5).int().tolist()[1]
    [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]]
    """
    batch, nodes = len(lengths), ancestors.shape[-1]
    slots = torch.arange(span, device=lengths.device)
    visible = (slots < lengths[:, None])[:, None].repeat(1, nodes, 1)  # (B, N, span)
    index = (lengths[:, None] + torch.arange(nodes, device=lengths.device))[:, None].expand(batch, nodes, nodes)
    return visible.scatter_(2, index, ancestors.expand(batch, nodes, nodes))


def within_window(lengths: Tensor, depths: Tensor, span: int, window: int) -> Tensor:
    """Boolean (B, N, span): whether slot s is less than ``window`` positions before node n; depths (1 or B, N)."""
    batch, nodes = len(lengths), depths.shape[-1]
    depths = depths.expand(batch, nodes)
    # (B, span): a text token's position is its slot
    positions = torch.arange(span, device=lengths.device).repeat(batch, 1)
    index = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    queries = lengths[:, None] + depths
    positions.scatter_(1, index, queries)
    return queries[:, :, None] - positions[:, None, :] < window


def as_float_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, S) bool -> (B, 1, N, S) in ``dtype``: 0 where visible, else the lowest finite number."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def slots_for(num_tokens: int, num_nodes: int = 0, *, is_static: bool = False) -> int:
    """Slots of a cache whose longest text has ``num_tokens``, after which ``num_nodes`` are verified."""
    if num_nodes and is_static:
        return rounded_up(num_tokens + padded_nodes(num_nodes), STATIC_SLOTS)
    return whole_blocks(num_tokens + num_nodes)


def held_rows(num_rows: int) -> int:
    """Rows of a cache for so many: rows that join one by one do not copy it each time.

    >>> [held_rows(n) for n in (0, 1, 2, 3, 4, 5, 9)]
    [0, 1, 2, 4, 4, 8, 12]
    """
    return num_rows if num_rows <= 2 else rounded_up(num_rows, 4)


def padded_nodes(num_nodes: int) -> int:
    """The number of nodes of a static step for a tree of that size. Few sizes need few captures.

    >>> [padded_nodes(n) for n in (1, 2, 10, 16, 17, 33, 65)]
    [1, 4, 12, 16, 24, 48, 80]
    """
    if num_nodes == 1:
        return 1
    return rounded_up(num_nodes, 4 if num_nodes <= 16 else 8 if num_nodes <= 32 else 16)


def _groups(counts: Sequence[int]) -> list[slice]:
    """Neighbouring texts of so many tokens that are read in the same passes: padding is read, too."""
    groups: list[slice] = []
    for place, _ in enumerate(counts):
        start = groups[-1].start if groups else 0
        if not groups or (place + 1 - start) * max(counts[start : place + 1]) > PASS_TOKENS:
            groups.append(slice(place, place + 1))
        else:
            groups[-1] = slice(start, place + 1)
    return groups


def _moves(path: Tensor, num_accepted: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Source and target slots of the accepted nodes, each (B, P). Nodes that are not accepted do not move."""
    steps = torch.arange(path.shape[1], device=path.device)  # (P,)
    real = steps < num_accepted[:, None]
    starts = lengths[:, None]
    return starts + torch.where(real, path, steps), starts + steps
