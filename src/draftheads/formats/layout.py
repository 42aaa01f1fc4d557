"""A head in another project's layout: which of its tensors are which of ours, in both directions."""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.checkpoints.checkpoint import weightless_head
from draftheads.checkpoints.head_files import TENSORS_FILE
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, InvalidSettings, UnsupportedModel
from draftheads.formats.source import CONFIG, Source
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.models.model import TargetModel
from draftheads.models.model_config import fits, layer_sizes
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names

_OF_LAYER = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
)
CLOSE = 1e-2  # how far a copy of the base's weights may be from them, relative: 16-bit types differ by less
Written = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, and the tensors by name


class Made(NamedTuple):
    """A tensor of ours that is computed from some of the file's."""

    of: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Layout:
    """What a file holds.

    Args:
        format: its name, for messages.
        config: of the head that it is.
        names: the file's tensor for each of ours, or how ours is made.
        copies: the file's tensors that repeat the base model's ``embedding`` or ``lm_head``, which are checked.
        unused: the file's tensors that no head needs.
        tree: on which it was drafted with it, if the file says it.
    """

    format: str
    config: HeadConfig
    names: Mapping[str, str | Made]
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: Collection[str] = ()
    tree: Tree | None = None

    def read(self, source: Source, base: TargetModel) -> dict[str, Tensor]:
        """The head's tensors by name."""
        expected = weightless_head(self.config).state_dict()
        if unnamed := set(expected) ^ set(self.names):
            raise AssertionError(f"{self.format}: {sorted(unnamed)} of {self.config.method} have no place")
        used = {name for where in self.names.values() for name in (where.of if isinstance(where, Made) else [where])}
        found = set(source.shapes)
        for kind, names in (
            ("missing", (used | set(self.copies)) - found),
            ("surplus", found - used - set(self.copies) - set(self.unused)),
        ):
            if names:
                raise CheckpointCorrupt(
                    f"{source.path}: {kind} {'tensors' if len(names) > 1 else 'tensor'} {first_names(names)}: read as "
                    f"{self.format} with {self._sizes()}, it needs {counted(len(used), 'tensor')} and has {len(found)}"
                )
        for name, part in self.copies.items():
            self._check_copy(source, name, part, base)
        tensors = {}
        for name, where in self.names.items():
            shape = tuple(expected[name].shape)
            if isinstance(where, Made):
                tensor = where.make(*map(source.tensor, where.of))
                shapes = [f"{part} {source.shapes[part]}" for part in where.of]
                where = f"made of {' and '.join(shapes)}"  # noqa: PLW2901 - for the message
            else:
                tensor = source.tensor(where)
            if tuple(tensor.shape) != shape:
                raise CheckpointCorrupt(
                    f"{source.path}: tensor {where} is {tuple(tensor.shape)}; {self.format} with {self._sizes()} "
                    f"makes it {shape}"
                )
            if not fits(tensor.dtype, expected[name].dtype):
                raise CheckpointCorrupt(
                    f"{source.path}: tensor {where} holds {tensor.dtype}, which is no value of {expected[name].dtype}"
                )
            tensors[name] = tensor
        return tensors

    def is_in_file(self, name: str) -> bool:
        """Whether one of our tensors is read, not only filled in."""
        where = self.names[name]
        return not isinstance(where, Made) or bool(where.of)

    def _sizes(self) -> str:
        config = self.config
        return (
            f"{counted(config.num_heads, 'head')} of {counted(config.num_layers, 'layer')}, hidden_size "
            f"{config.hidden_size} and {counted(config.num_draft_tokens, 'draft token')}"
        )

    def _check_copy(self, source: Source, name: str, part: str, base: TargetModel) -> None:
        apart = distance(source.tensor(name), own := getattr(base.weights, part))
        if apart is None or not apart <= CLOSE:
            by = f"{apart:.0%}" if apart is not None else f"its size {source.shapes[name]}, not {tuple(own.shape)},"
            raise CheckpointMismatch(
                f"{source.path}: its {name} differs by {by} from the {part} of {base.model_id}: give the base model "
                "that the head was trained for"
            )


class Format(NamedTuple):
    """How a project stores heads. Without ``read`` it is only written, and without ``write`` only read."""

    name: str  # for export
    fits: Callable[[Mapping[str, tuple[int, ...]]], bool] = lambda _: False  # whether tensors of these shapes are it
    read: Callable[[Source, TargetModel], Layout] | None = None
    methods: tuple[str, ...] = ()  # of the heads that it is written for; the first format of a method is its default
    write: Callable[[DraftHead, TargetModel, str], Written] | None = None  # of a head, its base and that one's name
    commands: Mapping[str, str] = {}  # that decode with it, by engine; VLLM(method) stands for vLLM's
    file: str = TENSORS_FILE
    has_tokenizer: bool = False
    keeps_vocab: bool = False  # whether the draft vocabulary stays; otherwise all tokens are predicted


SGLANG = (
    "python -m sglang.launch_server --model <model> --speculative-algorithm {} --speculative-draft-model-path <head> "
    "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 12"
)


def distance(given: Tensor, own: Tensor) -> float | None:
    """How far a file's copy of one of the base's weights is from it, relative; None if the sizes differ.

    The base's vocabulary may have grown since.
    """
    own = own.detach()[: len(given)].float().cpu()
    if given.shape != own.shape:
        return None
    return float((given.float() - own).norm() / own.norm().clamp_min(1e-30))


def numbers_in(shapes: Collection[str], pattern: str) -> list[tuple[int, ...]]:
    r"""The numbers in all names that match a pattern, sorted.

    >>> numbers_in(["0.1.w", "0.0.w", "norm"], r"(\d+)\.(\d+)\.w")
    [(0, 0), (0, 1)]
    """
    found = (re.fullmatch(pattern, name) for name in shapes)
    return sorted(tuple(map(int, match.groups())) for match in found if match)


def refuse(reasons: Sequence[str]) -> None:
    """Raises :class:`InvalidSettings` with all the reasons why a head cannot be written, if there are any."""
    if reasons:
        raise InvalidSettings("; ".join(reasons))


def partial_vocabulary(config: HeadConfig) -> list[str]:
    """Why :func:`whole_lm_heads` cannot be made, if they cannot."""
    if config.draft_vocab_size is None or config.lm_head == "shared":
        return []
    reason = (
        f"the layout has lm_heads of the whole vocabulary, and those of the head are of the kind {config.lm_head} for "
        f"{counted(config.draft_vocab_size, 'draft token')} of {config.vocab_size}: train it with --draft-vocab-size 0 "
        "or with --lm-head shared"
    )
    return [reason]


def whole_lm_heads(head: DraftHead, target: TargetModel) -> list[tuple[Tensor, Tensor]]:
    """Weight (V, F) and bias (V,) of each lm_head, whatever its kind: the target's has rows for all tokens."""
    config, weights = head.config, target.weights
    if config.lm_head == "shared":
        matrix, bias = weights.lm_head.detach().float(), weights.lm_head_bias
        whole = torch.zeros(len(matrix)) if bias is None else bias.detach().float()
        return [(matrix * weights.logit_scale, whole * weights.logit_scale)] * config.num_lm_heads
    inputs = torch.cat([torch.zeros(1, config.feature_size), torch.eye(config.feature_size)])
    logits = [head.logits(inputs, i) for i in range(config.num_lm_heads)]
    return [((of_units[1:] - of_units[0]).T, of_units[0]) for of_units in logits]


def sizes_of(base: TargetModel) -> dict[str, Any]:
    """The sizes that every head shares with its base."""
    return {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}


def need_config(source: Source, why: str) -> None:
    if not source.config:
        raise CheckpointCorrupt(f"{source.folder / CONFIG} is missing; {why}")


def layer_options(source: Source, base: TargetModel, given: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Options of a layer of that size that a Llama configuration gives."""
    from transformers import LlamaConfig  # noqa: PLC0415 - slow to import

    need_config(source, "it says how many heads the layer's attention has, and its rotary positions")
    if (act := given.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"{source.path}: the layer's activation is {act!r}; only silu can be read")
    kept = {name: given[name] for name in _OF_LAYER if given.get(name) is not None}
    for name in _OF_LAYER[:4]:
        source.number(name, given=given)
    if "num_attention_heads" not in kept:
        raise CheckpointCorrupt(f"{source.folder / CONFIG}: num_attention_heads is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LlamaConfig(**kept, hidden_size=size)
        sizes = layer_sizes(config, size)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise CheckpointCorrupt(f"{source.folder / CONFIG}: {error}") from None
    return {**sizes_of(base), **sizes}


def draft_ids(source: Source, name: str, vocab_size: int, ids: Tensor) -> Tensor:
    """A draft vocabulary that a tensor of the file makes."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size or len(ids.unique()) < len(ids) or ids.is_floating_point():
        fix = f"they must be different integers in 0 … {vocab_size - 1}"
        raise CheckpointCorrupt(f"{source.path}: {name} makes the ids {low} … {high}; {fix}")
    return ids.long()


def draft_vocab(source: Source, vocab_size: int, d2t: Tensor, t2d: Tensor | None = None) -> Tensor:
    """(V',) target ids of the draft tokens, of ``d2t`` (V',) and ``t2d`` (V,): see :func:`vocabulary_maps`."""
    ids = draft_ids(source, "d2t", vocab_size, d2t + torch.arange(len(d2t)))
    if t2d is not None and t2d.bool().nonzero()[:, 0].tolist() != sorted(ids.tolist()):
        raise CheckpointCorrupt(f"{source.path}: t2d and d2t name different draft tokens")
    return ids


def vocabulary_maps(head: DraftHead) -> dict[str, Tensor]:
    """``d2t`` (V',) int64, the target's id of each draft token minus its place; ``t2d`` (V,), true for draft tokens."""
    config = head.config
    ids = head.draft_vocab if config.draft_vocab_size is not None else torch.arange(config.vocab_size)
    is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}


def speculators_config(config: HeadConfig, layer: dict[str, Any], target: TargetModel, name: str) -> dict[str, Any]:
    """What every ``config.json`` of vllm-project/speculators says; ``name`` is the base model's."""
    architectures = list(getattr(target.config, "architectures", None) or ())
    return {
        "speculators_model_type": config.method,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": config.num_draft_tokens,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_heads}],
            "verifier": {"name_or_path": name, "architectures": architectures or [type(target.model).__name__]},
        },
    }


def changed_logits(target: TargetModel) -> list[str]:
    """What a layout whose logits are the product with the lm_head, and no more, has no place for."""
    scale = target.weights.logit_scale
    scaled = [] if scale == 1.0 else [f"the model multiplies its logits by {scale}, for which the layout has no place"]
    has_bias = target.weights.lm_head_bias is not None
    return scaled + (["the model's lm_head has a bias, for which the layout has no place"] if has_bias else [])


def zeros(size: int) -> Made:
    """A bias that is not there."""
    return Made((), lambda: torch.zeros(size))


def scaled_otherwise(config: LayerConfig, target: TargetModel) -> list[str]:
    """Why :func:`llama_config` is not the head's, if it is not."""
    scaled = config.rope_frequencies
    if scaled is None or scaled == layer_sizes(target.config, config.hidden_size).get("rope_frequencies"):
        return []
    return ["the head's rotary positions are scaled otherwise than the model's, which the layout would be written with"]


def layer_names(config: LayerConfig, ours: str, theirs: str) -> dict[str, str]:
    """Llama's name of each tensor of a transformer layer but the norm of its inputs, by ours; both with a prefix."""
    parts = [f"{part}_proj.weight" for part in "qkvo"]
    parts += [f"{part}_proj.bias" for part in "qkv"] if config.qkv_bias else []
    names = {f"{ours}{part}": f"{theirs}self_attn.{part}" for part in parts}
    middle = {f"{part}_proj.weight" for part in ("gate", "up", "down")}
    names |= {f"{ours}feed_forward.{part}": f"{theirs}mlp.{part}" for part in sorted(middle)}
    return names | {f"{ours}middle_norm.weight": f"{theirs}post_attention_layernorm.weight"}


def llama_config(config: LayerConfig, target: TargetModel) -> dict[str, Any]:
    """What a Llama configuration says of one layer, with rotary positions in the old and the new schema."""
    rope: dict[str, Any] = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    is_scaled = config.rope_frequencies is not None
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"} if is_scaled else None
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "max_position_embeddings": target.max_positions,
        "vocab_size": config.vocab_size,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
