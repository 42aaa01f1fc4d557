"""Where the acceptance profiles of heads are stored: in the head's folder, or in the user's cache.

``draftheads tune`` writes into the folder of a head that belongs to the user. For a bundled head or one in the Hub's
cache it writes into the user's cache, under the head's digest. Loading looks there first.
"""

import contextlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from draftheads.checkpoints.head_files import HeadFiles
from draftheads.checkpoints.registry import zoo_heads
from draftheads.errors import InvalidSettings, ModelNotFound
from draftheads.speculation.acceptance_profile import PROFILE_FILE, AcceptanceProfile, read_profile
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import user_path

if TYPE_CHECKING:
    from draftheads.checkpoints.checkpoint import SavedHead


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
    if folder in bundled or folder.is_relative_to(Path(HF_HUB_CACHE).resolve()):
        return cached_profile_folder(saved)
    return saved.folder
