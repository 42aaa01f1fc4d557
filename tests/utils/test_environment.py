"""Environment variables are read in one class, which the manual shows as a table."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from draftheads.utils.environment import NAMES, Environment

ROOT = Path(__file__).parents[2]


def test_the_manual_has_all_variables():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([A-Z_]+)` \| (.+) \|$", page, re.MULTILINE)
    assert shown == [(each.metadata["name"], each.metadata["meaning"]) for each in fields(Environment)]
    build = (ROOT / "hatch_build.py").read_text(encoding="utf-8")
    assert all(f"`{name}" in page for name in re.findall(r'environ\.get\("(\w+)"', build))


def test_no_other_file_reads_the_environment():
    files = (ROOT / "src" / "draftheads").rglob("*.py")
    readers = {path.name for path in files if re.search(r"\bos\.(environ|getenv)", path.read_text(encoding="utf-8"))}
    assert readers - {"endpoint.py"} == {"environment.py"}, "a server's key is in a variable that the user names"


def test_values_are_those_of_this_moment(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    assert (Environment().cache, Environment().num_processes) == (None, 1)
    monkeypatch.setenv("DRAFTHEADS_CACHE", "here")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (Environment().cache, Environment().num_processes, Environment().gpus) == ("here", 4, "")
