"""Finds a head by its name: bundled, in the data package ``draftheads-zoo``, a folder, or on the Hugging Face Hub.

Knows names and places. :mod:`draftheads.checkpoint` knows what is in a head's folder and which model it belongs to.
"""

import re
from importlib import resources
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from draftheads.errors import ModelNotFound, first_line
from draftheads.files import user_path
from draftheads.head_files import CONFIG_FILE, HEAD_FILES
from draftheads.models.embedded import SMOLLM2_135M
from draftheads.models.model_names import base_of, hint_at, model_name

DATA_PACKAGE = "draftheads-zoo"
DATA_PACKAGE_INSTALL = "pip install ./zoo (in a checkout of draftheads)"
# heads for smollm2-135m that the wheel of draftheads leaves out: zoo/pyproject.toml lists the same
DATA_PACKAGE_HEADS = ("amphista", "eagle", "eagle3", "hydra++", "markov-medusa", "mlp-speculator", "small-llama")

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<subfolder>\w[\w.+-]*(?:/\w[\w.+-]*)*))?")
_HUB_TIMEOUT_SECONDS = 10.0


class ZooHead(NamedTuple):
    """A trained head that is installed with a package."""

    base_name: str  # of its base model, as in ``draftheads.load("smollm2-135m")``
    method: str  # the name it is loaded by
    folder: Path


def weights_folder() -> Path:
    """The folder of the heads in this package, BASE/METHOD each."""
    return Path(str(resources.files("draftheads.zoo"))) / "weights"


def data_package_folder() -> Path | None:
    """The folder of the heads in the package ``draftheads-zoo``; None where it is not installed."""
    spec = find_spec(DATA_PACKAGE.replace("-", "_"))
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "weights"


def zoo_heads() -> list[ZooHead]:
    """All installed heads, sorted by base and method; one in this package comes before the data package's."""
    found: dict[tuple[str, str], ZooHead] = {}
    for root in (weights_folder(), data_package_folder()):
        for path in root.glob(f"*/*/{CONFIG_FILE}") if root is not None else ():
            head = ZooHead(path.parent.parent.name, path.parent.name, path.parent)
            found.setdefault(head[:2], head)
    return [found[key] for key in sorted(found)]


def head_name(name: object) -> str:
    """The name of a head as a text.

    Raises:
        InvalidSettings: it is not a name.
    """
    return model_name(name, "head", fix="give a bundled head's name, a folder or a Hugging Face id")


def find_head(name: str | PathLike[str], base_name: str) -> Path:
    """The folder of a head. A head on the Hub is downloaded.

    Args:
        name: a method that is installed for the base (``medusa``; write ``./medusa`` for a folder of that name), a
            folder, or a Hub repository (``owner/name``, or ``owner/name/subfolder``). They are tried in this order.
        base_name: the model that the head drafts for, such as ``smollm2-135m`` or its Hub id. For the folder of an
            adapter it is the adapter's base model.

    Raises:
        ModelNotFound: the name is none of these, or the download fails. The message lists the installed heads, and
            names the package to install where that has the head.
    """
    name, base_name = head_name(name), base_of(base_name)
    for head in zoo_heads():
        if (head.base_name, head.method) == (base_name, name):
            return head.folder
    folder = user_path(name)
    if folder.is_dir():
        return folder
    if base_name == SMOLLM2_135M.name and name in DATA_PACKAGE_HEADS:
        raise ModelNotFound(
            f"the head {name!r} for {base_name} is in the package {DATA_PACKAGE}; "
            f"install it with: {DATA_PACKAGE_INSTALL}"
        )
    if match := _HUB_ID.fullmatch(name):
        return _download(match["repo"], match["subfolder"], base_name)
    installed = [head.method for head in zoo_heads() if head.base_name == base_name]
    raise ModelNotFound(
        f"no head {name!r}{hint_at(name, installed)}: neither a folder here nor an id on the Hugging Face Hub "
        f"(owner/name); {_installed_for(base_name)}"
    )


def _download(repo: str, subfolder: str | None, base_name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - most heads need no network

    files = [f"{subfolder}/{name}" if subfolder else name for name in HEAD_FILES]
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
    if own := [head.method for head in heads if head.base_name == base_name]:
        return f"installed for {base_name}: {', '.join(own)}"
    others = ", ".join(f"{head.method} for {head.base_name}" for head in heads)
    return f"none is installed for {base_name}" + (f", only {others}" if others else "")
