"""Merges a model and its adapter into one ordinary model folder, with the head that was tuned with it.

If embedding and lm_head are one matrix and the lm_head was adapted, the merged model has two matrices: the adapter
changed the lm_head, but not the embedding.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from draftheads.checkpoint import load_head, read_head, save_head
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, InvalidSettings, ModelNotFound
from draftheads.files import atomic_directory, user_path
from draftheads.models.fingerprint import MAX_DIFFERENCE, Fingerprints, difference
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import stored_dtype
from draftheads.train.joint.lora import Adapter
from draftheads.train.joint.run import ADAPTER_FOLDER, BASE_FILE, FORMAT_VERSION, HEAD_FOLDER


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Merge a model and its tuned adapter into one model folder; OUT/head is its head."""

    model: str
    """The model that was tuned: a name, a folder or a Hugging Face id."""
    adapter: Path
    """Folder of a `draftheads train-joint` run."""
    out: Path
    """Folder to make."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the saved weights; the type of the model's files when left out."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise InvalidSettings(f"--dtype is {self.dtype!r}: choose {', '.join(_DTYPES)}")


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def merge(options: MergeOptions) -> None:
    """Merges in fp32 on the CPU, and writes the folder whole or not at all.

    Raises:
        ModelNotFound: no such model, or no adapter.
        CheckpointMismatch: the adapter was tuned for another model.
        CheckpointCorrupt: files of the run are damaged.
        StorageError: the folder exists, or cannot be written.
        InvalidSettings: a path in an unknown home folder.
    """
    out = user_path(options.out)
    dtype = _DTYPES[options.dtype] if options.dtype else stored_dtype(options.model)
    base = TargetModel.load(options.model, dtype=torch.float32, device="cpu")
    merged = merged_model(base, options.adapter, dtype=dtype, model_id=str(out.resolve()))
    with atomic_directory(out) as staged:
        merged.model.save_pretrained(staged)
        merged.tokenizer.save_pretrained(staged)
        saved = read_head(options.adapter / HEAD_FOLDER)
        head = load_head(saved.folder, merged, dtype=torch.float32)
        base = replace(merged, chat_template=saved.chat_template)
        save_head(head, staged / HEAD_FOLDER, base=base, card=saved.card, profile=saved.profile)


def merged_model(base: TargetModel, run: Path, *, dtype: torch.dtype, model_id: str) -> TargetModel:
    """The tuned model of a run as an ordinary one; it takes over the modules of the base."""
    folder = run / ADAPTER_FOLDER
    check_adapter_base(folder, base)
    model = Adapter.load(base.model, folder).merge()
    return TargetModel(model.to(dtype).eval().requires_grad_(requires_grad=False), base.tokenizer, model_id)


def check_adapter_base(folder: Path, base: TargetModel) -> None:
    """Checks that this is the model that the adapter was tuned for.

    Raises:
        ModelNotFound: no adapter there.
        CheckpointMismatch: another tokenizer, or other weights.
        CheckpointCorrupt: the folder has no valid record of its base.
    """
    model_id, theirs = _read_base(folder / BASE_FILE)
    ours = Fingerprints.of(base)
    if theirs.tokenizer != ours.tokenizer:
        what = f"tokenizer is {ours.tokenizer}, not {theirs.tokenizer}"
    elif apart := [name for name in ("embedding", "lm_head") if _differ(getattr(theirs, name), getattr(ours, name))]:
        what = f"{' and '.join(apart)} are those of another model"
    else:
        return
    raise CheckpointMismatch(
        f"{folder} was tuned for {model_id}; this model is {base.model_id}, whose {what}: "
        f"merge it with --model {model_id}"
    )


def _differ(one: str, other: str) -> bool:
    return not difference(one, other) <= MAX_DIFFERENCE


def _read_base(path: Path) -> tuple[str, Fingerprints]:
    """Model id and fingerprints of ``base.json``."""
    if not path.parent.is_dir():
        raise ModelNotFound(f"no adapter at {path.parent}: give the folder of a `draftheads train-joint` run")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if raw["format_version"] != FORMAT_VERSION:
            raise CheckpointMismatch(
                f"{path}: format_version is {raw['format_version']} and this package reads {FORMAT_VERSION}: "
                "upgrade it with `pip install --upgrade draftheads`"
            )
        return str(raw["base"]["model_id"]), Fingerprints(**raw["base"]["fingerprints"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} has no valid record of the model that the adapter is for: {error}") from None
