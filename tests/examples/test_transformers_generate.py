"""The script for transformers runs on a tiny model."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftheads.checkpoints.checkpoint import save_head
from families import tiny_head
from training_world import chat_model

SCRIPT = Path(__file__).parents[2] / "examples" / "transformers_generate.py"


def test_transformers_generate_prints_the_same_text(
    cheap_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = chat_model()
    tokenizer = target.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    target.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    base = replace(target, tokenizer=tokenizer)
    save_head(tiny_head("hydra", base), tmp_path / "head", base=base)
    options = ["--model", str(tmp_path / "model"), "--head", str(tmp_path / "head"), "--max-new-tokens", "12"]
    monkeypatch.setattr(sys, "argv", ["transformers_generate.py", *options])
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    with torch.random.fork_rng():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count(" places in ") == 2
    assert out.endswith("the same text as generate: True\n")
