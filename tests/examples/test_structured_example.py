"""The example of docs/structured.md runs on a tiny model."""

import runpy
import sys
from pathlib import Path

import pytest

from draftheads.checkpoints.checkpoint import save_head
from families import tiny_head
from structured_world import json_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_structured_prints_json_and_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = json_model()
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    save_head(tiny_head("hydra", model), tmp_path / "head", base=model)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    options = ["structured.py", "--model", str(tmp_path / "model"), "--head", str(tmp_path / "head")]
    monkeypatch.setattr(sys, "argv", options)
    runpy.run_path(str(EXAMPLES / "structured.py"), run_name="__main__")
    facts, steps, choice = capsys.readouterr().out.splitlines()
    assert facts.startswith("{'name': '")
    assert steps.endswith("tokens per step, the same text: True")
    assert choice in ("yes", "no")
