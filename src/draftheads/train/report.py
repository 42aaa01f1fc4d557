"""What a training run found, as plain numbers; ``metrics.json`` holds them under these names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Report:
    """The heads as they were measured on held-out text, and the run that made them."""

    method: str
    model_id: str
    num_training_texts: int
    num_held_out_texts: int
    num_steps: int
    training_seconds: float  # of this process: of a resumed run the last part only
    tokens_per_second: float  # of text, in those seconds
    losses: list[float]  # per head
    accuracy_by_rank: list[list[float]]  # per head: share of true tokens among its 1, 2, … best guesses
    top1: list[float]  # per head: share of true tokens that were its best guess
    top3: list[float]
    top10: list[float]
    tokens_per_step_chain: float  # expected, with a chain as deep as there are heads
    tokens_per_step_tree: float  # expected, with the tree below
    tree: list[list[int]]  # rank paths, root left out

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Self:
        """The report in the content of a ``metrics.json``."""
        return cls(**{field.name: metrics[field.name] for field in fields(cls)})
