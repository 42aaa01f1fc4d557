"""``draftheads generate`` with a grammar."""

import json
from pathlib import Path

import pytest

from cli_world import Run
from draftheads.cli.main import main
from structured_world import PERSON, json_model

SCHEMA = json.dumps(PERSON)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a model with a tokenizer that spells JSON, and schemas."""
    model = json_model()
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "person.json").write_text(SCHEMA)
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("given", [SCHEMA, f"\n {SCHEMA}", "person.json"])
@pytest.mark.usefixtures("folder")
def test_json_of_a_schema(given: str, run: Run):
    answer = run(["generate", "name", "--model", "model", "--json-schema", given]).out
    assert list(json.loads(answer)) == ["name", "age", "tags"]


@pytest.mark.usefixtures("folder")
def test_a_regular_expression(run: Run):
    assert run(["generate", "name", "--model", "model", "--regex", "(yes|no)"]).out in ("yes\n", "no\n")


@pytest.mark.usefixtures("folder")
def test_any_json(run: Run):
    schema = ["--json-schema", '{"type": "object"}']
    assert run(["generate", "name", "--model", "model", *schema, "--max-new-tokens", "9"]).out.startswith("{")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json-schema", SCHEMA, "--regex", "a"], "--json-schema and --regex: give one of them"),
        (["--json-schema", "missing.json"], "--json-schema missing.json cannot be read: give a JSON schema or a file"),
        (["--json-schema", "bytes.json"], "--json-schema bytes.json cannot be read"),
        (["--json-schema", "half.json"], "the JSON schema is not JSON"),
        (["--json-schema", '{"type": "strin"}'], "the grammar cannot be used: Invalid type: strin"),
        (["--regex", "(a"], "the grammar cannot be used: "),
        (["--regex", ""], "the grammar allows no text"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors_are_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "name", "--model", "model", *options]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
