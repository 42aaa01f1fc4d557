"""The commands of README.md run: on a tiny model where they name the user's, on the real model where they name it."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from draftheads.cli.main import main
from families import saved_model
from serve_process import ServerProcess
from training_world import chat_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL) for kind in ("bash", "python")}
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS["bash"] for line in block.splitlines() if line.strip()]


def test_readme_and_manual_are_short():
    assert len(README.splitlines()) < 130
    pages = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
    assert len(list(ROOT.glob("docs/**/*.md"))) <= 36
    assert [name for name, text in pages.items() if len(text.splitlines()) > 80] == []


@pytest.mark.parametrize("place", ["*.md", "docs/**/*.md", "packages/*/README.md", "zoo/*.md", "research/*.md"])
def test_links_lead_to_files(place: str):
    """In the repository, as its readers see it; mkdocs checks links of the built manual, and their places in pages."""
    for page in sorted(ROOT.glob(place)):
        code = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", code.sub("", page.read_text(encoding="utf-8")))
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


@pytest.mark.real
def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    """With shorter answers."""
    (block,) = BLOCKS["python"]
    for long, short in (("max_new_tokens=128", "max_new_tokens=16"), ("seed=1", "seed=1, max_new_tokens=48")):
        assert long in block
        block = block.replace(long, short)
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102 - our own page
    assert len(capsys.readouterr().out) > 100, "the streamed answer"


@pytest.mark.real
def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From questions to a head that serves; only a port is added."""
    monkeypatch.chdir(tmp_path)
    saved_model(chat_model(), tmp_path / "my-model")
    Path("questions.jsonl").write_text("".join(f'{{"prompt": "w{i}"}}\n' for i in range(24)), encoding="utf-8")
    *verbs, server = [shlex.split(line)[1:] for line in COMMANDS if line.startswith("draftheads ")]
    assert [words[0] for words in (*verbs, server)] == ["distill", "train", "generate", "serve"]
    for words in verbs:
        assert main(words) == 0
    assert (tmp_path / "my-head" / "model.safetensors").exists()
    with ServerProcess(tmp_path, *server[1:]) as process:
        assert process.client.get("/health").status_code == 200
        assert "<title>" in process.client.get("/").text


def test_what_the_readme_installs_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set()
    for line in COMMANDS:
        for place, names in re.findall(r"(?:^|\s)'?(\.(?:/[\w/]+)?)(?:\[([\w,]+)\])?'?(?=\s|$)", line):
            if line.startswith("pip install"):
                assert (ROOT / place / "pyproject.toml").exists(), line
                named |= set(filter(None, names.split(",")))
        if line.startswith("make "):
            assert f"\n{line.split()[1]}:" in makefile
    table = README.split("| extra | for |")[1].split("\n\n")[0]
    named |= set(re.findall(r"`([a-z]+)`", " ".join(row.split("|")[1] for row in table.splitlines() if "|" in row)))
    assert {"demo", "serve", "lora", "docs"} <= named <= set(extras)
