"""A draft head on disk: written atomically and read strictly.

The files of a head and their keys: :mod:`draftheads.checkpoints.head_files`.
"""

import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from draftheads.checkpoints.head_files import (
    CARD_FILE,
    CONFIG_FILE,
    FORMAT_VERSION,
    HEAD_FILES,
    TENSORS_FILE,
    HeadFiles,
    read_head_files,
)
from draftheads.checkpoints.registry import find_head
from draftheads.errors import BaseModelWarning, CheckpointCorrupt, CheckpointMismatch, InvalidSettings, InvalidTree
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.models.file_checks import not_finite
from draftheads.models.fingerprint import (
    MAX_DIFFERENCE,
    TUNED_DIFFERENCE,
    Fingerprints,
    difference,
    fingerprint_of,
    tokenizer_fingerprints,
)
from draftheads.models.model import TargetModel
from draftheads.models.model_config import dtype_named
from draftheads.models.model_names import shown_name
from draftheads.speculation.acceptance_profile import DEFAULT_NODES, PROFILE_FILE, AcceptanceProfile
from draftheads.utils.counts import counted
from draftheads.utils.files import atomic_directory, read_set, replaced_set, user_path
from draftheads.utils.messages import first_names
from draftheads.utils.provenance import provenance
from draftheads.utils.strict_json import read_dataclass

logger = logging.getLogger(__name__)
_ROUNDING = 0.006  # the relative difference of layers in another 16-bit type
_FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors as safetensors names them; those of 8 bits need scales


@dataclass(frozen=True, kw_only=True)
class SavedHead(HeadFiles):
    """A head's folder, checked against its architecture; this needs no base model."""

    config: HeadConfig
    fingerprints: Fingerprints  # of the base model


@dataclass(frozen=True, kw_only=True)
class ResolvedHead(SavedHead):
    """A head that was found by its name, and read once: its tensors belong to its profile."""

    name: str  # as the user gave it
    model: str  # the name of the model that it shall draft for
    tensors: dict[str, Tensor]  # mapped from the file


def resolve_head(
    name: str | PathLike[str], model: str | PathLike[str], *, folder: Path | None = None, ignore_profile: bool = False
) -> ResolvedHead:
    """Finds a head by its name, unless its folder is known, and reads it.

    Arguments and errors are those of ``find_head`` and ``read_head``.
    """
    saved, tensors = read_tensors(folder or find_head(name, fspath(model)), ignore_profile=ignore_profile)
    return ResolvedHead(**vars(saved), name=fspath(name), model=fspath(model), tensors=tensors)


def save_head(
    head: DraftHead,
    folder: str | PathLike[str],
    *,
    base: TargetModel,
    profile: AcceptanceProfile | None = None,
    card: str = "",
    dtype: torch.dtype | str = torch.bfloat16,
    assumed: Sequence[str] = (),
) -> None:
    """Writes a head and its acceptance profile to a folder.

    A new folder appears complete or not at all. In an existing folder, the files of a head are replaced together and
    other files stay: after a kill at any moment, :func:`load_head` finds the old head or the new one.

    Args:
        head: on any device, in any floating type.
        folder: to write; created if missing.
        base: the model it was trained for; a chat template that was given for it is saved, too.
        profile: its acceptance profile; by default an assumed one, which decoding corrects.
        card: Markdown; by default a line with the method and the base model.
        dtype: of the saved floating-point tensors.
        assumed: of a head of another project, what its files do not say.

    Raises:
        StorageError: it cannot be written (a full disk, …); the previous content is unchanged.
        InvalidSettings: an argument of another type.
        InvalidTree, CheckpointCorrupt: the profile does not fit the head.
    """
    if not isinstance(head, DraftHead):
        raise InvalidSettings(f"head is of type {type(head).__name__}; save_head takes a DraftHead")
    folder, dtype = _folder_for(base, folder), dtype_named(dtype) or torch.bfloat16
    profile = profile or AcceptanceProfile.assumed(head.config.num_heads)
    check_profile(head.config, profile, folder / PROFILE_FILE)
    tensors = {name: _cast(tensor.cpu(), dtype).contiguous() for name, tensor in head.state_dict().items()}
    about = {
        "format_version": FORMAT_VERSION,
        "method": head.config.method,
        "head": head.config.options(),
        "base": {"model_id": base.model_id, "fingerprints": asdict(base.fingerprints)},
        "provenance": {**provenance(), **({"assumed": list(assumed)} if assumed else {})},
        **({} if base.chat_template is None else {"chat_template": base.chat_template}),
    }
    card = card or f"# {head.config.method} head for {shown_name(base.model_id)}"
    texts = {PROFILE_FILE: profile.to_json(), CARD_FILE: card, CONFIG_FILE: json.dumps(about, indent=2)}
    with (replaced_set if folder.is_dir() else atomic_directory)(folder) as staged:
        save_file(tensors, staged / TENSORS_FILE, metadata={"format": "pt"})
        for name, text in texts.items():
            (staged / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def load_head(
    folder: str | PathLike[str],
    base: TargetModel,
    *,
    dtype: torch.dtype | str | None = None,
    ignore_profile: bool = False,
) -> DraftHead:
    """A saved head, ready to draft for ``base``: on the same device, bound to its weights, frozen.

    Its ``shape`` is the best static tree of 10 nodes.

    Args:
        folder: written by :func:`save_head`.
        base: the model that the head was trained for.
        dtype: of the head; by default the base model's.
        ignore_profile: as for :func:`read_head`.

    Raises:
        CheckpointMismatch: made for another model or tokenizer.
        ModelNotFound, CheckpointError, UnknownMethod, InvalidTree: as for :func:`read_head`.
        InvalidSettings: an argument of another type.
    """
    folder, dtype = _folder_for(base, folder), dtype_named(dtype)
    return bound_head(*read_tensors(folder, ignore_profile=ignore_profile), base, dtype)


def bound_head(
    saved: SavedHead, tensors: Mapping[str, Tensor], base: TargetModel, dtype: torch.dtype | None = None
) -> DraftHead:
    """The head of these tensors, ready to draft for ``base``; arguments and errors as for :func:`load_head`."""
    check_base(saved, base)
    if saved.config.draft_vocab_size is not None:
        low, high = int(tensors["draft_vocab"].min()), int(tensors["draft_vocab"].max())
        if low < 0 or high >= saved.config.vocab_size:
            found = f"{saved.folder / TENSORS_FILE}: draft_vocab has ids {low} … {high}"
            raise CheckpointCorrupt(f"{found}; they must lie in 0 … {saved.config.vocab_size - 1}")
    head = _filled(*_grown(saved.config, tensors, base.vocab_size), base, dtype or base.dtype)
    if unsaved := [name for name, buffer in head.named_buffers() if buffer.is_meta]:
        raise AssertionError(f"{saved.method} heads compute {unsaved} when built: save or derive them instead")
    head.default_shape = saved.profile.tree(DEFAULT_NODES)
    return head


def _folder_for(base: object, folder: object) -> Path:
    """The folder as a path, if both arguments have the right types."""
    if not isinstance(base, TargetModel):
        raise InvalidSettings(
            f"base is of type {type(base).__name__}; give a TargetModel, such as TargetModel.load(NAME)"
        )
    if isinstance(folder, str | PathLike) and str(folder):
        return user_path(str(folder))
    raise InvalidSettings(f"folder is {folder!r}; give the path of a head's folder")


def copy_for(head: DraftHead, base: TargetModel) -> DraftHead:
    """A copy of a head in the base model's type and bound to its weights, ready to draft."""
    return _filled(head.config, head.state_dict(), base, base.dtype)


def _filled(config: HeadConfig, tensors: Mapping[str, Tensor], base: TargetModel, dtype: torch.dtype) -> DraftHead:
    """A head with these values in a type, bound to a model's weights and frozen."""
    head = weightless_head(config)
    values = {name: _cast(tensor.to(base.device), dtype) for name, tensor in tensors.items()}
    head.load_state_dict(values, strict=True, assign=True)
    head.bind(base.weights)
    return head.eval().requires_grad_(requires_grad=False)


def _grown(
    config: HeadConfig, tensors: Mapping[str, Tensor], vocab_size: int
) -> tuple[HeadConfig, Mapping[str, Tensor]]:
    """The head for a base model whose vocabulary has grown: it drafts the tokens that it knows, and reads all."""
    known = config.vocab_size
    if vocab_size == known:
        return config, tensors
    config = replace(config, vocab_size=vocab_size, draft_vocab_size=config.draft_vocab_size or known)
    grown = {"draft_vocab": torch.arange(known), **tensors}
    for name, expected in weightless_head(config).state_dict().items():
        if expected.shape[:1] == (vocab_size,) and len(grown[name]) == known:  # an embedding of its own
            grown[name] = F.pad(grown[name], (0, 0, 0, vocab_size - known))
    return config, grown


def read_head(folder: str | PathLike[str], *, ignore_profile: bool = False) -> SavedHead:
    """Reads and checks everything but the values of the tensors; needs no base model.

    With ``ignore_profile``, ``acceptance.json`` is not read, and the profile is an assumed one: for commands that write
    a new one.

    Raises:
        ModelNotFound: no such folder.
        CheckpointCorrupt: a file, key or tensor is missing, surplus, or not what it should be.
        CheckpointMismatch: made by a newer version of this package.
        UnknownMethod: no such architecture here.
        InvalidTree: its profile's paths are not a tree, or are deeper than its heads.
    """
    files = read_head_files(folder, ignore_profile=ignore_profile)
    path = files.folder / CONFIG_FILE
    config_class, _ = head_classes(files.method)
    try:
        config = read_dataclass(config_class, {**config_class.optional_defaults(), **files.options}, path, "head")
    except InvalidSettings as error:
        raise CheckpointCorrupt(f"{path}: head: {error}") from None
    profile = AcceptanceProfile.assumed(config.num_heads) if ignore_profile else files.profile
    check_profile(config, profile, files.folder / PROFILE_FILE)
    _check_tensors(files, weightless_head(config))
    return SavedHead(
        **{**vars(files), "profile": profile},
        config=config,
        fingerprints=read_dataclass(Fingerprints, files.base_prints, path, "base.fingerprints"),
    )


def read_tensors(folder: Path, *, ignore_profile: bool = False) -> tuple[SavedHead, dict[str, Tensor]]:
    """A saved head and its tensors by name; arguments and errors as for :func:`read_head`."""

    def read() -> tuple[SavedHead, dict[str, Tensor]]:
        saved = read_head(folder, ignore_profile=ignore_profile)
        tensors = load_file(saved.tensors_file)
        if (name := not_finite(tensors.items())) is not None:
            raise CheckpointCorrupt(f"{saved.tensors_file}: {name} has a NaN or infinite number: get it anew")
        return saved, tensors

    return read_set(folder, HEAD_FILES, read)


def check_profile(config: HeadConfig, profile: AcceptanceProfile, path: Path) -> None:
    """Checks that the profile at ``path`` fits a head of this configuration.

    Raises:
        InvalidTree: its trees are too deep or too wide for the head.
        CheckpointCorrupt: its number of heads is not the head's.
    """
    skeleton = weightless_head(config)
    try:
        skeleton.check_shape(profile.tree(len(profile.paths) + 1))
    except InvalidTree as error:
        raise InvalidTree(f"{path}: {error}") from None
    further = profile.depth - config.num_heads
    if further < 0 or (further and skeleton.depth_limit is not None):
        numbers, heads = counted(profile.depth, "number"), counted(config.num_heads, "head")
        raise CheckpointCorrupt(f"{path}: temperatures has {numbers} but the head has {heads}")


def check_base(saved: SavedHead, base: TargetModel) -> None:
    """Checks that this is the model that the head was trained for. Its vocabulary may have grown since.

    Raises:
        CheckpointMismatch: other sizes, another tokenizer, or another embedding or lm_head.

    Warns:
        BaseModelWarning: the layers between them differ much.
    """
    prints, given_prints, rows = saved.fingerprints, base.fingerprints, saved.config.vocab_size
    if base.vocab_size > rows:
        of_old = (fingerprint_of(matrix[:rows]) for matrix in (base.weights.embedding, base.weights.lm_head))
        given_prints = replace(given_prints, **dict(zip(("embedding", "lm_head"), of_old, strict=True)))
    is_other = prints.tokenizer != given_prints.tokenizer and _apart(saved, "embedding", given_prints) <= MAX_DIFFERENCE
    if is_other and prints.tokenizer in tokenizer_fingerprints(base.tokenizer):
        given_prints = replace(given_prints, tokenizer=prints.tokenizer)
    saved.check("hidden_size", saved.config.hidden_size, base.hidden_size, base.model_id)
    saved.check("vocab_size", rows, min(base.vocab_size, rows), base.model_id)
    saved.check("tokenizer fingerprint", prints.tokenizer, given_prints.tokenizer, base.model_id)
    for name in ("embedding", "lm_head"):
        apart = _apart(saved, name, given_prints)
        if not apart <= MAX_DIFFERENCE:
            own = f"the {name} of this model, {base.model_id}, differs by {apart:.0%}"
            most = f"a quantised copy differs by at most {MAX_DIFFERENCE:.0%}"
            fix = f"{saved.fix_for(base.model_id)}, or with `--start-from {saved.folder}` if this is a tuned copy"
            raise CheckpointMismatch(f"{saved.folder}: trained for {saved.model_id}; {own}; {most}: {fix}")
    if None in (prints.layers, given_prints.layers):
        return
    apart = _apart(saved, "layers", given_prints)
    if not apart <= TUNED_DIFFERENCE:
        differ = f"the layers of {base.model_id} differ by {apart:.0%} from those of {saved.model_id}"
        fewer = f"for which the head {saved.folder} was trained, so fewer draft tokens are accepted"
        further = f"--method {saved.method} --start-from {saved.folder} --model {base.model_id} --data … --out …"
        words = f"{differ}, {fewer}. Train it further: `draftheads train {further}`"
        warnings.warn(words, BaseModelWarning, stacklevel=4)
    elif apart > _ROUNDING:
        logger.info(
            "the head %s was trained for %s, whose layers differ by %.1f %% from those of %s: `draftheads tune` tells "
            "how many draft tokens are accepted",
            *(saved.folder.name, shown_name(saved.model_id), 100 * apart, shown_name(base.model_id)),
        )


def _apart(saved: SavedHead, name: str, given: Fingerprints) -> float:
    """The relative difference of a part of the base model."""
    try:
        return difference(getattr(saved.fingerprints, name), getattr(given, name))
    except ValueError as error:
        raise CheckpointCorrupt(f"{saved.folder / CONFIG_FILE}: {name}: {error}") from None


def weightless_head(config: HeadConfig) -> DraftHead:
    """The module on the meta device: it takes no memory and draws no random numbers."""
    _, head_class = head_classes(config.method)
    with torch.device("meta"):
        return head_class(config)


def check_names(
    path: Path, found: Iterable[str], needed: Iterable[str], counts: str, *, unused: Iterable[str] = ()
) -> None:
    """Raises :class:`CheckpointCorrupt` if a file at ``path`` has other tensors than needed ones and unused ones."""
    missing, surplus = set(needed).difference(found), set(found).difference(needed, unused)
    for kind, names in (("missing", missing), ("surplus", surplus)):
        if names:
            noun = "tensors" if len(names) > 1 else "tensor"
            raise CheckpointCorrupt(f"{path}: {kind} {noun} {first_names(names)}: {counts}")


def _check_tensors(files: HeadFiles, skeleton: DraftHead) -> None:
    """Names, shapes and types of the saved tensors must be those of the skeleton."""
    path, expected = files.folder / TENSORS_FILE, skeleton.state_dict()
    counts = f"it has {counted(len(files.shapes), 'tensor')}, {CONFIG_FILE} needs {len(expected)}"
    check_names(path, files.shapes, expected, counts)
    for name, tensor in expected.items():
        if files.shapes[name] != tuple(tensor.shape):
            raise CheckpointCorrupt(
                f"{path}: tensor {name} is {files.shapes[name]}; {CONFIG_FILE} makes it {tuple(tensor.shape)}"
            )
        if (files.types[name] in _FLOATS) != tensor.is_floating_point():
            raise CheckpointCorrupt(f"{path}: tensor {name} holds {files.types[name]}; it must be {tensor.dtype}")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
