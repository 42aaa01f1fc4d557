"""Identities of runs: differences are named, a run does not continue another one, and its own results are found."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import InvalidSettings
from draftheads.utils.provenance import as_json_values, changes, identity_digest, require_same, saved_json


def test_another_run_is_refused_with_its_differences() -> None:
    assert changes({"seed": 0}, {"rate": 0.1}) == ["seed was 0 and is None", "rate was None and is 0.1"]
    before = {"seed": 0, "old": 1}
    require_same(before, {"seed": 0}, names=["seed"], problem="", fix="")
    with pytest.raises(InvalidSettings, match=r"^another run: old was 1 and is None. Name it$"):
        require_same(before, {"seed": 0}, problem="another run", fix="Name it")


def test_values_are_compared_as_files_give_them_back() -> None:
    assert as_json_values({"betas": (0.9, 0.95), "out": Path("out")}) == {"betas": [0.9, 0.95], "out": "out"}


# --- saved results ---


@pytest.mark.parametrize(
    ("value", "read"), [({"error": 0.5}, {"error": 0.5}), ([], []), ({"ids": ((5, 6), (7,))}, {"ids": [[5, 6], [7]]})]
)
def test_a_saved_result_is_not_computed_again(tmp_path: Path, value: Any, read: Any) -> None:
    """It has the same types the first time and later: JSON has no tuples."""
    found = [saved_json(tmp_path / "work" / "one.json", iter([value]).__next__) for _ in range(2)]
    assert found == [read] * 2


def test_a_run_that_is_stopped_saves_nothing(tmp_path: Path) -> None:
    def stopped() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved_json(tmp_path / "one.json", stopped)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ['{"a": ', "", "\x00\x00"])
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    assert [saved_json(path, iter(["new"]).__next__) for _ in range(2)] == ["new"] * 2


def test_runs_that_differ_have_different_digests() -> None:
    identity = {"settings": {"sizes": [1, 2]}, "prompts": [[5, 6], [7]]}
    others: list[Any] = [{**identity, "prompts": [[5, 6, 7]]}, {**identity, "settings": {}}, {**identity, "model": "m"}]
    assert len({identity_digest(one) for one in [identity, *others]}) == 4
    assert identity_digest(identity) == identity_digest({**identity, "settings": {"sizes": (1, 2)}})
