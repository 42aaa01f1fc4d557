"""The functions that recurrent mixers of ``transformers`` call while a pass of ours runs.

A tree is walked by levels (:mod:`draftheads.runners.recurrence`). Prompts are read by the original functions, which
compute many tokens at once.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from draftheads.models.model_layers import CONVOLUTION, DELTA_RULE, KIMI_RULE, MAMBA1, MAMBA2
from draftheads.runners.recurrence import RUNNING, DeltaRule, Pass, Rule, StateSpace, walk


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
        padding = run.padding[..., None]  # a padded token changes no state
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
        dt = dt.masked_fill(run.padding[..., None], 0)
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
    for level, here, new in walk(rule, states, run.levels):
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


FUNCTIONS: dict[str, Callable[..., Any]] = {  # ours, by the names of those that mixers call
    CONVOLUTION: convolution,
    DELTA_RULE: delta_rule,
    MAMBA2: mamba2,
    MAMBA1: mamba1,
    KIMI_RULE: delta_rule,
}
_LINEAR_FROM = 20.0  # of softplus, as in PyTorch
_LOCK = threading.Lock()
_uses: Counter[str] = Counter()  # passes that run now, by module
_originals: dict[tuple[str, str], Callable[..., Any]] = {}


def _dispatch(ours: Callable[..., Any], original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    run = RUNNING.get()
    return original(*args, **options) if run is None else ours(run, original, *args, **options)


@contextmanager
def running(run: Pass, modules: Sequence[ModuleType]) -> Iterator[Pass]:
    """While the pass runs, mixers of these modules call our functions in this thread."""
    with _LOCK:
        for module in modules:
            _uses[module.__name__] += 1
            for name in FUNCTIONS if _uses[module.__name__] == 1 else ():
                if (original := getattr(module, name, None)) is not None:
                    _originals[module.__name__, name] = original
                    setattr(module, name, partial(_dispatch, FUNCTIONS[name], original))
    token = RUNNING.set(run)
    try:
        yield run
    finally:
        RUNNING.reset(token)
        with _LOCK:
            for module in modules:
                _uses[module.__name__] -= 1
                for name in FUNCTIONS if not _uses[module.__name__] else ():
                    if (module.__name__, name) in _originals:
                        setattr(module, name, _originals.pop((module.__name__, name)))
