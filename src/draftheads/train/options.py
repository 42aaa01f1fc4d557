"""The settings of a training run, in groups; the sentence under a field is its help on the command line.

The command line, recipes, ``run.json`` and ``metrics.json`` name settings without their group: ``learning_rate``, not
``schedule.learning_rate``. No two groups have a setting of the same name.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro

from draftheads.data.files import KINDS
from draftheads.errors import InvalidSettings
from draftheads.heads import check_method, head_classes
from draftheads.settings import LK_ETA, LmHeadKind, LossKind
from draftheads.train.joint.options import AdapterOptions, TuningOptions
from draftheads.utils.identity import as_json_values
from draftheads.utils.option_group import ABOVE_0, FRACTION, FROM_0, FROM_1, OptionGroup, Range, up_to
from draftheads.utils.template_variables import keep_variables

_TUNING, _ADAPTER = TuningOptions(), AdapterOptions()
_SEED = Range("must be at least 0 and below 2**32", lambda value: 0 <= value < 2**32)  # NumPy's limit
_MANY = 1 << 20  # tokens
_CHATS = (
    f'Chats: files ({KINDS}), or folders of them. One {{"messages": [...]}} a line, or {{"prompt": ..., '
    '"completion": ...}, or what `draftheads serve --record` wrote.'
)
_TEXTS = (
    f'Plain text for a first stage, before the chats: files ({KINDS}), or folders of them. With {{"text": ...}} a '
    "line. --max-tokens counts for it and for the chats, each."
)
_SIZE = Range("give 0 for the whole vocabulary", FROM_0.has)
_WARMUP = Range(
    "give a part of the steps, at least 0 and below 1, or a whole number of steps",
    lambda value: 0 <= value < 1 or (value >= 1 and float(value).is_integer()),
)
_INTERVAL = Range("give 0 for none", FROM_0.has)


@dataclass(frozen=True, kw_only=True)
class HeadOptions(OptionGroup):
    """Architecture of the draft heads."""

    method: str
    """Architecture of the heads: medusa, hydra, hydra++, amphista, mlp-speculator, eagle, eagle3, dflash, dspark, mtp,
    markov-medusa, or small-llama (a small model that reads only the text); vLLM, SGLang and llama.cpp serve eagle3.
    What serves the others: `draftheads export --help-verbose`."""
    head_options: tuple[str, ...] = ()
    """Further options of the architecture, NAME=VALUE. Such as num_auto_embedding_blocks=2 (amphista) or
    layers=[2,15,27] (eagle3). A wrong name lists those of the method."""
    num_heads: Annotated[int, up_to(64)] = 4
    """Draft tokens on a path. That is how many tokens beyond the next one are predicted in training. eagle, eagle3,
    mtp and small-llama also draft deeper."""
    num_layers: Annotated[int, up_to(64)] = 1
    """Blocks in each head."""
    lm_head: LmHeadKind = "shared"
    """How heads reach the vocabulary. shared: by the model's lm_head; own: each by its own; low_rank: each by a small
    one."""
    lm_head_rank: Annotated[int, FROM_1] = 64
    """Rank of a low_rank lm_head."""
    draft_vocab_size: Annotated[int, _SIZE] = 8192
    """Most frequent tokens that heads predict; 0: all."""
    start_from: str | None = None
    """A trained head to start from. A name, a folder or a Hugging Face id. Layers of the same name and size are copied.
    Use it for other data, for a model tuned since, or to start hydra++ from hydra. Defaults of num-heads, num-layers
    and draft-vocab-size are then those of that head; of the same method, also the other settings here."""

    def check_method(self) -> None:
        """Raises DraftHeadsError if there is no such method, or it does not accept these settings."""
        check_method(self.method)
        from draftheads.heads.base import LARGEST_SIZE  # noqa: PLC0415 - slow to import
        from draftheads.heads.head_options import parse_head_options  # noqa: PLC0415

        config_class, _ = head_classes(self.method)
        own = parse_head_options(self.method, self.head_options)
        groups = ("num_attention_heads", "num_key_value_heads")
        if given := own.keys() & groups:  # the other one is the target's, which is not known yet
            own = {**dict.fromkeys(groups, own[min(given)]), **own}
        config_class(
            hidden_size=64,
            vocab_size=LARGEST_SIZE,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            lm_head=self.lm_head,
            lm_head_rank=self.lm_head_rank,
            **own,
        )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(OptionGroup):
    """Chats to train on."""

    data: Annotated[tuple[Path, ...], tyro.conf.arg(help=_CHATS)] = ()
    max_length: Annotated[int, up_to(_MANY)] = 2048
    """Texts are cut after that many tokens, or where the model ends."""
    max_tokens: Annotated[int | None, FROM_1] = None
    """Stop reading data after that many tokens. Also of finished --features."""
    held_out: Annotated[float, FRACTION] = 0.05
    """Part of the texts that is held out. Heads are measured on at most 200 of them."""


@dataclass(frozen=True, kw_only=True)
class PlainTextOptions(OptionGroup):
    """A first stage on plain text."""

    text: Annotated[tuple[Path, ...], tyro.conf.arg(help=_TEXTS)] = ()
    text_length: Annotated[int | None, up_to(_MANY)] = None
    """Tokens in each block of plain text. Default: --max-length."""
    text_part: Annotated[float, FRACTION] = 0.714
    """Part of the steps on plain text if there are chats, too. The text is repeated or cut as needed."""
    second_stage_rate: Annotated[float, ABOVE_0] = 0.1
    """Factor of the learning rate in the second stage. That is on chats, after a first stage on plain text."""


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(OptionGroup):
    """Hidden states of the frozen model."""

    features: Path | None = None
    """Folder of the model's hidden states. Made if they are not there; OUT/features when left out."""
    extracted: Path | None = None
    """Folder of hidden states that vLLM wrote. They are of the texts of --data and --text; see docs/train/large.md."""
    features_budget: Annotated[float, FROM_0] = 50.0
    """Gigabytes of disk for hidden states. If they need more, they are computed for each batch."""
    keep_features: bool = False
    """Keep OUT/features after a successful end."""
    feature_weight: Annotated[float, FROM_0] = 0.0
    """Weight of a loss on predicted hidden states; 10 for EAGLE. Smooth L1 between heads' features and the model's next
    hidden states."""
    shard_model: bool = False
    """With several processes: shard the model over them (FSDP). While it reads the texts, for a model too large for one
    device. Each process still loads it whole into memory first."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(OptionGroup):
    """Loss and regularisation."""

    loss: LossKind = "teacher"
    """What heads learn. The model's distribution (teacher by cross-entropy; kl, tv, nla, lk by another measure), the
    text's tokens (hard), or both (amphista, dspark)."""
    alignment_weight: Annotated[float, FROM_0] = 1.0
    """Weight of the model's distribution in the amphista loss."""
    lm_weight: Annotated[float, FROM_0] = 1.0
    """Weight of the text's tokens in the amphista loss."""
    lk_eta: Annotated[float, FROM_0] = LK_ETA
    """How fast the lk loss moves from divergence to acceptance."""
    noise_alpha: Annotated[float, FROM_0] = 0.0
    """Noise on the hidden states in training; 75 in Hydra's paper. It is uniform; heads that read no hidden states have
    none."""
    dropout: Annotated[float, FRACTION] = 0.0
    """Dropout of a head's MLP in training; 0.2 for Hydra++. The part of the inputs of each layer, and of its lm_head,
    that is set to zero."""
    depth_decay: Annotated[float, ABOVE_0] = 0.8
    """Weight of each head's loss relative to the head before it. small-llama, which is the same at every depth, trains
    on the first depth only."""
    anchors: Annotated[int, FROM_0] = 64
    """Places of a text, at random, behind which dflash and dspark are trained in an epoch; 0: all."""


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """Steps and learning rate."""

    epochs: Annotated[int, up_to(10_000)] = 2
    """Passes over the training text."""
    batch_tokens: Annotated[int, up_to(_MANY)] = 1024
    """Tokens in a batch, padding included."""
    accumulate: Annotated[int, up_to(10_000)] = 1
    """Batches whose gradients are averaged for one step. In every process."""
    learning_rate: Annotated[float, ABOVE_0] = 1e-3
    """Highest learning rate. It rises during warm-up and falls along a cosine. With --joint: of the model."""
    final_learning_rate: Annotated[float, FRACTION] = 0.0
    """End of the cosine, as a part of the highest learning rate."""
    warmup: Annotated[float, _WARMUP] = 0.05
    """Steps in which the learning rate rises. Below 1 a part of the steps, else their number, such as 40."""
    seed: Annotated[int, _SEED] = 0
    """Seed of batches, their order and random initial values."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionGroup):
    """AdamW or Muon."""

    optimizer: Literal["adamw", "adamw-8bit", "muon"] = "adamw"
    """The optimizer. adamw-8bit keeps its moments in 8 bits: a quarter of the memory; needs bitsandbytes. muon moves
    the matrices of linear layers by Muon, and all else, lm_heads included, by AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """β1 and β2 of AdamW."""
    weight_decay: Annotated[float, FROM_0] = 0.0
    """Weight decay of the optimizer."""
    max_grad_norm: Annotated[float, ABOVE_0] = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = all(map(FRACTION.has, self.betas))
        self._require("betas", fine=fine, fix="both must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class HardwareOptions(OptionGroup):
    """Precision."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the heads' products. Weights and losses stay fp32; auto is bf16 where the machine computes in it. Try
    fp32 on a CPU: some multiply large matrices faster in it. The model then reads the texts in fp32, too, if it takes
    at most half of the memory."""
    four_bit: bool = False
    """Hold the model's linear layers in 4 bits. With --joint: QLoRA. Needs bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionGroup):
    """Checkpoints, logs and measurements."""

    save_steps: Annotated[int, FROM_1] = 200
    """Steps between checkpoints."""
    log_steps: Annotated[int, FROM_1] = 10
    """Steps between lines of OUT/log.jsonl. A checkpoint adds one, too."""
    eval_steps: Annotated[int, _INTERVAL] = 500
    """Steps between measurements on held-out text; 0: none. In OUT/validation.jsonl; also before the first step and
    after each epoch."""
    eval_texts: Annotated[int, FROM_1] = 32
    """Held-out texts that are measured during training. At the end all of them are."""
    tree_nodes: Annotated[int, up_to(1024)] = 16
    """Nodes of the reported tree, root included. The tree is chosen from the ranks on held-out text."""
    chain: bool = False
    """Draft chains of the best draft tokens only, not trees."""
    tensorboard: bool = False
    """Write the losses to OUT/tensorboard, too. Needs tensorboard."""


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train draft heads for a frozen model on chats; with --joint, tune the model together with them (Medusa-2)."""

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own. A Jinja file, or chatml, hermes, llama-2 or vicuna."""
    template_variables: tuple[str, ...] = ()
    """Values of variables of the chat template, NAME=VALUE. Such as enable_thinking=false. A head keeps them."""
    out: Path
    """Folder for the result, metrics and checkpoints."""
    resume: bool = False
    """Resume from the last checkpoint in OUT. Starts from the beginning if there is none, so that the same command is
    always right."""
    recipe: str | None = None
    """Settings of a paper as defaults: medusa-1, hydra, hydra-teacher, hydra++, prefix-mlp, amphista, amphista-alpha,
    mlp-speculator, eagle, eagle3, dflash, dspark, mtp, blockwise, small; medusa-2, medusa-2-self (with the model).
    Options on the command line replace them."""
    heads: HeadOptions
    chats: ChatOptions = ChatOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    hardware: HardwareOptions = HardwareOptions()
    report: ReportOptions = ReportOptions()
    plain_text: PlainTextOptions = PlainTextOptions()
    hidden_states: FeatureOptions = FeatureOptions()
    joint: bool = False
    """Tune the model together with its heads, as Medusa-2 does. A LoRA adapter; `draftheads merge` then makes one model
    folder. Recipes medusa-2 and medusa-2-self set it."""
    tuning: TuningOptions = _TUNING
    adapter: AdapterOptions = _ADAPTER

    def __post_init__(self) -> None:
        if self.out is not tyro.MISSING:  # the defaults of a command line have no --out yet
            self.check()
        keep_variables(self)

    @property
    def first_head(self) -> str | None:
        """The trained head that the run starts with or copies from, if any."""
        return self.heads.start_from if self.tuning.head is None else str(self.tuning.head)

    def check(self) -> None:
        """Raises DraftHeadsError if settings of different groups do not fit together, or something is missing."""
        self.heads.check_method()
        from draftheads.heads.head_options import has_blocks  # noqa: PLC0415 - slow to import

        _, head_class = head_classes(self.heads.method)
        for name, value, fine, fix in (
            ("dropout", self.objective.dropout, has_blocks(self.heads.method), "have no MLP to drop inputs of"),
            ("noise_alpha", self.objective.noise_alpha, head_class.reads_hidden, "read no hidden states"),
        ):
            if value and not fine:
                raise InvalidSettings(f"{name} is {value}, but {self.heads.method} heads {fix}")
        if self.joint:
            self._check_joint()
        else:
            self._check_frozen()

    def _check_frozen(self) -> None:
        method, weight = self.heads.method, self.hidden_states.feature_weight
        if self.tuning != _TUNING or self.adapter != _ADAPTER:
            raise InvalidSettings("--head and settings of the tuning and its adapter need --joint")
        if weight and not head_classes(method)[1].predicts_hidden_states:
            raise InvalidSettings(
                f"feature_weight is {weight}, but the features of {method} heads do not predict hidden states"
            )
        extracted, features = self.hidden_states.extracted, self.hidden_states.features
        if extracted is not None and (features is not None or self.hidden_states.shard_model):
            other = "shard_model" if features is None else f"--features {features}"
            raise InvalidSettings(f"extracted={extracted} has the hidden states already: leave out {other}")
        if self.hidden_states.shard_model and self.hardware.four_bit:
            raise InvalidSettings("shard_model does not work with four_bit: leave one of them out")
        if not self.chats.data and not self.plain_text.text and self.hidden_states.features is None:
            raise InvalidSettings("give --data FILE…, --text FILE… or a finished --features DIR to train on")

    def _check_joint(self) -> None:
        if not self.chats.data:
            raise InvalidSettings("give --data FILE… to train on")
        if self.plain_text != PlainTextOptions() or self.hidden_states != FeatureOptions():
            what = "--text, --features and other settings of hidden states"
            raise InvalidSettings(f"{what} are not for --joint: it trains on chats, and hidden states change each step")
        if self.optimizer.optimizer == "muon":
            raise InvalidSettings("--optimizer muon is not for --joint: an adapter has no full matrices; give adamw")
        if self.tuning.head is not None and self.heads.start_from is not None:
            raise InvalidSettings(
                f"--head is {self.tuning.head} and --start-from {self.heads.start_from}: give one; "
                "--head continues with that head as it is, --start-from copies its weights into a new head"
            )

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Options from settings without their groups, as on the command line.

        >>> TrainOptions.of(method="hydra", out=Path("out"), data=(Path("chats.jsonl"),), epochs=3).schedule.epochs
        3

        Raises:
            InvalidSettings: no such setting, or a bad value.
        """
        given = cls._by_field(settings)
        for field in fields(cls):
            if is_dataclass(field.type):
                group: Any = field.type
                default: Any = field.default
                changes = given.get(field.name, {})
                given[field.name] = group(**changes) if default is MISSING else replace(default, **changes)
        return cls(**given)

    def changed(self, **settings: Any) -> Self:
        """The same options with other values of some settings, named without their groups."""
        given = self._by_field(settings)
        groups = {
            name: replace(getattr(self, name), **changes)
            for name, changes in given.items()
            if is_dataclass(getattr(self, name))
        }
        return replace(self, **given | groups)

    def flat(self) -> dict[str, Any]:
        """All settings by name, without their groups."""
        settings: dict[str, Any] = {}
        for name, value in vars(self).items():
            settings |= vars(value) if is_dataclass(value) else {name: value}
        return settings

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Default values of all settings but ``out`` and ``method`` by name, as JSON values."""
        settings = cls.of(out=tyro.MISSING, method=tyro.MISSING).flat()
        del settings["out"], settings["method"]
        return as_json_values(settings)

    @classmethod
    def _by_field(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings by the name of their field; those of a group together in a dict."""
        group_of: dict[str, str | None] = {}
        for field in fields(cls):
            group: Any = field.type
            if is_dataclass(group):
                group_of |= {inner.name: field.name for inner in fields(group)}
            else:
                group_of[field.name] = None
        if unknown := sorted(settings.keys() - group_of.keys()):
            raise InvalidSettings(f"no setting {unknown[0]!r}; choose among {', '.join(group_of)}")
        by_field: dict[str, Any] = {}
        for name, value in settings.items():
            if (group_name := group_of[name]) is None:
                by_field[name] = value
            else:
                by_field.setdefault(group_name, {})[name] = value
        return by_field
