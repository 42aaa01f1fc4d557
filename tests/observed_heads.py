"""Heads and answers for tests of what is observed along recorded answers."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Answer, draft_along, observe
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Path
from families import tiny_head

K = 3
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "hydra": ("hydra", {}),
    "trimmed medusa": ("medusa", {"draft_vocab_size": 14}),
    "trimmed hydra": ("hydra", {"draft_vocab_size": 14, "lm_head": "own"}),
}


def head_of(kind: str, model: TargetModel) -> DraftHead:
    method, options = HEADS.get(kind, (kind, {}))
    return tiny_head(method, model, num_heads=K, **options)


def drafted_along(head: DraftHead, model: TargetModel, answers: list[Answer], shape: BestFirst) -> list[Tensor]:
    """(K, m, K) of each answer, with states as they are observed."""
    seen, hidden = zip(*(observe(head, model, answer, top_k=2, temperature=0.0) for answer in answers), strict=True)
    return draft_along(head, shape, answers, hidden, [list(range(len(each.ranks))) for each in seen])


def steps_through(truth: Sequence[Sequence[int]], tree: Collection[Path]) -> int:
    """Steps of decoding an answer: truth[j] are the ranks of what follows token j."""
    place = steps = 0
    while place < len(truth) - 1:
        depth = 0
        while depth < len(truth[place]) and tuple(truth[place][: depth + 1]) in tree:
            depth += 1
        place += depth + 1
        steps += 1
    return steps
