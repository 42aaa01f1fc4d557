"""Files of one folder that are replaced together: a reader sees all old ones or all new ones.

The new files are written to a hidden folder, which one rename calls ``.incoming``. From then on they are the files of
the set, and each is moved to its place. After a kill, readers take from ``.incoming`` what is still there, and the next
write moves it first. Other files and folders beside them stay where they are, and so does the folder itself, which may
be a mount point or hold the lock of its owner.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from draftheads.errors import StorageError
from draftheads.utils.files import atomic_directory

_INCOMING = ".incoming"
_MOST_READS = 100

T = TypeVar("T")


@contextlib.contextmanager
def replaced_set(folder: Path) -> Iterator[Path]:
    """An empty folder to fill with files. If the ``with`` block succeeds, they replace those in ``folder``."""
    finish_replacing(folder)
    with atomic_directory(folder / _INCOMING) as staged:
        yield staged
    finish_replacing(folder)


def finish_replacing(folder: Path) -> None:
    """Moves the files that a process which was killed has not moved. Renames need no space on the disk."""
    incoming = folder / _INCOMING
    for path in sorted(incoming.glob("*")):
        try:
            path.replace(folder / path.name)
        except FileNotFoundError:  # another process moved it
            continue
        except OSError as error:
            problem = f"{error.strerror}; the new file is at {path}, and is read from there"
            raise StorageError(f"cannot save {folder / path.name}: {problem}") from error
    with contextlib.suppress(OSError):  # another process removed it
        incoming.rmdir()


def current(folder: Path, name: str) -> Path:
    """Where a file of the set is. It may be moved at any time: read it within :func:`read_set`."""
    incoming = folder / _INCOMING / name
    return incoming if incoming.exists() else folder / name


def read_set(folder: Path, names: Iterable[str], read: Callable[[], T]) -> T:
    """What ``read`` returns or raises, called again if one of the files was replaced or moved meanwhile."""
    for _ in range(_MOST_READS):
        with contextlib.ExitStack() as opened:  # the number of an open file is not given to a new one
            before = [_identity(folder, name, opened) for name in names]
            try:
                value = read()
            except Exception:
                if before == [_identity(folder, name, opened) for name in names]:
                    raise
                continue
            if before == [_identity(folder, name, opened) for name in names]:
                return value
    raise StorageError(f"{folder} was replaced {_MOST_READS} times while it was read: wait until it is written")


def _identity(folder: Path, name: str, opened: contextlib.ExitStack) -> tuple[Path, int, int] | None:
    """Place, device and number of a file, which stays open; None if it cannot be opened."""
    for path in (folder / _INCOMING / name, folder / name):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        opened.callback(os.close, descriptor)
        facts = os.fstat(descriptor)
        return path, facts.st_dev, facts.st_ino
    return None
