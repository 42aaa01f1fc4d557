"""The KV cache: keys and values of the target, one slot per token and row, written in place.

How it grows: :meth:`SlotCache.reserve` makes room, in blocks of ``BLOCK_SLOTS`` slots. A finished row causes no copy of
the other rows: its place is reused. Memory is freed when less than half of it is in use (:meth:`SlotCache.keep`).

Knows ``transformers``' cache interface. Knows nothing of text or trees: callers choose the slots to write and to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftheads.utils.transfer import to_device

BLOCK_SLOTS = 128  # a small cache for short texts, yet few reallocations for long ones


@dataclass
class Window:
    """The part of the buffers that the next forward pass uses."""

    rows: slice = field(default_factory=lambda: slice(0, 0))  # neighbouring rows
    row_index: Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.long))  # (b, 1): the same rows
    slots: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))  # (b, T): the slots to write
    start: int | None = None  # the first slot to write, if all rows write the same range
    span: int = 0  # slots 0 … span-1 are read


@dataclass(frozen=True)
class RowEntries:
    """Keys and values of the first T tokens of one row: for each layer two tensors (kv heads, T, head size)."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def num_slots(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory that these tensors hold, also of slots that they do not show."""
        return sum(part.untyped_storage().nbytes() for layer in self.layers for part in layer)

    def first(self, num_slots: int) -> "RowEntries":
        """Those of the first tokens; shares the memory."""
        return RowEntries(tuple((keys[:, :num_slots], values[:, :num_slots]) for keys, values in self.layers))

    def copied(self) -> "RowEntries":
        """The same in memory of its own."""
        form = torch.contiguous_format  # without the slots that they do not show
        return RowEntries(
            tuple((keys.clone(memory_format=form), values.clone(memory_format=form)) for keys, values in self.layers)
        )


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: (rows, kv heads, capacity, head size); some rows may be unused."""

    is_sliding = False  # sliding layers keep the full history, too; their mask does the sliding
    keys: Tensor
    values: Tensor

    def __init__(self, window: Window, value_dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.value_dtype = value_dtype  # by default the model's own
        self.shape = (0, 0)  # rows and capacity of the buffers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers; the first entries determine sizes, type and device."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states.to(self.value_dtype))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes (b, heads, T, size) into the window's slots and returns its rows' first ``span`` slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window, rows = self.window, self.window.rows
        if window.start is None:
            self.keys[window.row_index, :, window.slots] = key_states.transpose(1, 2)
            self.values[window.row_index, :, window.slots] = value_states.transpose(1, 2).to(self.values.dtype)
        else:  # the same slots in every row: a plain copy
            slots = slice(window.start, window.start + window.slots.shape[1])
            self.keys[rows, :, slots] = key_states
            self.values[rows, :, slots] = value_states
        return self.keys[rows, :, : window.span], self.values[rows, :, : window.span]

    def prepare(self, groups: int, size: int, dtype: torch.dtype) -> None:
        """Allocates the buffers of a layer that another than :meth:`update` writes."""
        if not self.is_initialized:
            entries = torch.empty(0, groups, 0, size, dtype=dtype)
            self.lazy_initialization(entries, entries)

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocates the buffers and keeps the entries that fit."""
        self.shape = (rows, capacity)
        if self.is_initialized:
            self.keys, self.values = (self._resized(buffer) for buffer in (self.keys, self.values))

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copies slots ``source`` to ``target``, each (b, P), in rows (b, 1)."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[rows, :, target] = buffer[rows, :, source]

    def write_row(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Writes (heads, T, size) to the first slots of a row."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        self.keys[row, :, : keys.shape[1]] = keys
        self.values[row, :, : values.shape[1]] = values

    def take(self, source: Tensor, target: Tensor) -> None:
        """Copies whole rows ``source`` (n,) to the rows ``target`` (n,)."""
        for buffer in (self.keys, self.values):
            buffer[target] = buffer[source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The span of the window: every pass has its own mask over it."""
        return self.window.span, 0

    def get_seq_length(self) -> int:
        """The span of the window. Positions never depend on it: they are always given explicitly."""
        return self.window.span

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.10

    def _buffer(self, like: Tensor) -> Tensor:
        rows, capacity = self.shape
        return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])

    def _resized(self, old: Tensor) -> Tensor:
        new = self._buffer(old)
        rows, slots = min(len(old), len(new)), min(old.shape[2], new.shape[2])
        new[:rows, :, :slots] = old[:rows, :, :slots]
        return new


class SlotCache(Cache):
    """One :class:`SlotLayer` per model layer, and the window that they share."""

    layers: list[SlotLayer]  # type: ignore[assignment]  # these layers and no others

    def __init__(self, num_layers: int, *, value_dtype: torch.dtype | None = None) -> None:
        self.window = Window()
        super().__init__(layers=[SlotLayer(self.window, value_dtype) for _ in range(num_layers)])
        self.num_rows = 0  # in use; they come first
        self.held_rows = 0  # of the buffers
        self.capacity = 0  # slots per row
        self.generation = 0  # changes when the buffers are reallocated

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Makes room for that many rows and slots. The number of slots is rounded up to whole blocks."""
        capacity = max(self.capacity, whole_blocks(num_slots))
        self.num_rows = num_rows
        if num_rows > self.held_rows or capacity > self.capacity:
            self._resize(capacity)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies, in every row, the entries of slots ``source`` (rows, P) to slots ``target`` (rows, P)."""
        rows = torch.arange(self.num_rows, device=source.device)[:, None]
        for layer in self.layers:
            layer.move(rows, source, target)

    def entries(self, row: int, num_slots: int) -> RowEntries:
        """What the first slots of a row hold; shares the memory."""
        return RowEntries(
            tuple((layer.keys[row, :, :num_slots], layer.values[row, :, :num_slots]) for layer in self.layers)
        )

    def write_row(self, row: int, entries: RowEntries) -> None:
        """Writes to the first slots of a row, which :meth:`reserve` has made."""
        for layer, (keys, values) in zip(self.layers, entries.layers, strict=True):
            layer.write_row(row, keys, values)

    def trim(self, num_slots: int) -> None:
        """Frees the rows that are not in use, and the slots beyond ``num_slots``."""
        capacity = min(self.capacity, whole_blocks(num_slots))
        if (self.num_rows, capacity) != (self.held_rows, self.capacity):
            self._resize(capacity)

    def keep(self, rows: Sequence[int], num_slots: int) -> None:
        """Keeps the given n rows, in that order, and at least ``num_slots`` slots of each."""
        moved = [place for place, row in enumerate(rows) if row != place]
        if moved and self.layers[0].is_initialized:
            device = self.layers[0].keys.device
            source, target = to_device([rows[place] for place in moved], device), to_device(moved, device)
            for layer in self.layers:
                layer.take(source, target)
        self.num_rows = len(rows)
        capacity = min(self.capacity, whole_blocks(num_slots))
        if 2 * self.num_rows * capacity <= self.held_rows * self.capacity:
            self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        """Reallocates the buffers for the rows in use."""
        for layer in self.layers:
            layer.resize(self.num_rows, capacity)
        self.held_rows, self.capacity = self.num_rows, capacity
        self.generation += 1


def whole_blocks(num_slots: int) -> int:
    """The number of slots, rounded up to whole blocks."""
    return -(-num_slots // BLOCK_SLOTS) * BLOCK_SLOTS
