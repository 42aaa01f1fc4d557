"""Passes by the native library: the tokens of all texts side by side, and memory for each text alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from draftheads.cpu.native_library import SequenceBatch, ancestor_bits
from draftheads.models.model import TargetModel
from draftheads.runners.runner import CHUNK_TOKENS, PASS_TOKENS, Entries, Row, Runner, States, whole_blocks
from draftheads.speculation.draft import AcceptResult, Draft


class NativeRunner(Runner):
    """A row's memory are its keys and values, (layers, 2, groups, slots, d), and its states :class:`TextStates`."""

    def __init__(self, model: TargetModel, layers: Sequence[int] = ()) -> None:
        super().__init__(model, layers)
        assert model.native is not None, "the model has a native pass"
        self.native = model.native
        self._rows: set[Row] = set()

    @torch.inference_mode()
    def open(self, most_tokens: int, known: Entries | None = None, states: States | None = None) -> Row:
        row = Row(is_long=self.model.is_long(most_tokens), memory=self.native.memory(0))
        row.states = self.native.states()
        for state in (states or {}).values():
            row.states.states.copy_(state)
        if known is not None:
            [old] = known
            row.length = old.shape[3]
            row.memory = self.native.memory(whole_blocks(row.length + 1), old)
        self._rows.add(row)
        return row

    @torch.inference_mode()
    def read(self, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        lengths = [row.length for row in rows]
        for row, ids in zip(rows, token_ids, strict=True):
            self._reserve(row, row.length + len(ids))
        with self._undone(rows):
            return self._read(rows, lengths, token_ids)

    def _read(
        self, rows: Sequence[Row], lengths: Sequence[int], token_ids: Sequence[Sequence[int]]
    ) -> list[tuple[Tensor, Tensor]]:
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in rows]
        done = [0] * len(rows)
        while counts := _next_counts([len(ids) - read for ids, read in zip(token_ids, done, strict=True)]):
            sizes, there = list(counts.values()), [rows[place] for place in counts]
            tokens = [token for place, count in counts.items() for token in token_ids[place][done[place] :][:count]]
            depths = torch.cat([torch.arange(count) for count in sizes]).int()
            before = [lengths[place] + done[place] for place in counts]
            texts = SequenceBatch([row.memory for row in there], before, sizes, depths)
            last, hidden = self._pass(there, torch.tensor(tokens), texts)
            for place, *states in zip(counts, last.split(sizes), hidden.split(sizes), strict=True):
                parts[place].append((states[0], states[1]))
                done[place] += counts[place]
        for row, length, ids in zip(rows, lengths, token_ids, strict=True):
            row.length = length + len(ids)
        return [tuple(torch.cat(states) for states in zip(*of_text, strict=True)) for of_text in parts]  # type: ignore[misc]

    @torch.inference_mode()
    def verify(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        last, hidden = self._verified(rows, draft)
        return self.model.logits(last), hidden

    @torch.inference_mode()
    def most_likely(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        last, hidden = self._verified(rows, draft)
        return self.model.most_likely(last), hidden

    def _verified(self, rows: Sequence[Row], draft: Draft) -> tuple[Tensor, Tensor]:
        """h_t (B, N, D) and hidden states (B, N, D or n·D)."""
        batch, nodes = len(rows), draft.num_nodes
        for row in rows:
            self._reserve(row, row.length + nodes)
        of_rows = SequenceBatch(
            [row.memory for row in rows],
            [row.length for row in rows],
            [nodes] * batch,
            draft.depths.expand(batch, nodes).flatten().int(),
            ancestor_bits(draft.ancestors, batch),
        )
        last, hidden = self._pass(rows, draft.token_ids.flatten(), of_rows)
        return last.view(batch, nodes, -1), hidden.view(batch, nodes, -1)

    @torch.inference_mode()
    def commit(self, rows: Sequence[Row], result: AcceptResult, num_accepted: Sequence[int]) -> None:
        for row, nodes, count in zip(rows, result.path.tolist(), num_accepted, strict=True):
            source = nodes[:count]
            if source != list(range(count)):
                end = row.length + count
                row.memory[..., row.length : end, :] = row.memory[..., [row.length + node for node in source], :]
            row.states.accepted = source
            row.length += count

    def drop(self, rows: Sequence[Row]) -> None:
        self._rows.difference_update(rows)

    def entries(self, row: Row, num_tokens: int) -> Entries:
        return (row.memory[..., :num_tokens, :].clone(memory_format=torch.contiguous_format),)

    @torch.inference_mode()
    def states(self, row: Row) -> States:
        if not self.native.has_states:
            return {}
        self.native.settle([row.states])
        return {("native", 0, 0): row.states.states.clone()}

    @property
    def num_bytes(self) -> int:
        parts = ((row.memory, row.states.states, row.states.records) for row in self._rows)
        return sum(part.nbytes for of_row in parts for part in of_row)

    @contextmanager
    def _undone(self, rows: Sequence[Row]) -> Iterator[None]:
        """If reading fails inside, the states of these rows are as before; entries are only written behind others."""
        before = [(row.states.states.clone(), row.states.accepted) for row in rows]
        try:
            yield
        except BaseException:
            for row, (states, accepted) in zip(rows, before, strict=True):
                row.states.states, row.states.accepted = states, accepted
            raise

    def _reserve(self, row: Row, num_tokens: int) -> None:
        row.memory = self.native.memory(whole_blocks(num_tokens), row.memory)

    def _pass(self, rows: Sequence[Row], tokens: Tensor, texts: SequenceBatch) -> tuple[Tensor, Tensor]:
        """h_t (M, D) and hidden states (M, D or n·D) of tokens (M,)."""
        if self.native.has_states:
            texts = replace(texts, states=[row.states for row in rows])
        if self.model.long_rope is not None:
            texts = replace(texts, are_long=[row.is_long for row in rows])
        return self.native.run(tokens, texts, self.layers, last_position=self.positions())


def _next_counts(left: Sequence[int]) -> dict[int, int]:
    """How many tokens of each text the next pass reads, of those that have some left."""
    counts: dict[int, int] = {}
    room = PASS_TOKENS
    for place, tokens in enumerate(left):
        if count := min(tokens, CHUNK_TOKENS, room):
            counts[place] = count
            room -= count
    return counts
