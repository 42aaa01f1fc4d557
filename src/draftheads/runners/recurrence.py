"""Recurrent layers in trees: a node goes on from the state of its parent, not from that of the token before it.

The mixers of ``transformers`` call a convolution and a recurrence by names of their module. While a pass of ours runs,
these names lead to functions that look up the pass in a context variable; calls from elsewhere go to the originals.
The cache hides states from mixers, so that they always make the calls for whole texts; the functions
(:mod:`draftheads.runners.mixers`) find them here.

A tree is walked by levels: nodes of one depth together, whatever their row. Each node's numbers are added in the same
order however many nodes there are.

B rows, N nodes or tokens of each, C channels, W inputs in the window of a convolution, m nodes of a level.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.runners.kv_cache import SlotCache
from draftheads.utils.transfer import to_device


class Level(NamedTuple):
    """Nodes that are computed at once."""

    nodes: Tensor  # (m,) in all rows side by side: n of row b is b·N + n
    above: Tensor | None  # (m,) whose state each follows: places in the level before, rows in the first; None: all
    rows: Tensor  # (m,)


def levels_of(
    parents: Sequence[Sequence[int]], device: torch.device, numbers: Sequence[Sequence[int]] | None = None
) -> list[Level]:
    """The levels of each row's nodes. A parent comes before its children; −1 is the text.

    ``numbers`` are those of the nodes in all rows side by side, if these are not all nodes of equally wide rows.

    >>> [(level.nodes.tolist(), level.above) for level in levels_of([[-1, 0], [-1]], torch.device("cpu"))]
    [([0, 2], None), ([1], tensor([0]))]
    """
    width = max(map(len, parents), default=0)
    found: list[list[tuple[int, int, int]]] = []
    for row, of_row in enumerate(parents):
        at: list[tuple[int, int]] = []  # of each node: its level, its place there
        for node, parent in enumerate(of_row):
            level, place = (at[parent][0] + 1, at[parent][1]) if parent >= 0 else (0, row)
            if level == len(found):
                found.append([])
            at.append((level, len(found[level])))
            found[level].append((numbers[row][node] if numbers else row * width + node, place, row))
    levels, before = [], len(parents)
    for entries in found:
        nodes, places, rows = (list(part) for part in zip(*entries, strict=True))
        above = None if places == [*range(before)] else to_device(places, device)
        levels.append(Level(to_device(nodes, device), above, to_device(rows, device)))
        before = len(places)
    return levels


def path_levels(paths: Sequence[Sequence[int]], num_nodes: int, device: torch.device) -> list[Level]:
    """One path of each row's nodes as levels. It may be empty."""
    numbers = [[row * num_nodes + node for node in path] for row, path in enumerate(paths)]
    return levels_of([range(-1, len(path) - 1) for path in paths], device, numbers)


# --- recurrences: one update, of m states at once ---


class DeltaRule(NamedTuple):
    """The gated delta rule (arXiv 2412.06464, eq. 10) of m nodes, in fp32; states (m, heads, K, V).

    In Kimi Linear (arXiv 2510.26692, eq. 1) each number of a key has a decay of its own.
    """

    query: Tensor  # (m, heads, K) normed and scaled, as keys are
    key: Tensor
    value: Tensor  # (m, heads, V)
    decay: Tensor  # (m, heads, 1 or K)
    beta: Tensor  # (m, heads)

    def next(self, state: Tensor) -> Tensor:
        state = state * self.decay[..., None]
        delta = (self.value - (state * self.key[..., None]).sum(-2)) * self.beta[..., None]
        return state + self.key[..., None] * delta[..., None, :]

    def output(self, state: Tensor) -> Tensor:
        return (state * self.query[..., None]).sum(-2)


class StateSpace(NamedTuple):
    """Mamba-2 (arXiv 2405.21060, section 3), and Mamba-1 with one number a head; states (m, heads, P, S) in fp32."""

    inputs: Tensor  # (m, heads, P) times dt
    key: Tensor  # (m, heads or 1, S): B
    query: Tensor  # (m, heads or 1, S): C
    decay: Tensor  # (m, heads, 1 or S)

    def next(self, state: Tensor) -> Tensor:
        return state * self.decay[..., None, :] + self.inputs[..., None] * self.key[..., None, :]

    def output(self, state: Tensor) -> Tensor:
        return (state * self.query[..., None, :]).sum(-1)


Rule = DeltaRule | StateSpace


def walk(rule: Rule, states: Tensor, levels: Sequence[Level]) -> Iterator[tuple[Level, Rule, Tensor]]:
    """Each level with its part of the rule and its states (m, …), which begin after ``states`` of the texts (B, …)."""
    for level in levels:
        here = type(rule)(*(part[level.nodes] for part in rule))
        states = here.next(states if level.above is None else states[level.above])
        yield level, here, states


# --- states of rows ---


class StateCache(SlotCache):
    """What mixers call: states are hidden from them."""

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        run = RUNNING.get()
        assert run is not None, "a cache with states is used in a pass"
        run.layer = layer_idx, state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


@dataclass
class Pass:
    """A pass over the nodes of some rows, and what their states need to follow accepted nodes."""

    cache: StateCache
    rows: slice
    device: torch.device
    parents: list[list[int]]  # of each row's nodes, all rows equally many; −1: the text
    counts: Sequence[int] | None = None  # reading: how many tokens of each row are not padding
    layer: tuple[int, int] = (0, 0)  # whose mixer runs
    columns: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # (B, C, W+N) inputs of convolutions
    # of each layer, and the states (m, …) of the first level
    rules: dict[tuple[str, int, int], tuple[Rule, Tensor]] = field(default_factory=dict)
    _tables: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return len(self.parents[0])

    @cached_property
    def levels(self) -> list[Level]:
        """Of all nodes; when reading, of those that are not padding."""
        if self.counts is None:
            return levels_of(self.parents, self.device)
        return path_levels([range(count) for count in self.counts], self.num_nodes, self.device)

    @cached_property
    def padding(self) -> Tensor:
        """(B, N) bool; when reading."""
        assert self.counts is not None
        return torch.arange(self.num_nodes, device=self.device) >= to_device(list(self.counts), self.device)[:, None]

    def before(self, window: int) -> Tensor:
        """(B, W+N): which column comes before each of a window and the nodes behind it."""
        if window not in self._tables:
            first = [max(0, column - 1) for column in range(window)]
            rows = [first + [window + (parent if parent >= 0 else -1) for parent in row] for row in self.parents]
            self._tables[window] = to_device(rows, self.device)
        return self._tables[window]

    def last(self, columns: Tensor, count: int, window: int) -> list[Tensor]:
        """The last ones on the ways to some columns (B, n) of a window and its nodes, each (B, n), oldest first."""
        found = [columns]
        while len(found) < count:
            found.append(self.before(window).gather(1, found[-1]))
        return found[::-1]

    def states(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """(B, …) of the running layer: a view."""
        return self.cache.state(("state", *self.layer), shape, like, torch.float32)[self.rows]

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Moves the states of all rows behind their accepted nodes."""
        for key, columns in self.columns.items():
            window = columns.shape[2] - self.num_nodes
            at = to_device([[window + (path[-1] if path else -1)] for path in paths], columns.device)
            index = torch.cat(self.last(at, window, window), 1)[:, None].expand(-1, columns.shape[1], -1)
            self.cache.states[key][self.rows] = columns.gather(2, index)
        begun, levels = [row for row, path in enumerate(paths) if path], None
        for key, (rule, roots) in self.rules.items():
            states = self.cache.states[key][self.rows]
            first = to_device(begun, states.device, torch.long)  # it may be empty
            # the first level has nodes that only fill up, too
            is_root = self.levels[0].nodes % self.num_nodes == 0
            new = roots[is_root.nonzero()[:, 0]]
            states[first] = new[first]
            if levels is None:
                levels = path_levels([path[1:] for path in paths], self.num_nodes, states.device)
            for level, _, part in walk(rule, new, levels):
                states[level.rows] = part


def tree_pass(cache: StateCache, rows: slice, parents: Tensor, depths: Tensor) -> Pass:
    """A pass over trees: parents and depths (1 or B, N). Nodes of depth 0 follow the text."""
    above = parents.expand(rows.stop - rows.start, -1).masked_fill(depths == 0, -1)
    return Pass(cache, rows, parents.device, above.tolist())


def text_pass(cache: StateCache, rows: slice, counts: Sequence[int], steps: Tensor) -> Pass:
    """A pass over the next tokens of texts, so many of each row, filled up to as many as there are ``steps``."""
    return Pass(cache, rows, steps.device, [[*range(-1, len(steps) - 1)] for _ in counts], counts=counts)


RUNNING: ContextVar[Pass | None] = ContextVar("RUNNING", default=None)
