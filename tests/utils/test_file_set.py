"""A set of files is read as one: again if a file was replaced meanwhile, and from where each file is now."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from draftheads.errors import DataError, StorageError
from draftheads.utils import file_set
from draftheads.utils.files import current, finish_replacing, read_set, replaced_set, write_atomic

NAMES = ("a", "b")


def write(folder: Path, text: str) -> None:
    with replaced_set(folder) as staged:
        for name in NAMES:
            (staged / name).write_text(text)


def texts(folder: Path) -> Sequence[str]:
    return [current(folder, name).read_text() for name in NAMES]


@pytest.fixture
def half_moved(tmp_path: Path) -> Path:
    """A folder as a process leaves it that is killed before it moves its second file."""
    write(tmp_path, "old")
    (tmp_path / ".incoming").mkdir()
    (tmp_path / ".incoming" / "b").write_text("new")
    (tmp_path / "a").write_text("new")
    return tmp_path


def test_what_was_not_moved_is_read_from_where_it_is_and_moved_at_the_next_write(half_moved: Path) -> None:
    assert texts(half_moved) == ["new", "new"]
    assert (half_moved / "b").read_text() == "old"
    finish_replacing(half_moved)
    assert (half_moved / "b").read_text() == "new"
    assert sorted(path.name for path in half_moved.iterdir()) == ["a", "b"]


def test_a_write_that_fails_after_a_kill_leaves_what_the_killed_process_wrote(half_moved: Path) -> None:
    def fail(text: str) -> None:
        with replaced_set(half_moved) as staged:
            (staged / "a").write_text(text)
            raise DataError("bad")

    with pytest.raises(DataError, match="bad"):
        fail("newest")
    assert texts(half_moved) == ["new", "new"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_again_if_a_file_was_replaced_meanwhile(tmp_path: Path, name: str) -> None:
    write(tmp_path, "old")
    tries = []

    def read() -> Sequence[str]:
        tries.append(texts(tmp_path))
        if len(tries) == 1:
            write_atomic(tmp_path / name, b"other")
        return tries[-1]

    assert read_set(tmp_path, NAMES, read) == texts(tmp_path) == tries[1] != tries[0]


def test_it_is_read_again_if_new_files_come_in_meanwhile(tmp_path: Path) -> None:
    write(tmp_path, "old")
    tries = []

    def read() -> Sequence[str]:
        first = current(tmp_path, "a").read_text()
        if not tries:
            (tmp_path / ".incoming").mkdir()
            for name in NAMES:
                (tmp_path / ".incoming" / name).write_text("new")
        tries.append([first, current(tmp_path, "b").read_text()])
        return tries[-1]

    assert read_set(tmp_path, NAMES, read) == ["new", "new"]


def test_a_file_that_is_moved_while_it_is_read_is_read_from_its_new_place(half_moved: Path) -> None:
    def read() -> str:
        path = current(half_moved, "b")
        finish_replacing(half_moved)
        return path.read_text()

    assert read_set(half_moved, NAMES, read) == "new"


def test_an_error_counts_only_if_nothing_was_replaced_meanwhile(tmp_path: Path) -> None:
    write(tmp_path, "old")
    tries = []

    def read() -> str:
        tries.append(len(tries))
        if len(tries) == 1:
            write(tmp_path, "new")
        raise DataError(f"try {len(tries)}")

    with pytest.raises(DataError, match="try 2"):
        read_set(tmp_path, NAMES, read)


def test_it_gives_up_if_it_is_written_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_set(tmp_path, NAMES, lambda: "found") == "found", "a missing file is the reader's matter"
    monkeypatch.setattr(file_set, "_MOST_READS", 3)
    with pytest.raises(StorageError, match=r"replaced 3 times"):
        read_set(tmp_path, NAMES, lambda: write(tmp_path, "new"))
