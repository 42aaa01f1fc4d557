"""Options that messages, docstrings and the chat page name exist, and there are not too many."""

import re
from pathlib import Path

import pytest

import draftheads
from draftheads.cli.help import options_of as options_in
from draftheads.cli.main import COMMANDS, all_commands, main, options_of

# others: 10
MOST = {"train": 35, "generate": 25, "serve": 22, "chat": 15, "distill": 15, "bench": 22, "demo": 10, "tune": 11}
MOST_IN_ALL = 260
OF_OTHERS = {"help", "help-verbose", "version", "force-reinstall", "upgrade", "no-deps"}
CALL_OTHERS = {"export.py", "provenance.py"}  # files with options of other programs, as all in formats/


def test_every_option_that_is_named_exists():
    names = OF_OTHERS | {"tyro-print-completion", "config", "print-config"}
    for command in COMMANDS:
        every = options_in(*options_of(command))
        found = {option.name.replace("_", "-") for option in every}
        names |= found | {f"no-{name}" for name in found}
    unknown = dict[str, str]()
    for path in sorted(Path(draftheads.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".js", ".html") and path.name not in CALL_OTHERS and path.parent.name != "formats":
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])", text):
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
