"""A reader sees a complete file, folder or set of files, or none; writers keep out of each other's way."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from draftheads.errors import DataError, InvalidSettings, StorageError
from draftheads.utils import files
from draftheads.utils.files import (
    append_synced,
    atomic_directory,
    check_writable,
    current,
    finish_replacing,
    locked,
    read_set,
    remove_leftovers,
    replaced_set,
    user_path,
    write_atomic,
)

DISK_BYTES = 2 << 20
TOO_MUCH = torch.zeros(DISK_BYTES, dtype=torch.uint8)
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system in memory, of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def new_file(target: Path, fail: Callable[[], None]) -> None:
    def content(file: Any) -> None:
        file.write(b"half")
        fail()

    write_atomic(target, content)


def new_folder(target: Path, fail: Callable[[], None]) -> None:
    with atomic_directory(target, replace=True) as folder:
        (folder / "half").touch()
        fail()


# --- files and folders ---


def test_a_file_is_written_from_bytes_or_by_a_function_and_a_folder_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "file"
    write_atomic(target, b"one")
    assert target.read_bytes() == b"one"
    write_atomic(target, lambda file: file.write(b"two"))
    assert (target.read_bytes(), names(target.parent)) == (b"two", ["file"])
    head = tmp_path / "head"
    with atomic_directory(head) as folder:
        save_file({"a": torch.zeros(1)}, folder / "a.safetensors")  # makes it 0600
        mode = folder.stat().st_mode & 0o666
        assert not head.exists()
    assert (head / "a.safetensors").stat().st_mode & 0o777 == mode, "as readable as the folder"
    with pytest.raises(StorageError, match="already exists"), atomic_directory(head):
        pytest.fail("the block must not be entered")
    with atomic_directory(head, replace=True) as folder:
        (folder / "new").touch()
    assert names(head) == ["new"]


@pytest.mark.parametrize("write", [new_file, new_folder])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyboardInterrupt("now"), "^now$"),
        (DataError("bad line"), "^bad line$"),  # the caller's own is not changed
        (FULL, r"cannot save .*place: no space left"),
        (OSError(errno.EIO, "Input/output error"), "cannot save .*place: Input/output error"),
    ],
)
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, write: Any, error: BaseException, message: str
) -> None:
    for _ in ("nothing", "an older one"):
        before = names(tmp_path)
        with pytest.raises((type(error), StorageError), match=message):
            write(tmp_path / "place", Mock(side_effect=error))
        assert names(tmp_path) == before
        write(tmp_path / "place", lambda: None)


@pytest.mark.parametrize(
    "fill",
    [
        lambda file: file.write_bytes(bytes(DISK_BYTES + 1)),
        lambda file: save_file({"a": TOO_MUCH}, file),
        lambda file: torch.save(TOO_MUCH, file),
    ],
    ids=["plainly", "by safetensors", "by torch"],
)
def test_a_really_full_disk_keeps_the_old_folder(disk: Path, fill: Callable[[Path], None]) -> None:
    with atomic_directory(disk / "head") as folder:
        (folder / "old").touch()
    with pytest.raises(StorageError, match="no space left"), atomic_directory(disk / "head", replace=True) as folder:
        fill(folder / "a")
    assert names(disk) == ["head", "old"]


def test_a_failed_replacement_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with atomic_directory(tmp_path / "head") as folder:
        (folder / "old").touch()
    rename = Path.rename

    def refuse_the_new_one(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(StorageError, match="Input/output error"):
        new_folder(tmp_path / "head", lambda: None)
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


def test_a_kill_leaves_no_folder_of_that_name_and_no_lock(tmp_path: Path) -> None:
    target = tmp_path / "head"
    with killed_at_the_end("atomic_directory(sys.argv[1])", target):
        pass
    assert not target.exists()
    remove_leftovers(target)
    assert names(tmp_path) == []
    with killed_at_the_end("locked(sys.argv[1], '')", tmp_path), pytest.raises(StorageError, match="another process"):
        locked(tmp_path, "").__enter__()
    with locked(tmp_path, ""):
        pass


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
    assert (deleted, (folder / "file").read_bytes()) == ([folder], b"1")

    def moved_and_deleted(path: Path, target: Path) -> None:
        path.unlink()
        path.parent.rmdir()

    (folder / "file").unlink()
    monkeypatch.setattr(Path, "replace", moved_and_deleted)
    write_atomic(folder / "file", b"2")
    assert not folder.exists()


def test_paths_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (user_path("~/a"), user_path("a/~")) == (tmp_path / "a", Path("a/~"))
    with pytest.raises(InvalidSettings, match=r"^~nobody-9/a: no home folder is known for ~nobody-9; write the whole"):
        user_path("~nobody-9/a")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for want of HOME and of a user's entry
    with pytest.raises(InvalidSettings, match=r"^~/a: no home folder is known for ~;"):
        user_path(Path("~/a"))


def test_appending_drops_the_content_after_the_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "file"
    append_synced(target, b"one two", offset=0)
    append_synced(target, b"2", offset=4)
    assert target.read_bytes() == b"one 2"
    for error, message in (
        (FULL, r"no space left on the disk.*its first 4 bytes are untouched"),
        (OSError(errno.EMFILE, "Too many open files"), "^.Errno 24. Too many"),  # an error of the program
    ):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
        with pytest.raises((StorageError, OSError), match=message):
            append_synced(target, b"3", offset=4)
        assert target.read_bytes()[:4] == b"one "


# --- locks ---


@pytest.mark.parametrize("file", ["", "chats.jsonl"])
def test_a_second_process_is_refused_until_the_first_one_ends(tmp_path: Path, file: str) -> None:
    folder, fix = tmp_path / "new" / "out", "name another --out"
    message = re.escape(f"another process is writing {folder / file}: wait for it, or {fix}")
    with contextlib.suppress(KeyboardInterrupt), locked(folder, fix, file=file):
        with pytest.raises(StorageError, match=message):
            locked(folder, fix, file=file).__enter__()
        with locked(folder, "", file="others.jsonl"):  # beside it
            raise KeyboardInterrupt
    with locked(folder, fix, file=file):
        pass


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    for write in (new_file, new_folder):
        with pytest.raises(StorageError, match="cannot save"):
            write(below, lambda: None)
    with pytest.raises(StorageError, match=r"cannot write into .*file.*below: Not a directory; name another --out"):
        locked(below, "name another --out").__enter__()


def test_a_missing_permission_is_no_lock_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to make a file, which the lock's library takes for a lock that is held."""
    own = os.open

    def refused(path: str | Path, flags: int, *rest: int, **named: int) -> int:
        if Path(path).is_relative_to(tmp_path) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, "Permission denied")
        return own(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StorageError, match=r"cannot write into .*: Permission denied; give --out"):
        locked(tmp_path, "give --out").__enter__()
    with pytest.raises(StorageError, match=r"cannot save .*out: cannot write into .*: Permission denied"):
        check_writable(tmp_path / "new" / "out")


@pytest.mark.parametrize(("is_old", "writes"), [(False, False), (False, True), (True, False)])
def test_only_a_new_and_empty_folder_is_removed_when_the_work_fails(tmp_path: Path, is_old: bool, writes: bool) -> None:
    folder = tmp_path / "out"
    if is_old:
        folder.mkdir()
    with contextlib.suppress(ValueError), locked(folder, "name another"):
        (folder / ("result" if writes else ".lock")).touch()
        raise ValueError("bad data")
    assert (folder.exists(), (folder / "result").exists()) == (is_old or writes, writes)


# --- sets of files ---

SET = ("a", "b")


def write_set(folder: Path, text: str, end: Callable[[], None] = lambda: None) -> None:
    with replaced_set(folder) as staged:
        for name in SET:
            (staged / name).write_text(text)
        end()


def texts(folder: Path) -> list[str]:
    return [current(folder, name).read_text() for name in SET]


@pytest.fixture
def half_moved(tmp_path: Path) -> Path:
    """A folder as a process leaves it that is killed before it moves its second file."""
    write_set(tmp_path, "old")
    (tmp_path / ".incoming").mkdir()
    (tmp_path / ".incoming" / "b").write_text("new")
    (tmp_path / "a").write_text("new")
    return tmp_path


def test_what_was_not_moved_is_read_from_where_it_is_and_moved_at_the_next_write(half_moved: Path) -> None:
    assert (texts(half_moved), (half_moved / "b").read_text()) == (["new", "new"], "old")
    with pytest.raises(DataError, match="bad"):
        write_set(half_moved, "newest", Mock(side_effect=DataError("bad")))
    assert texts(half_moved) == ["new", "new"]

    def read() -> str:
        path = current(half_moved, "b")
        finish_replacing(half_moved)  # it is moved while it is read
        return path.read_text()

    assert read_set(half_moved, SET, read) == "new"
    assert ((half_moved / "b").read_text(), names(half_moved)) == ("new", ["a", "b"])


def all_come_in(folder: Path) -> None:
    (folder / ".incoming").mkdir()
    for name in SET:
        (folder / ".incoming" / name).write_text("new")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write_atomic(folder / "a", b"other"),
        lambda folder: write_atomic(folder / "b", b"other"),
        lambda folder: write_set(folder, "new"),
        all_come_in,
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_read_again_if_a_file_was_replaced_meanwhile(
    tmp_path: Path, change: Callable[[Path], None], fails: bool
) -> None:
    write_set(tmp_path, "old")
    tries = []

    def read() -> list[str]:
        first = current(tmp_path, "a").read_text()
        if not tries:
            change(tmp_path)
        tries.append([first, current(tmp_path, "b").read_text()])
        if fails:
            raise DataError(f"try {len(tries)}")
        return tries[-1]

    if fails:
        with pytest.raises(DataError, match="try 2"):
            read_set(tmp_path, SET, read)
    else:
        assert read_set(tmp_path, SET, read) == texts(tmp_path)
        assert len(tries) == 2


def test_it_gives_up_if_it_is_written_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_set(tmp_path, SET, lambda: "found") == "found", "a missing file is the reader's matter"
    monkeypatch.setattr(files, "_MOST_READS", 3)
    with pytest.raises(StorageError, match=r"replaced 3 times"):
        read_set(tmp_path, SET, lambda: write_set(tmp_path, "new"))
