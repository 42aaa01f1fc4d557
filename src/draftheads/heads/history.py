"""Keys and values of the texts that heads read, and of draft tokens behind them.

Alphabet: B rows, P tokens, N draft tokens, C slots, G key-value heads, d their size, D hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftheads.cpu.native_library import SequenceBatch, ancestor_bits
from draftheads.cpu.native_step import NativeStep
from draftheads.utils.counts import rounded_up
from draftheads.utils.transfer import to_device

BLOCK_SLOTS = 128  # a history grows by as many slots as the target's cache


class KeysValues(NamedTuple):
    """Keys and values of some tokens; the leading dimensions differ."""

    keys: Tensor  # (…, G, d)
    values: Tensor  # (…, G, d)


class Places(NamedTuple):
    """Where P tokens of some rows are, and what they see."""

    positions: Tensor  # (rows, P)
    slots: Tensor  # (rows, P)
    back: Tensor  # (rows, P, C) tokens from each slot on to them; below 0: not seen
    longest: int  # C


class HeadKVCache:
    """Keys and values of all accepted tokens of the rows at work, for each of some layers.

    Slots are positions. What is written beyond a row's count is not kept: the next write begins there.
    A layer with a window W keeps the last W tokens: position p is in slot 1 + p mod W, and slot 0 has what is not kept.

    Args:
        num_layers: as many layers.
        windows: of each layer, in tokens; 0 keeps all. All are 0 when left out.
    """

    def __init__(self, num_layers: int, windows: Sequence[int] = ()) -> None:
        self.layers: list[KeysValues | None] = [None] * num_layers
        self.windows = [*windows] or [0] * num_layers
        self.counts = torch.zeros(0, dtype=torch.long)  # (B,) tokens of each row
        self.lengths: list[int] = []  # the same on the host

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def join(self, batch: int, device: torch.device) -> None:
        """New rows stand behind the old ones, with nothing kept."""
        if batch == self.num_rows:
            return
        new = torch.zeros(batch - self.num_rows, dtype=torch.long, device=device)
        self.counts = torch.cat([self.counts, new]) if self.lengths else new
        self.lengths += [0] * len(new)

    def span(self, rows: slice, length: int) -> tuple[Tensor, int]:
        """Positions of the next ``length`` tokens of some rows, (rows, length), and how many slots they make."""
        positions = self.counts[rows, None] + torch.arange(length, device=self.counts.device)
        return positions, max(self.lengths[rows]) + length

    def write(
        self, layer: int, rows: slice, new: KeysValues, positions: Tensor, longest: int, *, ends: Tensor | None = None
    ) -> KeysValues:
        """Puts keys and values of some rows at positions (rows, P); returns those rows' slots up to ``longest``.

        Of a layer with a window, only positions from 0 to ``ends`` (rows,) are kept, which is how long the texts are.
        """
        if (window := self.windows[layer]) and ends is not None:
            is_kept = (positions >= (ends[:, None] - window).clamp(min=0)) & (positions < ends[:, None])
            positions = torch.where(is_kept, positions % window + 1, 0)
            longest = min(longest, window) + 1
        kept = self._with_room(layer, new, longest)
        index = torch.arange(rows.start, rows.stop, device=positions.device)[:, None]
        for old, values in zip(kept, new, strict=True):
            old[index, positions] = values
        return KeysValues(*(part[rows, :longest] for part in kept))

    def accepted(self) -> tuple[list[KeysValues], Tensor]:
        """What is kept of each layer: slots (B, C, G, d), and a mask (B, C) of those that count."""
        longest = max(self.lengths)
        seen = [KeysValues(*(part[: self.num_rows, :longest] for part in kept)) for kept in self.layers if kept]
        return seen, torch.arange(longest, device=self.counts.device) < self.counts[:, None]

    def placed(self) -> tuple[list[KeysValues], list[Tensor]]:
        """What is kept of each layer, slots (B, C, G, d), and the slots' positions (1 or B, C), below 0 where empty."""
        longest, last = max(self.lengths), self.counts[:, None] - 1
        seen, places = [], []
        for kept, window in zip(self.layers, self.windows, strict=True):
            if kept is not None:
                slots = torch.arange(min(longest, window or longest), device=last.device)
                first = int(window > 0)
                seen.append(KeysValues(*(part[: self.num_rows, first : first + len(slots)] for part in kept)))
                places.append(last - (last - slots) % window if window else slots[None])
        return seen, places

    def places(self, rows: slice, count: int, *, depth: int = 0, seen: Tensor | None = None) -> "Places":
        """Of the next ``count`` tokens of some rows, or of draft tokens, whose slots the next tokens will overwrite.

        Args:
            rows: which ones.
            count: P tokens of each.
            depth: of the draft tokens below the first one.
            seen: (rows, P, N) which of a row's N draft tokens so far each of the last P sees: those on its path.
        """
        positions, longest = self.span(rows, count)
        slots = torch.arange(longest, device=positions.device)
        if seen is None:
            return Places(positions, positions, positions[:, :, None] - slots, longest)
        counts, drafted = self.counts[rows, None], seen.shape[2]
        longest += drafted - count
        slots = torch.arange(longest, device=counts.device)
        of_nodes = counts + torch.arange(drafted, device=counts.device)  # (rows, N)
        back = torch.where(slots < counts, counts + depth - slots, -1)[:, None].repeat(1, count, 1)
        of_path = torch.where(seen, depth + 1 - seen.cumsum(2), -1)
        back.scatter_(2, of_nodes[:, None].expand_as(seen), of_path)
        return Places((counts + depth).expand(-1, count), of_nodes[:, drafted - count :], back, longest)

    def accept(self, rows: slice, counts: Tensor, lengths: Sequence[int]) -> None:
        """So many of the tokens written last are kept: (rows,), on the device and on the host."""
        self.counts[rows] += counts
        self.lengths[rows] = [old + new for old, new in zip(self.lengths[rows], lengths, strict=True)]

    def keep(self, rows: Tensor) -> None:
        """Rows left or moved: row ``rows[i]`` is row i from now on. Slots that no row needs any more are freed."""
        for layer, kept in enumerate(self.layers):
            if kept is not None:
                self._with_room(layer, kept, 0)  # also for rows that have joined, of which nothing is written yet
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        rows = to_device(rows, self.counts.device)
        self.counts = self.counts[rows]
        num_slots = rounded_up(max(self.lengths, default=0) + any(self.windows), BLOCK_SLOTS)
        self.layers = [
            None if kept is None else KeysValues(*(part[rows, :num_slots] for part in kept)) for kept in self.layers
        ]

    def _with_room(self, layer: int, new: KeysValues, longest: int) -> KeysValues:
        """The layer's buffers, for all rows and ``longest`` slots at least."""
        kept = self.layers[layer]
        if kept is not None and kept.keys.shape[0] >= self.num_rows and kept.keys.shape[1] >= longest:
            return kept
        capacity = longest if kept is None else max(longest, kept.keys.shape[1])
        size = (self.num_rows, rounded_up(capacity, BLOCK_SLOTS))
        grown = KeysValues(*(part.new_zeros(*size, *part.shape[2:]) for part in new))
        if kept is not None:
            for old, part in zip(kept, grown, strict=True):
                part[: old.shape[0], : old.shape[1]] = old
        self.layers[layer] = grown
        return grown


class NativeKVCache(HeadKVCache):
    """The same of layers that the native library computes, with a row's keys and values in memory of their own."""

    def __init__(self, native: NativeStep) -> None:
        super().__init__(0)
        self.native = native
        self.memory: list[Tensor] = []

    def join(self, batch: int, device: torch.device) -> None:
        super().join(batch, device)
        self.memory += [self.native.memory(0) for _ in range(batch - len(self.memory))]

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.memory = [self.memory[row] for row in rows.tolist()]

    def run(self, x: Tensor, rows: slice, *, depth: int = 0, seen: Tensor | None = None) -> Tensor:
        """All layers on P tokens of some rows, (rows, P, D) -> (rows, P, D); more as for :meth:`places`."""
        (batch, count, _), bits, drafted = x.shape, None, 0
        steps = torch.arange(count, dtype=torch.int32)
        if seen is not None:
            bits, drafted = ancestor_bits(seen, batch), seen.shape[2] - count
            steps = torch.full_like(steps, depth)
        for row, length in enumerate(self.lengths[rows], rows.start):
            slots = rounded_up(length + drafted + count, BLOCK_SLOTS)
            self.memory[row] = self.native.memory(slots, self.memory[row])
        texts = SequenceBatch(
            self.memory[rows], self.lengths[rows], [count] * batch, steps.repeat(batch), bits, drafted=drafted
        )
        return self.native.run(x.flatten(0, 1), texts, [self.native.num_layers])[1].view(x.shape)
