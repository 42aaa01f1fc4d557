"""Recurrent layers in trees: a node goes on from the state of its parent, not from that of the token before it.

The mixers of ``transformers`` call a convolution and a recurrence by names of their module. While a pass of ours runs,
these names lead to functions that look up the pass in a context variable; calls from elsewhere go to the originals.
The cache hides states from mixers, so that they always make the calls for whole texts; the functions find them here.

A tree is walked by levels: nodes of one depth together, whatever their row. Each node's numbers are added in the same
order however many nodes there are. Prompts are read by the original functions, which compute many tokens at once.

B rows, N nodes or tokens of each, C channels, W inputs in the window of a convolution, m nodes of a level.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from draftheads.models.recurrent import CONVOLUTION, DELTA_RULE, KIMI_RULE, MAMBA1, MAMBA2
from draftheads.runners.kv_cache import SlotCache
from draftheads.utils.transfer import to_device


class Level(NamedTuple):
    """Nodes that are computed at once."""

    nodes: Tensor  # (m,) in all rows side by side: n of row b is b·N + n
    above: Tensor | None  # (m,) whose state each follows: places in the level before, rows in the first; None: all
    rows: Tensor  # (m,)


def levels_of(parents: Sequence[Sequence[int]], device: torch.device) -> list[Level]:
    """The levels of each row's nodes. A parent comes before its children; −1 is the text.

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
            found[level].append((row * width + node, place, row))
    levels, before = [], len(parents)
    for entries in found:
        nodes, places, rows = (list(part) for part in zip(*entries, strict=True))
        above = None if places == [*range(before)] else to_device(places, device)
        levels.append(Level(to_device(nodes, device), above, to_device(rows, device)))
        before = len(places)
    return levels


def path_levels(paths: Sequence[Sequence[int]], num_nodes: int, device: torch.device) -> list[Level]:
    """One path of each row's nodes as levels. It may be empty."""
    levels, before = [], [*range(len(paths))]
    for depth in range(max(map(len, paths), default=0)):
        rows = [row for row in before if depth < len(paths[row])]
        above = None if rows == before else to_device([before.index(row) for row in rows], device)
        nodes = [row * num_nodes + paths[row][depth] for row in rows]
        levels.append(Level(to_device(nodes, device), above, to_device(rows, device)))
        before = rows
    return levels


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


def at_nodes(rule: Rule, nodes: Tensor) -> Rule:
    """The same of some nodes."""
    return type(rule)(*(part[nodes] for part in rule))


def walk(rule: Rule, states: Tensor, levels: Sequence[Level]) -> Iterator[tuple[Level, Rule, Tensor]]:
    """Each level with its part of the rule and its states (m, …), which begin after ``states`` of the texts (B, …)."""
    for level in levels:
        here = at_nodes(rule, level.nodes)
        states = here.next(states if level.above is None else states[level.above])
        yield level, here, states


# --- states of rows ---


class StateCache(SlotCache):
    """Beside keys and values the states of recurrent layers and the last inputs of convolutions, one of each row."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.states: dict[tuple[str, int, int], Tensor] = {}  # (rows, …) by kind, layer and number in the layer

    @property
    def of_rows(self) -> list[Tensor]:
        return [*self.buffers, *self.states.values()]

    def state(self, key: tuple[str, int, int], shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """All rows' states of that name, each zeros at first."""
        if key not in self.states:
            self.states[key] = torch.zeros(self.shape[0], *shape, dtype=dtype, device=like.device)
        return self.states[key]

    def resize(self, rows: int, capacity: int) -> None:
        super().resize(rows, capacity)
        for key, old in self.states.items():
            if len(old) != rows:
                self.states[key] = old.new_zeros(rows, *old.shape[1:])
                self.states[key][: len(old)] = old[:rows]

    def clear(self, row: int) -> None:
        for state in self.states.values():
            state[row : row + 1] = 0

    @contextmanager
    def undone(self, rows: slice) -> Iterator[None]:
        before = {key: state[rows].clone() for key, state in self.states.items()}
        try:
            yield
        except BaseException:
            for key, state in self.states.items():
                state[rows] = before.get(key, 0)
            raise

    # what mixers call: states are hidden from them

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        _pass().layer = layer_idx, state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


@dataclass
class Pass:
    """A pass over the nodes of some rows, and what their states need to follow accepted nodes."""

    cache: StateCache
    rows: slice
    parents: list[list[int]]  # of each row's nodes, all rows equally many; −1: the text
    counts: Sequence[int] | None = None  # reading: how many tokens of each row are not padding
    layer: tuple[int, int] = (0, 0)  # whose mixer runs
    columns: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # (B, C, W+N) inputs of convolutions
    # of each layer, and the states (m, …) of the first level
    rules: dict[tuple[str, int, int], tuple[Rule, Tensor]] = field(default_factory=dict)
    _tables: dict[int, Tensor] = field(default_factory=dict)
    _levels: list[Level] | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.parents[0])

    def levels(self, device: torch.device) -> list[Level]:
        """Of all nodes; when reading, of those that are not padding."""
        if self._levels is None:
            self._levels = (
                levels_of(self.parents, device)
                if self.counts is None
                else path_levels([range(count) for count in self.counts], self.num_nodes, device)
            )
        return self._levels

    def padding(self, device: torch.device) -> Tensor:
        """(B, N) bool; when reading."""
        assert self.counts is not None
        return torch.arange(self.num_nodes, device=device) >= to_device(list(self.counts), device)[:, None]

    def before(self, window: int, device: torch.device) -> Tensor:
        """(B, W+N): which column comes before each of a window and the nodes behind it."""
        if window not in self._tables:
            first = [max(0, column - 1) for column in range(window)]
            rows = [first + [window + (parent if parent >= 0 else -1) for parent in row] for row in self.parents]
            self._tables[window] = to_device(rows, device)
        return self._tables[window]

    def last(self, columns: Tensor, count: int, window: int) -> list[Tensor]:
        """The last ones on the ways to some columns (B, n) of a window and its nodes, each (B, n), oldest first."""
        found = [columns]
        while len(found) < count:
            found.append(self.before(window, columns.device).gather(1, found[-1]))
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
            first = to_device(begun, states.device)
            new = roots[self._roots(states.device)]
            states[first] = new[first]
            if levels is None:
                levels = path_levels([path[1:] for path in paths], self.num_nodes, states.device)
            for level, _, part in walk(rule, new, levels):
                states[level.rows] = part

    def _roots(self, device: torch.device) -> Tensor:
        """(B,) places of the roots in the first level, which has nodes that only fill up, too."""
        nodes: Tensor = self.levels(device)[0].nodes
        return (nodes % self.num_nodes == 0).nonzero()[:, 0]


def tree_pass(cache: StateCache, rows: slice, parents: Tensor, depths: Tensor) -> Pass:
    """A pass over trees: parents and depths (1 or B, N). Nodes of depth 0 follow the text."""
    above = parents.expand(rows.stop - rows.start, -1).masked_fill(depths == 0, -1)
    return Pass(cache, rows, above.tolist())


def text_pass(cache: StateCache, rows: slice, counts: Sequence[int], num_tokens: int) -> Pass:
    """A pass over the next tokens of texts, so many of each row, filled up to ``num_tokens``."""
    return Pass(cache, rows, [[*range(-1, num_tokens - 1)] for _ in counts], counts=counts)


# --- the functions that mixers call ---


def convolution(
    run: Pass,
    _: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **__: Any,
) -> Tensor:
    """Causal convolution of (B, C, N) with (C, W+1): tap by tap, the oldest input first."""
    window = weight.shape[1] - 1
    key = ("window", *run.layer)
    known = run.cache.state(key, (x.shape[1], window), x, x.dtype)[run.rows]
    columns = torch.cat([known, x], 2)
    run.columns[key] = columns
    nodes = torch.arange(window, columns.shape[2], device=x.device).expand(len(x), -1)
    found = torch.zeros((), device=x.device) if bias is None else bias.float()[:, None]
    for tap, column in enumerate(run.last(nodes, window + 1, window)):
        taken = columns.gather(2, column[:, None].expand(-1, x.shape[1], -1))
        found = found + taken.float() * weight[:, tap, None].float()
    found = found.to(weight.dtype)
    return (found if activation is None else _activated(found, activation)).to(x.dtype)


def delta_rule(
    run: Pass,
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Of queries and keys (B, N, key heads, K), values (B, N, heads, V), and (B, N, heads).

    Of Kimi Linear ``g`` is (B, N, heads, K).
    """
    states = run.states((value.shape[2], key.shape[3], value.shape[3]), value)
    if run.counts is not None:
        padding = run.padding(g.device)[..., None]  # a padded token changes no state
        options["g"] = g.masked_fill(padding if g.dim() == 3 else padding[..., None], 0)
        options |= {"beta": beta.masked_fill(padding, 0), "output_final_state": True}
        options |= {"initial_state": states.clone(), "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        found, last = original(query, key, value, **options)
        states.copy_(last)
        return found, states
    group = value.shape[2] // key.shape[2]
    query, key = (part.float().repeat_interleave(group, 2).flatten(0, 1) for part in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    decay, beta = (part.float().flatten(0, 1).contiguous() for part in (g, beta))
    decay = decay.exp().view(*beta.shape, -1)
    rule = DeltaRule(query * key.shape[-1] ** -0.5, key, value.float().flatten(0, 1), decay, beta)
    return _walked(run, rule, states).view(value.shape).to(value.dtype), states


def mamba2(  # noqa: PLR0917 - as it is called
    run: Pass,
    original: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Of inputs (B, N, heads, P), steps dt (B, N, heads), and B and C (B, N, groups, S)."""
    states = run.states((x.shape[2], x.shape[3], B.shape[3]), x)
    dt = _steps(dt.contiguous(), dt_bias, is_soft=dt_softplus).clamp(*dt_limit)
    if run.counts is not None:
        dt = dt.masked_fill(run.padding(dt.device)[..., None], 0)
        options |= {"initial_states": states.clone(), "return_final_states": True}
        found, last = original(x, dt, A, B, C, D=D, **options)
        states.copy_(last)
        return found, states
    group = x.shape[2] // B.shape[2]
    key, query = (part.float().repeat_interleave(group, 2).flatten(0, 1) for part in (B, C))
    inputs, dt = x.float().flatten(0, 1), dt.float().flatten(0, 1)
    rule = StateSpace(inputs * dt[..., None], key, query, (A.float() * dt).exp()[..., None])
    found = _walked(run, rule, states)
    return (found if D is None else found + inputs * D.float()[:, None]).view(x.shape), states


def mamba1(  # noqa: PLR0917 - as it is called
    run: Pass,
    _: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Of inputs and steps (B, channels, N), A (channels, S), and B and C (B, S, N). The original knows no states."""
    states = run.states((x.shape[1], 1, A.shape[1]), x)
    inputs, dt, key, query = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in (x, dt, B, C))
    inputs, dt = inputs.float(), _steps(dt, delta_bias, is_soft=delta_softplus).float()
    decay = (A.float() * dt[..., None]).exp()
    rule = StateSpace((inputs * dt)[..., None], key.float()[:, None], query.float()[:, None], decay)
    found = _walked(run, rule, states)[..., 0]  # (B·N, channels)
    found = found if D is None else found + inputs * D.float()
    if z is not None:
        found = found * _activated(z.transpose(1, 2).flatten(0, 1).contiguous().float(), "silu")
    return found.view(x.shape[0], x.shape[2], -1).transpose(1, 2).to(x.dtype), states


def _steps(dt: Tensor, bias: Tensor | None, *, is_soft: bool) -> Tensor:
    """Sizes of steps; the bias is of the last dimension."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return torch.where(dt > _LINEAR_FROM, dt, dt.exp().log1p()) if is_soft else dt


def _activated(x: Tensor, name: str) -> Tensor:
    # PyTorch's silu and softplus have other bits at the end of an array than in it, unlike exp and log1p
    return x / (1 + (-x).exp()) if name in ("silu", "swish") else ACT2FN[name](x)


def _walked(run: Pass, rule: Rule, states: Tensor) -> Tensor:
    """Outputs (B·N, …). The rule is kept for accepted nodes; a text's states are moved at once."""
    found = roots = None
    for level, here, new in walk(rule, states, run.levels(states.device)):
        part = here.output(new)
        if found is None:
            found, roots = part.new_zeros(len(rule[0]), *part.shape[1:]), new
        found[level.nodes] = part
        if run.counts is not None:
            states[level.rows] = new
    assert found is not None
    assert roots is not None
    if run.counts is None:
        run.rules["state", *run.layer] = rule, roots
    return found


_OURS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: convolution,
    DELTA_RULE: delta_rule,
    MAMBA2: mamba2,
    MAMBA1: mamba1,
    KIMI_RULE: delta_rule,
}
_LINEAR_FROM = 20.0  # of softplus, as in PyTorch
_RUNNING: ContextVar[Pass | None] = ContextVar("_RUNNING", default=None)
_LOCK = threading.Lock()
_uses: Counter[str] = Counter()  # passes that run now, by module
_originals: dict[tuple[str, str], Callable[..., Any]] = {}


def _pass() -> Pass:
    run = _RUNNING.get()
    assert run is not None, "a cache with states is used in a pass"
    return run


def _dispatch(ours: Callable[..., Any], original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    run = _RUNNING.get()
    return original(*args, **options) if run is None else ours(run, original, *args, **options)


@contextmanager
def running(run: Pass, modules: Sequence[ModuleType]) -> Iterator[Pass]:
    """While the pass runs, mixers of these modules call our functions in this thread."""
    with _LOCK:
        for module in modules:
            _uses[module.__name__] += 1
            for name in _OURS if _uses[module.__name__] == 1 else ():
                if (original := getattr(module, name, None)) is not None:
                    _originals[module.__name__, name] = original
                    setattr(module, name, partial(_dispatch, _OURS[name], original))
    token = _RUNNING.set(run)
    try:
        yield run
    finally:
        _RUNNING.reset(token)
        with _LOCK:
            for module in modules:
                _uses[module.__name__] -= 1
                for name in _OURS if not _uses[module.__name__] else ():
                    if (module.__name__, name) in _originals:
                        setattr(module, name, _originals.pop((module.__name__, name)))
