"""``draftheads distill``: what it prints, and which options arrive."""

import json
from pathlib import Path

import pytest

from distill_world import options
from draftheads.cli.main import main
from draftheads.distill.local import EngineSource
from draftheads.distill.run import distill
from draftheads.loading import load
from fake_progress import FakeProgress
from families import saved_model
from training_world import chat_model


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chosen = options(tmp_path, temperature=(0.0, 0.0, 1.0), num_self_talk=3)
    saved_model(chat_model(seed=3), tmp_path / "model")
    out = tmp_path / "cli.jsonl"
    words = "--num-self-talk 3 --temperature 0 0 1 --max-new-tokens 12 --batch-size 4"
    command = f"distill --model {tmp_path}/model --prompts {chosen.prompts[0]} {words} --precision fp32".split()
    command += ["--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "answering 28 of 28 conversations" in printed
    engine = load(tmp_path / "model", precision="fp32", max_batch_size=4)
    distill(chosen, lambda: EngineSource(engine, chosen), FakeProgress())
    assert out.read_bytes() == chosen.out.read_bytes()
    assert main(command) == 0
    assert "was complete already" in capsys.readouterr().out
    assert main([*command, "--seed", "1"]) == 1
    assert "seed was 0 and is 1" in capsys.readouterr().err
    assert json.loads((tmp_path / "cli.jsonl.manifest.json").read_text())["options"]["precision"] == "fp32"
