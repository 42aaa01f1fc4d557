"""Keys and values of the accepted tokens, which heads with transformer layers attend to.

B rows, C slots, G key-value heads, d their size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftheads.utils.transfer import to_device

_BLOCK_SLOTS = 128  # a history grows by as many slots as the target's cache


class KeysValues(NamedTuple):
    """Keys and values of some tokens; the leading dimensions differ."""

    keys: Tensor  # (…, G, d)
    values: Tensor  # (…, G, d)


class HeadKVCache:
    """Keys and values of all accepted tokens of the rows at work, for each of some layers.

    Slots are positions. What is written beyond a row's count is not kept: the next write begins there.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: list[KeysValues | None] = [None] * num_layers
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

    def write(self, layer: int, rows: slice, new: KeysValues, positions: Tensor, longest: int) -> KeysValues:
        """Puts keys and values of some rows at positions (rows, P); returns those rows' slots up to ``longest``."""
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
        num_slots = _whole_blocks(max(self.lengths, default=0))
        self.layers = [
            None if kept is None else KeysValues(*(part[rows, :num_slots] for part in kept)) for kept in self.layers
        ]

    def _with_room(self, layer: int, new: KeysValues, longest: int) -> KeysValues:
        """The layer's buffers, for all rows and ``longest`` slots at least."""
        kept = self.layers[layer]
        if kept is not None and kept.keys.shape[0] >= self.num_rows and kept.keys.shape[1] >= longest:
            return kept
        capacity = longest if kept is None else max(longest, kept.keys.shape[1])
        size = (self.num_rows, _whole_blocks(capacity))
        grown = KeysValues(*(part.new_zeros(*size, *part.shape[2:]) for part in new))
        if kept is not None:
            for old, part in zip(kept, grown, strict=True):
                part[: old.shape[0], : old.shape[1]] = old
        self.layers[layer] = grown
        return grown


def _whole_blocks(num_slots: int) -> int:
    return -(-num_slots // _BLOCK_SLOTS) * _BLOCK_SLOTS
