"""A head in another project's layout: its files, and which of its tensors are which of ours, in both directions.

Nothing in the files is executed: a pickle may hold tensors and no other objects.
"""

import json
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from draftheads.checkpoints.checkpoint import check_names, weightless_head
from draftheads.checkpoints.head_files import TENSORS_FILE, read_header
from draftheads.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    DraftHeadsError,
    InvalidSettings,
    ModelNotFound,
    UnsupportedModel,
    first_line,
)
from draftheads.heads.base import LARGEST_SIZE, DraftHead, HeadConfig
from draftheads.models.file_checks import unread_keys
from draftheads.models.model import TargetModel
from draftheads.models.model_config import fits
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names
from draftheads.utils.strict_json import unique

CLOSE = 1e-2  # how far a copy of the base's weights may be from them, relative: 16-bit types differ by less
EMBEDDINGS = {"model.embed_tokens.weight", "model.language_model.embed_tokens.weight"}  # of whole models
Written = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, and the tensors by name
Reasons = Mapping[str, object]  # why a head cannot be read or written, each with what is true if it is so
_ENDINGS = (".safetensors", ".bin", ".pt")  # the first kind that is there counts
_OF_TRAINING = ("training_args", "optimizer", "scheduler")  # beside the weights
_HEADS_ALONE = ("medusa_lm_head", "hydra_lm_head")  # maybe beside files of a base model


class Source:
    """The files of a head that another project has saved: names and shapes first, tensors when they are needed.

    Args:
        path: of a folder, or of one file in it.

    Raises:
        ModelNotFound: there is none.
        CheckpointCorrupt: a file cannot be read, or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = (path if path.is_dir() else path.parent) / "config.json"
        if not path.exists():
            raise ModelNotFound(f"no head at {path}: no such file or folder")
        self.files = _files_of(path)
        self._places: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name, shape in self._shapes_in(file).items():
                if name in self._places:
                    places = f"{self._places[name].name} and {file.name}"
                    raise CheckpointCorrupt(f"{path}: the tensor {name!r} is in {places}")
                self._places[name], self.shapes[name] = file, shape

    @cached_property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says; empty where there is none."""
        if not self.config_file.is_file():
            return {}
        try:
            values = json.loads(self.config_file.read_text(encoding="utf-8"), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"{self.config_file} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointCorrupt(f"{self.config_file} holds a {type(values).__name__}; it must be an object")
        return values

    def need_config(self, why: str) -> None:
        if not self.config:
            raise CheckpointCorrupt(f"{self.config_file} is missing; {why}")

    def wrong(self, what: str) -> CheckpointCorrupt:
        """The error for a configuration that cannot be."""
        return CheckpointCorrupt(f"{self.config_file}: {what}")

    def number(self, name: str, *, most: int = LARGEST_SIZE, given: Mapping[str, Any] | None = None) -> int | None:
        """A key of the configuration, or of the ``given`` part of it; None where it is missing."""
        value = (self.config if given is None else given).get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
            raise self.wrong(f"{name} is {value!r}; it must lie in 1 … {most}")
        return value

    def flag(self, name: str, given: Mapping[str, Any] | None = None) -> bool:
        """Whether a key of the configuration, or of the ``given`` part, is true; false where it is missing."""
        value = (self.config if given is None else given).get(name) or False
        if not isinstance(value, bool):
            raise self.wrong(f"{name} is {value!r}; it must be true or false")
        return value

    def tensor(self, name: str) -> Tensor:
        if name in self._pickled:
            return self._pickled[name]
        with safe_open(self._places[name], framework="pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]

    def _shapes_in(self, file: Path) -> dict[str, tuple[int, ...]]:
        if file.suffix == ".safetensors":
            return read_header(file)[0]
        tensors = _tensors_in(file)
        self._pickled |= tensors
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # a pipe of that name would never end
    files = sorted(f for f in path.iterdir() if f.suffix in _ENDINGS and f.stem not in _OF_TRAINING and f.is_file())
    files = [file for file in files if file.stem in _HEADS_ALONE] or files
    for ending in _ENDINGS:
        if found := [file for file in files if file.suffix == ending]:
            return found
    raise ModelNotFound(f"no head at {path}: it has no file that ends in {', '.join(_ENDINGS)}")


def saved_in(file: Path) -> Any:
    """What ``torch.save`` wrote. Without ``weights_only`` a pickle could run any code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles of other kinds, which are errors
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        problem = f"{file} holds more than tensors, and other objects could run code, so nothing of it was read"
        raise CheckpointCorrupt(f"{problem}: {first_line(error)}") from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{file} is not a file of torch.save: {first_line(error)}") from None


def _tensors_in(file: Path) -> dict[str, Tensor]:
    values = saved_in(file)
    are_tensors = isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values())
    if not are_tensors or not all(isinstance(name, str) for name in values):
        raise CheckpointCorrupt(f"{file} holds a {type(values).__name__}; it must be a dictionary of tensors")
    return dict(values)


class Made(NamedTuple):
    """A tensor of ours that is computed from some of the file's."""

    of: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class Layout:
    """What a file holds.

    Args:
        format: its name, for messages.
        config: of the head that it is.
        names: the file's tensor for each of ours, or how ours is made.
        copies: tensors that repeat the base model's ``embedding`` or ``lm_head``, which are checked if they are there.
        unused: the file's tensors that no head needs.
        tree: on which it was drafted with it, if the file says it.
        guesses: what the file does not say and was assumed, each a clause.
    """

    format: str
    config: HeadConfig
    names: Mapping[str, str | Made]
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: Collection[str] = ()
    tree: Tree | None = None
    guesses: tuple[str, ...] = ()

    def read(self, source: Source, base: TargetModel) -> dict[str, Tensor]:
        """The head's tensors by name."""
        expected, config = weightless_head(self.config).state_dict(), self.config
        heads = f"{counted(config.num_heads, 'head')} of {counted(config.num_layers, 'layer')}"
        tokens = counted(config.num_draft_tokens, "draft token")
        read_as = f"{self.format} with {heads}, hidden_size {config.hidden_size} and {tokens}"
        made = {name: where if isinstance(where, Made) else Made((where,)) for name, where in self.names.items()}
        used = {part for where in made.values() for part in where.of}
        counts = f"read as {read_as}, it needs {counted(len(used), 'tensor')} and has {len(source.shapes)}"
        check_names(source.path, source.shapes, used, counts, unused={*self.copies, *self.unused})
        for name, part in self.copies.items():
            if name not in source.shapes:
                continue
            apart = distance(source.tensor(name), own := getattr(base.weights, part))
            if apart is None or not apart <= CLOSE:
                by = f"{apart:.0%}" if apart is not None else f"its size {source.shapes[name]}, not {tuple(own.shape)},"
                differs = f"its {name} differs by {by} from the {part} of {base.model_id}"
                raise CheckpointMismatch(f"{source.path}: {differs}: give the base model that the head was trained for")
        tensors = {}
        for name, where in made.items():
            tensor, own = where.make(*map(source.tensor, where.of)), expected[name]
            shape, wanted = tuple(tensor.shape), tuple(own.shape)
            stored = {part: source.shapes[part] for part in where.of}
            parts = (part if size == shape else f"{part} {size}" for part, size in stored.items())
            start = f"{source.path}: tensor {' and '.join(parts)}"
            if shape != wanted:
                raise CheckpointCorrupt(f"{start} is {shape}; {read_as} makes it {wanted}")
            if not fits(tensor.dtype, own.dtype):
                raise CheckpointCorrupt(f"{start} holds {tensor.dtype}, which is no value of {own.dtype}")
            tensors[name] = tensor
        return tensors


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
    "python -m sglang.launch_server --model <model> --speculative-algorithm {} --speculative-draft-model-path <head>"
)


def distance(given: Tensor, own: Tensor) -> float | None:
    """How far a file's copy of one of the base's weights is from it, relative; None if the sizes differ.

    The base's vocabulary may have grown since.
    """
    own = own.detach()[: len(given)].float().cpu()
    if given.shape != own.shape:
        return None
    return float((given.float() - own).norm() / own.norm().clamp_min(1e-30))


@cache
def _of_transformers() -> frozenset[str]:
    """Keys of every configuration of ``transformers``, and of how a whole model writes texts."""
    from transformers import GenerationConfig, PreTrainedConfig  # noqa: PLC0415 - slow to import

    return frozenset({**PreTrainedConfig().to_dict(), **GenerationConfig().to_dict()})


_HARMLESS = {  # keys of names, of training, and of what the tensors show
    *("_name_or_path", "transformers_version", "torch_dtype", "auto_map", "tie_word_embeddings", "vocab_size"),
    *("hidden_size", "num_hidden_layers", "attention_bias", "mlp_bias", "bias", "qkv_bias", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "dropout_rate", "resid_pdrop", "pretraining_tp", "max_window_layers"),
    *("base_model_name_or_path", "speculators_version", "speculators_model_type", "embed_requires_grad", "debug"),
}


def check_keys(source: Source, used: Collection[str], given: Mapping[str, Any], place: str = "") -> None:
    """Raises :class:`UnsupportedModel` if a configuration has other keys than used ones and those that change nothing.

    Keys that are off (null, false, 0, empty) change nothing, either.
    """
    known = {*used, *_HARMLESS, *_of_transformers()}
    if unknown := sorted(name for name, value in given.items() if value and name not in known):
        why = "which may change what the head computes; if it does not, delete it from the file"
        raise UnsupportedModel(f"{source.config_file}: unknown key {place}{first_names(unknown)}, {why}")


def added_keys(base: TargetModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a whole model's configuration what nothing reads, without keys of the base: they are named at its loading."""
    changed = {name: value for name, value in given.items() if getattr(base.config, name, None) != value}
    return {name: changed[name] for name in unread_keys(changed, type(base.config), type(base.model))}


def numbers_in(shapes: Collection[str], pattern: str) -> list[tuple[int, ...]]:
    r"""The numbers in all names that match a pattern, sorted.

    >>> numbers_in(["0.1.w", "0.0.w", "norm"], r"(\d+)\.(\d+)\.w")
    [(0, 0), (0, 1)]
    """
    found = (re.fullmatch(pattern, name) for name in shapes)
    return sorted(tuple(map(int, match.groups())) for match in found if match)


def has_names(pattern: str) -> Callable[[Collection[str]], bool]:
    """Whether any name matches a pattern, of names that come later."""
    return lambda names: any(re.fullmatch(pattern, name) for name in names)


def refuse(reasons: Reasons, error: type[DraftHeadsError] = InvalidSettings, start: str = "") -> None:
    """Raises an error with all the reasons that are so, if there are any."""
    if said := "; ".join(reason for reason, is_so in reasons.items() if is_so):
        raise error(start + said)


def partial_vocabulary(config: HeadConfig) -> Reasons:
    """Why :func:`whole_lm_heads` cannot be made."""
    return {
        f"the layout has lm_heads of the whole vocabulary, and those of the head are of the kind {config.lm_head} for "
        f"{counted(config.num_draft_tokens, 'draft token')} of {config.vocab_size}: train it with --draft-vocab-size 0 "
        "or with --lm-head shared": config.draft_vocab_size is not None and config.lm_head != "shared"
    }


def changed_logits(target: TargetModel) -> Reasons:
    """What a layout whose logits are the product with the lm_head, and no more, has no place for."""
    scale, bias = target.weights.logit_scale, target.weights.lm_head_bias
    return {
        f"the model multiplies its logits by {scale}, for which the layout has no place": scale != 1.0,
        "the model's lm_head has a bias, for which the layout has no place": bias is not None,
    }


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


def lm_head_of(head: DraftHead) -> Tensor:
    """The weight (V', F) of the only lm_head, whatever its kind: the logits of unit vectors are its columns."""
    return head.lm_heads(torch.eye(head.config.feature_size), 0).T  # type: ignore[no-any-return]


def sizes_of(base: TargetModel) -> dict[str, Any]:
    """The sizes that every head shares with its base."""
    return {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}


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
    ids = head.to_target_ids(torch.arange(head.config.num_draft_tokens))
    is_drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}


def speculators_config(config: HeadConfig, layer: dict[str, Any], target: TargetModel, name: str) -> dict[str, Any]:
    """What every ``config.json`` of vllm-project/speculators says; ``name`` is the base model's."""
    architectures = list(getattr(target.config, "architectures", None) or ())
    kind = config.method.replace("-", "")
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": config.num_draft_tokens,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_heads}],
            "verifier": {"name_or_path": name, "architectures": architectures or [type(target.model).__name__]},
        },
    }
