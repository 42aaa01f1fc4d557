"""The settings of training heads and model together (Medusa-2), beyond those of every training run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from draftheads.errors import InvalidSettings
from draftheads.train.options import HeadOptions, RunOptions, ScheduleOptions
from draftheads.utils.option_group import ABOVE_0, FRACTION, FROM_1, OptionGroup

HEAD_WEIGHTS = {"text": 0.2, "original": 0.01}  # λ0 of Medusa, sections 4.1 and 4.2


@dataclass(frozen=True, kw_only=True)
class TuningOptions(OptionGroup):
    """How the model is tuned with its heads."""

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
        return HEAD_WEIGHTS[self.backbone_loss] if self.head_weight is None else self.head_weight


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(OptionGroup):
    """LoRA layers in the model."""

    lora_rank: Annotated[int, FROM_1] = 32
    """Rank of the adapter."""
    lora_alpha: Annotated[int, ABOVE_0] = 16
    """Factor of the adapter's product, over the rank."""
    lora_dropout: Annotated[float, FRACTION] = 0.05
    """Dropout before the adapter's layers."""
    lora_targets: tuple[str, ...] = ()
    """Ends of the names of layers to adapt. All linear layers when left out, but no lm_head that is
    the embedding, too: `merge` would make two matrices of them."""


_HEADS = HeadOptions(method="medusa")
_SCHEDULE = ScheduleOptions(learning_rate=2.5e-4)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True, kw_only=True)
class JointOptions(RunOptions):
    """Tune a model and its draft heads together (Medusa-2); `draftheads merge` then makes one model folder."""

    recipe: str | None = None
    """Settings of a paper as defaults: medusa-2, medusa-2-self. Options on the command line replace them."""
    heads: HeadOptions = _HEADS
    schedule: ScheduleOptions = _SCHEDULE
    tuning: TuningOptions = TuningOptions()
    adapter: AdapterOptions = AdapterOptions()

    @property
    def first_head(self) -> str | None:
        """The head of ``--head`` or ``--start-from``."""
        return self.heads.start_from if self.tuning.head is None else str(self.tuning.head)

    def check(self) -> None:
        """As of every run, and that there are chats and at most one head to start with."""
        if not self.chats.data:
            raise InvalidSettings("give --data FILE… to train on")
        super().check()
        if self.optimizer.optimizer == "muon":
            raise InvalidSettings(
                "--optimizer muon is not for train-joint: an adapter has no full matrices; give adamw"
            )
        if self.tuning.head is not None and self.heads.start_from is not None:
            raise InvalidSettings(
                f"--head is {self.tuning.head} and --start-from {self.heads.start_from}: give one; "
                "--head continues with that head as it is, --start-from copies its weights into a new head"
            )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OptionGroup):
    """Merge a model and its adapter into one model folder. OUT/head is the head of a train-joint run."""

    model: str | None = None
    """The model that was tuned. A name, a folder or a Hugging Face id; the one that the adapter names when left out."""
    adapter: Path
    """Folder of a PEFT adapter, or of a run of train-joint."""
    out: Path
    """Folder to make."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the saved weights. The type of the model's files when left out."""
