"""Sentences about tokens per step: the class of each value, and a fix that a pip user can reach."""

import re
import subprocess
import sys

import pytest

from draftheads.cli.main import COMMANDS
from draftheads.train.summary import training_verdict


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


@pytest.mark.parametrize(
    ("texts", "tokens", "share", "said"),
    [
        (
            4,
            300,
            0.1,
            "2.41 tokens per step on held-out text (plain decoding: 1), but there are only 4 held-out texts ",
        ),
        (1, 5000, None, "but there is only 1 held-out text with 5,000 answer tokens, so other texts may give far less"),
        (200, 999, 0.1, "but there are only 200 held-out texts with 999 answer tokens, so"),
        (15, None, None, "but there are only 15 held-out texts, so"),
        (200, 50_000, 0.93, "but 93% of the held-out answers is in other texts, too, so other texts may give far less"),
        (
            4,
            300,
            0.93,
            "only 4 held-out texts with 300 answer tokens and 93% of the held-out answers is in other texts",
        ),
    ],
)
def test_few_or_similar_held_out_texts_are_no_proof(
    texts: int | None, tokens: int | None, share: float | None, said: str
) -> None:
    facts = {"num_texts": texts, "num_tokens": tokens, "share_in_other_texts": share}
    verdict = training_verdict(2.41, **facts)
    assert said in verdict
    assert "good" not in verdict
    assert training_verdict(1.03, **facts) == training_verdict(1.03), "that it learned nothing needs no proof"


@pytest.mark.parametrize(("texts", "tokens", "share"), [(16, 1000, 0.29), (200, None, None), (None, None, None)])
def test_many_different_texts_are(texts: int | None, tokens: int | None, share: float | None) -> None:
    verdict = training_verdict(2.41, num_texts=texts, num_tokens=tokens, share_in_other_texts=share)
    assert verdict == training_verdict(2.41)


@pytest.mark.parametrize("value", [1.0, 1.2, 2.0, None])
@pytest.mark.parametrize("num_steps", [10, 10_000])
def test_it_names_commands_that_exist(value: float | None, num_steps: int) -> None:
    said = training_verdict(value, num_steps=num_steps)
    named = re.findall(r"`draftheads ([a-z-]+)", said)
    assert named
    assert set(named) <= COMMANDS.keys()


def test_it_needs_no_torch() -> None:
    code = "import sys, draftheads.train.summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
