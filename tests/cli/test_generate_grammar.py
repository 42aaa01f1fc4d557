"""``draftheads generate`` with a grammar."""

import json
from pathlib import Path

import pytest

from cli_world import Run
from families import saved_model
from structured_world import PERSON, json_model

SCHEMA = json.dumps(PERSON)


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a model with a tokenizer that spells JSON, and schemas."""
    saved_model(json_model(), tmp_path / "model")
    (tmp_path / "person.json").write_text(SCHEMA)
    (tmp_path / "half.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_answers_are_of_the_grammar(run: Run):
    for given in (f"\n {SCHEMA}", "person.json"):
        answer = run(["generate", "name", "--model", "model", "--json-schema", given]).out
        assert list(json.loads(answer)) == ["name", "age", "tags"]
    assert run(["generate", "name", "--model", "model", "--regex", "(yes|no)"]).out in ("yes\n", "no\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json-schema", SCHEMA, "--regex", "a"], "--json-schema and --regex: give one of them"),
        (["--json-schema", "missing.json"], "--json-schema missing.json cannot be read: give a JSON schema or a file"),
        (["--json-schema", "half.json"], "the JSON schema is not JSON"),
        (["--regex", "(a"], "the grammar cannot be used: "),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors_are_one_line(options: list[str], words: str, run: Run):
    out, err = run(["generate", "name", "--model", "model", *options], code=1)
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
