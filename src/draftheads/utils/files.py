"""Atomic writes: a reader sees a complete file, folder or set of files, or none.

New content is written next to its place under a hidden name, flushed to the disk, and renamed. After a full disk, an
exception or Ctrl-C it is removed. A kill leaves at most the hidden file, which nothing reads.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout

from draftheads.errors import CheckpointCorrupt, DraftHeadsError, InvalidSettings, StorageError

_STORAGE_ERRNOS = frozenset(  # errors of the place, not of the program
    {
        *(errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO),
        *(errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS),
    }
)
_NO_SPACE_TEXT = f"(os error {errno.ENOSPC})"  # the text of Rust libraries: safetensors, tokenizers
_FULL_DISK_BYTES = 1 << 20  # if a save fails with less free space, the disk is full
_TEMPORARY_SUFFIX = ".tmp"
_INCOMING = ".incoming"
_MOST_READS = 100

T = TypeVar("T")


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder in place of a leading ``~``."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        whose = Path(path).parts[0]
        raise InvalidSettings(f"{path}: no home folder is known for {whose}; write the whole path") from None


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The path, with the home folder in place of ``~``, if a file can be written there. Call it before long work."""
    target = user_path(path)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if target.is_dir():
        raise StorageError(f"cannot save {target}: it is a folder; add the name of a file")
    if not folder.is_dir():
        raise StorageError(f"cannot save {target}: {folder} is not a folder; choose another one")
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits are not the whole truth: the disk may be full
            return target
    except OSError as error:
        problem = f"cannot write into {folder}: {error.strerror}; choose another folder"
        raise StorageError(f"cannot save {target}: {problem}") from None


def write_atomic(
    path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object], *, flush: bool = True
) -> None:
    """Writes one complete file, or nothing. An existing file is replaced by one rename; missing folders are made.

    Args:
        path: of the file.
        content: the bytes, or a function that writes them to the binary file it is given.
        flush: off for a large file with a checksum: after a loss of power it may be damaged.
    """
    target = Path(path)
    temporary = _sibling(target, _TEMPORARY_SUFFIX)
    with _all_or_nothing(target, temporary):
        with _new_file(temporary) as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        temporary.replace(target)
        with contextlib.suppress(FileNotFoundError):  # `draftheads cache clear` was faster
            _sync(target.parent)


def append_synced(path: str | os.PathLike[str], content: bytes, *, offset: int, mode: int = 0o666) -> None:
    """Writes ``content`` at ``offset`` of a file and flushes it to the disk; missing files and folders are made.

    Older content after ``offset`` is dropped: the caller keeps a record of how much of the file is valid.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), mode), "r+b") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if (reason := _storage_reason(error, target)) is None:
            raise
        raise StorageError(f"cannot write {target}: {reason}; its first {offset:,} bytes are untouched") from error


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """A new, empty folder to fill. It gets the name ``path`` only if the ``with`` block succeeds.

    To ``replace`` an existing folder or file takes two renames. A kill between them leaves the old content next to its
    place, under a hidden name that ends in ``.old``.
    """
    target = Path(path)
    temporary = _sibling(target, _TEMPORARY_SUFFIX)
    with _all_or_nothing(target, temporary):
        if target.exists() and not replace:
            raise FileExistsError(errno.EEXIST, "it already exists")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        _settle(temporary)
        _move_into_place(temporary, target)


@contextlib.contextmanager
def locked(
    folder: str | os.PathLike[str],
    fix: str,
    *,
    file: str = "",
    waiting: contextlib.AbstractContextManager[object] | None = None,
) -> Iterator[None]:
    """Holds a lock on the folder, or on one file in it, against other processes that use this function.

    The lock file stays. If the process that holds the lock dies, the lock is free. If the block fails before it has
    written anything, a folder that was made for it is removed.

    Args:
        folder: created if missing.
        fix: how to choose another place, for the messages: "name another --out".
        file: lock only this file; other processes may write other files in the folder.
        waiting: entered while another process holds the lock, to show a message; None raises instead of waiting.
    """
    place = Path(folder)
    is_new = not place.exists()
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / (f".{file}.lock" if file else ".lock"))
        with tempfile.TemporaryFile(dir=place):  # without permission FileLock would wait, as if another held the lock
            pass
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is None:
                raise StorageError(f"another process is writing {place / file}: wait for it, or {fix}") from None
            with waiting:
                lock.acquire()
    except OSError as error:
        raise StorageError(f"cannot write into {place}: {error.strerror or error}; {fix}") from error
    try:
        yield
    except BaseException:
        if is_new and list(place.iterdir()) == [Path(lock.lock_file)]:
            _remove(place)
        raise
    finally:
        lock.release()


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Removes what killed processes left next to ``path``. Hold its lock: a running process's file looks the same."""
    target = Path(path)
    for leftover in target.parent.glob(f".{target.name}.*{_TEMPORARY_SUFFIX}"):
        _remove(leftover)


def _new_file(path: Path) -> BinaryIO:
    """An open file; its folder is made, and made again if `draftheads cache clear` deletes it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("xb")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")


def _sibling(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{suffix}")


@contextlib.contextmanager
def _all_or_nothing(target: Path, temporary: Path) -> Iterator[None]:
    """Removes ``temporary`` if the block fails; raises :class:`StorageError` if the reason is the disk."""
    try:
        yield
    except BaseException as error:
        reason = _storage_reason(error, target)  # before the removal: it checks how full the disk is
        _remove(temporary)
        if reason is None:
            raise
        raise StorageError(f"cannot save {target}: {reason}; nothing was left half-written") from error


def _storage_reason(error: BaseException, target: Path) -> str | None:
    """The problem of the storage, in words; None if the error has another cause."""
    if isinstance(error, DraftHeadsError) or not isinstance(error, Exception):  # has its message already; or Ctrl-C
        return None
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    is_no_space = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or _NO_SPACE_TEXT in str(error)
    # torch.save does not mention the disk ("unexpected pos 576 vs 534"), so check the disk itself
    folder = next((parent for parent in target.parents if parent.is_dir()), None)
    if is_no_space or (folder is not None and shutil.disk_usage(folder).free < _FULL_DISK_BYTES):
        return "no space left on the disk; free some or choose another folder"
    return None


def _settle(directory: Path) -> None:
    """Gives every file below the usual permissions and flushes it all to the disk."""
    mode = directory.stat().st_mode & 0o666  # as the user's umask allows
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(mode)  # safetensors writes 0600: other users could not read a shared model
        _sync(file)
    _sync(directory)


def _move_into_place(temporary: Path, target: Path) -> None:
    replaced = _sibling(target, ".old") if target.exists() else None
    if replaced is not None:
        target.rename(replaced)
    try:
        temporary.rename(target)
    except BaseException:
        if replaced is not None:
            replaced.rename(target)
        raise
    _sync(target.parent)
    if replaced is not None:
        _remove(replaced)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Errors are ignored, because another error is being handled."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_set(folder: Path) -> Iterator[Path]:
    """An empty folder to fill with files. If the ``with`` block succeeds, they replace those in ``folder``, together.

    One rename calls the new folder ``.incoming``. From then on its files are those of the set, and each is moved to its
    place. After a kill, readers take from ``.incoming`` what is still there, and the next write moves it first. Other
    files beside them stay where they are, and so does the folder itself, which may be a mount point or hold the lock of
    its owner.
    """
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
    """What ``read`` returns or raises, called again if one of the files was replaced or moved meanwhile.

    Raises:
        CheckpointCorrupt: one is a pipe, a device or a folder. It is not read.
    """
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
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # else it waits for a pipe's writer
        except OSError:
            continue
        opened.callback(os.close, descriptor)
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointCorrupt(f"{path} is not a regular file: put a file in its place")
        return path, facts.st_dev, facts.st_ino
    return None
