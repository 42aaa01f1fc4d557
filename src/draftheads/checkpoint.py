"""A draft head on disk: written atomically and read strictly.

Knows heads and the fingerprints of their base model. Knows nothing of decoding or of where heads come from.
A head is a folder of four files:

=====================  ======================================================================================
``config.json``        format_version, method, head (every option), base (model_id, fingerprints), provenance
``model.safetensors``  the head's own tensors, bf16 by default; never the base model's
``acceptance.json``    the acceptance profile, see :mod:`draftheads.acceptance_profile`
``README.md``          the model card
=====================  ======================================================================================

These keys are public names. Unknown keys are errors, so a new key needs a new format version. Only ``chat_template`` in
``config.json`` is optional: the template used in training, if it was not the tokenizer's own.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.acceptance_profile import DEFAULT_NODES, PROFILE_FILE, AcceptanceProfile, read_profile
from draftheads.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    InvalidSettings,
    InvalidTree,
    ModelNotFound,
    StorageError,
    UnknownMethod,
)
from draftheads.files import atomic_directory
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.models.fingerprint import MAX_DIFFERENCE, Fingerprints, difference
from draftheads.models.model import TargetModel
from draftheads.provenance import provenance
from draftheads.strict_json import checked, read_dataclass, read_object

FORMAT_VERSION = 1
CONFIG_FILE, TENSORS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
HEAD_FILES = (TENSORS_FILE, PROFILE_FILE, CARD_FILE, CONFIG_FILE)

_CONFIG_KEYS = {
    "format_version": int,
    "method": str,
    "head": dict,
    "base": dict,
    "provenance": dict,
    "chat_template": str | None,
}
_BASE_KEYS = {"model_id": str, "fingerprints": dict}


@dataclass(frozen=True)
class SavedHead:
    """A head's folder, read and checked; this needs no base model."""

    folder: Path
    method: str
    config: HeadConfig
    model_id: str  # of the base model
    fingerprints: Fingerprints  # of the base model
    provenance: dict[str, Any]  # how it was made
    profile: AcceptanceProfile  # tokens per step by tree
    shapes: dict[str, tuple[int, ...]]  # of its tensors
    chat_template: str | None = None  # used in training; None: the tokenizer's own

    @property
    def digest(self) -> str:
        """Of the tensors' file: 16 hexadecimal digits."""
        with (self.folder / TENSORS_FILE).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    @property
    def num_parameters(self) -> int:
        """How many numbers were trained; the map of a trimmed vocabulary does not count."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name != "draft_vocab")

    @property
    def num_bytes(self) -> int:
        """Size of the tensors' file."""
        return (self.folder / TENSORS_FILE).stat().st_size

    @property
    def card(self) -> str:
        """The text of the model card; empty if there is none."""
        path = self.folder / CARD_FILE
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def save_head(
    head: DraftHead,
    folder: str | PathLike[str],
    *,
    base: TargetModel,
    profile: AcceptanceProfile | None = None,
    card: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a head and its acceptance profile to a folder.

    A new folder appears complete or not at all. In an existing folder, the files of a head are replaced and other
    files stay. The new files are complete on the disk before the first old file is replaced.

    Args:
        head: on any device, in any floating type.
        folder: to write; created if missing.
        base: the model it was trained for; a chat template that was given for it is saved, too.
        profile: its acceptance profile; by default an assumed one, which decoding corrects.
        card: Markdown; by default a line with the method and the base model.
        dtype: of the saved floating-point tensors.

    Raises:
        StorageError: it cannot be written (a full disk, …); the previous content is unchanged.
        InvalidTree, CheckpointCorrupt: the profile does not fit the head.
    """
    folder = Path(folder)
    profile = profile or AcceptanceProfile.assumed(head.config.num_heads)
    check_profile(head.config, profile, folder / PROFILE_FILE)
    tensors = {name: _cast(tensor.cpu(), dtype).contiguous() for name, tensor in head.state_dict().items()}
    texts = {
        PROFILE_FILE: profile.to_json().rstrip("\n"),
        CARD_FILE: (card or f"# {head.config.method} head for {base.model_id}").rstrip("\n"),
        CONFIG_FILE: json.dumps(_config_object(head.config, base), indent=2),
    }
    is_new = not folder.is_dir()
    incoming = folder if is_new else folder / ".incoming"
    with atomic_directory(incoming, replace=not is_new) as staged:
        save_file(tensors, staged / TENSORS_FILE, metadata={"format": "pt"})
        for name, text in texts.items():
            (staged / name).write_text(text + "\n", encoding="utf-8")
    if not is_new:
        _move_files(incoming, folder)


def load_head(
    folder: str | PathLike[str], base: TargetModel, *, dtype: torch.dtype | None = None, ignore_profile: bool = False
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
    """
    saved = read_head(folder, ignore_profile=ignore_profile)
    check_base(saved, base)
    tensors = load_file(saved.folder / TENSORS_FILE, device=str(base.device))
    _check_draft_vocab(saved, tensors)
    head = _filled(saved.config, tensors, base, dtype or base.dtype)
    if unsaved := [name for name, buffer in head.named_buffers() if buffer.is_meta]:
        raise AssertionError(f"{saved.method} heads compute {unsaved} when built: save or derive them instead")
    head.default_shape = saved.profile.tree(DEFAULT_NODES)
    return head


def copy_for(head: DraftHead, base: TargetModel) -> DraftHead:
    """A copy of a head in the base model's type and bound to its weights, ready to draft."""
    return _filled(head.config, head.state_dict(), base, base.dtype)


def _filled(config: HeadConfig, tensors: Mapping[str, Tensor], base: TargetModel, dtype: torch.dtype) -> DraftHead:
    """A head with these values in a type, bound to a model's weights and frozen."""
    head = _skeleton(config)
    values = {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
    head.load_state_dict(values, strict=True, assign=True)
    head.bind(base.weights)
    return head.eval().requires_grad_(requires_grad=False)


def read_head(folder: str | PathLike[str], *, ignore_profile: bool = False) -> SavedHead:
    """Reads and checks everything but the values of the tensors; needs no base model.

    Args:
        folder: written by :func:`save_head`.
        ignore_profile: do not read ``acceptance.json``, and use an assumed profile: for commands that write a new one.

    Raises:
        ModelNotFound: no such folder.
        CheckpointCorrupt: a file, key or tensor is missing, surplus, or not what it should be.
        CheckpointMismatch: made by a newer version of this package.
        UnknownMethod: no such architecture here.
        InvalidTree: its profile's paths are not a tree, or are deeper than its heads.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelNotFound(f"no head at {folder}: no such folder")
    path = folder / CONFIG_FILE
    raw = checked({"chat_template": None, **read_object(_present(path), newest=FORMAT_VERSION)}, _CONFIG_KEYS, path)
    base = checked(raw["base"], _BASE_KEYS, path, "base")
    config = _read_config(raw["method"], raw["head"], path)
    profile = AcceptanceProfile.assumed(config.num_heads)
    if not ignore_profile:
        profile = read_profile(_present(folder / PROFILE_FILE))
    check_profile(config, profile, folder / PROFILE_FILE)
    return SavedHead(
        folder=folder,
        method=raw["method"],
        config=config,
        model_id=base["model_id"],
        fingerprints=read_dataclass(Fingerprints, base["fingerprints"], path, "base.fingerprints"),
        provenance=raw["provenance"],
        profile=profile,
        shapes=_read_shapes(folder / TENSORS_FILE, _skeleton(config)),
        chat_template=raw["chat_template"],
    )


def check_profile(config: HeadConfig, profile: AcceptanceProfile, path: Path) -> None:
    """Checks that the profile at ``path`` fits a head of this configuration.

    Raises:
        InvalidTree: its trees are too deep or too wide for the head.
        CheckpointCorrupt: its number of heads is not the head's.
    """
    try:
        _skeleton(config).check_shape(profile.tree(len(profile.paths) + 1))
    except InvalidTree as error:
        raise InvalidTree(f"{path}: {error}") from None
    if len(profile.confidence) != config.num_heads:
        raise CheckpointCorrupt(
            f"{path}: confidence has {len(profile.confidence)} numbers but the head has {config.num_heads} heads"
        )


def check_base(saved: SavedHead, base: TargetModel) -> None:
    """Checks that this is the model that the head was trained for.

    Raises:
        CheckpointMismatch: other sizes, another tokenizer, or other weights.
    """
    _check_same(saved, base, "hidden_size", saved.config.hidden_size, base.hidden_size)
    _check_same(saved, base, "vocab_size", saved.config.vocab_size, base.vocab_size)
    ours, theirs = saved.fingerprints, Fingerprints.of(base)
    _check_same(saved, base, "tokenizer fingerprint", ours.tokenizer, theirs.tokenizer)
    for name in ("embedding", "lm_head"):
        try:
            apart = difference(getattr(ours, name), getattr(theirs, name))
        except ValueError as error:
            raise CheckpointCorrupt(f"{saved.folder / CONFIG_FILE}: {name}: {error}") from None
        if not apart <= MAX_DIFFERENCE:
            raise CheckpointMismatch(
                f"{saved.folder}: trained for {saved.model_id}; the {name} of this model, {base.model_id}, differs "
                f"by {apart:.0%}; a quantised copy differs by at most {MAX_DIFFERENCE:.0%}: {_fix(saved, base)}"
            )


def _check_same(saved: SavedHead, base: TargetModel, what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise CheckpointMismatch(
            f"{saved.folder}: trained for {saved.model_id} with {what} {ours}, "
            f"this model, {base.model_id}, has {theirs}: {_fix(saved, base)}"
        )


def _fix(saved: SavedHead, base: TargetModel) -> str:
    train = f"draftheads train --method {saved.method} --model {base.model_id}"
    return f"load the head with its own base model, or train a new head with `{train}`"


def _config_object(config: HeadConfig, base: TargetModel) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "method": config.method,
        "head": asdict(config),
        "base": {"model_id": base.model_id, "fingerprints": asdict(Fingerprints.of(base))},
        "provenance": provenance(),
        **({} if base.chat_template is None else {"chat_template": base.chat_template}),
    }


def _move_files(source: Path, folder: Path) -> None:
    """Renames need no space, so a full disk cannot interrupt them."""
    try:
        for name in HEAD_FILES:
            (source / name).replace(folder / name)
        source.rmdir()
    except OSError as error:
        raise StorageError(f"cannot save {folder}: {error.strerror}; the new head is at {source}") from error


def _present(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointCorrupt(f"{path} is missing; a head's folder has {', '.join(sorted(HEAD_FILES))}")
    return path


def _read_config(method: str, options: Any, path: Path) -> HeadConfig:
    try:
        config_class, _ = head_classes(method)
    except UnknownMethod as error:
        raise UnknownMethod(f"{path}: {error}, or upgrade this package") from None
    try:
        return read_dataclass(config_class, options, path, "head")
    except InvalidSettings as error:
        raise CheckpointCorrupt(f"{path}: head: {error}") from None


def _skeleton(config: HeadConfig) -> DraftHead:
    """The module on the meta device: it takes no memory and draws no random numbers."""
    _, head_class = head_classes(config.method)
    with torch.device("meta"):
        return head_class(config)


def _read_shapes(path: Path, skeleton: DraftHead) -> dict[str, tuple[int, ...]]:
    """Shapes of the saved tensors, from the file's header. Names, shapes and types must be those of the skeleton."""
    try:
        with safe_open(_present(path), framework="pt") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(entry.get_shape()) for name, entry in entries.items()}
            kinds = {name: str(entry.get_dtype()) for name, entry in entries.items()}
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{path} is not a complete safetensors file: {error}") from None
    expected = skeleton.state_dict()
    _check_names(path, set(shapes), set(expected))
    for name, tensor in expected.items():
        if shapes[name] != tuple(tensor.shape):
            raise CheckpointCorrupt(
                f"{path}: tensor {name} is {shapes[name]}; {CONFIG_FILE} makes it {tuple(tensor.shape)}"
            )
        if kinds[name].startswith(("F", "BF")) != tensor.is_floating_point():
            raise CheckpointCorrupt(f"{path}: tensor {name} holds {kinds[name]}; it must be {tensor.dtype}")
    return shapes


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    for kind, names in (("missing", expected - found), ("surplus", found - expected)):
        if names:
            counts = f"it has {len(found)} tensors, {CONFIG_FILE} needs {len(expected)}"
            raise CheckpointCorrupt(f"{path}: {kind} tensor {min(names)}: {counts}")


def _check_draft_vocab(saved: SavedHead, tensors: Mapping[str, Tensor]) -> None:
    if saved.config.draft_vocab_size is None:
        return
    ids = tensors["draft_vocab"]
    low, high, size = int(ids.min()), int(ids.max()), saved.config.vocab_size
    if low < 0 or high >= size:
        path = saved.folder / TENSORS_FILE
        raise CheckpointCorrupt(f"{path}: draft_vocab has ids {low} … {high}; they must lie in 0 … {size - 1}")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
