"""Heads and answers for tests of what is observed along recorded answers."""

from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead, HeadSession, Root
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Answer, draft_along, observe
from draftheads.speculation.draft import Context
from draftheads.speculation.shapes import BestFirst
from families import tiny_head

K = 3
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "hydra": ("hydra", {}),
    "trimmed medusa": ("medusa", {"draft_vocab_size": 14}),
    "trimmed hydra": ("hydra", {"draft_vocab_size": 14, "lm_head": "own"}),
}


class Remembering(HydraHead):
    """Reads a fading memory of all states and tokens so far in place of the last state."""

    needs_history = True

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        memory = torch.zeros_like(hidden[:, 0])
        memories = []
        for place in range(hidden.shape[1]):
            memory = self.further(memory, hidden[:, place], token_ids[:, place])
            memories.append(memory)
        return super().forward(torch.stack(memories, 1), token_ids)

    def start(self) -> "RememberingSession":
        return RememberingSession(self)

    def further(self, memory: Tensor, state: Tensor, token_id: Tensor) -> Tensor:
        return 0.5 * memory + state + self.target_embedding[token_id]


class RememberingSession(HeadSession):
    head: Remembering

    def __init__(self, head: Remembering) -> None:
        super().__init__(head)
        self.memories: list[Tensor] = []  # of the rows at work

    def root(self, context: Context) -> Root:
        for row, count in enumerate(context.num_accepted.tolist()):
            if row == len(self.memories):
                self.memories.append(torch.zeros_like(context.hidden[row, 0]))
            for place in range(count):
                state, token = context.hidden[row, place], context.token_ids[row, place]
                self.memories[row] = self.head.further(self.memories[row], state, token)
        return Root(context.root_ids, torch.stack(self.memories))

    def keep(self, rows: Tensor) -> None:
        self.memories = [self.memories[row] for row in rows.tolist()]


def remembering_head(model: TargetModel) -> Remembering:
    torch.manual_seed(0)
    head = Remembering(HydraConfig(hidden_size=model.hidden_size, vocab_size=model.vocab_size, num_heads=K))
    head.initialise(model.weights)
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return head.eval().requires_grad_(requires_grad=False)


def head_of(kind: str, model: TargetModel) -> DraftHead:
    if kind == "remembering":
        return remembering_head(model)
    method, options = HEADS.get(kind, (kind, {}))
    return tiny_head(method, model, num_heads=K, **options)


def drafted_along(head: DraftHead, model: TargetModel, answers: list[Answer], shape: BestFirst) -> list[Tensor]:
    """(K, m, K) of each answer, with states as they are observed."""
    hidden = [observe(head, model, answer, top_k=2, temperature=0.0)[1] for answer in answers]
    layers = head.hidden_layers
    prompts = [head.split(model.hidden_states(torch.tensor([answer.prompt_ids]), layers))[0][0] for answer in answers]
    return draft_along(head, shape, answers, hidden, prompts)
