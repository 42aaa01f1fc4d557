"""The model while an adapter in it is trained, seen as the merged model; and how far it is from the original."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.data.features import Documents
from draftheads.errors import DataError
from draftheads.models.adapter import Adapter
from draftheads.models.fingerprint import sampled_layers
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import TargetWeights
from draftheads.train.learner import LowRankUpdate
from draftheads.train.objectives import CHUNK_SIZE, precedes_answer
from draftheads.utils.counts import counted


class TunedModel(TargetModel):
    """A model with an adapter in it. Its weights are those of the merged model."""

    @property
    def update(self) -> LowRankUpdate | None:
        """The adapter's part of the lm_head as it is now; None if the lm_head is not adapted."""
        adapted: Any = self.lm_head
        if not hasattr(adapted, "lora_A"):
            return None
        (name,) = adapted.active_adapters
        return LowRankUpdate(
            adapted.lora_A[name].weight, adapted.lora_B[name].weight, adapted.scaling[name], adapted.lora_dropout[name]
        )

    @property
    def weights(self) -> TargetWeights:  # not cached, unlike those of the original: they change
        """The weights that a draft head reads; the tuned lm_head in fp32."""
        original, update = super().weights, self.update
        if update is None:
            return original
        with torch.no_grad():
            lm_head = original.lm_head.float() + update.matrix.float()
        return replace(original, lm_head=lm_head, lm_head_product=None)

    @property
    def layers_fingerprint(self) -> str | None:
        return sampled_layers(self.layer_matrices())

    def layer_matrices(self) -> list[Tensor]:
        """W + (α/r) B A of the adapted layers, and the others."""
        matrices = []
        for name, module in self.decoder.named_modules():
            if "lora_" in name or isinstance(module, nn.Embedding):
                continue
            weights = [weight.detach() for weight in module.parameters(recurse=False) if weight.dim() > 1]
            adapted: Any = self.decoder.get_submodule(name.removesuffix(".base_layer"))
            if hasattr(adapted, "lora_A") and all(weight.is_floating_point() for weight in weights):
                (active,) = adapted.active_adapters
                weights = [weight + adapted.get_delta_weight(active).detach().to(weight.dtype) for weight in weights]
            matrices += weights
        return matrices


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
    """The movement on these documents. Both models read the true text."""
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

    Of logits (n, V) of both, and the true next tokens (n,).
    """
    before, after = original.float().log_softmax(-1), tuned.float().log_softmax(-1)
    kl = (before.exp() * (before - after)).sum()
    losses = [-log_probs.gather(1, next_ids[:, None]).sum() for log_probs in (before, after)]
    agreed = (original.argmax(-1) == tuned.argmax(-1)).sum()
    return torch.stack([kl, *losses, agreed.to(kl)]).double().cpu()
