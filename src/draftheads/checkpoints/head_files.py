"""The files of a saved head, read strictly. Imports nothing slow: `draftheads info` needs no architecture and no torch.

A head is a folder of four files:

=====================  ======================================================================================
``config.json``        format_version, method, head (every option), base (model_id, fingerprints), provenance
``model.safetensors``  the head's own tensors, bf16 by default; never the base model's
``acceptance.json``    the acceptance profile, see :mod:`draftheads.speculation.acceptance_profile`
``README.md``          the model card
=====================  ======================================================================================

These keys are public names. Unknown keys are errors, so a new key needs a new format version. Some keys of
``config.json`` are optional: ``chat_template``, the template used in training if it was not the tokenizer's own; and
``rope_frequencies`` and ``rope_scale`` of ``head``, which only heads for targets with scaled rotary positions have.
"""

import hashlib
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, ModelNotFound, UnknownMethod, first_line
from draftheads.heads import check_method
from draftheads.models.model_names import kind_of_folder
from draftheads.speculation.acceptance_profile import PROFILE_FILE, AcceptanceProfile, read_profile
from draftheads.utils.files import current, read_set
from draftheads.utils.strict_json import checked, read_object

FORMAT_VERSION = 1
CONFIG_FILE, TENSORS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
HEAD_FOLDER = "head"  # of a joint run and of a merged model
HEAD_FILES = (TENSORS_FILE, PROFILE_FILE, CARD_FILE, CONFIG_FILE)

_CONFIG_KEYS: dict[str, Any] = {"format_version": int, "method": str, "head": dict, "base": dict, "provenance": dict}
_CONFIG_KEYS |= {"chat_template": str | None}
_BASE_KEYS = {"model_id": str, "fingerprints": dict}


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """What a head's folder holds, without the values of its tensors."""

    folder: Path
    method: str
    options: dict[str, Any]  # of its architecture
    model_id: str  # of the base model
    base_prints: dict[str, Any]  # fingerprints of the base model
    provenance: dict[str, Any]  # how it was made
    profile: AcceptanceProfile  # tokens per step by tree
    shapes: dict[str, tuple[int, ...]]  # of its tensors
    types: dict[str, str]  # of its tensors, as in safetensors: BF16, I64 …
    chat_template: str | None = None  # used in training; None: the tokenizer's own

    @property
    def tensors_file(self) -> Path:
        return current(self.folder, TENSORS_FILE)

    @property
    def digest(self) -> str:
        """Of the tensors' file: 16 hexadecimal digits."""
        with self.tensors_file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    @property
    def num_parameters(self) -> int:
        """How many numbers were trained; the map of a trimmed vocabulary does not count."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name != "draft_vocab")

    @property
    def num_bytes(self) -> int:
        return self.tensors_file.stat().st_size

    def check(self, what: str, trained: object, given: object, model: str, *, name: str = "", fix: str = "") -> None:
        """Raises :class:`CheckpointMismatch` if something of the model differs from what the head was trained with."""
        if trained != given:
            differs = f"with {what} {trained}, this model, {model}, has {given}: {fix or self.fix_for(model)}"
            raise CheckpointMismatch(f"{name or self.folder}: trained for {self.model_id} {differs}")

    def fix_for(self, model: str) -> str:
        """What to do where the head is not for this model."""
        train = f"`draftheads train --method {self.method} --model {model}`"
        return f"load the head with its own base model, or train a new head with {train}"

    @property
    def card(self) -> str:
        """The text of the model card; empty if there is none."""
        path = current(self.folder, CARD_FILE)
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_head_files(folder: str | PathLike[str], *, ignore_profile: bool = False) -> HeadFiles:
    """Reads a head's folder, written by :func:`draftheads.save_head`; ``read_head`` also checks its architecture.

    With ``ignore_profile``, ``acceptance.json`` is not read, and the profile is an assumed one, for one head.
    """
    folder = Path(folder)
    return read_set(folder, HEAD_FILES, lambda: _read(folder, ignore_profile=ignore_profile))


def _read(folder: Path, *, ignore_profile: bool) -> HeadFiles:
    _check_is_head(folder)
    path = current(folder, CONFIG_FILE)
    raw = checked({"chat_template": None, **read_object(_present(path), newest=FORMAT_VERSION)}, _CONFIG_KEYS, path)
    base = checked(raw["base"], _BASE_KEYS, path, "base")
    try:
        check_method(raw["method"])
    except UnknownMethod as error:
        raise UnknownMethod(f"{path}: {error}, or upgrade this package") from None
    profile = AcceptanceProfile.assumed(1) if ignore_profile else read_profile(_present(current(folder, PROFILE_FILE)))
    shapes, types = read_header(_present(current(folder, TENSORS_FILE)))
    same = {name: raw[name] for name in ("method", "provenance", "chat_template")}
    of_base = {"model_id": base["model_id"], "base_prints": base["fingerprints"]}
    return HeadFiles(**same, **of_base, folder=folder, options=raw["head"], profile=profile, shapes=shapes, types=types)


def _check_is_head(folder: Path) -> None:
    """Names what the folder holds if it is no head, and the head in it if there is one."""
    if not folder.is_dir():
        raise ModelNotFound(
            f"no head at {folder}: no such folder; the bundled heads are loaded by name: load(MODEL, head=NAME)"
        )
    kind, inner = kind_of_folder(folder), folder / HEAD_FOLDER
    if kind == "draft head" or (kind is None and current(folder, CONFIG_FILE).exists()):
        return
    if kind_of_folder(inner) == "draft head":
        raise ModelNotFound(f"{folder} is not a draft head, but has one in {inner}: give that folder")
    if kind is not None:
        article = "an" if kind == "adapter" else "a"
        fix = "give the folder of a trained head (`draftheads import` reads heads of other projects)"
        raise ModelNotFound(f"{folder} is {article} {kind}, not a draft head: {fix}")


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and types of the tensors in a safetensors file by name, from its header."""
    try:
        with safe_open(path, framework="numpy") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(entry.get_shape()) for name, entry in entries.items()}
            return shapes, {name: str(entry.get_dtype()) for name, entry in entries.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(f"{path} is not a complete safetensors file: {first_line(error)}") from None


def _present(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointCorrupt(f"{path} is missing; a head's folder has {', '.join(sorted(HEAD_FILES))}")
    return path
