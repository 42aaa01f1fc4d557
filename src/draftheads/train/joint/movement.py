"""How far a tuned model is from the original, on held-out text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.data.features import Documents
from draftheads.errors import DataError
from draftheads.models.adapter import Adapter
from draftheads.train.joint.learner import precedes_answer
from draftheads.train.joint.merged_view import TunedModel
from draftheads.train.objectives import CHUNK_SIZE
from draftheads.utils.counts import counted


@dataclass(frozen=True)
class Movement:
    """How far a tuned model is from the original: means over the assistant's tokens of held-out text."""

    num_tokens: int
    kl: float  # KL(original || tuned), nats per token
    original_perplexity: float
    tuned_perplexity: float
    agreement: float  # how often both have the same most probable token


@torch.no_grad()
def measure_movement(tuned: TunedModel, adapter: Adapter, store: Documents, documents: Sequence[int]) -> Movement:
    """How far the tuned model is from the original on these documents. Both read the true text.

    Raises:
        DataError: they have no token of the assistant with a token before it.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    num_tokens = 0
    for index in documents:
        positions = precedes_answer(store.loss_masks[index][None])
        token_ids = store.token_ids[index].to(tuned.device)
        after = tuned.hidden_states(token_ids[None])[0]  # (T, D)
        with adapter.off():
            before = tuned.hidden_states(token_ids[None])[0]
        for chunk in positions.to(tuned.device).split(CHUNK_SIZE):
            with adapter.off():
                original = tuned.logits(before[chunk])
            sums += compare(original, tuned.logits(after[chunk]), token_ids[chunk + 1])
        num_tokens += len(positions)
    if num_tokens == 0:
        raise DataError(f"no assistant token in {counted(len(documents), 'held-out text')}: give more data")
    kl, loss_before, loss_after, agreed = (sums / num_tokens).tolist()
    return Movement(num_tokens, kl, math.exp(loss_before), math.exp(loss_after), agreed)


def compare(original: Tensor, tuned: Tensor, next_ids: Tensor) -> Tensor:
    """Sums over n positions, (4,) fp64 on the CPU: KL(original || tuned), losses of both models, agreements.

    Args:
        original: (n, V) logits.
        tuned: (n, V) logits.
        next_ids: (n,) the true next tokens.
    """
    before, after = original.float().log_softmax(-1), tuned.float().log_softmax(-1)
    kl = (before.exp() * (before - after)).sum()
    losses = [-log_probs.gather(1, next_ids[:, None]).sum() for log_probs in (before, after)]
    agreed = (original.argmax(-1) == tuned.argmax(-1)).sum()
    return torch.stack([kl, *losses, agreed.to(kl)]).double().cpu()
