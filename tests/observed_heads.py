"""Heads and answers for tests of what is observed along recorded answers."""

from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Answer, draft_along, observe
from draftheads.speculation.shapes import BestFirst
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
    hidden = [observe(head, model, answer, top_k=2, temperature=0.0)[1] for answer in answers]
    layers = head.hidden_layers
    prompts = [head.split(model.hidden_states(torch.tensor([answer.prompt_ids]), layers))[0][0] for answer in answers]
    return draft_along(head, shape, answers, hidden, prompts)
