"""Whether an adapter belongs to a model: by the record of a joint run, else by the name of its base model."""

import json
from pathlib import Path
from typing import Any

from draftheads.errors import CheckpointCorrupt, CheckpointMismatch
from draftheads.models.fingerprint import MAX_DIFFERENCE, Fingerprints, difference
from draftheads.models.model_names import ADAPTER_CONFIG, BASE_FILE, base_of, model_id_of

FORMAT_VERSION = 1  # of ``base.json``


def check_base(folder: Path, model_id: str, fingerprints: Fingerprints) -> None:
    """Checks an adapter of any origin.

    Raises:
        CheckpointMismatch: it names another model, or is for other weights or another tokenizer.
        CheckpointCorrupt: it names no model, or its record is damaged.
    """
    if (folder / BASE_FILE).exists():
        check_adapter_base(folder, model_id, fingerprints)
        return
    name = base_of(str(folder))
    if model_id_of(name) != model_id:
        raise CheckpointMismatch(
            f"{folder} is an adapter for {name}, and this model is {model_id}; if these are the same model, "
            f"correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        )


def check_adapter_base(folder: Path, model_id: str, ours: Fingerprints) -> None:
    """Checks by its record that this is the model that the adapter of a joint run was tuned for.

    Raises:
        CheckpointMismatch: another tokenizer, or other weights.
        CheckpointCorrupt: the folder has no valid record of its base.
    """
    tuned, theirs = _read_base(folder / BASE_FILE)
    if theirs.tokenizer != ours.tokenizer:
        what = f"tokenizer is {ours.tokenizer}, not {theirs.tokenizer}"
    elif apart := [name for name in ("embedding", "lm_head") if _differ(getattr(theirs, name), getattr(ours, name))]:
        what = f"{' and '.join(apart)} are those of another model"
    else:
        return
    raise CheckpointMismatch(
        f"{folder} was tuned for {tuned}; this model is {model_id}, whose {what}: use it with {tuned}"
    )


def _differ(one: str, other: str) -> bool:
    return not difference(one, other) <= MAX_DIFFERENCE


def _read_base(path: Path) -> tuple[str, Fingerprints]:
    """Model id and fingerprints of ``base.json``."""
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
