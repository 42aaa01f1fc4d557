"""Refuses wrong names and missing files before anything slow is imported: torch takes seconds, weights take longer."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from draftheads.checkpoints.registry import check_head
from draftheads.errors import DataError
from draftheads.models.chat_template import read_template
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.models.model_names import check_model
from draftheads.utils.files import user_path

# options by their names, which mean the same in every command
_MODELS = ("model", "draft_model")
_HEADS = ("head", "heads", "start_from")
_INPUTS = ("prompts", "data", "text", "documents", "json_schema", "costs", "corpus")


def check_names(given: Iterable[tuple[str, Any]]) -> None:
    """Checks names and files among options (names and values), as far as that needs no torch and no network."""
    pairs = [(name, each) for name, value in given for each in (value if isinstance(value, tuple) else (value,))]
    for name, value in pairs:
        is_file = isinstance(value, Path) or (name == "corpus" and value is not None)
        if name in _INPUTS and is_file and not user_path(value).exists():
            raise DataError("cannot be read: there is no such file or folder", path=value)
    is_remote = dict(pairs).get("endpoint") is not None  # then no model is loaded here
    for name, value in pairs:
        if name in _MODELS and value is not None and not is_remote:
            check_model(value)
        elif name == "chat_template":
            read_template(value)
    model = dict(pairs).get("model") or SMOLLM2_135M
    for name, value in [] if ("resume", True) in pairs else pairs:  # its head may be gone
        if name in _HEADS and value is not None:
            check_head(str(value), model)


def flat(options: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields, of groups, too."""
    for name, value in vars(options).items():
        yield from flat(value) if is_dataclass(value) else [(name, value)]
