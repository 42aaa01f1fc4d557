"""Identities of runs: differences are named, a run does not continue another one, and its own results are found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import InvalidSettings
from draftheads.utils.identity import as_json_values, changes, identity_digest, require_same, saved_json


def test_a_missing_value_is_a_difference() -> None:
    assert changes({"seed": 0}, {"rate": 0.1}) == ["seed was 0 and is None", "rate was None and is 0.1"]


def test_only_the_given_names_are_compared() -> None:
    assert changes({"seed": 0, "old": 1}, {"seed": 0}, names=["seed"]) == []


def test_values_are_compared_as_files_give_them_back() -> None:
    assert as_json_values({"betas": (0.9, 0.95), "out": Path("out")}) == {"betas": [0.9, 0.95], "out": "out"}


def test_another_run_is_refused_with_its_differences_and_a_fix() -> None:
    require_same({"seed": 0}, {"seed": 0}, problem="", fix="")
    with pytest.raises(InvalidSettings, match=r"^out is of another run: seed was 0 and is 1\. Name another --out$"):
        require_same({"seed": 0}, {"seed": 1}, problem="out is of another run", fix="Name another --out")


# --- saved results ---


class Search:
    """Finds something, and counts how often it was called."""

    def __init__(self, answer: Any = "found") -> None:
        self.answer, self.count = answer, 0

    def __call__(self) -> Any:
        self.count += 1
        return self.answer


@pytest.mark.parametrize("value", [{"ranks": [0, 1], "error": 0.5}, [], "text"], ids=str)
def test_a_saved_result_is_not_computed_again(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "work" / "one.json"
    assert saved_json(path, Search(value)) == value
    again = Search("other")
    assert saved_json(path, again) == value
    assert again.count == 0


def test_a_result_has_the_same_types_the_first_time_and_later(tmp_path: Path) -> None:
    """JSON has no tuples."""
    assert saved_json(tmp_path / "one.json", Search({"ids": ((5, 6), (7,))})) == {"ids": [[5, 6], [7]]}


def test_a_run_that_is_stopped_saves_nothing(tmp_path: Path) -> None:
    def stopped() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved_json(tmp_path / "one.json", stopped)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [lambda text: text[: len(text) // 2], lambda _: "", lambda _: "\x00\x00"])
def test_a_damaged_file_is_replaced(tmp_path: Path, cut: Callable[[str], str]) -> None:
    path = tmp_path / "one.json"
    saved_json(path, Search({"a": 1}))
    path.write_text(cut(path.read_text()))
    assert saved_json(path, Search("new")) == "new"
    assert saved_json(path, Search("newer")) == "new"


def test_runs_that_differ_have_different_digests() -> None:
    identity = {"settings": {"sizes": [1, 2]}, "prompts": [[5, 6], [7]]}
    others: list[Any] = [{**identity, "prompts": [[5, 6, 7]]}, {**identity, "settings": {}}, {**identity, "model": "m"}]
    assert len({identity_digest(one) for one in [identity, *others]}) == 4
    assert identity_digest(identity) == identity_digest({**identity, "settings": {"sizes": (1, 2)}})
