"""Whether a model may be a tuned copy of a base in the zoo: it has the base's sizes and tokenizer. Names tell nothing.

Reads configurations and tokenizers, no weights: loading a head compares those (``checkpoint.py``).
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftheads.checkpoints.head_files import read_head_files
from draftheads.errors import DraftHeadsError, UnsupportedModel
from draftheads.utils.files import user_path
from draftheads.utils.identity import changes

Facts = Mapping[str, Any]  # hidden_size, vocab_size, tokenizer fingerprint


def differences(model: str, bases: Mapping[str, Path]) -> dict[str, list[str]]:
    """What the model does not have in common with each base, with both values; nothing with a base that it may copy.

    Args:
        model: a folder, or an id on the Hugging Face Hub.
        bases: by a base's name the folder of a head for it.

    Returns:
        By the name of the base; empty if the model's configuration cannot be read here.

    Raises:
        ModelNotFound: no such model.
        CheckpointError: a head cannot be read.

    """
    folder = user_path(model)
    stamp = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.json")))
    own = _facts_of(model, stamp)
    return {} if own is None else {name: changes(_facts_of_base(head), own, names=own) for name, head in bases.items()}


def _facts_of_base(head: Path) -> Facts:
    files = read_head_files(head, ignore_profile=True)
    sizes = {name: files.options.get(name) for name in ("hidden_size", "vocab_size")}
    return {**sizes, "tokenizer fingerprint": files.base_prints.get("tokenizer")}


@lru_cache(maxsize=8)
def _facts_of(model: str, stamp: tuple[tuple[str, int], ...]) -> Facts | None:
    """The model's facts; without the fingerprint if it has no tokenizer, which is then given to ``load``."""
    from draftheads.models.fingerprint import tokenizer_fingerprint  # noqa: PLC0415 - slow to import
    from draftheads.models.pretrained import load_config, load_tokenizer  # noqa: PLC0415

    try:
        config = load_config(model).get_text_config()
    except UnsupportedModel:  # it has code of its own
        return None
    sizes = {name: getattr(config, name, None) for name in ("hidden_size", "vocab_size")}
    try:
        return {**sizes, "tokenizer fingerprint": tokenizer_fingerprint(load_tokenizer(model).tokenizer)}
    except DraftHeadsError:
        return sizes
