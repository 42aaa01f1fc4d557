"""Identities of runs: differences are named, and a run does not continue another one."""

from pathlib import Path

import pytest

from draftheads.errors import InvalidSettings
from draftheads.utils.identity import as_json_values, changes, require_same


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
