"""Where heads come from: bundled with this package, a folder, or the Hugging Face Hub.

Knows names and places; what lies there, and for which model, is :mod:`draftheads.checkpoint`'s to say.
"""

import re
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from draftheads.checkpoint import CONFIG_FILE, HEAD_FILES
from draftheads.errors import ModelNotFound
from draftheads.files import user_path
from draftheads.models.embedded import SMOLLM2_135M

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_TIMEOUT_SECONDS = 10.0


class ZooHead(NamedTuple):
    """A head that comes with the package."""

    base_name: str  # of its base model, as in ``draftheads.load("smollm2-135m")``
    method: str  # how it is asked for
    folder: Path


def weights_folder() -> Path:
    """Where the bundled heads lie, BASE/METHOD each."""
    return Path(str(resources.files("draftheads.zoo"))) / "weights"


def zoo_heads() -> list[ZooHead]:
    """All bundled heads, sorted by base and method."""
    configs = sorted(weights_folder().glob(f"*/*/{CONFIG_FILE}"))
    return [ZooHead(path.parent.parent.name, path.parent.name, path.parent) for path in configs]


def find_head(name: str, base_name: str) -> Path:
    """The folder of a head; downloaded where it is on the Hub.

    Args:
        name: a method that is bundled for the base (``medusa``; a folder of that name is ``./medusa``), a
            folder, or a Hub id (``owner/name``). They are tried in this order.
        base_name: of the model it is to draft for, such as ``smollm2-135m``; its Hub id will do.

    Raises:
        ModelNotFound: it is none of them, or the Hub does not give it; the text lists what is bundled.
    """
    if base_name == SMOLLM2_135M.hub_id:
        base_name = SMOLLM2_135M.name
    for head in zoo_heads():
        if (head.base_name, head.method) == (base_name, name):
            return head.folder
    folder = user_path(name)
    if name and folder.is_dir():  # "" is a path, too: the working directory
        return folder
    if _HUB_ID.fullmatch(name):
        return _download(name, base_name)
    raise ModelNotFound(
        f"no head {name!r}: neither a folder here nor an id on the Hugging Face Hub (owner/name); "
        f"{_bundled_for(base_name)}"
    )


def _download(hub_id: str, base_name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - most heads need no network

    try:
        folder = snapshot_download(hub_id, allow_patterns=list(HEAD_FILES), etag_timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:  # its client raises what the network does
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"no head {hub_id!r}: no such folder here, and the Hugging Face Hub does not give it ({reason}); "
            f"{_bundled_for(base_name)}"
        ) from error
    return Path(folder)


def _bundled_for(base_name: str) -> str:
    heads = zoo_heads()
    if own := [head.method for head in heads if head.base_name == base_name]:
        return f"bundled for {base_name}: {', '.join(own)}"
    others = ", ".join(f"{head.method} for {head.base_name}" for head in heads)
    return f"none is bundled for {base_name}" + (f", only {others}" if others else "")
