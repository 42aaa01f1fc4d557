"""ARCHITECTURE.md describes the code as it is: its files exist, and its floors are those that import-linter checks."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "ARCHITECTURE.md", *sorted(ROOT.glob("docs/**/*.md"))]
}
MADE_BY_COMMANDS = {
    *("answers/", "costs/", "profiles/", "README.md", "bench.md"),
    *("judge_prompts.jsonl", "answers.jsonl", "table.md"),
}
FILE = re.compile(r"`([\w/.-]+(?:\.(?:py|toml|md|jsonl)|/))`")


def test_the_floors_are_those_of_import_linter():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = config["tool"]["importlinter"]["contracts"][0]
    checked = [set(re.findall(r"\w+", layer)) - {"__main__"} for layer in contract["layers"]]
    block = TEXT.split("### Floors")[1].split("```")[1]
    shown = [set(re.findall(r"\w+", re.split(r"\s{3,}", line)[0])) for line in block.strip().splitlines()]
    assert shown == [layer for layer in checked if layer]


def test_every_script_has_strict_types():
    """Of tests, mypy checks less."""
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    strict = mypy["overrides"][1]["module"]
    places = ("benchmarks/*.py", "benchmarks/workers/*.py", "examples/*.py", "examples/custom_head/*.py", "tools/*.py")
    scripts = {path.stem for place in places for path in ROOT.glob(place)} | {"hatch_build"}
    packages = {f"{path.parent.name}.*" for path in ROOT.glob("packages/*/src/*/__init__.py")} | {"draftheads.*"}
    assert {name if name.endswith("*") else name.rpartition(".")[2] for name in strict} == scripts | packages


@pytest.mark.parametrize("page", PAGES)
def test_every_file_in_a_page_exists(page: str):
    places = (ROOT, ROOT / "src" / "draftheads", ROOT / "docs")
    files = {name for name in FILE.findall(PAGES[page]) if name not in MADE_BY_COMMANDS}
    assert [name for name in sorted(files) if not any((place / name).exists() for place in places)] == []
