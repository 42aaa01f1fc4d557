"""README.md and the manual are short, what they link to and install exists. tests/test_pages.py runs their commands."""

import re
import tomllib
from pathlib import Path

import pytest

from draftheads.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_and_manual_are_short():
    assert len(README.splitlines()) < 130
    pages = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
    assert len(pages) <= 36
    assert [name for name, text in pages.items() if len(text.splitlines()) > 80] == []


@pytest.mark.parametrize("place", ["*.md", "docs/**/*.md", "packages/*/README.md", "zoo/*.md", "research/*.md"])
def test_links_lead_to_files(place: str):
    """In the repository, as its readers see it; mkdocs checks links of the built manual, and their places in pages."""
    for page in sorted(ROOT.glob(place)):
        code = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", code.sub("", page.read_text(encoding="utf-8")))
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/models.md", "docs/results/heads.md"])
def test_pages_say_on_what_we_and_the_papers_measured(page: str):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("\n> ", " ").split())
    assert re.search(r"none on a GPU|nothing was run on a GPU", text)
    assert re.search(r"SmolLM2-135M|135 million parameters", text)
    assert re.search(r"papers measured? [^.]*7 to 33 billion[^.]* A100 GPUs", text)


def test_the_extras_that_the_readme_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = README.split("| extra | for |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z]+)`", " ".join(row.split("|")[1] for row in table.splitlines() if "|" in row)))
    assert {"demo", "serve", "lora", "docs"} <= named <= set(extras)


def test_the_readme_shows_what_info_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """In a checkout, which has all heads."""
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["info"]) == 0
    assert f"$ draftheads info\n{capsys.readouterr().out}```" in README
