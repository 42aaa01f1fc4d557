"""A model with LoRA layers in it: trained, switched off, saved; seen as the merged model; its distance to the original.

LoRA (Hu et al. 2021) adds to a frozen matrix W a product of two thin ones: W + (α/r) B A, with A at random and
B = 0 at the start, so that the tuned model starts as the original. In training, dropout comes before A.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.data.features import Documents
from draftheads.errors import DataError, InvalidSettings
from draftheads.models.adapter import is_tied, quiet, require_peft
from draftheads.models.fingerprint import sampled_layers
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import TargetWeights
from draftheads.train.learner import LowRankUpdate
from draftheads.train.losses import CHUNK_SIZE, precedes_answer
from draftheads.train.report import Movement
from draftheads.utils.counts import counted

RANK, ALPHA, DROPOUT = 32, 16, 0.05  # of Medusa, section 4


class Adapter:
    """Untrained LoRA layers in place of a model's linear layers; the model object stays the same.

    They are drawn from torch's global generator. ``targets`` are ends of the names of layers; :func:`linear_layers`
    when left out. The model's own weights are frozen.
    """

    def __init__(
        self,
        model: Any,
        *,
        rank: int = RANK,
        alpha: int = ALPHA,
        dropout: float = DROPOUT,
        targets: Sequence[str] = (),
    ) -> None:
        peft = require_peft()
        names = list(targets) or linear_layers(model)
        config = peft.LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none", task_type="CAUSAL_LM"
        )
        with quiet():
            try:
                self.peft_model = peft.get_peft_model(model, config)
            except ValueError as error:
                raise InvalidSettings(f"the layers {' '.join(names)} cannot be adapted: {error}") from error
        self.set_dropout(on=False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The A and B of all layers."""
        return [parameter for name, parameter in self.peft_model.named_parameters() if "lora_" in name]

    @contextmanager
    def off(self) -> Iterator[None]:
        """A ``with`` block in which the model is the original one."""
        layers = self.peft_model.base_model  # peft's disable_adapter() does the same after a slow look at every module
        layers.disable_adapter_layers()
        try:
            yield
        finally:
            layers.enable_adapter_layers()

    def set_dropout(self, *, on: bool) -> None:
        """Dropout before A as in training, or none."""
        for name, module in self.peft_model.named_modules():
            if "lora_dropout" in name:
                module.train(on)

    def save(self, folder: Path) -> None:
        """Writes the adapter in peft's format, without any of the model's own weights."""
        with quiet():  # peft would add the embeddings as soon as it sees that the lm_head is adapted
            self.peft_model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty template

    def remove(self) -> None:
        """Gives the model its own layers back."""
        self.peft_model.unload()


def linear_layers(model: Any) -> list[str]:
    """Last parts of the names of all linear layers; the whole name if the last part is a number.

    The lm_head is among them if its matrix is its own: where it is the embedding, too, merging would make it a second
    matrix, and the model larger.
    """
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - two seconds that --help need not pay

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = [name for name, module in linear if not (is_tied(model) and module is model.get_output_embeddings())]
    return sorted({name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in names})


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
