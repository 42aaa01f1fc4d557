"""The user's cache: where it is, what its parts are for, and how a part is deleted. Imports no torch.

A part has files of known names only. Whatever else is in the folder is never deleted.
"""

import contextlib
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from draftheads.errors import InvalidSettings, StorageError
from draftheads.utils.files import locked, user_path
from draftheads.utils.machine import Environment

_DEFAULT_MODEL = "smollm2-135m"
_FIX = "set DRAFTHEADS_CACHE to a folder of its own"
_WRITING_SECONDS = 3600.0  # an incomplete file that is younger may be written at this moment


def cache_folder() -> Path:
    """``$DRAFTHEADS_CACHE``, else ``draftheads`` in the user's cache."""
    chosen, shared = Environment().cache, Environment().shared_cache
    try:
        return user_path(chosen) if chosen else (Path(shared) if shared else user_path("~/.cache")) / "draftheads"
    except InvalidSettings as error:
        raise InvalidSettings(f"no folder for converted models: {error} into the variable DRAFTHEADS_CACHE") from None


class Contents(NamedTuple):
    """Files, and their bytes; a link counts as an empty file."""

    num_files: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, *paths: Path) -> Self:
        """What these files and folders have, without lock files."""
        sizes = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                files = [path] if path.is_symlink() or path.is_file() else path.rglob("*")
                own_files = (file for file in files if file.name != ".lock" and (file.is_symlink() or file.is_file()))
                sizes += [0 if file.is_symlink() else file.stat().st_size for file in own_files]
        return cls(len(sizes), sum(sizes))


@dataclass(frozen=True)
class CachePart:
    """One kind of content of the cache."""

    name: str
    what: str
    loss: str  # what happens after it is deleted
    entries: str  # a regular expression for the names of its files and folders

    def is_own(self, name: str) -> bool:
        """Whether a file or folder of that name belongs to the part, also if it is not complete.

        >>> costs = next(part for part in PARTS if part.name == "costs")
        >>> costs.is_own("04d6347cd77c26e13234ed0c.json"), costs.is_own("costs-of-my-flat.json")
        (True, False)
        >>> costs.is_own(".04d6347cd77c26e13234ed0c.json.0a1b2c3d.tmp")  # a name of utils/files.py
        True
        """
        return re.fullmatch(rf"{self.entries}|\.{self.entries}\.[0-9a-f]{{8}}\.(tmp|old)", name) is not None

    def paths(self, cache: Path) -> list[Path]:
        """Its files and folders, except those that may be written at this moment."""
        folder = cache / self.folder
        try:
            return sorted(path for path in folder.iterdir() if self.is_own(path.name) and not _is_being_written(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"cannot read {folder}: {error.strerror}; {_FIX}") from error

    @property
    def folder(self) -> str:
        """That has its files and folders; "" for the cache itself."""
        return "" if self.name == _DEFAULT_MODEL else self.name


_DIGEST, _LONG_DIGEST = r"[0-9a-f]{16}", r"[0-9a-f]{24}"
_MEASURED = rf"{_LONG_DIGEST}\.json"
PARTS = (
    CachePart(
        _DEFAULT_MODEL, "the default model, converted", "converted again, or downloaded", rf"{_DEFAULT_MODEL}-v\d+"
    ),
    CachePart("gguf", "models converted from GGUF files", "converted again", rf"[^/]+-{_DIGEST}-v\d+"),
    CachePart("weights", "packed int8 and int4 weights", "packed again by the next load", rf"{_LONG_DIGEST}\.packed"),
    CachePart("costs", "milliseconds of steps, by model, head", "measured again in a second for each head", _MEASURED),
    CachePart("profiles", "profiles by `draftheads tune`", "lost: heads use their own", rf"[\w.+-]+-{_DIGEST}"),
    CachePart("answers", "prompts of `draftheads tune`, with answers", "answered again by the next tune", _DIGEST),
    CachePart("bench", "results from which `bench` continues", "measured again; files in --out stay", _DIGEST),
)


def contents_of(part: CachePart, cache: Path) -> Contents:
    """The files that clearing the part would delete."""
    return Contents.of(*part.paths(cache))


def clear(part: CachePart, cache: Path) -> tuple[Contents, list[Path]]:
    """What was deleted of a part, and the folders that stay because another process holds a lock on them.

    A link is deleted, and not what it points to.
    """
    deleted, in_use = [Contents()], []
    for path in part.paths(cache):
        contents = Contents.of(path)
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                with locked(path, _FIX):  # a run locks its folder
                    pass
                shutil.rmtree(path)
            deleted.append(contents)
        except FileNotFoundError:  # another process deleted it
            pass
        except OSError as error:
            raise StorageError(f"cannot delete {path}: {error.strerror}; delete it by hand") from error
        except StorageError as error:
            if error.__cause__ is not None:  # it is not locked, but cannot be written
                raise
            in_use.append(path)
    return Contents(*map(sum, zip(*deleted, strict=True))), in_use


def _is_being_written(path: Path) -> bool:
    return path.name.endswith((".tmp", ".old")) and time.time() - path.lstat().st_mtime < _WRITING_SECONDS
