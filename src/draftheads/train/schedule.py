"""Learning rates by step, counted from 0; pure numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Steps with a warm-up and a cosine of their own."""

    num_steps: int
    peak: float = 1.0  # part of the highest learning rate


def staged_rate(step: int, stages: Sequence[Stage], *, warmup: float, final: float) -> float:
    """The learning rate of a step, as a part of the highest.

    Args:
        step: counted through all stages.
        stages: in their order.
        warmup: steps of a stage in which the rate rises: below 1 a part of them, else their number.
        final: where a stage's cosine ends, as a part of its peak.

    >>> stages = [Stage(4), Stage(2, peak=0.1)]
    >>> [round(staged_rate(step, stages, warmup=0.0, final=0.1), 3) for step in range(6)]
    [1.0, 0.868, 0.55, 0.232, 0.1, 0.055]
    """
    for stage in stages:
        if step < stage.num_steps or stage is stages[-1]:
            return stage.peak * rise_and_cosine(step, stage.num_steps, warmup=warmup, final=final)
        step -= stage.num_steps
    raise AssertionError("a schedule needs a stage")


def rise_and_cosine(step: int, num_steps: int, *, warmup: float, final: float = 0.0) -> float:
    """A linear warm-up and half a cosine, as ``transformers``' ``cosine_with_min_lr``.

    >>> [round(rise_and_cosine(step, 6, warmup=0.4), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    >>> rise_and_cosine(1, 6, warmup=2)  # below 1 it is a part of the steps, else their number
    0.5
    """
    num_warmup_steps = int(warmup * num_steps if warmup < 1 else warmup)
    if step < num_warmup_steps:
        return step / num_warmup_steps
    part = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return final + (1 - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, part)))
