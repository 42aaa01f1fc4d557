"""Sentences about tokens per step: the class of each value, and a fix that a pip user can reach."""

import re
import subprocess
import sys
from typing import Any

import pytest

from draftheads.cli.main import COMMANDS
from draftheads.train.summary import verdict_of


def verdict(
    tokens_per_step: float, *, steps: int = 10, texts: int = 200, tokens: int = 50_000, share: float | None = None
) -> str:
    metrics = {"tokens_per_step_tree": tokens_per_step, "num_steps": steps, "share_in_other_texts": share}
    return verdict_of({**metrics, "num_held_out_texts": texts, "num_held_out_tokens": tokens})


@pytest.mark.parametrize(
    ("tokens_per_step", "steps", "said"),
    [
        (1.03, 999, "1.03 tokens per step on held-out text (plain decoding: 1): the heads have learned almost nothing"),
        (1.14, 999, "almost nothing; train on more text"),
        (1.03, 1000, "almost nothing in 1,000 steps; look at the learned tokens"),
        (1.15, 10, "a start; each doubling of the text adds about 0.1"),
        (1.149, 10, "1.15 tokens per step on held-out text (plain decoding: 1): a start"),
        (1.79, 1000, "a start"),
        (1.8, 10, "good"),
        (2.41, 10, "2.41 tokens per step on held-out text (plain decoding: 1): good"),
    ],
)
def test_each_value_has_its_class(tokens_per_step: float, steps: int, said: str) -> None:
    assert said in verdict(tokens_per_step, steps=steps)


@pytest.mark.parametrize(
    ("texts", "tokens", "share", "said"),
    [
        (1, 5000, None, "but there is only 1 held-out text with 5,000 answer tokens, so other texts may give far less"),
        (15, 5000, 0.1, "but there are only 15 held-out texts with 5,000 answer tokens, so"),
        (200, 999, 0.1, "but there are only 200 held-out texts with 999 answer tokens, so"),
        (200, 50_000, 0.93, "but 93% of the held-out answers is in other texts, too, so other texts may give far less"),
        (4, 300, 0.3, "4 held-out texts with 300 answer tokens and 30% of the held-out answers is in other texts"),
    ],
)
def test_few_or_similar_held_out_texts_are_no_proof(texts: int, tokens: int, share: float | None, said: str) -> None:
    facts: dict[str, Any] = {"texts": texts, "tokens": tokens, "share": share}
    assert said in verdict(2.41, **facts)
    assert "good" not in verdict(2.41, **facts)
    assert verdict(1.03, **facts) == verdict(1.03), "that it learned nothing needs no proof"
    assert verdict(2.41, texts=16, tokens=1000, share=0.29) == verdict(2.41), "many different ones are"


@pytest.mark.parametrize("value", [1.0, 1.2, 2.0])
@pytest.mark.parametrize("steps", [10, 10_000])
def test_it_names_commands_that_exist(value: float, steps: int) -> None:
    said = verdict(value, steps=steps)
    named = re.findall(r"`draftheads ([a-z-]+)", said)
    assert named
    assert set(named) <= COMMANDS.keys()


def test_it_needs_no_torch() -> None:
    code = "import sys, draftheads.train.summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
