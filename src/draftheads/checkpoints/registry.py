"""Finds a head by its name: bundled, in the data package ``draftheads-zoo``, a folder, or on the Hugging Face Hub.

Knows names and places; ``checkpoint.py`` knows what is in a head's folder and which model it belongs to. The acceptance
profile of a head is in its folder, or in the user's cache: ``draftheads tune`` writes into the folder of a head that
belongs to the user. For a bundled head or one in the Hub's cache it writes into the user's cache, under the head's
digest. Loading looks there first.
"""

import contextlib
import re
from collections.abc import Container, Iterable
from importlib import resources
from importlib.util import find_spec
from os import PathLike
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftheads.checkpoints.head_files import CONFIG_FILE, HEAD_FILES, HeadFiles, read_head_files, read_header
from draftheads.errors import InvalidSettings, ModelNotFound, first_line
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.models.model_names import (
    base_of,
    check_model_can_exist,
    check_path,
    config_of,
    find_adapter,
    hint_at,
    json_in,
    kind_of_folder,
    model_id_of,
    model_name,
)
from draftheads.speculation.acceptance_profile import (
    DEFAULT_NODES,
    KINDS,
    PROFILE_FILE,
    AcceptanceProfile,
    read_profile,
)
from draftheads.speculation.shapes import AUTO_HEAD, UNTRAINED_HEADS
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import current, user_path

if TYPE_CHECKING:
    from draftheads.checkpoints.checkpoint import SavedHead

DATA_PACKAGE = "draftheads-zoo"
DATA_PACKAGE_INSTALL = "pip install ./zoo (in a checkout of draftheads)"
# heads for smollm2-135m that the wheel of draftheads leaves out: zoo/pyproject.toml lists the same
DATA_PACKAGE_HEADS = (
    *("amphista", "dspark", "eagle", "eagle3"),
    *("hydra++", "markov-medusa", "mlp-speculator", "small-llama"),
)

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<subfolder>\w[\w.+-]*(?:/\w[\w.+-]*)*))?")
_HUB_TIMEOUT_SECONDS = 10.0
_OF_OTHERS = ("*.json", "*.safetensors", "*.bin", "*.pt")  # files of heads of other projects
_MOST_OF_HUB = 5  # heads of each tag
_MOST_LAYERS = 8  # of a draft head; a repository with more is a whole model


class ZooHead(NamedTuple):
    """A trained head that is installed with a package."""

    base_name: str  # of its base model, as in ``draftheads.load("smollm2-135m")``
    method: str  # the name it is loaded by
    folder: Path


def weights_folder() -> Path:
    """The folder of the heads in this package, BASE/METHOD each."""
    return Path(str(resources.files("draftheads"))) / "zoo" / "weights"


def data_package_folder() -> Path | None:
    """The folder of the heads in the package ``draftheads-zoo``; None where it is not installed."""
    spec = find_spec(DATA_PACKAGE.replace("-", "_"))
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "weights"


def zoo_heads() -> list[ZooHead]:
    """All installed heads, sorted by base and method; one in this package comes before the data package's."""
    heads: dict[tuple[str, str], ZooHead] = {}
    for root in (weights_folder(), data_package_folder()):
        for path in root.glob(f"*/*/{CONFIG_FILE}") if root is not None else ():
            head = ZooHead(path.parent.parent.name, path.parent.name, path.parent)
            heads.setdefault(head[:2], head)
    return [heads[key] for key in sorted(heads)]


class FoundHead(NamedTuple):
    """A head that is made for a model."""

    name: str  # as ``--head`` takes it
    method: str  # or the format of another project
    place: str  # where it was found, in words

    def __str__(self) -> str:
        return f"{self.name} ({'' if self.name == self.method else f'{self.method}, '}{self.place})"


def heads_here(model: str, *, base: str | None = None) -> list[FoundHead]:
    """Heads for a model in its folder, installed ones and those in the caches of this machine, in this order.

    Of the installed ones those of the wheel come first, which were the fastest here, then those that make most tokens
    per step. With ``base``, heads of this other model: the one that ``model`` was tuned from.
    """
    own, folder = base_of(model) if base is None else base, user_path(model)
    inner = sorted(path for path in folder.iterdir() if path.is_dir()) if base is None and folder.is_dir() else []
    found = [FoundHead(str(place), method, "in the model's folder") for place in inner if (method := _method_in(place))]
    gains = {head: gain_of(read_profile(head.folder / PROFILE_FILE)) for head in zoo_heads() if head.base_name == own}
    for head in sorted(gains, key=lambda head: (head.method in DATA_PACKAGE_HEADS, -gains[head], head.method)):
        name = head.method if base is None else f"{own}/{head.method}"
        found.append(FoundHead(name, head.method, f"installed, {gains[head]:.2f} tokens/step"))
    ids = {own, model_id_of(own)}
    for place in _cached_heads():
        method = _method_in(place, ids)
        if method and method not in {head.method for head in found}:  # an older copy, or of one that was found
            found.append(FoundHead(str(place), method, "in the cache"))
    return found


def _method_in(folder: Path, model_ids: Container[str] | None = None) -> str | None:
    """The method of the head in a folder, of some of these models or of any; None if there is no such head."""
    if kind_of_folder(folder) != "draft head":
        return None
    config = json_in(current(folder, CONFIG_FILE))
    base = config["base"].get("model_id") if isinstance(config["base"], dict) else None
    return str(config["method"]) if model_ids is None or base in model_ids else None


def _cached_heads() -> list[Path]:
    """Folders that may have heads, the newest first: converted ones, and downloads from the Hub."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - slow to import

    found: list[Path] = []
    with contextlib.suppress(InvalidSettings, OSError):  # the user has no cache
        found += (cache_folder() / "heads").glob("*/")
        found += Path(HF_HUB_CACHE).glob("models--*/snapshots/*/")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def gain_of(profile: AcceptanceProfile) -> float:
    """Tokens per step on small trees."""
    return max(tokens[min(DEFAULT_NODES, len(tokens)) - 1] for kind in KINDS if (tokens := profile.tokens(kind)))


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a model's safetensors files by name; of a model on the Hub they are not downloaded."""
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - slow to import

    folder = user_path(model)
    if is_hub_model(model):
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except Exception:  # noqa: BLE001 - of any class, where it was not downloaded before
            with contextlib.suppress(Exception):  # without the Hub the model is not loaded, either
                files = HfApi().get_safetensors_metadata(model).files_metadata.values()
                return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}
            return {}
    return {name: shape for file in folder.glob("*.safetensors") for name, shape in read_header(file)[0].items()}


def heads_on_hub(model: str, tags: Iterable[str]) -> tuple[list[FoundHead], str | None]:
    """Heads on the Hub with one of these tags whose cards name the model as their base; or why nothing was looked for.

    They are in the order of the tags, and the most downloaded come first.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import

    if not is_hub_model(model):
        return [], f"the Hugging Face Hub was not asked: {model} is not an id of a model there"
    found: dict[str, FoundHead] = {}
    try:
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_SECONDS)  # list_models would retry for long without a network
        for tag in tags:
            for info in HfApi().list_models(filter=[f"base_model:{model}", tag], sort="downloads", limit=_MOST_OF_HUB):
                found.setdefault(info.id, FoundHead(info.id, tag, "on the Hugging Face Hub"))
    except Exception as error:  # noqa: BLE001 - the errors of its network client are not documented
        return [], f"the Hugging Face Hub was not asked, as it cannot be reached ({first_line(error)})"
    return list(found.values()), None


def is_hub_model(name: str) -> bool:
    """Whether a model's name can only be an id on the Hub, with its owner."""
    return not user_path(name).exists() and (match := _HUB_ID.fullmatch(name)) is not None and not match["subfolder"]


def is_model(name: str) -> bool:
    """Whether this is the name of a model, not of a head. Of an id on the Hub the configuration is downloaded."""
    folder = user_path(name)
    if base_of(name) in {SMOLLM2_135M, *(head.base_name for head in zoo_heads())}:
        return True
    if is_hub_model(name):
        with contextlib.suppress(ModelNotFound):
            folder = _download(name, None, name, [CONFIG_FILE])
        return bool(config_of(str(folder)).get("num_hidden_layers", 1) > _MOST_LAYERS)
    return folder.is_dir() and (find_adapter(folder) is not None or kind_of_folder(folder) == "model")


def head_name(name: object) -> str:
    """The name of a head as a text."""
    return model_name(name, "head", fix="give a bundled head's name, a folder or a Hugging Face id")


def find_head(name: str | PathLike[str], base_name: str) -> Path:
    """The folder of a head. A head on the Hub is downloaded.

    Args:
        name: a method that is installed for the base (``medusa``; write ``./medusa`` for a folder of that name), a
            folder, a method that is installed for another base (``smollm2-135m/medusa``, for a tuned copy of it), or a
            Hub repository (``owner/name``, or ``owner/name/subfolder``). They are tried in this order.
        base_name: the model that the head drafts for, such as ``smollm2-135m`` or its Hub id. An adapter in a folder
            counts as its base model.
    """
    name, base_name = head_name(name), base_of(base_name)
    base, slash, method = name.rpartition("/")
    folder = user_path(name)
    if slash and folder.is_dir():  # smollm2-135m/medusa may be one's own
        return folder
    if base or not slash:
        for head in zoo_heads():
            if (head.base_name, head.method) == (base or base_name, method):
                return head.folder
    if folder.is_dir():
        return folder
    if folder.exists():
        fix = "`draftheads import` reads heads of other projects"
        raise ModelNotFound(f"{name} is a file, not the folder of a draft head; {fix}")
    if (model := base_of(name)) in {SMOLLM2_135M, *(head.base_name for head in zoo_heads())}:
        raise ModelNotFound(f"{name} is a model, not a draft head; {_installed_for(model)}")
    if (base or base_name) == SMOLLM2_135M and method in DATA_PACKAGE_HEADS:
        where = f"is in the package {DATA_PACKAGE}; install it with: {DATA_PACKAGE_INSTALL}"
        raise ModelNotFound(f"the head {method!r} for {SMOLLM2_135M} {where}")
    if match := _HUB_ID.fullmatch(name):
        return _download(match["repo"], match["subfolder"], base_name)
    check_path(name, longest_id=len(name))
    check_model_can_exist(base_name)
    methods = [head.method for head in zoo_heads() if head.base_name == base_name]
    where = "neither a folder here nor an id on the Hugging Face Hub (owner/name)"
    raise ModelNotFound(f"no head {name!r}{hint_at(name, methods)}: {where}; {_installed_for(base_name)}")


def check_head(name: str, base_name: str) -> None:
    """Refuses by names and configurations alone what is no head, is damaged, or does not fit its model.

    The Hub is not asked, and heads of other projects are not looked at.
    """
    path = user_path(head_name(name))
    if name in (AUTO_HEAD, *UNTRAINED_HEADS) or path.is_file() or (not path.exists() and _HUB_ID.fullmatch(name)):
        return
    folder = find_head(name, base_name)
    if kind_of_folder(folder) not in ("draft head", "adapter"):
        return
    files = read_head_files(folder, ignore_profile=True)
    trained, given = files.options.get("hidden_size"), config_of(base_name).get("hidden_size")
    files.check("hidden_size", trained, trained if given is None else given, base_name)


def find_published(name: str | PathLike[str], base_name: str) -> Path:
    """The file or folder of a head of another project; one on the Hub is downloaded."""
    name = head_name(name)
    if exists(path := user_path(name)):  # noqa: PTH110 - the method is an error for names that are too long
        return path
    match = _HUB_ID.fullmatch(name)
    if match is None:
        check_path(name, longest_id=len(name))
        raise ModelNotFound(
            f"no head {name!r}: neither a file or folder here nor an id on the Hugging Face Hub (owner/name)"
        )
    folder = _download(match["repo"], match["subfolder"], base_name)
    config = json_in(folder / CONFIG_FILE)
    words = [*config, str(config.get("model_type"))]
    has_heads = any(part in word for word in words for part in ("medusa", "nextn", "mtp", "qwen3_next"))
    if config.get("num_hidden_layers", 1) > _MOST_LAYERS and not has_heads:
        raise ModelNotFound(f"{name} is a model (num_hidden_layers: {config['num_hidden_layers']}), not a draft head")
    return _download(match["repo"], match["subfolder"], base_name, _OF_OTHERS)


def _download(repo: str, subfolder: str | None, base_name: str, names: Iterable[str] = HEAD_FILES) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - most heads need no network

    files = [f"{subfolder}/{name}" if subfolder else name for name in names]
    try:
        folder = Path(snapshot_download(repo, allow_patterns=files, etag_timeout=_HUB_TIMEOUT_SECONDS))
    except Exception as error:  # the errors of its network client are not documented
        raise ModelNotFound(
            f"no head {repo!r}: there is no such folder here, and the download from the Hugging Face Hub failed "
            f"({first_line(error)}); {_installed_for(base_name)}"
        ) from error
    if subfolder and not (folder / subfolder).is_dir():
        raise ModelNotFound(f"the repository {repo} on the Hugging Face Hub has no head in a folder {subfolder}")
    return folder / (subfolder or "")


def _installed_for(base_name: str) -> str:
    heads = zoo_heads()
    if methods := [head.method for head in heads if head.base_name == base_name]:
        return f"installed for {base_name}: {', '.join(methods)}"
    others = ", ".join(f"{head.base_name}/{head.method}" for head in heads)
    is_here = base_name == SMOLLM2_135M or user_path(base_name).exists()
    meant = "" if is_here else hint_at(base_name, [SMOLLM2_135M])
    return f"none is installed for {base_name}{meant}" + (f"; for a tuned copy of its base: {others}" if others else "")


def find_profile(saved: "SavedHead", profile: str | PathLike[str] = "auto") -> AcceptanceProfile:
    """The acceptance profile of a head; ``profile`` as for :func:`draftheads.load`."""
    from draftheads.checkpoints.checkpoint import check_profile  # noqa: PLC0415 - slow to import

    if profile == "auto":
        path = cached_profile(saved)
        if path is None:
            return saved.profile
    else:
        place = user_path(profile)
        path = place / PROFILE_FILE if place.is_dir() else place
        if not path.is_file():
            raise ModelNotFound(f"no acceptance profile at {profile}: no such file; `draftheads tune` makes one")
    stored = read_profile(path)
    check_profile(saved.config, stored, path)
    return stored


def cached_profile(saved: HeadFiles) -> Path | None:
    """The head's profile in the user's cache; None where there is none or the cache cannot be read."""
    with contextlib.suppress(InvalidSettings, OSError):
        path = cached_profile_folder(saved) / PROFILE_FILE
        return path if path.is_file() else None
    return None


def cached_profile_folder(saved: HeadFiles) -> Path:
    """The folder in the user's cache for the head's profile."""
    return cache_folder() / "profiles" / f"{saved.method}-{saved.digest}"


def folder_to_write(saved: HeadFiles) -> Path:
    """Where a new profile belongs: the head's folder, or the user's cache for a bundled or downloaded head."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - slow to import

    folder = saved.folder.resolve()
    bundled = [head.folder.resolve() for head in zoo_heads()]
    is_others = folder in bundled or folder.is_relative_to(Path(HF_HUB_CACHE).resolve())
    return cached_profile_folder(saved) if is_others else saved.folder
