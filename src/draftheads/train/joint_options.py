"""The settings of training heads and backbone together (Medusa-2), beyond those of training heads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Suppress

from draftheads.errors import InvalidSettings
from draftheads.train.options import TrainOptions

HEAD_WEIGHTS = {"text": 0.2, "original": 0.01}  # λ0 of Medusa, sections 4.1 and 4.2


@dataclass(frozen=True, kw_only=True)
class JointOptions(TrainOptions):
    """Tune a model and its draft heads together (Medusa-2): the model changes, `draftheads merge` makes it whole."""

    recipe: str | None = None
    """Settings of a paper to start from (medusa-2, medusa-2-self); options beside it win."""
    method: str = "medusa"
    """Architecture of the heads; see `draftheads train --help`."""
    out: Path
    """Folder for the adapter, the heads, how far the model moved, and the checkpoints on the way."""
    data: tuple[Path, ...] = ()
    """Chat files (.jsonl, .jsonl.gz), one {"messages": [...]} a line."""
    model: str = "smollm2-135m"
    """The model to tune: a name, a folder or a Hugging Face id."""
    head: Path | None = None
    """Go on from this trained head; its own architecture and sizes count then, and --heads-first 0 is enough."""
    backbone_loss: Literal["text", "original"] = "text"
    """What keeps the backbone: the tokens of the text, or the original model's own distribution (self-distillation)."""
    head_weight: float | None = None
    """λ0, what the heads' loss weighs beside the backbone's; 0.2 with text and 0.01 with original when left out."""
    head_weight_rise: Literal["constant", "sine"] = "constant"
    """While both are trained λ0 is constant, or rises along a quarter sine and reaches its value at the end."""
    heads_first: float = 0.25
    """Part of the steps in which only the heads are trained, the backbone frozen."""
    learning_rate: float = 2.5e-4
    """Highest learning rate of the backbone; it rises during warm-up and falls to zero along a cosine."""
    head_rate_factor: float = 4.0
    """The heads' learning rate is that many times the backbone's."""
    lora_rank: int = 32
    """Rank of the adapter."""
    lora_alpha: int = 16
    """The adapter's product is multiplied by this over the rank."""
    lora_dropout: float = 0.05
    """Dropout before the adapter's layers."""
    lora_targets: tuple[str, ...] = ()
    """Ends of the names of layers to adapt; all linear layers and the lm_head when left out."""
    four_bit: bool = False
    """Hold the backbone's linear layers in 4 bits (QLoRA); needs bitsandbytes."""
    features: Annotated[Path | None, Suppress] = None
    """The backbone changes, so its hidden states cannot be stored."""
    keep_features: Annotated[bool, Suppress] = False
    """Likewise."""
    features_budget: Annotated[float, Suppress] = 50.0
    """Likewise."""
    feature_weight: Annotated[float, Suppress] = 0.0
    """Likewise."""
    text: Annotated[tuple[Path, ...], Suppress] = ()
    """The backbone is tuned on chats."""
    text_part: Annotated[float, Suppress] = 0.714
    """Likewise."""
    shard_model: Annotated[bool, Suppress] = False
    """Each process holds the model that it tunes."""
    second_stage_rate: Annotated[float, Suppress] = 0.1
    """Likewise."""

    def __post_init__(self) -> None:
        if not self.data:
            raise InvalidSettings("give --data FILE… to learn from")
        if self.features is not None:
            raise InvalidSettings(f"--features is {self.features}: hidden states of a changing model cannot be stored")
        super().__post_init__()
        if self.feature_weight:
            raise InvalidSettings(f"--feature-weight is {self.feature_weight}: hidden states of the model change here")
        if self.head is not None and self.start_from is not None:
            raise InvalidSettings(
                f"--head is {self.head} and --start-from {self.start_from}: give one; "
                "--head goes on with that head as it is, --start-from gives its weights to the head that is asked for"
            )
        self._require("heads_first", 0 <= self.heads_first < 1, "must be at least 0 and below 1")
        self._require("lora_dropout", 0 <= self.lora_dropout < 1, "must be at least 0 and below 1")
        self._require("head_weight", self.head_weight is None or self.head_weight > 0, "must be above 0")
        for name in ("head_rate_factor", "lora_alpha"):
            self._require(name, getattr(self, name) > 0, "must be above 0")
        self._require("lora_rank", self.lora_rank >= 1, "must be at least 1")
        self._require("backbone_loss", self.backbone_loss in HEAD_WEIGHTS, "choose text or original")
        self._require("head_weight_rise", self.head_weight_rise in ("constant", "sine"), "choose constant or sine")

    @property
    def peak_head_weight(self) -> float:
        """λ0."""
        return HEAD_WEIGHTS[self.backbone_loss] if self.head_weight is None else self.head_weight
