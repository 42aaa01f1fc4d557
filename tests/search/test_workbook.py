"""Findings of a long search are kept for whoever goes on with it, and for nobody else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftheads.search.workbook import Workbook

IDENTITY: dict[str, Any] = {"settings": {"batch_sizes": (1, 2)}, "prompts": [[5, 6], [7]]}


class Search:
    """Finds something, and counts how often it had to."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer if answer is not None else {"ranks": [0, 1], "error": 0.5}
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return self.answer


def opened(folder: Path, **changes: Any) -> Workbook:
    return Workbook(folder, {**IDENTITY, **changes})


def found(book: Workbook, name: str = "costs-1", answer: Any = None) -> tuple[Any, int]:
    """What the book says, and how often it was looked for."""
    search = Search(answer)
    return book.get(name, search), search.count


def test_what_was_found_is_not_looked_for_again(tmp_path: Path) -> None:
    book = opened(tmp_path / "work")
    assert found(book) == ({"ranks": [0, 1], "error": 0.5}, 1)
    assert found(book, answer="other") == ({"ranks": [0, 1], "error": 0.5}, 0)
    assert found(book, "costs-2", answer="other") == ("other", 1)


def test_findings_survive(tmp_path: Path) -> None:
    found(opened(tmp_path / "work"))
    assert found(opened(tmp_path / "work"), answer="other") == ({"ranks": [0, 1], "error": 0.5}, 0)


def test_a_finding_is_the_same_the_first_time_and_later(tmp_path: Path) -> None:
    """JSON knows no tuples: who sees one the first time only has a search that ends differently when it goes on."""
    book = opened(tmp_path / "work")
    assert found(book, answer={"ids": ((5, 6), (7,))}) == ({"ids": [[5, 6], [7]]}, 1)
    assert found(book, answer="other") == ({"ids": [[5, 6], [7]]}, 0)


def test_a_finding_of_nothing_is_one(tmp_path: Path) -> None:
    book = opened(tmp_path / "work")
    assert found(book, answer=[]) == ([], 1)
    assert found(book, answer="other") == ([], 0)


def test_a_search_that_fails_leaves_no_finding(tmp_path: Path) -> None:
    book = opened(tmp_path / "work")

    def fail() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        book.get("costs-1", fail)
    assert found(book)[1] == 1


@pytest.mark.parametrize(
    "changes", [{"settings": {"batch_sizes": [1, 4]}}, {"prompts": [[5, 6]]}, {"model": "another"}], ids=str
)
def test_another_search_begins_anew(tmp_path: Path, changes: dict[str, Any]) -> None:
    found(opened(tmp_path / "work"))
    book = opened(tmp_path / "work", **changes)
    assert found(book, answer="other") == ("other", 1)
    assert found(opened(tmp_path / "work"))[1] == 1, "the first one's findings came back"


@pytest.mark.parametrize("cut", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: "\x00\x00"])
def test_what_is_half_written_is_found_anew(tmp_path: Path, cut: Callable[[str], str]) -> None:
    found(opened(tmp_path / "work"))
    path = tmp_path / "work" / "costs-1.json"
    path.write_text(cut(path.read_text()))
    assert found(opened(tmp_path / "work"), answer="other") == ("other", 1)
    assert found(opened(tmp_path / "work"))[1] == 0


def test_a_half_written_identity_is_nobodys(tmp_path: Path) -> None:
    found(opened(tmp_path / "work"))
    (tmp_path / "work" / "identity.json").write_text('{"settings"')
    assert found(opened(tmp_path / "work"))[1] == 1
