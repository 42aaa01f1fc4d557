"""Options that messages, docstrings, the chat page and the manual name exist, and there are not too many."""

import re
from pathlib import Path

import pytest

import draftheads
from draftheads.cli.help import options_of as options_in
from draftheads.cli.main import all_commands, main, options_of

ROOT = Path(__file__).parents[2]
# others: 10
MOST = {"train": 35, "generate": 25, "serve": 22, "chat": 15, "distill": 15, "bench": 22, "demo": 10, "tune": 12}
MOST_IN_ALL = 260
OF_OTHERS = {"help", "help-verbose", "version", "force-reinstall", "upgrade", "no-deps", "editable", "dataset"}
OF_OTHERS |= {"spec-type", "spec-draft-n-max", "tensor-parallel-size"}  # llama.cpp, vLLM; and SGLang
OF_OTHERS |= {"data-parallel-size", "dp-size", "tp-size", "parallel", "split-mode", "tensor-split", "node-rank"}
OF_OTHERS |= {"kv-transfer-config"}
OF_OTHERS |= {f"speculative-{name}" for name in ("algorithm", "config", "draft-model-path")}
CALL_OTHERS = {"export.py", "provenance.py"}  # files with options of other programs, as all in formats/


def test_every_option_that_is_named_exists():
    """In pages those of blocks are left out: tests/test_pages.py runs them."""
    names = OF_OTHERS | {"tyro-print-completion", "config", "print-config"}
    for command in all_commands():
        every = options_in(*options_of(command))
        found = {option.name.replace("_", "-") for option in every}
        names |= found | {f"no-{name}" for name in found}
    source = sorted(Path(draftheads.__file__).parent.rglob("*"))
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in (*source, ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        if path.suffix in (".py", ".js", ".html", ".md")
        and path.name not in CALL_OTHERS
        and path.parent.name != "formats"
    }
    unknown = dict[str, str]()
    for path, text in texts.items():
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL) if path.suffix == ".md" else text
        for name in re.findall(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])", prose):
            if name not in names:
                unknown.setdefault(name, path.name)
    assert unknown == {}


def test_commands_have_few_options():
    """Of the packages beside this one, too."""
    counts = {name: len(list(options_in(*options_of(name)))) for name in all_commands()}
    assert {name: count for name, count in counts.items() if count > MOST.get(name, 10)} == {}
    assert sum(counts.values()) <= MOST_IN_ALL


def test_help_of_train_fits_60_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["train", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 60
