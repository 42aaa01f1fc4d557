"""The target during decoding: the frozen model and the KV cache of the rows of a batch.

Rows are dense: 0 … num_rows-1, and new rows come last.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from draftheads.cpu.attention import by_products, lay_out
from draftheads.cpu.native_step import OpenCache, Texts, ancestor_bits
from draftheads.cpu.threads import thread_choice
from draftheads.models.graphs import StepGraphs, capture_for
from draftheads.models.kv_cache import RowEntries, SlotCache, whole_blocks
from draftheads.models.masks import as_float_mask, tree_visibility, within_window
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.utils.transfer import to_device

_NO_LIMIT = 1 << 30  # positions
PREFILL_CHUNK = 512  # tokens of a long prompt per pass; limits the memory of mask and activations
PREFILL_TOKENS = 2048  # tokens of a pass over several prompts, padding included; larger passes are not faster
_ROUNDED = 0.25  # how much rounding to 16 bits may change logits, as a share of the largest; errors change them more
STATIC_SLOTS = 256  # static steps grow the cache by this many slots; each growth captures all steps again


class Target:
    """One KV cache for a shared frozen model: ``prefill``, ``verify``, ``commit``, ``keep``.

    With ``has_static_steps``, the shapes of a step depend only on the numbers of rows and nodes and on the capacity of
    the cache: a step reads all slots, and a mask hides the unused ones. On CUDA such steps are captured. Otherwise a
    step reads only the slots in use.

    If a drafter reads the inputs of n ``layers``, hidden states are theirs side by side, n·D numbers, in place of h_t.

    Raises:
        InvalidSettings: the model has fewer layers.
    """

    def __init__(self, model: TargetModel, layers: Sequence[int] = ()) -> None:
        model.check_layers(layers)
        self.model = model
        self.layers = tuple(layers)
        # exact attention sums values in fp64; stored in fp64, they are not converted in each step
        is_exact = model.batch_invariant and model.dtype == torch.float32 and model.native is None
        values = torch.float64 if is_exact else None
        self.cache = SlotCache(len(model.layer_kinds), value_dtype=values)
        self.num_heads = int(model.config.num_attention_heads)
        self.graphs = StepGraphs(capture_for(model.device))  # of static steps
        self.lengths: list[int] = []  # tokens of each row in the cache
        self.are_long: list[bool] = []  # rows whose texts have the long factors of LongRoPE
        self._open: tuple[int, OpenCache] | None = None  # for native passes: the cache's generation, and its pointers
        # with batch invariance, a row's bits were compared with one number of threads
        keeps_threads = model.batch_invariant and model.native is None
        self._threads = thread_choice() if model.device.type == "cpu" and not keeps_threads else None

    @property
    def state_bytes(self) -> int:
        """Memory of the hidden states of one token."""
        return max(1, len(self.layers)) * self.model.hidden_size * self.model.dtype.itemsize

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Adds a row per prompt and computes its cache entries.

        ``most_tokens`` of each text decide on its factors of LongRoPE; those of the prompt and one more where left out.

        Returns:
            The logits after the last token of each prompt (b, V), and the hidden states of all tokens (b, T, D or n·D),
            right-padded.
        """
        self.are_long += map(self.model.is_long, most_tokens or [len(prompt) + 1 for prompt in prompts])
        return self._prefill(prompts)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        groups = self._groups(prompts)
        if len(groups) > 1:  # room for all at once: a cache that grows with each group is copied each time
            self.cache.reserve(self.num_rows + len(prompts), max(map(len, prompts)))
            return _side_by_side([self._prefill(group) for group in groups])
        last, hidden = self._read(self.num_rows, [0] * len(prompts), prompts)
        device = last.device
        ends = to_device([len(prompt) - 1 for prompt in prompts], device)
        return self.model.logits(last[torch.arange(len(prompts), device=device), ends]), hidden

    @torch.inference_mode()
    def read(self, token_ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Reads the next T tokens of each row: for each h_t (T, D), and hidden states (T, D or n·D) for a drafter."""
        last, hidden = self._read(0, self.lengths, token_ids)
        return [(last[row, : len(ids)], hidden[row, : len(ids)]) for row, ids in enumerate(token_ids)]

    @torch.inference_mode()
    def adopt(self, rows: Sequence[RowEntries | None], most_tokens: Sequence[int] = ()) -> None:
        """Adds a row for each, with a copy of these keys and values; None: with none. ``most_tokens`` of each text."""
        self.are_long += map(self.model.is_long, most_tokens or [0] * len(rows))
        old, lengths = self.num_rows, [0 if row is None else row.num_slots for row in rows]
        self.cache.reserve(old + len(rows), max(lengths))
        for place, row in enumerate(rows):
            if row is not None:
                self.cache.write_row(old + place, row)
        self.lengths += lengths

    def trim(self) -> None:
        """Frees the slots and rows that are not in use."""
        self.cache.trim(max(self.lengths, default=0))

    @torch.inference_mode()
    def verify(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """One pass over all nodes of all rows: logits (B, N, V) and hidden states (B, N, D or n·D)."""
        if self.model.has_static_steps:
            return self._verify_static(draft)
        if self.model.native is not None:
            return self._verify_native(draft)
        if draft.row_nodes is not None and self.model.takes_flat_tokens:
            return self._verify_flat(draft, draft.row_nodes)
        rows = slice(0, self.num_rows)
        last, hidden = self._forward(rows, self.lengths, draft.token_ids, draft.depths, draft.ancestors)
        return self.model.logits(last), hidden

    @torch.inference_mode()
    def commit(self, verdict: AcceptResult, num_accepted: Sequence[int]) -> None:
        """Moves the cache entries of the accepted nodes to the text, and drops the other nodes.

        Args:
            verdict: paths (B, P) in the draft of the last :meth:`verify`.
            num_accepted: the counts of the verdict, on the host.
        """
        if max(num_accepted) > 1:  # the entry of the root is at its place already
            lengths = to_device(self.lengths, verdict.path.device)
            if self.model.has_static_steps:
                self._run_static("commit", self.move_static, verdict.path, verdict.num_accepted, lengths)
            else:
                source, target = _moves(verdict.path, verdict.num_accepted, lengths)
                # often all entries are at their places already; only on a CPU is this cheap to check
                if source.device.type != "cpu" or not torch.equal(source, target):
                    self.cache.move(source, target)
        self.lengths = [length + count for length, count in zip(self.lengths, num_accepted, strict=True)]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the given rows only, in that order."""
        if self._threads is not None and not rows:
            self._threads.restore()
        self.lengths = [self.lengths[row] for row in rows]
        self.are_long = [self.are_long[row] for row in rows]
        self.cache.keep(rows, max(self.lengths, default=0))

    def verify_static(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, lengths: Tensor, are_long: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`verify` as a static step: all is on the device, and the host reads no value. All nodes have a slot.

        Takes tokens (B, N), depths (B, N), ancestors (B, N, N), the lengths of the texts (B,), and which are long (B,).
        """
        self._set_window(slice(0, len(tokens)), lengths, tokens.shape[1], span=self.cache.capacity)
        positions, masks = self._positions(lengths, depths, are_long), self._masks(lengths, depths, ancestors)
        last, hidden = self._pass(tokens, positions, masks)
        return self.model.logits(last), hidden

    def move_static(self, path: Tensor, num_accepted: Tensor, lengths: Tensor) -> tuple[()]:
        """The computation of :meth:`commit`: paths (B, P), counts (B,), lengths (B,)."""
        self.cache.move(*_moves(path, num_accepted, lengths))
        return ()

    def _verify_static(self, draft: Draft) -> tuple[Tensor, Tensor]:
        nodes = draft.num_nodes
        filling = padded_nodes(nodes) - nodes
        self.cache.reserve(self.num_rows, _rounded_up(max(self.lengths) + nodes + filling, STATIC_SLOTS))
        inputs: tuple[Tensor, ...] = (
            F.pad(draft.token_ids, (0, filling)),
            F.pad(draft.depths.expand_as(draft.token_ids), (0, filling)),
            # padding nodes attend to the text only, and no node attends to them
            F.pad(draft.ancestors.expand(self.num_rows, nodes, nodes), (0, filling, 0, filling)),
            to_device(self.lengths, draft.token_ids.device),
        )
        if (are_long := self._long_rows(slice(None), draft.token_ids.device)) is not None:
            inputs = (*inputs, are_long)
        logits, hidden = self._run_static("verify", self.verify_static, *inputs)
        return logits[:, :nodes], hidden[:, :nodes]

    def _run_static(
        self, name: str, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Runs a captured graph if there is one. After a failed capture the model has no static steps any more."""
        key = (name, *inputs[0].shape, self.cache.capacity)  # rows, nodes or places of a path, slots
        outputs = self.graphs.run(key, self.cache.generation, function, *inputs)
        if self.graphs.failure is not None:
            self.model.set_graphs(on=False)
        return outputs

    def _groups(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
        """Groups of prompts that are read in the same passes."""
        if self.model.batch_invariant:  # results must not depend on the other prompts
            return [[prompt] for prompt in prompts]
        groups: list[list[Sequence[int]]] = []
        for prompt in prompts:
            if not groups or (len(groups[-1]) + 1) * max(map(len, [*groups[-1], prompt])) > PREFILL_TOKENS:
                groups.append([])
            groups[-1].append(prompt)
        return list(groups)

    def _read(self, first_row: int, starts: Sequence[int], token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """As :meth:`_pass`, of the next T tokens of neighbouring rows with so many tokens, read in chunks."""
        if self.model.native is not None:
            return self._read_natively(first_row, starts, token_ids)
        tokens = to_device(pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True), self.model.device)
        rows = slice(first_row, first_row + len(tokens))
        self.cache.reserve(rows.stop, max(starts) + tokens.shape[1])
        parts = []
        for first in range(0, tokens.shape[1], PREFILL_CHUNK):
            chunk = tokens[:, first : first + PREFILL_CHUNK]
            steps = torch.arange(chunk.shape[1], device=tokens.device)
            # a text is a tree, too: a chain, in which every token attends to those before it
            chain = (steps[:, None] >= steps)[None]
            parts.append(self._forward(rows, [start + first for start in starts], chunk, steps[None], chain))
        self.lengths[rows] = [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)]
        last = torch.cat([part for part, _ in parts], 1)
        return last, torch.cat([part for _, part in parts], 1) if self.layers else last

    def _forward(
        self, rows: slice, starts: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """h_t (b, N, D) and hidden states (b, N, D or n·D) of tokens (b, N) at positions ``starts`` + ``depths``."""
        lengths = to_device(starts, tokens.device)
        start = starts[0] if len(set(starts)) == 1 else None
        span = self._span(starts, len(tokens), tokens.shape[1])
        self._set_window(rows, lengths, tokens.shape[1], span=span, start=start)
        are_long = self._long_rows(rows, tokens.device)
        return self._pass(tokens, self._positions(lengths, depths, are_long), self._masks(lengths, depths, ancestors))

    def _verify_flat(self, draft: Draft, row_nodes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As :meth:`verify`, but nodes that fill up their row are not computed: their results are those of others."""
        nodes, lengths, counts = draft.num_nodes, torch.tensor(self.lengths), torch.tensor(row_nodes)
        places = torch.arange(nodes)
        texts, numbers = (places < counts[:, None]).nonzero(as_tuple=True)  # (M,)
        self._set_window(slice(0, self.num_rows), lengths, nodes, span=self._span(self.lengths, self.num_rows, nodes))
        window = self.cache.window
        window.row_index, window.slots = texts[None], window.slots[texts, numbers][None]
        masks = self._masks(lengths, draft.depths, draft.ancestors)
        index = (counts.cumsum(0) - counts)[:, None] + places.minimum(counts[:, None] - 1)  # (B, N) into M
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            lay_out(mask, index.flatten(), texts * nodes + numbers)
        positions = self._positions(lengths, draft.depths, torch.tensor(self.are_long)).expand(self.num_rows, nodes)
        last, hidden = self._pass(draft.token_ids[texts, numbers][None], positions[texts, numbers][None], masks)
        return self.model.logits(last[0])[index], hidden[0][index]

    def _verify_native(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """As :meth:`verify`: nodes that fill up their row are not computed, as in :meth:`_verify_flat`."""
        nodes = draft.num_nodes
        row_nodes = draft.row_nodes or (nodes,) * self.num_rows
        places, counts = torch.arange(nodes), torch.tensor(row_nodes)
        texts, numbers = (places < counts[:, None]).nonzero(as_tuple=True)  # (M,)
        self.cache.reserve(self.cache.num_rows, max(self.lengths) + nodes)
        depths = draft.depths.expand(self.num_rows, nodes)[texts, numbers]
        ancestors = ancestor_bits(draft.ancestors, texts, numbers)
        of_rows = Texts(range(self.num_rows), list(self.lengths), row_nodes, depths.int(), ancestors)
        last, hidden = self._native_pass(draft.token_ids[texts, numbers], of_rows)
        logits = self.model.logits(last)
        if min(row_nodes) == nodes:
            return logits.view(self.num_rows, nodes, -1), hidden.view(self.num_rows, nodes, -1)
        index = (counts.cumsum(0) - counts)[:, None] + places.minimum(counts[:, None] - 1)  # (B, N) into M
        return logits[index], hidden[index]

    def _read_natively(
        self, first_row: int, starts: Sequence[int], token_ids: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        rows = range(first_row, first_row + len(token_ids))
        ends = [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)]
        self.cache.reserve(rows.stop, max(ends))
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in rows]
        for first in range(0, max(map(len, token_ids)), PREFILL_CHUNK):
            chunks = {
                place: ids[first : first + PREFILL_CHUNK] for place, ids in enumerate(token_ids) if len(ids) > first
            }
            counts = [len(chunk) for chunk in chunks.values()]
            depths = torch.cat([torch.arange(count) for count in counts])
            tokens = torch.tensor([token for chunk in chunks.values() for token in chunk])
            lengths = [starts[place] + first for place in chunks]
            of_rows = Texts([first_row + place for place in chunks], lengths, counts, depths.int())
            last, hidden = self._native_pass(tokens, of_rows)
            for place, last_of_text, hidden_of_text in zip(
                chunks, last.split(counts), hidden.split(counts), strict=True
            ):
                parts[place].append((last_of_text, hidden_of_text))
        self.lengths[rows.start : rows.stop] = ends
        whole = [tuple(torch.cat(of_pass) for of_pass in zip(*of_text, strict=True)) for of_text in parts]
        last, hidden = (pad_sequence(list(of_texts), batch_first=True) for of_texts in zip(*whole, strict=True))
        return last, hidden

    def _native_pass(self, tokens: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
        """h_t (M, D) and hidden states (M, D or n·D) of tokens (M,)."""
        native = self.model.native
        assert native is not None
        if self._threads is not None:
            self._threads.before_pass()
        if self._open is None or self._open[0] != self.cache.generation:
            for layer in self.cache.layers:
                layer.prepare(*native.cache_shape(), native.cache_dtype)
            self._open = self.cache.generation, native.open(self.cache.layers)
        last_position = (self.model.max_positions or _NO_LIMIT) - 1
        if self.model.long_rope is not None:
            texts = replace(texts, are_long=[self.are_long[row] for row in texts.rows])
        return native.run(tokens, texts, self._open[1], self.layers, last_position=last_position)

    def _span(self, starts: Sequence[int], num_rows: int, nodes: int) -> int:
        """How many slots a pass reads, which are reserved."""
        span = max(starts) + nodes
        self.cache.reserve(self.cache.num_rows, span)
        whole = min(self.cache.capacity, whole_blocks(span))
        queries = (num_rows, self.num_heads, nodes, 0)
        if not self.model.batch_invariant and by_products(queries, whole, self.model.dtype, self.model.device):
            return whole  # few different sizes, because each needs its own kernel; and contiguous keys
        return span

    def _set_window(self, rows: slice, lengths: Tensor, nodes: int, *, span: int, start: int | None = None) -> None:
        """The slots of the cache that a pass writes and reads.

        Args:
            rows: b neighbouring ones.
            lengths: (b,) of their texts.
            nodes: N, which are written after the texts.
            span: slots that are read, the first ones of each row.
            start: the common length of all rows, or None if the lengths differ.
        """
        window = self.cache.window
        window.rows, window.span, window.start = rows, span, start
        window.row_index = torch.arange(rows.start, rows.stop, device=lengths.device)[:, None]
        window.slots = lengths[:, None] + torch.arange(nodes, device=lengths.device)

    def _pass(self, tokens: Tensor, positions: Tensor, masks: Tensor | dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """h_t (b, N, D) and hidden states (b, N, D or n·D) of tokens (b, N)."""
        if self._threads is not None:
            self._threads.before_pass()
        return self.model.run(
            self.layers,
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{self.model.cache_name: self.cache},
        )

    def _long_rows(self, rows: slice, device: torch.device) -> Tensor | None:
        """Which rows have the long factors of LongRoPE, (b,); None for models without it."""
        return None if self.model.long_rope is None else to_device(self.are_long[rows], device, torch.bool)

    def _positions(self, lengths: Tensor, depths: Tensor, are_long: Tensor | None) -> Tensor:
        """Positions (b, N). Nodes beyond the last position are never accepted, so any value is valid for them."""
        positions = lengths[:, None] + depths
        if self.model.max_positions is not None:
            positions = positions.clamp(max=self.model.max_positions - 1)
        rope = self.model.long_rope
        return positions if rope is None or are_long is None else rope.marked(positions, are_long[:, None])

    def _masks(self, lengths: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor | dict[str, Tensor]:
        """One mask over the window's slots, or one per kind of layer if the model has several kinds."""
        span = self.cache.window.span
        visible = tree_visibility(lengths, ancestors, span)
        kinds = sorted(set(self.model.layer_kinds))
        masks = {}
        for kind in kinds:
            window = self.model.sliding_window if kind == "sliding_attention" else None
            seen = visible if window is None else visible & within_window(lengths, depths, span, window)
            masks[kind] = as_float_mask(seen, self.model.dtype)
        return masks if len(masks) > 1 else masks[kinds[0]]


def slots_for(model: TargetModel, num_tokens: int, num_nodes: int = 0) -> int:
    """Slots of a cache whose longest text has ``num_tokens``, after which ``num_nodes`` are verified."""
    if num_nodes and model.has_static_steps:
        return _rounded_up(num_tokens + padded_nodes(num_nodes), STATIC_SLOTS)
    return whole_blocks(num_tokens + num_nodes)


def bytes_per_slot(model: TargetModel) -> int:
    """Memory of the keys and values of one token, from those of a text of one token."""
    target = Target(model)
    target.prefill([[0]])
    return target.cache.num_bytes // target.cache.capacity


def padded_nodes(num_nodes: int) -> int:
    """The number of nodes of a static step for a tree of that size. Few sizes need few captures.

    >>> [padded_nodes(n) for n in (1, 2, 10, 16, 17, 33, 65)]
    [1, 4, 12, 16, 24, 48, 80]
    """
    if num_nodes == 1:
        return 1
    return _rounded_up(num_nodes, 4 if num_nodes <= 16 else 8 if num_nodes <= 32 else 16)


def _rounded_up(number: int, block: int) -> int:
    return -(-number // block) * block


def _moves(path: Tensor, num_accepted: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Source and target slots of the accepted nodes, each (B, P). Nodes that are not accepted do not move."""
    steps = torch.arange(path.shape[1], device=path.device)  # (P,)
    real = steps < num_accepted[:, None]
    starts = lengths[:, None]
    return starts + torch.where(real, path, steps), starts + steps


def _side_by_side(read: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenates the logits (b, V) and the hidden states (b, T, D) of groups of rows, right-padded."""
    logits, hidden = zip(*read, strict=True)
    longest = max(states.shape[1] for states in hidden)
    return torch.cat(logits), torch.cat([F.pad(states, (0, 0, 0, longest - states.shape[1])) for states in hidden])
