import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
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

DISK_BYTES = 2 << 20
TOO_MUCH = torch.zeros(DISK_BYTES, dtype=torch.uint8)


def mounted(folder: Path, option: str) -> Iterator[Path]:
    """A real file system in memory."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of two megabytes."""
    yield from mounted(tmp_path / "disk", f"size={DISK_BYTES}")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flush to the disk fails for want of space."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_is_written_from_bytes_or_by_a_function(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "file"
    write_atomic(target, b"one")
    assert target.read_bytes() == b"one"
    write_atomic(target, lambda file: file.write(b"two"))
    assert target.read_bytes() == b"two"
    assert _names(target.parent) == ["file"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    def interrupted(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    target = tmp_path / "file"
    write_atomic(target, b"old")
    with pytest.raises(KeyboardInterrupt):
        write_atomic(target, interrupted)
    assert (_names(tmp_path), target.read_bytes()) == (["file"], b"old")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target = tmp_path / "file"
    write_atomic(target, b"old")
    request.getfixturevalue("full_disk")
    with pytest.raises(StorageError, match=r"cannot save .*file: no space left"):
        write_atomic(target, b"new")
    assert (_names(tmp_path), target.read_bytes()) == (["file"], b"old")


def test_a_folder_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "head"
    with atomic_directory(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert _names(tmp_path) == ["a", "deep", "head"]


def test_the_files_of_a_folder_are_as_readable_as_the_folder(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "head") as folder:
        save_file({"a": torch.zeros(1)}, folder / "a.safetensors")  # makes it 0600
        mode = folder.stat().st_mode & 0o666
    assert (tmp_path / "head" / "a.safetensors").stat().st_mode & 0o777 == mode


def test_a_folder_is_replaced_only_on_demand(tmp_path: Path) -> None:
    target = tmp_path / "head"
    for replace, text in [(False, "old"), (True, "new")]:
        with atomic_directory(target, replace=replace) as folder:
            (folder / text).touch()
    assert _names(tmp_path) == ["head", "new"]
    with pytest.raises(StorageError, match="already exists"), atomic_directory(target):
        pytest.fail("the block must not be entered")
    assert _names(tmp_path) == ["head", "new"]


def test_an_error_of_the_caller_is_not_changed(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise DataError("bad line")

    with pytest.raises(DataError, match=r"^bad line$"), atomic_directory(tmp_path / "head") as folder:
        fail(folder)
    assert _names(tmp_path) == []


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"cannot save .*head: no space left"),
        atomic_directory(tmp_path / "head") as folder,
    ):
        (folder / "half").touch()
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    "fill",
    [
        lambda file: file.write_bytes(bytes(DISK_BYTES + 1)),
        lambda file: save_file({"a": TOO_MUCH}, file),
        lambda file: torch.save(TOO_MUCH, file),
    ],
    ids=["plainly", "by safetensors", "by torch"],
)
def test_a_really_full_disk_keeps_the_old_folder(small_disk: Path, fill: Callable[[Path], None]) -> None:
    target = small_disk / "head"
    with atomic_directory(target) as folder:
        (folder / "old").touch()
    with pytest.raises(StorageError, match="no space left"), atomic_directory(target, replace=True) as folder:
        fill(folder / "a")
    assert _names(small_disk) == ["head", "old"]


def test_a_failed_replacement_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "head"
    with atomic_directory(target) as folder:
        (folder / "old").touch()
    rename = Path.rename

    def refuse_the_new_one(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(StorageError, match="Input/output error"), atomic_directory(target, replace=True):
        pass
    assert _names(tmp_path) == ["head", "old"]


def test_a_file_in_place_of_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot save"):
        write_atomic(tmp_path / "file" / "below", b"")
    with pytest.raises(StorageError, match="cannot save"), atomic_directory(tmp_path / "file" / "below"):
        pytest.fail("the block must not be entered")


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
    assert _names(tmp_path) == []
    with atomic_directory(target) as folder:
        (folder / "whole").touch()
    assert _names(tmp_path) == ["head", "whole"]


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
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("a/~") == Path("a/~")


def test_an_unknown_home_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings, match=r"^~nobody-9/a: no home folder is known for ~nobody-9; write the whole"):
        user_path("~nobody-9/a")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for want of HOME and of a user's entry
    with pytest.raises(InvalidSettings, match=r"^~/a: no home folder is known for ~;"):
        user_path(Path("~/a"))


# --- growing files ---


def test_appending_drops_the_content_after_the_offset(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    append_synced(target, b"one two", offset=0)
    append_synced(target, b"2", offset=4)
    assert target.read_bytes() == b"one 2"


def test_appending_to_a_full_disk_is_an_error_and_keeps_the_content(tmp_path: Path, full_disk: None) -> None:
    (tmp_path / "file").write_bytes(b"one two")
    with pytest.raises(StorageError, match=r"no space left on the disk.*its first 4 bytes are untouched"):
        append_synced(tmp_path / "file", b"2", offset=4)
    assert (tmp_path / "file").read_bytes()[:4] == b"one "


def test_appending_does_not_hide_errors_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(OSError, match="Too many open files"):
        append_synced(tmp_path / "file", b"1", offset=0)


@pytest.mark.parametrize("file", ["", "chats.jsonl"])
def test_a_second_process_is_refused(tmp_path: Path, file: str):
    folder = tmp_path / "new" / "out"
    told = re.escape(f"another process is writing {folder / file}: wait for it, or name another --out")
    with locked(folder, "name another --out", file=file):
        with pytest.raises(StorageError, match=told), locked(folder, "name another --out", file=file):
            pytest.fail("two write at once")
        with locked(folder, "", file="others.jsonl"):  # beside it
            pass
    with locked(folder, "name another --out", file=file):  # the first one is done
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


def test_a_lock_is_released_after_an_error(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), locked(tmp_path, ""):
        raise KeyboardInterrupt
    with locked(tmp_path, ""):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(StorageError, match=r"cannot write into .*file.*head: Not a directory; name another --out"),
        locked(tmp_path / "file" / "head", "name another --out"),
    ):
        pytest.fail("it was written")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder into which not even root can write."""
    yield from mounted(tmp_path / "disk", "ro")


def test_a_read_only_file_system_is_named(read_only: Path):
    with pytest.raises(StorageError, match=r"cannot write into .*disk: Read-only file system; choose another folder"):
        check_writable(read_only / "new" / "file")
    with (
        pytest.raises(StorageError, match=r"cannot write into .*disk: Read-only file system; name another --out"),
        locked(read_only, "name another --out"),
    ):
        pytest.fail("it was written")


def test_a_missing_permission_is_no_lock_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system refuses to make a file, which the lock's library takes for a lock that is held."""
    own = os.open

    def refused(path: str | Path, flags: int, *rest: int, **named: int) -> int:
        if Path(path).is_relative_to(tmp_path) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, "Permission denied")
        return own(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    with (
        pytest.raises(StorageError, match=r"cannot write into .*: Permission denied; give --out"),
        locked(tmp_path, "give --out"),
    ):
        pytest.fail("it was written")
    with pytest.raises(StorageError, match=r"cannot save .*out: cannot write into .*: Permission denied"):
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
