"""Sentences about tokens per step: the class of each value, and a fix that a pip user can reach."""

import re
import subprocess
import sys

import pytest

from draftheads.cli.main import COMMANDS
from draftheads.train.verdict import training_verdict


@pytest.mark.parametrize(
    ("tokens_per_step", "said"),
    [
        (1.03, "1.03 tokens per step on held-out text (plain decoding: 1): the heads have learned almost nothing"),
        (1.14, "almost nothing"),
        (1.15, "a start; each doubling of the text adds about 0.1"),
        (1.149, "1.15 tokens per step on held-out text (plain decoding: 1): a start"),
        (1.35, "1.35 tokens per step"),
        (1.79, "a start"),
        (1.8, "good"),
        (2.41, "2.41 tokens per step on held-out text (plain decoding: 1): good"),
        (float("nan"), "no held-out text"),
        (None, "no held-out text"),
    ],
)
def test_each_value_has_its_class(tokens_per_step: float | None, said: str) -> None:
    assert said in training_verdict(tokens_per_step)


def test_after_many_steps_the_settings_are_suspected() -> None:
    few, many = training_verdict(1.03, num_steps=999), training_verdict(1.03, num_steps=1000)
    assert "more text" in few
    assert "in 1,000 steps" in many
    assert "--learning-rate" in many
    assert "more text" not in many


@pytest.mark.parametrize("value", [1.0, 1.2, 2.0, None])
@pytest.mark.parametrize("num_steps", [10, 10_000])
def test_it_names_commands_that_exist(value: float | None, num_steps: int) -> None:
    said = training_verdict(value, num_steps=num_steps)
    named = re.findall(r"`draftheads ([a-z-]+)", said)
    assert named
    assert set(named) <= COMMANDS.keys()


def test_it_needs_no_torch() -> None:
    code = "import sys, draftheads.train.verdict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
