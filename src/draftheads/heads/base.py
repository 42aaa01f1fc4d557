"""What every draft head is: a configuration, a training face and a drafting face.

Knows the target only as :class:`TargetWeights` (its embedding and lm_head, frozen) and hidden states.
K heads; head i (0-based) reads position t and predicts x_{t+2+i}; V' is the draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftheads.cpu.drafts import HeadLayers, NativeGrowth
from draftheads.cpu.kernels import NativeInt8, pack, replace_linears
from draftheads.cpu.native_library import load_library
from draftheads.errors import InvalidSettings, InvalidTree, require_at_least
from draftheads.heads.layers import LmHeads
from draftheads.settings import LmHeadKind
from draftheads.speculation.candidates import Candidates
from draftheads.speculation.draft import Context, Draft, TargetWeights
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.growing import Expand, Predictor, fill
from draftheads.speculation.shapes import BestFirst, Shape, check_ranks
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted

MOST_DEPTH = 127  # heads, and blocks of a head: no tree has more nodes
LARGEST_SIZE = 1 << 20
_MOST_MODULES = 1024  # of what an option counts


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and options that all draft heads share."""

    hidden_size: int
    """D, the target's hidden size."""
    vocab_size: int
    """V, the target's vocabulary."""
    num_heads: int = 4
    """K: how many tokens beyond the next one are predicted."""
    num_layers: int = 1
    """Blocks in each head."""
    lm_head: LmHeadKind = "shared"
    """How features become logits: the target's lm_head, one per head (own), or D -> rank -> V' per head (low_rank)."""
    lm_head_rank: int = 64
    """Rank of a low_rank lm_head."""
    draft_vocab_size: int | None = None
    """V': only that many frequent tokens can be predicted; all of them when left out."""

    method: ClassVar[str]
    description: ClassVar[str] = ""  # one line, for the list of methods
    paper: ClassVar[str] = ""  # its authors and year
    extends: ClassVar[str] = ""  # the method whose layers it has under the same names: it may start from such a head
    optional: ClassVar[frozenset[str]] = frozenset()  # options that are saved only where they are not the default
    one_layer: ClassVar[str] = ""  # what has one layer, of heads that cannot have more
    one_lm_head: ClassVar[bool] = False  # whether all depths share it

    def __post_init__(self) -> None:
        names = ("hidden_size", "vocab_size", "num_heads", "num_layers", "lm_head_rank")
        require_at_least(1, **{name: getattr(self, name) for name in names})
        depths = {"num_heads": MOST_DEPTH, "num_layers": MOST_DEPTH}
        for name, value in vars(self).items():  # a file may name any size
            most = depths.get(name, _MOST_MODULES if "num_" in name else LARGEST_SIZE)
            if isinstance(value, int) and value > most:
                raise InvalidSettings(f"{name} is {value}; it must be at most {most}")
        if self.one_layer and self.num_layers != 1:
            raise InvalidSettings(f"num_layers is {self.num_layers}; {self.one_layer} has one layer")
        if self.lm_head not in ("shared", "own", "low_rank"):
            raise InvalidSettings(f"lm_head is {self.lm_head!r}; choose shared, own or low_rank")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise InvalidSettings(
                f"draft_vocab_size is {self.draft_vocab_size}; it must lie in 1 … vocab_size ({self.vocab_size})"
            )

    def options(self) -> dict[str, Any]:
        """All options by name, as they are saved."""
        usual = self.optional_defaults().items()
        return dict(option for option in asdict(self).items() if option not in usual)

    @classmethod
    def optional_defaults(cls) -> dict[str, Any]:
        """Values of the options that a saved head may not have."""
        given = ((option.name, option.default, option.default_factory) for option in fields(cls))
        return {name: made() if callable(made) else value for name, value, made in given if name in cls.optional}

    @property
    def num_lm_heads(self) -> int:
        """How many lm_heads there are, unless they are the target's."""
        return 1 if self.one_lm_head else self.num_heads

    @property
    def feature_size(self) -> int:
        """F, the size of what an lm_head reads."""
        return self.hidden_size

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads in place of h_t; see :class:`Drafter`."""
        return ()

    @property
    def num_draft_tokens(self) -> int:
        """V', the number of tokens a head can predict."""
        return self.draft_vocab_size or self.vocab_size


@dataclass(frozen=True)
class EmbeddingConfig(HeadConfig):
    """The option of heads that read the target's embeddings of tokens."""

    embedding_scale: float = 1.0
    """Embeddings are multiplied by it before a head reads them, so that they weigh as much as hidden states do."""

    scales_embedding: ClassVar[bool] = True
    """Whether training measures that number; else a new head reads embeddings as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.embedding_scale > 0:
            raise InvalidSettings(f"embedding_scale is {self.embedding_scale}; it must be above 0")


@dataclass(frozen=True)
class Root:
    """Where drafting begins: the root of each row, and what is known of the text before it."""

    token_ids: Tensor  # (B,) x_{t+1}
    states: Tensor  # (B, D) h_t in the head's type; of a stateful head what it made of the text, (B, …)
    history: Any = None  # of a stateful head: its HeadKVCache


class DraftHead(nn.Module, Drafter, Predictor):
    """A set of K heads on the target's last hidden state.

    Build it from a config, ``bind`` it to the target's weights (also after loading), then train with ``forward`` and
    ``logits``, or draft with a session, which calls ``begin``, ``predict`` and ``descend`` and changes nothing in it.
    """

    predicts_hidden_states: ClassVar[bool] = True  # whether an lm_head's inputs are predicted hidden states
    reads_hidden: ClassVar[bool] = True  # whether it reads hidden states at all
    is_same_at_all_depths: ClassVar[bool] = False  # head i at t is head 0 at t+i: only head 0 is taught
    shares_layers: ClassVar[bool] = False  # whether all K heads are the same layers; for lm_heads see depth_limit

    def __init__(self, config: HeadConfig, *, lm_head_bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.lm_heads = LmHeads(config, bias=lm_head_bias)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_vocab", torch.arange(config.draft_vocab_size))
        self.register_buffer("target_embedding", None, persistent=False)
        self.rounded_embedding: NativeInt8 | None = None  # in its place, where the target has it in 8 bits
        self.dtype = torch.float32  # what it computes in; its parameters' when it is bound
        self.embedding_scale = config.embedding_scale if isinstance(config, EmbeddingConfig) else 1.0
        self.default_shape: Shape = Tree.chain(config.num_heads)
        self.hidden_layers, self.max_depth = config.hidden_layers, config.num_heads
        self.growth: NativeGrowth | None = None  # finds candidates in one call; made by speed_up

    draft_vocab: Tensor  # (V',) int64: target id of each draft token; only with a trimmed vocabulary
    target_embedding: Any  # Tensor (V, D): the target's, frozen, not saved

    @property
    def place_shares(self) -> Sequence[float]:
        """Of each of the K heads, behind which part of the places of a text it is trained; of drawn ones.

        Empty: behind all. Else ``forward`` takes the positions (B, A) that are drawn for head 0.
        """
        return ()

    def place_numbers(self, num_places: int) -> list[int]:
        """Behind how many of the first drawn places each head is trained, of so many that are drawn for head 0."""
        first, *_ = self.place_shares
        return [max(1, round(num_places * share / first)) for share in self.place_shares]

    @property
    def name(self) -> str:
        """Its method."""
        return self.config.method

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What it reads, (…, D or n·D), and h_t, (…, D), of hidden states as training stores them.

        These are h_t, (…, D); for a head that reads the inputs of n layers these and then h_t, (…, (n+1)·D).
        """
        size = self.config.hidden_size
        return (hidden[..., :-size] if self.hidden_layers else hidden), hidden[..., -size:]

    @abstractmethod
    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Features of all heads at all positions, for training.

        Args:
            hidden: (B, T, D) the target's last hidden states h_t, after its final norm; or (B, T, n·D) the inputs of
                its :attr:`hidden_layers`, side by side.
            token_ids: (B, T) the text x_t.

        Returns:
            (K, B, T, F), F = D for most heads. Entry (i, b, t) predicts x_{t+2+i}; it is not used where t+2+i ≥ T.
        """

    @abstractmethod
    def begin(self, root: Root, depth: int) -> Any:
        """The state at the root of every row, for draft tokens down to ``depth``, 1 … :attr:`depth_limit`."""

    def start(self) -> "HeadSession":
        """A session for one batch."""
        return HeadSession(self)

    def speed_up(self) -> None:
        """Drafts with faster modules and products; after ``bind``."""
        on_cpu = self.rounded_embedding is not None or self.target_embedding.device.type == "cpu"
        if on_cpu and self.dtype in (torch.float32, torch.bfloat16):
            self.lm_heads.pack()  # a draft that is rounded costs half as much, and what is accepted stays the same
            pack(replace_linears(self), bits=8)
            self.growth = self._native_growth()

    def layers_of_depths(self) -> Sequence[Sequence[tuple[Any, Any]]] | None:
        """The layers on the state of each depth, if that is all: see :class:`HeadLayers`. None: there is more.

        It is used only where the class itself defines it: what a parent class computes is not what this one does.
        """
        return None

    def _native_growth(self) -> NativeGrowth | None:
        is_own = "layers_of_depths" in vars(type(self))
        layers = self.layers_of_depths() if is_own and load_library() is not None else None
        if layers is None or self.config.lm_head == "low_rank":
            return None
        try:
            return NativeGrowth(
                [HeadLayers(part, self.lm_heads.layer(i)) for i, part in enumerate(layers)],  # type: ignore[arg-type]
                reads_path=self.reads_path,
                embedding=self.rounded_embedding or self.target_embedding,
                embedding_scale=self.embedding_scale,
                logit_scale=self.lm_heads.logit_scale,
                target_ids=self.draft_vocab if self.config.draft_vocab_size is not None else None,
            )
        except (AttributeError, TypeError, ValueError):  # a layer for which there is no native product
            return None

    def expander(self, root: Root) -> Expand | None:
        """What finds all candidates in one call, if this head has it."""
        if (growth := self.growth) is None:
            return None
        return lambda beams, **options: Candidates(*growth.expand(root.token_ids, root.states, beams, **options))

    @property
    def depth_limit(self) -> int | None:
        """How deep its trees may be: K, or None where all depths are the same function."""
        return None if self.shares_layers and self.lm_heads.is_one else self.config.num_heads

    def depth_for(self, shape: Shape) -> int:
        """How deep a shape without a depth grows: K, or as deep as its temperatures was measured within the limit."""
        measured = len(shape.temperatures) if isinstance(shape, BestFirst) else 0
        return self.depth_limit or max(self.config.num_heads, shape.max_depth or measured)

    def with_depth(self, depth: int) -> Self:
        """A head of the same weights, whose K is ``depth``; of heads without a limit. It is no copy of the weights."""
        assert self.depth_limit is None, "its depths have weights of their own"
        deeper = copy(self)
        deeper.config, deeper.max_depth = replace(self.config, num_heads=depth), depth
        return deeper

    def check_shape(self, shape: Shape) -> None:
        """Raises :class:`InvalidTree` if it is deeper than :attr:`depth_limit`, or wider than the draft vocabulary."""
        depth, heads, limit = shape.max_depth, self.config.num_heads, self.depth_limit
        if depth is not None and limit is not None and depth > limit:
            raise InvalidTree(
                f"the tree is {depth} deep but the head has {counted(heads, 'head')}: cut the tree or train more heads"
            )
        if isinstance(shape, BestFirst) and 0 < len(shape.temperatures) < (depth or heads):
            numbers = counted(len(shape.temperatures), "number")
            needs = f"the head has {counted(heads, 'head')}" if (depth or 0) <= heads else f"the tree is {depth} deep"
            raise InvalidTree(f"temperatures has {numbers} but {needs}")
        check_ranks(shape, self.config.num_draft_tokens)

    def bind(self, weights: TargetWeights) -> None:
        """Reads the target's embedding and, where this head shares it, its lm_head. Call it again after a device move.

        Raises:
            InvalidSettings: the target's sizes differ from the configuration's.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name in ("embedding", "lm_head"):
            if (shape := tuple(getattr(weights, name).shape)) != expected:
                raise InvalidSettings(f"the target's {name} is {shape} but the head was made for {expected}")
        self.growth, self.rounded_embedding = None, weights.rounded_embedding
        self.target_embedding = None if self.rounded_embedding else weights.embedding.detach()
        self._read_type()
        rows = self.draft_vocab.to(weights.lm_head.device) if self.config.draft_vocab_size else None
        self.lm_heads.bind(weights, rows, self.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own signature
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._read_type()
        return self

    def _read_type(self) -> None:
        self.dtype = next((parameter.dtype for parameter in self.parameters()), self.dtype)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """The target's embedding of tokens in this head's type, (…) -> (…, D)."""
        rounded = self.rounded_embedding
        return (rounded.rows_of(token_ids) if rounded else self.target_embedding[token_ids]).to(self.dtype)

    def scaled_embedding(self, token_ids: Tensor) -> Tensor:
        """The same times ``embedding_scale``."""
        return self.embedded(token_ids) * self.embedding_scale

    def initialise(self, weights: TargetWeights, draft_vocab: Tensor | None = None) -> None:
        """Starting values for training that come from the target; ``draft_vocab`` is (V',) target ids."""
        if (draft_vocab is None) != (self.config.draft_vocab_size is None):
            raise InvalidSettings("give the draft vocabulary exactly when draft_vocab_size is set")
        if draft_vocab is not None:
            if draft_vocab.shape != self.draft_vocab.shape:
                raise InvalidSettings(
                    f"the draft vocabulary has {counted(len(draft_vocab), 'token')}; "
                    f"draft_vocab_size is {len(self.draft_vocab)}"
                )
            self.draft_vocab.copy_(draft_vocab)
        self.bind(weights)
        self.initialise_lm_heads(weights, draft_vocab)

    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Starting values for training that come from texts; none here.

        Args:
            texts: hidden states, (T, D) or (T, (n+1)·D) as :meth:`split` takes them, and token ids (T,).
        """

    def hidden_scale(self, weights: TargetWeights) -> float:
        """Root mean square of the target's hidden states: that of its embeddings times ``embedding_scale``."""
        return float(weights.embedding.float().square().mean().sqrt()) * self.embedding_scale

    def initialise_lm_heads(self, weights: TargetWeights, draft_vocab: Tensor | None) -> None:
        """As the target's, for heads whose features stand where hidden states do."""
        self.lm_heads.initialise(weights, draft_vocab)

    def logit_parameters(self) -> list[nn.Parameter]:
        """What :meth:`logits` depends on besides its inputs, as far as it is trained."""
        return list(self.lm_heads.parameters())

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        """Head ``head_index``'s logits over the draft vocabulary: (…, F) -> (…, V')."""
        return self.lm_heads(features, head_index)

    def lm_head_logits(self, features: Tensor) -> Tensor:
        """The lm_heads' logits of the first heads at once, (depth, B, D) -> (depth, B, V'): one product if one."""
        if self.lm_heads.is_one:
            return self.lm_heads(features, 0)
        return torch.stack([self.lm_heads(feature, i) for i, feature in enumerate(features)])

    def lm_head_inputs(self, features: Tensor) -> Tensor:
        """The part of features (…, F) that an lm_head reads."""
        return features

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary indices as the target's token ids, any shape."""
        return draft_ids if self.config.draft_vocab_size is None else self.draft_vocab[draft_ids]


class AllAtOnceHead(DraftHead):
    """A head whose predictions do not depend on draft tokens. Its state is the logits of all depths, (depth, B, V')."""

    reads_path = False

    def predict(self, state: Any, depth: int) -> Tensor:
        """(B, 1, V'), the same for all nodes of a depth."""
        return state[depth][:, None]


class HeadSession(DraftSession):
    """Drafts for one batch. Heads that read the last hidden state alone keep nothing between steps."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._checked: Shape | None = None  # the last shape, which the head can fill

    def propose(self, context: Context, shape: Shape) -> Draft:
        """Draft tokens for every row of the context.

        Raises:
            InvalidTree: as for :meth:`DraftHead.check_shape`.
        """
        if shape is not self._checked:
            self.head.check_shape(shape)
            self._checked = shape
        head, root = self.head, self.root(context)

        def begin(depth: int) -> Any:
            return head.begin(root, depth) if depth else None  # nothing is predicted for a root alone

        return fill(head, shape, context, begin=begin, max_depth=head.depth_for(shape), expand=head.expander(root))

    def root(self, context: Context) -> Root:
        """What drafting begins with."""
        return Root(context.root_ids, context.last_hidden.to(self.head.dtype))
