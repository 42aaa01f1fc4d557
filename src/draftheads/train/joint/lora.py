"""A low-rank adapter inside a model: attached, switched off, saved, merged. The only file that knows ``peft``.

LoRA (Hu et al. 2021) adds to a frozen matrix W a product of two thin ones: W + (α/r) B A, with A at random and
B = 0 at the start, so that the tuned model starts as the original. In training, dropout comes before A.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import nn

from draftheads.draft import TargetWeights
from draftheads.errors import CheckpointCorrupt, InvalidSettings, MissingDependency, ModelNotFound
from draftheads.models.model import TargetModel
from draftheads.train.learner import LowRankUpdate

_CONFIG_FILE = "adapter_config.json"


class Adapter:
    """LoRA layers in place of a model's linear layers; the model object stays the same."""

    def __init__(self, peft_model: Any) -> None:
        self._peft = peft_model
        self.set_dropout(on=False)

    @classmethod
    def attach(cls, model: Any, *, rank: int, alpha: int, dropout: float, targets: tuple[str, ...] = ()) -> Self:
        """Puts untrained LoRA layers, drawn from torch's global generator, in place of linear layers.

        Args:
            model: a transformers causal LM; its own weights are frozen.
            rank: r.
            alpha: α.
            dropout: probability, in training.
            targets: ends of the names of layers; all linear layers and the lm_head when left out.

        Raises:
            MissingDependency: no peft.
            InvalidSettings: no layer of the model has such a name.
        """
        peft = require_peft()
        names = list(targets) or linear_layers(model)
        config = peft.LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none", task_type="CAUSAL_LM"
        )
        with _quiet():
            try:
                return cls(peft.get_peft_model(model, config))
            except ValueError as error:
                raise InvalidSettings(f"--lora-targets {' '.join(names)}: {error}") from error

    @classmethod
    def load(cls, model: Any, folder: Path) -> Self:
        """Puts saved LoRA layers into their base model.

        Raises:
            MissingDependency: no peft.
            ModelNotFound: no adapter in that folder.
            CheckpointCorrupt: the adapter does not fit the model's layers.
        """
        peft = require_peft()
        if not (folder / _CONFIG_FILE).is_file():
            raise ModelNotFound(f"no adapter at {folder}: it has no {_CONFIG_FILE}")
        with _quiet():
            try:
                return cls(peft.PeftModel.from_pretrained(model, str(folder)))
            except (OSError, ValueError, RuntimeError, UserWarning, SafetensorError) as error:
                raise CheckpointCorrupt(f"{folder} does not fit the model: {str(error).splitlines()[0]}") from error

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The A and B of all layers."""
        return [parameter for name, parameter in self._peft.named_parameters() if "lora_" in name]

    @contextmanager
    def off(self) -> Iterator[None]:
        """A ``with`` block in which the model is the original one."""
        layers = self._peft.base_model  # peft's own disable_adapter() does the same after a slow look at every module
        layers.disable_adapter_layers()
        try:
            yield
        finally:
            layers.enable_adapter_layers()

    def set_dropout(self, *, on: bool) -> None:
        """Dropout before A as in training, or none."""
        for name, module in self._peft.named_modules():
            if "lora_dropout" in name:
                module.train(on)

    def save(self, folder: Path) -> None:
        """Writes the adapter in peft's format, without any of the model's own weights."""
        with _quiet():  # peft would add the embeddings as soon as it sees that the lm_head is adapted
            self._peft.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty template

    def merge(self) -> Any:
        """An ordinary model with the weights W + (α/r) B A. An adapted lm_head is no longer tied to the embedding."""
        _untie(self._peft.get_base_model())
        with _quiet():
            return self._peft.merge_and_unload(safe_merge=True)

    def remove(self) -> None:
        """Gives the model its own layers back."""
        self._peft.unload()


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


def update_of(layer: nn.Module) -> LowRankUpdate | None:
    """The adapter's part of a layer; None if the layer is not adapted."""
    if not hasattr(layer, "lora_A"):
        return None
    adapted: Any = layer
    (name,) = adapted.active_adapters
    return LowRankUpdate(
        adapted.lora_A[name].weight, adapted.lora_B[name].weight, adapted.scaling[name], adapted.lora_dropout[name]
    )


def _untie(model: Any) -> None:
    """Gives an adapted lm_head its own matrix, so that the adapter does not change the embedding."""
    lm_head = model.get_output_embeddings()
    if update_of(lm_head) is None or lm_head.weight is not model.get_input_embeddings().weight:
        return
    lm_head.get_base_layer().weight = nn.Parameter(lm_head.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}  # transformers would tie them again


def linear_layers(model: Any) -> list[str]:
    """Last parts of the names of all linear layers with the lm_head; the whole name if the last part is a number."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - two seconds that --help need not pay

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    return sorted({name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in names})


def require_peft() -> Any:
    """The package, or MissingDependency with its pip line."""
    try:
        import peft  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency("joint training needs peft", pip_install="'draftheads[lora]'") from None
    return peft


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignores peft's warnings of tied or transposed matrices, which are handled here; missing tensors are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)  # peft 0.21 uses names that transformers 6 drops
        warnings.filterwarnings("error", message="(?s).*missing adapter keys", category=UserWarning)
        yield
