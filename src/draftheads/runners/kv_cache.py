"""Keys and values for transformers' modules: one rectangle of slots for all rows, written in place.

Beside them are states of recurrent layers and the last inputs of convolutions, one of each row; of other models none.

Callers choose the slots to write and to read; it knows nothing of text or trees.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftheads.runners.runner import Entries, States
from draftheads.utils.transfer import to_device


@dataclass
class SlotView:
    """The slots that the next pass uses."""

    rows: slice = field(default_factory=lambda: slice(0, 0))  # b neighbouring rows
    row_index: Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.long))  # (b, 1): the same rows
    slots: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))  # (b, T): the slots to write
    start: int | None = None  # the first slot to write, if all rows write the same range
    span: int = 0  # slots 0 … span-1 are read


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: (rows, kv heads, capacity, head size)."""

    is_sliding = False  # sliding layers keep the full history, too; their mask does the sliding
    keys: Tensor
    values: Tensor

    def __init__(self, view: SlotView) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view = view
        self.shape = (0, 0)  # rows and capacity of the buffers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers; the first entries determine sizes, type and device."""
        self.keys, self.values = (
            like.new_zeros(self.shape[0], like.shape[1], self.shape[1], like.shape[3])
            for like in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes (b, heads, T, size) into the view's slots and returns its rows' first ``span`` slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        view, rows = self.view, self.view.rows
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if view.start is None:
                buffer[view.row_index, :, view.slots] = states.transpose(1, 2)
            else:  # the same slots in every row: a plain copy
                buffer[rows, :, view.start : view.start + view.slots.shape[1]] = states
        return self.keys[rows, :, : view.span], self.values[rows, :, : view.span]

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocates the buffers and keeps the entries that fit."""
        self.shape = (rows, capacity)
        if self.is_initialized:
            old = self.keys, self.values
            self.lazy_initialization(*old)
            for before, new in zip(old, (self.keys, self.values), strict=True):
                slots = min(before.shape[2], capacity)
                new[: len(before), :, :slots] = before[:rows, :, :slots]

    def entries(self, row: int, num_slots: int) -> Entries:
        """A copy of the keys and values in the first slots of a row, each (kv heads, slots, head size)."""
        if not self.is_initialized:  # such as a recurrent layer
            return (torch.empty(0, num_slots, 0),) * 2
        exact = torch.contiguous_format
        return tuple(part[row, :, :num_slots].clone(memory_format=exact) for part in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The span of the view: every pass has its own mask over it."""
        return self.view.span, 0

    def get_seq_length(self) -> int:
        """The span of the view. Positions never depend on it: they are always given explicitly."""
        return self.view.span

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.10


class SlotCache(Cache):
    """One :class:`SlotLayer` for each layer of the model, the view that they share, and the states."""

    layers: list[SlotLayer]  # type: ignore[assignment]  # these layers and no others

    def __init__(self, num_layers: int) -> None:
        self.view = SlotView()
        super().__init__(layers=[SlotLayer(self.view) for _ in range(num_layers)])
        self.states: dict[tuple[str, int, int], Tensor] = {}  # (rows, …) by kind, layer and number in the layer
        self.shape = (0, 0)  # rows and slots
        self.generation = 0  # changes when the buffers are reallocated

    @property
    def buffers(self) -> list[Tensor]:
        """Of all layers, keys and values."""
        return [part for layer in self.layers if layer.is_initialized for part in (layer.keys, layer.values)]

    @property
    def of_rows(self) -> list[Tensor]:
        """All that it holds, each (rows, …)."""
        return [*self.buffers, *self.states.values()]

    def clear(self, row: int) -> None:
        """A new text has that row. Masks hide what the slots held."""
        for state in self.states.values():
            state[row : row + 1] = 0

    @contextmanager
    def undone(self, rows: slice) -> Iterator[None]:
        """If reading fails inside, these rows are as before. Entries are only written behind what rows hold."""
        before = {key: state[rows].clone() for key, state in self.states.items()}
        try:
            yield
        except BaseException:
            for key, state in self.states.items():
                old = before.get(key, state[:0])
                state[rows] = 0
                state[rows][: len(old)] = old  # fewer rows, if there was no place for the last ones yet
            raise

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocates the buffers, if they have another shape."""
        if (rows, capacity) != self.shape:
            for layer in self.layers:
                layer.resize(rows, capacity)
            for key, old in self.states.items():
                if len(old) != rows:
                    self.states[key] = old.new_zeros(rows, *old.shape[1:])
                    self.states[key][: len(old)] = old[:rows]
            self.shape = (rows, capacity)
            self.generation += 1

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copies, in rows (b, 1), the entries of slots ``source`` (b, P) to slots ``target`` (b, P)."""
        for buffer in self.buffers:
            buffer[rows, :, target] = buffer[rows, :, source]

    def order(self, rows: Sequence[int]) -> None:
        """Row ``rows[i]`` is row i from now on. Rows that the buffers do not have yet are empty."""
        moved = [place for place, row in enumerate(rows) if row != place]
        there = [place for place in moved if rows[place] < self.shape[0]]
        for buffer in self.of_rows if there else ():
            source, target = to_device([rows[place] for place in there], buffer.device), to_device(there, buffer.device)
            buffer[target] = buffer[source]
        for place in set(moved).difference(there):
            self.clear(place)

    def entries(self, row: int, num_slots: int) -> Entries:
        """A copy of what the first slots of a row hold."""
        return tuple(part for layer in self.layers for part in layer.entries(row, num_slots))

    def write(self, row: int, entries: Entries) -> None:
        """Writes to the first slots of a row."""
        for layer, pair in zip(self.layers, zip(entries[::2], entries[1::2], strict=True), strict=True):
            if not len(pair[0]):  # such as a recurrent layer
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(*(part[None] for part in pair))
            for buffer, part in zip((layer.keys, layer.values), pair, strict=True):
                buffer[row, :, : part.shape[1]] = part

    def state(self, key: tuple[str, int, int], shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """All rows' states of that name, each zeros at first."""
        if key not in self.states:
            self.states[key] = torch.zeros(self.shape[0], *shape, dtype=dtype, device=like.device)
        return self.states[key]

    def states_of(self, row: int) -> States:
        """A copy of a row's states."""
        return {key: state[row].clone() for key, state in self.states.items()}

    def write_states(self, row: int, states: States) -> None:
        """The row goes on from a copy of these."""
        for key, state in states.items():
            self.state(key, state.shape, state, state.dtype)[row] = state
