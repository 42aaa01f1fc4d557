"""What a training run found, as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """What a run found; written as ``metrics.json``."""

    method: str
    model_id: str
    num_training_texts: int
    num_held_out_texts: int
    num_steps: int
    training_seconds: float
    losses: list[float]  # per head, on held-out text
    top1: list[float]  # accuracy per head
    top3: list[float]
    top10: list[float]
    tokens_per_step_chain: float
    tokens_per_step_tree: float
    tree: list[list[int]]  # rank paths, root left out
