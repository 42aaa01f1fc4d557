"""The settings of a training run; the sentence under a field is its help on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from draftheads.errors import InvalidSettings
from draftheads.heads import has_blocks, head_classes, parse_head_options
from draftheads.heads.base import LmHeadKind
from draftheads.train.losses import LK_ETA, LossKind


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train draft heads for a frozen model on chats."""

    recipe: str | None = None
    """Settings of a paper to start from (medusa-1, hydra, hydra-teacher, hydra++, prefix-mlp, amphista,
    amphista-alpha, mlp-speculator, eagle, blockwise, small); options beside it win."""
    method: str
    """Architecture of the heads: medusa, hydra, hydra++, amphista, mlp-speculator, eagle, markov-medusa, or
    small-llama, a small model that reads the text alone."""
    head_options: tuple[str, ...] = ()
    """Further options of the architecture, NAME=VALUE, such as num_auto_embedding_blocks=2; a wrong name lists them."""
    out: Path
    """Folder for the trained head, its metrics and the checkpoints on the way."""
    data: tuple[Path, ...] = ()
    """Chat files (.jsonl, .jsonl.gz), one {"messages": [...]} a line; not needed with finished --features."""
    text: tuple[Path, ...] = ()
    """Plain text files (.txt, or .jsonl with {"text": ...} a line), learned from in a first stage before the chats.
    --max-tokens counts for them and for the chats, each."""
    text_part: float = 0.714
    """Part of the steps that plain text gets where there are chats, too; it is repeated or cut as needed."""
    second_stage_rate: float = 0.1
    """After a first stage on plain text, chats are learned with that part of the learning rate."""
    model: str = "smollm2-135m"
    """The model to train heads for: a name, a folder or a Hugging Face id."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    four_bit: bool = False
    """Hold the model's linear layers in 4 bits while it reads the texts; needs bitsandbytes."""
    shard_model: bool = False
    """With several processes, spread the model over them (FSDP) while it reads the texts: for one too large for one
    device. Each process still loads it whole into memory first."""
    start_from: str | None = None
    """A trained head to start with (a bundled method, a folder or a Hugging Face id): of its layers those that have
    name and sizes of the new head's. For other data, for a model tuned since, or to grow hydra++ from hydra. On the
    command line its numbers of heads and layers and its draft vocabulary are the new head's where none are given, and
    of a start of the same kind the other settings, too."""
    num_heads: int = 4
    """How many tokens beyond the next one are guessed."""
    num_layers: int = 1
    """Blocks in each head."""
    lm_head: LmHeadKind = "shared"
    """How heads reach the vocabulary: by the model's lm_head, or each by its own, or by a low-rank one."""
    lm_head_rank: int = 64
    """Rank of a low_rank lm_head."""
    draft_vocab_size: int = 8192
    """Guess only among that many most frequent tokens; 0 for all of them."""
    loss: LossKind = "teacher"
    """Learn the model's own distribution (teacher by cross-entropy; kl, tv, nla, lk by another measure), the text's
    tokens (hard), or both (amphista)."""
    alignment_weight: float = 1.0
    """Weight of the model's distribution in the amphista loss."""
    lm_weight: float = 1.0
    """Weight of the text's tokens in the amphista loss."""
    lk_eta: float = LK_ETA
    """How fast the lk loss turns from divergence to acceptance."""
    feature_weight: float = 0.0
    """Weight of a second loss (smooth L1) that draws heads' features to the hidden states that come; 10 for EAGLE."""
    noise_alpha: float = 0.0
    """Strength of uniform noise on the hidden states that heads read in training; 75 in Hydra's experiment."""
    dropout: float = 0.0
    """Part of the inputs of each layer of a head's MLP that is set to zero in training; 0.2 for Hydra++."""
    depth_decay: float = 0.8
    """Each head's loss weighs this much of the head before it; of small-llama, the same at every depth, the first alone
    is taught."""
    epochs: int = 2
    """Passes over the training text."""
    learning_rate: float = 1e-3
    """Highest learning rate; it rises during warm-up and falls along a cosine."""
    final_learning_rate: float = 0.0
    """Where the cosine ends, as a part of the highest learning rate."""
    warmup: float = 0.05
    """Part of the steps in which the learning rate rises."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw-8bit keeps its moments in 8 bits: a quarter of the memory; needs bitsandbytes."""
    betas: tuple[float, float] = (0.9, 0.999)
    """β1 and β2 of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    batch_tokens: int = 1024
    """Tokens in a batch, padding included."""
    accumulate: int = 1
    """Batches whose gradients are averaged to one step, in every process."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """What the heads' products are computed in (weights and losses stay fp32); auto takes bf16 where it is native."""
    max_length: int = 2048
    """Texts are cut after that many tokens."""
    max_tokens: int | None = None
    """Stop reading data, or finished --features, after that many tokens."""
    held_out: float = 0.05
    """Part of the texts kept for measuring, at most 200 texts."""
    tree_nodes: int = 16
    """Nodes of the tree that the report shows, chosen from the held-out ranks, root included."""
    chain: bool = False
    """Draft on chains of the best draft tokens alone, not on trees."""
    seed: int = 0
    """Decides batches, their order and random starting values."""
    features: Path | None = None
    """Folder of the model's hidden states, made if they are not there; OUT/features when left out."""
    features_budget: float = 50.0
    """Gigabytes that hidden states may take on the disk; where they need more they are computed anew for each batch."""
    keep_features: bool = False
    """Keep OUT/features after a successful end."""
    resume: bool = False
    """Go on from the last checkpoint in OUT; start where there is none, so that the same command is always right."""
    save_steps: int = 200
    """Steps between checkpoints."""
    log_steps: int = 10
    """Steps between lines of OUT/log.jsonl; a checkpoint adds one, too."""
    eval_steps: int = 500
    """Steps between measurements on held-out text (OUT/validation.jsonl), also before the first step; 0 for none."""
    eval_texts: int = 32
    """Held-out texts that are measured in between; at the end all of them are."""
    tensorboard: bool = False
    """Write the losses to OUT/tensorboard, too; needs tensorboard."""

    def __post_init__(self) -> None:
        head_classes(self.method)
        counts = ("num_heads", "num_layers", "epochs", "batch_tokens", "accumulate", "max_length", "tree_nodes")
        for name in (*counts, "save_steps", "log_steps", "eval_texts"):
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        self._require("seed", 0 <= self.seed < 2**32, "must be at least 0 and below 2**32")  # as NumPy wants it
        for name in ("held_out", "warmup", "final_learning_rate", "text_part"):
            self._require(name, 0 <= getattr(self, name) < 1, "must be at least 0 and below 1")
        for name in ("learning_rate", "depth_decay", "max_grad_norm", "second_stage_rate"):
            self._require(name, getattr(self, name) > 0, "must be above 0")
        self._require("precision", self.precision in ("auto", "bf16", "fp32"), "choose auto, bf16 or fp32")
        self._require("loss", self.loss in get_args(LossKind), f"choose among {', '.join(get_args(LossKind))}")
        self._require("optimizer", self.optimizer in ("adamw", "adamw-8bit"), "choose adamw or adamw-8bit")
        for name in (
            "alignment_weight",
            "lm_weight",
            "lk_eta",
            "noise_alpha",
            "feature_weight",
            "features_budget",
            "weight_decay",
        ):
            self._require(name, getattr(self, name) >= 0, "must be at least 0")
        self._require("dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1")
        if self.dropout and not has_blocks(self.method):
            raise InvalidSettings(f"--dropout is {self.dropout}, but {self.method} heads have no MLP to drop inputs of")
        if self.noise_alpha and not head_classes(self.method)[1].reads_hidden:
            raise InvalidSettings(f"--noise-alpha is {self.noise_alpha}, but {self.method} heads read no hidden states")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "both must be at least 0 and below 1")
        config_class, _ = head_classes(self.method)
        config_class(  # says now what cannot be; sizes of the target are not known yet
            hidden_size=64,
            vocab_size=1 << 30,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            lm_head=self.lm_head,
            lm_head_rank=self.lm_head_rank,
            **parse_head_options(self.method, self.head_options),
        )
        if self.feature_weight and not head_classes(self.method)[1].predicts_hidden_states:
            raise InvalidSettings(
                f"--feature-weight is {self.feature_weight}, but features of {self.method} heads are no hidden states"
            )
        self._require("shard_model", not (self.shard_model and self.four_bit), "it goes without --four-bit")
        self._require("eval_steps", self.eval_steps >= 0, "give 0 for none")
        self._require("draft_vocab_size", self.draft_vocab_size >= 0, "give 0 for the whole vocabulary")
        self._require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        if not self.data and not self.text and self.features is None:
            raise InvalidSettings("give --data FILE…, --text FILE… or a finished --features DIR to learn from")

    def _require(self, name: str, is_fine: bool, mend: str) -> None:  # noqa: FBT001
        if not is_fine:
            raise InvalidSettings(f"--{name.replace('_', '-')} is {getattr(self, name)!r}: {mend}")
