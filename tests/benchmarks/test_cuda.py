"""The CUDA benchmark: its parts run on a CPU, too, and it says where there is nothing to measure."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cuda

from families import tiny_model

SMALL = cuda.Options(device="cpu", nodes=(1, 3), lengths=(16,), repeats=1, hidden_size=128, num_layers=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.main(cuda.Options()) == 1
    assert "no CUDA device" in capsys.readouterr().out


def test_static_steps_are_compared_with_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_target", lambda *_, **__: tiny_model("llama", max_position_embeddings=512))
    *steps, texts = cuda.check(SMALL, cuda.Clock(1.0))
    assert [step["nodes"] for step in steps] == [1, 3]
    assert 0 < max(step["largest difference"] for step in steps) < 1e-4
    assert texts == {"greedy texts equal": True, "failure": None}


def test_what_there_is_no_time_for_is_listed() -> None:
    clock = cuda.Clock(1.0)
    (first, second) = cuda.verification(SMALL, clock)
    assert (first["nodes"], second["nodes"], clock.left_out) == (1, 3, [])
    assert first["captured, ms"] > 0
    late = cuda.Clock(0.0)
    assert cuda.verification(SMALL, late) == []
    assert late.left_out == ["verification of 1 nodes at 16 tokens", "verification of 3 nodes at 16 tokens"]


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    late = cuda.Options(device="cpu", minutes=0.0)
    assert cuda.main(late) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["left_out"]) == 4
