"""The settings of training heads and model together (Medusa-2), and of ``merge``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from draftheads.utils.option_group import ABOVE_0, FRACTION, FROM_1, OptionGroup

HEAD_WEIGHTS = {"text": 0.2, "original": 0.01}  # λ0 of Medusa, sections 4.1 and 4.2


@dataclass(frozen=True, kw_only=True)
class TuningOptions(OptionGroup):
    """Tuning the model with its heads: --joint."""

    head: Path | None = None
    """Continue with this trained head. Its own architecture and sizes are used, and --heads-first 0 is enough."""
    backbone_loss: Literal["text", "original"] = "text"
    """What the model learns. text: the tokens of the text; original: its own distribution (self-distillation)."""
    head_weight: Annotated[float | None, ABOVE_0] = None
    """λ0, weight of the heads' loss relative to the model's. When left out 0.2 with text and 0.01 with original."""
    head_weight_rise: Literal["constant", "sine"] = "constant"
    """How λ0 changes while both are trained. sine: it rises along a quarter sine and reaches its value at the end."""
    heads_first: Annotated[float, FRACTION] = 0.25
    """Part of the steps in which only the heads are trained."""
    head_rate_factor: Annotated[float, ABOVE_0] = 4.0
    """The heads' learning rate as a multiple of the model's."""

    @property
    def peak_head_weight(self) -> float:
        """λ0, as given or by default."""
        return HEAD_WEIGHTS[self.backbone_loss] if self.head_weight is None else self.head_weight


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(OptionGroup):
    """LoRA layers in the model, with --joint."""

    lora_rank: Annotated[int, FROM_1] = 32
    """Rank of the adapter."""
    lora_alpha: Annotated[int, ABOVE_0] = 16
    """Factor of the adapter's product, over the rank."""
    lora_dropout: Annotated[float, FRACTION] = 0.05
    """Dropout before the adapter's layers."""
    lora_targets: tuple[str, ...] = ()
    """Ends of the names of layers to adapt. All linear layers when left out, but no lm_head that is
    the embedding, too: `merge` would make two matrices of them."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OptionGroup):
    """Merge a model and its adapter into one model folder. OUT/head is the head of a run with `train --joint`."""

    model: str | None = None
    """The model that was tuned. A name, a folder or a Hugging Face id; the one that the adapter names when left out."""
    adapter: Path
    """Folder of a PEFT adapter, or of a run of `train --joint`."""
    out: Path
    """Folder to make."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the saved weights. The type of the model's files when left out."""
