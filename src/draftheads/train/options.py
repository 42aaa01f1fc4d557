"""The settings of a training run, and of ``merge``; the sentence under a field is its help on the command line."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro

from draftheads.errors import InvalidSettings, no_such
from draftheads.heads import HEADS, check_method, head_classes, parse_head_options
from draftheads.settings import (
    ABOVE_0,
    FRACTION,
    FROM_0,
    FROM_1,
    HELD_OUT,
    LmHeadKind,
    LossKind,
    OptionGroup,
    Range,
    up_to,
)
from draftheads.train.recipes import RECIPES
from draftheads.utils.messages import keep_variables
from draftheads.utils.provenance import as_json_values

_SEED = Range("must be at least 0 and below 2**32", lambda value: 0 <= value < 2**32)  # NumPy's limit
_MANY = 1 << 20  # tokens
_WARMUP = Range(
    "give a part of the steps, at least 0 and below 1, or a whole number of steps",
    lambda value: 0 <= value < 1 or (value >= 1 and float(value).is_integer()),
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OptionGroup):
    """Train draft heads for a frozen model on chats; with --joint, tune the model together with them (Medusa-2)."""

    model: str = "smollm2-135m"
    """A name, a folder or a Hugging Face id."""
    data: tuple[Path, ...] = ()
    """Chats: files, or folders of them. {"messages": [...]} or {"prompt": ..., "completion": ...} a line."""
    out: Path
    """Folder for the result and checkpoints."""
    method: Annotated[str, tyro.conf.arg(help=f"Architecture: {', '.join(HEADS)}.")]
    recipe: Annotated[str | None, tyro.conf.arg(help=f"A paper's settings as defaults: {', '.join(RECIPES)}.")] = None
    resume: bool = False
    """Continue from the last checkpoint. Begins if there is none."""
    start_from: str | None = None
    """A trained head to start from. A name, a folder or a Hugging Face id; its layers of the same size are copied."""
    num_heads: Annotated[int, up_to(64)] = 4
    """Draft tokens on a path."""
    num_layers: Annotated[int, up_to(64)] = 1
    """Blocks in each head."""
    head_options: tuple[str, ...] = ()
    """Further options of the method, NAME=VALUE. A wrong name lists them."""
    lm_head: LmHeadKind = "shared"
    """Kind of lm_head. The model's, one for each head, or of rank lm_head_rank, which is one of --head-options."""
    draft_vocab_size: Annotated[int, Range("give 0 for the whole vocabulary", FROM_0.has)] = 8192
    """Frequent tokens to predict; 0: all."""
    text: tuple[Path, ...] = ()
    """Plain text for a first stage. It comes before the chats: .txt, or {"text": ...} a line."""
    features: Path | None = None
    """Folder of hidden states, which is kept. Made if it is not there; or those that vLLM wrote."""
    max_length: Annotated[int, up_to(_MANY)] = 2048
    """Texts are cut after so many tokens. Or where the model ends."""
    max_tokens: Annotated[int | None, FROM_1] = None
    """Stop reading data after so many tokens."""
    held_out: Annotated[float, FRACTION] = HELD_OUT
    """Part of the texts that is held out. At most 200 of them are measured."""
    chat_template: str | None = None
    """A Jinja file, or chatml, hermes, llama-2, vicuna. In place of the tokenizer's own."""
    template_variables: tuple[str, ...] = ()
    """Of the chat template, NAME=VALUE. Such as enable_thinking=false. A head keeps them."""
    joint: Literal["text", "original", "direct", "full"] | None = None
    """Tune the model, too. With LoRA: on the text, towards its own distribution (original), or without Medusa-2's
    rates and weights (direct); or all its weights, on the text (full)."""
    loss: LossKind = "teacher"
    """What heads learn. The model's distribution (teacher), the text's tokens (hard), or both as in the paper."""
    depth_decay: Annotated[float, ABOVE_0] = 0.8
    """Weight of a head's loss to that before it. λ of Medusa's equation 1."""
    noise_alpha: Annotated[float, FROM_0] = 0.0
    """Noise on hidden states; 75 in Hydra's paper. It is uniform, and in training only."""
    epochs: Annotated[int, up_to(10_000)] = 2
    """Passes over the training text."""
    batch_tokens: Annotated[int, up_to(_MANY)] = 1024
    """Tokens in a step, padding included. In each process; more than 4,096 are read as several batches."""
    learning_rate: Annotated[float, ABOVE_0] = 1e-3
    """Highest learning rate. With --joint that of the model."""
    final_learning_rate: Annotated[float, FRACTION] = 0.0
    """End of the cosine, a part of the highest rate."""
    warmup: Annotated[float, _WARMUP] = 0.05
    """Steps of a rising rate. Below 1 a part of the steps, else their number, such as 40."""
    seed: Annotated[int, _SEED] = 0
    """Seed of batches and initial values."""
    optimizer: Literal["adamw", "adamw-8bit", "muon"] = "adamw"
    """The optimizer. adamw-8bit has moments of 8 bits (bitsandbytes). muon moves matrices inside the heads by Muon."""
    betas: tuple[float, float] = (0.9, 0.999)
    """β1 and β2 of AdamW."""
    weight_decay: Annotated[float, FROM_0] = 0.0
    """Weight decay of the optimizer."""
    max_grad_norm: Annotated[float, ABOVE_0] = 1.0
    """Gradients are scaled down to this norm."""
    precision: Literal["auto", "bf16", "fp32", "4bit"] = "auto"
    """Type of products. 4bit also holds the model's linear layers in 4 bits (bitsandbytes)."""
    save_steps: Annotated[int, FROM_1] = 200
    """Steps between checkpoints. With each, heads are measured on held-out text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = all(map(FRACTION.has, self.betas))
        self._require("betas", fine=fine, fix="both must be at least 0 and below 1")
        if self.out is not tyro.MISSING:  # the defaults of a command line have no --out yet
            self.check()
        keep_variables(self)

    def check(self) -> None:
        """Raises DraftHeadsError if settings do not fit together, or something is missing."""
        check_method(self.method)
        from draftheads.heads.base import LARGEST_SIZE  # noqa: PLC0415 - slow to import

        config_class, head_class = head_classes(self.method)
        own = parse_head_options(self.method, self.head_options)
        groups = ("num_attention_heads", "num_key_value_heads")
        if given := own.keys() & groups:  # the other one is the target's, which is not known yet
            own = {**dict.fromkeys(groups, own[min(given)]), **own}
        sizes = {name: getattr(self, name) for name in ("num_heads", "num_layers", "lm_head")}
        config_class(hidden_size=64, vocab_size=LARGEST_SIZE, **sizes, **own)
        if self.noise_alpha and not head_class.reads_hidden:
            raise InvalidSettings(f"--noise-alpha is {self.noise_alpha}, but {self.method} heads read no hidden states")
        if self.loss == "eagle" and not head_class.predicts_hidden_states:
            raise InvalidSettings(f"--loss is eagle, but the features of {self.method} heads predict no hidden states")
        if not (self.data or (not self.joint and (self.text or self.features))):
            others = "" if self.joint else ", --text FILE… or a finished --features DIR"
            raise InvalidSettings(f"give --data FILE…{others} to train on")
        if self.joint and (self.text or self.features):
            raise InvalidSettings("--text and --features are not for --joint: hidden states change in each step")
        if self.joint and self.loss == "eagle":
            raise InvalidSettings("--loss eagle is not for --joint: the model would follow the heads' features")
        if self.joint and self.optimizer == "muon":
            raise InvalidSettings("--optimizer muon is not for --joint: it is for matrices inside heads; give adamw")
        if self.joint == "full" and self.precision == "4bit":
            fix = "give another --precision, or --joint text, which trains an adapter beside them"
            raise InvalidSettings(f"--precision 4bit is not for --joint full: 4 bits cannot be trained; {fix}")

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Options from settings by name.

        Raises:
            InvalidSettings: no such setting, or a bad value.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(settings.keys() - names):
            raise no_such("setting", unknown[0], names)
        return cls(**settings)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Default values of all settings that have one, as JSON values."""
        return as_json_values({field.name: field.default for field in fields(cls) if field.default is not MISSING})


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
