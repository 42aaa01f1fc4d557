"""The model while an adapter in it is trained, seen as the merged model."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.models.fingerprint import sampled_layers
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import TargetWeights
from draftheads.train.learner import LowRankUpdate


class TunedModel(TargetModel):
    """A model with an adapter in it. Its weights are those of the merged model."""

    @property
    def update(self) -> LowRankUpdate | None:
        """The adapter's part of the lm_head as it is now; None if the lm_head is not adapted."""
        return update_of(self.lm_head)

    @property
    def weights(self) -> TargetWeights:  # not cached, unlike those of the original: they change
        """The weights that a draft head reads; the tuned lm_head in fp32."""
        original = super().weights
        if self.update is None:
            return original
        with torch.no_grad():
            lm_head = original.lm_head.float() + self.update.matrix.float()
        return replace(original, lm_head=lm_head, lm_head_product=None)

    @property
    def layers_fingerprint(self) -> str | None:
        """That of the merged model."""
        return sampled_layers(self.layer_matrices())

    def layer_matrices(self) -> list[Tensor]:
        """W + (α/r) B A of the adapted layers, and the others."""
        found = []
        for name, module in self.decoder.named_modules():
            if "lora_" in name or isinstance(module, nn.Embedding):
                continue
            own = [weight.detach() for weight in module.parameters(recurse=False) if weight.dim() > 1]
            adapted: Any = self.decoder.get_submodule(name.removesuffix(".base_layer"))
            if hasattr(adapted, "lora_A") and all(weight.is_floating_point() for weight in own):
                (active,) = adapted.active_adapters
                own = [weight + adapted.get_delta_weight(active).detach().to(weight.dtype) for weight in own]
            found += own
        return found


def update_of(layer: nn.Module) -> LowRankUpdate | None:
    """The adapter's part of a layer; None if the layer is not adapted."""
    if not hasattr(layer, "lora_A"):
        return None
    adapted: Any = layer
    (name,) = adapted.active_adapters
    return LowRankUpdate(
        adapted.lora_A[name].weight, adapted.lora_B[name].weight, adapted.scaling[name], adapted.lora_dropout[name]
    )
