"""Files and folders are written whole or not at all, locks are those of processes, and errors name the place."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from draftheads.errors import DataError, InvalidSettings, StorageError
from draftheads.utils.files import (
    append_synced,
    atomic_directory,
    check_writable,
    locked,
    remove_leftovers,
    user_path,
    write_atomic,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def failing_sync(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Every flush to the disk fails with that error."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))


# --- whole files and folders ---


def test_a_file_is_written_from_bytes_or_by_a_function(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "file"
    write_atomic(target, b"one")
    assert target.read_bytes() == b"one"
    write_atomic(target, lambda file: file.write(b"two"))
    assert target.read_bytes() == b"two"
    assert names(target.parent) == ["file"]


def test_a_folder_appears_complete_and_is_as_readable_as_any_other(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "head"
    with atomic_directory(target) as folder:
        save_file({"a": torch.zeros(1)}, folder / "a.safetensors")  # makes it 0600
        mode = folder.stat().st_mode & 0o666
        assert not target.exists()
    assert names(tmp_path) == ["a.safetensors", "deep", "head"]
    assert (target / "a.safetensors").stat().st_mode & 0o777 == mode


def test_a_folder_is_replaced_only_on_demand(tmp_path: Path) -> None:
    target = tmp_path / "head"
    for replace, text in [(False, "old"), (True, "new")]:
        with atomic_directory(target, replace=replace) as folder:
            (folder / text).touch()
    with pytest.raises(StorageError, match="head"), atomic_directory(target):
        pytest.fail("the block must not be entered")
    assert names(tmp_path) == ["head", "new"]


FULL = 0  # bytes that are free


@pytest.mark.parametrize(
    ("error", "raised", "named"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (DataError("bad line"), DataError, "^bad line$"),
        (ValueError("bad value"), ValueError, "^bad value$"),
        (OSError(errno.EMFILE, "Too many open files"), OSError, "Too many"),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError, "place: no space left"),
        (RuntimeError("safetensors: (os error 28)"), StorageError, "place: no space left"),
        (RuntimeError("torch: unexpected pos 576 vs 534", FULL), StorageError, "place: no space left"),
        (OSError(errno.EIO, "Input/output error"), StorageError, "place: Input/output error"),
    ],
    ids=repr,
)
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException], named: str
) -> None:
    """An error of the caller is not changed, one of the disk names the place."""
    target = tmp_path / "place"
    write_atomic(target, b"old")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=FULL if FULL in error.args else 1 << 30))

    def fail(where: Path | None, file: object = None) -> None:
        if where is not None:
            (where / "half").touch()
        raise error

    with pytest.raises(raised, match=named) as caught:
        write_atomic(target, lambda file: fail(None, file))
    assert type(caught.value) is raised
    with pytest.raises(raised, match=named), atomic_directory(target, replace=True) as folder:
        fail(folder)
    assert (names(tmp_path), target.read_bytes()) == (["place"], b"old")


def test_a_flush_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_sync(monkeypatch, errno.ENOSPC)
    with pytest.raises(StorageError, match="no space left"):
        write_atomic(tmp_path / "file", b"new")
    with pytest.raises(StorageError, match="no space left"), atomic_directory(tmp_path / "head") as folder:
        (folder / "half").touch()
    assert names(tmp_path) == []


def test_a_failed_replacement_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "head", Path.rename
    with atomic_directory(target) as folder:
        (folder / "old").touch()

    def refuse_the_new_one(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(StorageError, match="Input/output error"), atomic_directory(target, replace=True):
        pass
    assert names(tmp_path) == ["head", "old"]


@contextlib.contextmanager
def killed_at_the_end(context: str, path: Path) -> Iterator[None]:
    """Another process is inside of that context on the path, in which it has written a file; then it is killed."""
    program = f"""
import sys, time, pathlib
from draftheads.utils.files import atomic_directory, locked
with {context} as folder:
    pathlib.Path(folder or sys.argv[1], "half").write_text("1")
    print("ready", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.kill()


def test_a_kill_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    target = tmp_path / "head"
    with killed_at_the_end("atomic_directory(sys.argv[1])", target):
        pass
    assert not target.exists()
    remove_leftovers(target)
    assert names(tmp_path) == []


def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `draftheads cache clear` does: before the file is opened, and after it is complete."""
    folder, own = tmp_path / "costs", Path.mkdir
    deleted = []

    def made_and_deleted(path: Path, **options: bool) -> None:
        own(path, **options)
        if not deleted:
            path.rmdir()
            deleted.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", made_and_deleted)
        write_atomic(folder / "file", b"1")
    assert deleted == [folder]
    assert (folder / "file").read_bytes() == b"1"

    def moved_and_deleted(path: Path, target: Path) -> None:
        path.unlink()
        path.parent.rmdir()

    (folder / "file").unlink()
    monkeypatch.setattr(Path, "replace", moved_and_deleted)
    write_atomic(folder / "file", b"2")
    assert not folder.exists()


# --- paths ---


def test_a_path_from_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("a/~") == Path("a/~")
    with pytest.raises(InvalidSettings, match=r"^~nobody-9/a: .* ~nobody-9;"):
        user_path("~nobody-9/a")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for want of HOME and of a user's entry
    with pytest.raises(InvalidSettings, match=r"^~/a: .* ~;"):
        user_path(Path("~/a"))


# --- growing files ---


def test_appending_drops_the_content_after_the_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "file"
    append_synced(target, b"one two", offset=0)
    append_synced(target, b"2", offset=4)
    assert target.read_bytes() == b"one 2"
    failing_sync(monkeypatch, errno.ENOSPC)
    with pytest.raises(StorageError, match=r"file: no space left.* 4 bytes"):
        append_synced(target, b"3", offset=4)
    assert target.read_bytes()[:4] == b"one "
    failing_sync(monkeypatch, errno.EMFILE)  # an error of the program
    with pytest.raises(OSError, match="Too many open files"):
        append_synced(target, b"1", offset=0)


# --- locks ---


@pytest.mark.parametrize("file", ["", "chats.jsonl"])
def test_a_second_process_is_refused(tmp_path: Path, file: str):
    folder = tmp_path / "new" / "out"
    with locked(folder, "name another", file=file):
        told = rf"{re.escape(str(folder / file))}: .*name another"
        with pytest.raises(StorageError, match=told), locked(folder, "name another", file=file):
            pytest.fail("two write at once")
        with locked(folder, "", file="others.jsonl"):  # beside it
            pass
    with pytest.raises(KeyboardInterrupt), locked(folder, "", file=file):
        raise KeyboardInterrupt
    with locked(folder, "", file=file):  # the first one is done, and the second one failed
        pass


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path):
    with (
        killed_at_the_end("locked(sys.argv[1], '')", tmp_path),
        pytest.raises(StorageError, match="another process"),
        locked(tmp_path, ""),
    ):
        pytest.fail("two write at once")
    with locked(tmp_path, ""):
        pass


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path):
    below = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=str(below)):
        write_atomic(below, b"")
    with pytest.raises(StorageError, match=str(below)), atomic_directory(below):
        pytest.fail("the block must not be entered")
    with pytest.raises(StorageError, match=f"{below}.*name another"), locked(below, "name another"):
        pytest.fail("it was written")
    for place in (below, tmp_path):
        with pytest.raises(StorageError, match=str(place)):
            check_writable(place)


def test_a_missing_permission_is_no_lock_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system refuses to make a file, which the lock's library takes for a lock that is held."""
    own = os.open

    def refused(path: str | Path, flags: int, *rest: int, **named: int) -> int:
        if Path(path).is_relative_to(tmp_path) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, "Permission denied")
        return own(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StorageError, match=r"Permission denied; give --out"), locked(tmp_path, "give --out"):
        pytest.fail("it was written")
    with pytest.raises(StorageError, match=r"out: .*: Permission denied"):
        check_writable(tmp_path / "new" / "out")


@pytest.mark.parametrize(("is_old", "writes"), [(False, False), (False, True), (True, False)])
def test_only_a_new_and_empty_folder_is_removed_when_the_work_fails(tmp_path: Path, is_old: bool, writes: bool):
    folder = tmp_path / "out"
    if is_old:
        folder.mkdir()

    def fail() -> None:
        with locked(folder, "name another"):
            if writes:
                (folder / "result").touch()
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        fail()
    assert folder.exists() == (is_old or writes)
    assert (folder / "result").exists() == writes
