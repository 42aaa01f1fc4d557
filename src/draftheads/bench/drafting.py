"""What drafting costs, head by head (Hydra, table 1)."""

from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from draftheads.decode.step_costs import StepTimer
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree

_REPEATS = 50


@dataclass(frozen=True)
class DraftingCost:
    """Medians in milliseconds, for one row with a chain of draft tokens."""

    prefix: float  # layers that read the accepted tokens; 0 without such layers
    heads: tuple[float, ...]  # what each further depth takes

    @property
    def record(self) -> dict[str, Any]:
        return asdict(self)


def drafting_cost(target: TargetModel, head: DraftHead) -> DraftingCost:
    """Times chains of 1, 2, … draft tokens in turn; a head's time is what its depth adds."""
    timer = StepTimer(target, head)
    chains = [Tree.chain(depth) for depth in range(1, head.max_depth + 1)]
    parts = [partial(timer.draft, 1, chain) for chain in chains]
    if head.needs_history:
        parts.insert(0, partial(timer.read, 1))
    times: list[list[float]] = [[] for _ in parts]
    for repeat in range(_REPEATS + 2):
        for own, part in zip(times, parts, strict=True):
            milliseconds = part()
            if repeat >= 2:  # after warming up
                own.append(milliseconds)
    sums = [median(each) for each in times]
    prefix = sums.pop(0) if head.needs_history else 0.0
    before = [prefix, *sums[:-1]]
    return DraftingCost(prefix, tuple(max(0.0, own - less) for own, less in zip(sums, before, strict=True)))
