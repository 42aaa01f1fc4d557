"""The user's cache: where it is, what its parts are for, and how a part is deleted. Imports no torch.

A part has files of known names only. Whatever else is in the folder is shown, and never deleted.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftheads.errors import InvalidSettings, StorageError
from draftheads.utils.files import locked, user_path

_FIX = "set DRAFTHEADS_CACHE to a folder of its own"
_LEFTOVER = r"\.({0})\.[0-9a-f]{{8}}\.(?:tmp|old)"  # the names of `utils/files.py` for content that is not complete
_LEFTOVER_SECONDS = 3600.0  # a younger one may be written at this moment


def cache_folder() -> Path:
    """The folder of converted models and measurements: ``$DRAFTHEADS_CACHE``, else ``draftheads`` in the user's cache.

    Raises:
        InvalidSettings: it is in an unknown home folder.
    """
    chosen, shared = os.environ.get("DRAFTHEADS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return user_path(chosen) if chosen else (Path(shared) if shared else user_path("~/.cache")) / "draftheads"
    except InvalidSettings as error:
        raise InvalidSettings(f"no folder for converted models: {error} into the variable DRAFTHEADS_CACHE") from None


@dataclass(frozen=True)
class CachePart:
    """One kind of content of the cache."""

    name: str
    what: str
    loss: str  # what happens after it is deleted
    entries: str  # a regular expression for the names of its files and folders
    folder: str = ""  # that has them; "" for the cache itself

    def is_own(self, name: str) -> bool:
        """Whether a file or folder of that name belongs to the part.

        >>> costs = next(part for part in PARTS if part.name == "costs")
        >>> costs.is_own("04d6347cd77c26e13234ed0c.json"), costs.is_own("costs-of-my-flat.json")
        (True, False)
        """
        return re.fullmatch(f"{self.entries}|{_LEFTOVER.format(self.entries)}", name) is not None


PARTS = (
    CachePart(
        "smollm2-135m",
        "the default model, converted from its package",
        "converted again, or downloaded",
        r"smollm2-135m-v\d+",
    ),
    CachePart(
        "kernels",
        "the fastest CPU kernels of each model",
        "measured again in 3 s for each model",
        r"[0-9a-f]{24}\.json",
        "kernels",
    ),
    CachePart(
        "costs",
        "milliseconds of steps, by model and head",
        "measured again in 5 s for each head",
        r"[0-9a-f]{24}\.json",
        "costs",
    ),
    CachePart(
        "profiles",
        "acceptance profiles by `draftheads tune`",
        "lost: heads use their own until you tune again",
        r"[\w.+-]+-[0-9a-f]{16}",
        "profiles",
    ),
    CachePart(
        "corpora",
        "the sorted texts of --corpus",
        "sorted again by the next command with --corpus",
        r"[0-9a-f]{24}",
        "corpora",
    ),
    CachePart(
        "answers",
        "prompts of `draftheads tune`, with answers",
        "answered again by the next `draftheads tune`",
        r"[0-9a-f]{16}",
        "answers",
    ),
    CachePart(
        "bench",
        "results from which `draftheads bench` continues",
        "measured again; files in --out stay",
        r"[0-9a-f]{16}",
        "bench",
    ),
)


@dataclass
class Contents:
    """Files, and their bytes; a link counts as an empty file."""

    num_files: int = 0
    num_bytes: int = 0

    def add(self, file: Path) -> None:
        """One more file."""
        self.num_bytes += 0 if file.is_symlink() else file.stat().st_size
        self.num_files += 1


def contents_of(part: CachePart, cache: Path) -> Contents:
    """The files that clearing the part would delete.

    Raises:
        StorageError: a folder cannot be read.
    """
    found = Contents()
    for entry in _own_entries(part, cache):
        for file in _files(entry):
            with contextlib.suppress(FileNotFoundError):  # deleted at this moment
                found.add(file)
    return found


def other_entries(cache: Path) -> list[Path]:
    """Files and folders in the cache that belong to no part, relative to it."""
    folders = {part.folder for part in PARTS if _is_folder(cache / part.folder)}
    found = []
    for folder in sorted(folders | {""}):
        parts = [part for part in PARTS if part.folder == folder]
        for path in _entries(cache / folder):
            is_known = any(part.is_own(path.name) for part in parts) or (not folder and path.name in folders)
            if not is_known and not path.name.endswith(".lock"):
                found.append(path.relative_to(cache))
    return found


def clear(part: CachePart, cache: Path) -> tuple[Contents, list[Path]]:
    """Deletes the files of a part, except those that another process holds a lock on or is writing.

    A link is deleted, and not what it points to.

    Args:
        part: one of :data:`PARTS`.
        cache: from :func:`clearable_folder`.

    Returns:
        What was deleted, and the folders that another process uses.

    Raises:
        StorageError: a file cannot be deleted.
    """
    deleted, in_use = Contents(), []
    for entry in _own_entries(part, cache):
        if not _is_folder(entry):
            _delete(entry, deleted)
            continue
        # a run locks its folder; a conversion locks the name of its folder
        lock = locked(entry, _FIX) if part.folder else locked(cache, _FIX, file=_complete_name(entry))
        try:
            with lock:
                _delete(entry, deleted)
        except StorageError as error:
            if error.__cause__ is not None:
                raise
            in_use.append(entry)
    return deleted, in_use


def clearable_folder() -> Path:
    """The cache folder without links, checked before anything in it is deleted.

    Raises:
        InvalidSettings: it is the root, the home folder or one above it, or a git repository.
    """
    cache = cache_folder()
    real = cache.resolve()
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - Path.home() raises if there is none
    problem = (
        "the root of the file system"
        if real == Path(real.anchor)
        else "your home folder"
        if real == home
        else "a folder above your home folder"
        if home.is_relative_to(real)
        else "a git repository"
        if (real / ".git").exists()
        else None
    )
    if problem is not None:
        raise InvalidSettings(f"nothing was deleted: the cache folder is {cache}, which is {problem}; {_FIX}")
    return real


def _own_entries(part: CachePart, cache: Path) -> list[Path]:
    """Files and folders of the part."""
    folder = cache / part.folder
    if part.folder and not _is_folder(folder):
        return []
    return [path for path in _entries(folder) if part.is_own(path.name) and not _is_being_written(path)]


def _files(path: Path) -> Iterator[Path]:
    """The file, or all files below the folder, except locks and what is being written."""
    if _is_folder(path):
        for inner in _entries(path):
            yield from _files(inner)
    elif path.name != ".lock" and not _is_being_written(path):
        yield path


def _delete(path: Path, deleted: Contents) -> None:
    """Deletes a file, or a folder with its files. A folder stays if something in it is being written."""
    try:
        if _is_folder(path):
            for inner in _entries(path):
                _delete(inner, deleted)
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path.name == ".lock":
            with contextlib.suppress(OSError):  # Windows does not delete a file that is open
                path.unlink()
        elif not _is_being_written(path):
            one = Contents()
            one.add(path)
            path.unlink()
            deleted.num_files += 1
            deleted.num_bytes += one.num_bytes
    except FileNotFoundError:  # another process deleted it
        return
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror}; delete it by hand") from error


def _complete_name(path: Path) -> str:
    """The name that a file or folder gets when it is complete.

    >>> _complete_name(Path(".smollm2-135m-v1.0a1b2c3d.tmp")), _complete_name(Path("smollm2-135m-v1"))
    ('smollm2-135m-v1', 'smollm2-135m-v1')
    """
    match = re.fullmatch(_LEFTOVER.format(".+"), path.name)
    return path.name if match is None else match[1]


def _is_being_written(path: Path) -> bool:
    """Whether it is not complete, and too young to be what a killed process left."""
    if _complete_name(path) == path.name:
        return False
    try:
        return time.time() - path.lstat().st_mtime < _LEFTOVER_SECONDS
    except FileNotFoundError:
        return True


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}; {_FIX}") from error
