"""Refuses wrong names and missing files before anything slow is imported: torch takes seconds, weights take longer."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from draftheads.checkpoints.registry import check_head
from draftheads.errors import DataError
from draftheads.models.chat_template import read_template
from draftheads.models.embedded import SMOLLM2_135M
from draftheads.models.model_names import check_model
from draftheads.utils.files import user_path

# options by their names, which mean the same in every command
_MODELS = ("model", "draft_model", "original_model")
_HEADS = ("head", "heads", "start_from")
_INPUTS = ("prompts", "data", "text", "documents", "corpus", "json_schema", "judge_prompts", "costs")


def check_names(given: Iterable[tuple[str, Any]]) -> None:
    """Checks what the options of a command name, as far as that needs no torch and no network.

    Args:
        given: names and values of options; others are ignored, and so is None.

    Raises:
        ModelNotFound, CheckpointError, UnknownMethod: a model or head is not here, is something else, or is damaged; or
            a head was trained for a model of another size.
        DataError: a file is missing.
        InvalidSettings: impossible names, or no such chat template.
    """
    pairs = [(name, each) for name, value in given for each in (value if isinstance(value, tuple) else (value,))]
    model = SMOLLM2_135M.name
    for name, value in pairs:
        if name in _MODELS and value is not None:
            check_model(value)
            model = value if name == "model" else model
        elif name == "chat_template":
            read_template(value)
        elif name in _INPUTS and isinstance(value, Path) and not user_path(value).exists():
            raise DataError("cannot be read: there is no such file or folder", path=value)
    for name, value in [] if ("resume", True) in pairs else pairs:  # its head may be gone
        if name in _HEADS and value is not None:
            check_head(str(value), model)


def flat(options: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields, of groups, too."""
    for field in fields(options):
        value = getattr(options, field.name)
        yield from flat(value) if is_dataclass(value) else [(field.name, value)]
