"""What a trained head's tokens per step mean, in one sentence. Imports nothing that is slow to import."""

import math
from collections.abc import Mapping
from typing import Any

from draftheads.utils.counts import counted

LITTLE = 1.15  # below it, a step saves less time than verifying a small tree costs
GOOD = 1.8  # the weakest bundled head has 1.91 with a tree of 10 nodes
_MANY_STEPS = 1000  # after so many steps without success, more of the same will not help
_FEW_TEXTS, _FEW_TOKENS = 16, 1000  # of held-out texts; below them, other texts may give quite another number
_ALIKE = 0.3  # of the runs of 8 tokens; 0.1 is usual, and 0.3 to 0.9 if every 12th to 20th word differs


def training_verdict(
    tokens_per_step: float | None,
    *,
    num_steps: int | None = None,
    num_texts: int | None = None,
    num_tokens: int | None = None,
    share_in_other_texts: float | None = None,
) -> str:
    """One sentence on what tokens per step mean, and what to do next.

    Plain decoding makes 1 token per step. Below 1.15 the heads have learned almost nothing. From 1.15 they are a start,
    and from 1.8 they are good. In our measurements, each doubling of the text adds about 0.1.

    Args:
        tokens_per_step: expected on held-out text; None or NaN if it was not measured.
        num_steps: training steps that the head had, if known. After 1,000 steps without success the settings are
            suspected, not the amount of text.
        num_texts: held-out texts, if known. If they are few or alike, good heads are not called good.
        num_tokens: tokens of their answers, if known.
        share_in_other_texts: share of their answers that is in other texts, too, if known.

    >>> training_verdict(2.41)
    '2.41 tokens per step on held-out text (plain decoding: 1): good; `draftheads bench` measures the speed'
    """
    if tokens_per_step is None or math.isnan(tokens_per_step):
        return "tokens per step were not measured, because there is no held-out text: measure with `draftheads bench`"
    tokens_per_step = round(tokens_per_step, 2)  # the class is of the number that is shown
    measured = f"{tokens_per_step:.2f} tokens per step on held-out text (plain decoding: 1)"
    doubts = _doubts(num_texts, num_tokens, share_in_other_texts)
    if tokens_per_step >= LITTLE and doubts:
        fix = "train on more and more varied text, and measure with `draftheads bench` on your own prompts"
        return f"{measured}, but {' and '.join(doubts)}, so other texts may give far less: {fix}"
    if tokens_per_step >= GOOD:
        return f"{measured}: good; `draftheads bench` measures the speed"
    if tokens_per_step >= LITTLE:
        return f"{measured}: a start; each doubling of the text adds about 0.1 (`draftheads distill` makes more)"
    if num_steps is not None and num_steps >= _MANY_STEPS:
        return (
            f"{measured}: the heads have learned almost nothing in {counted(num_steps, 'step')}; look at the learned "
            "tokens with `draftheads show-batch`, and try another --learning-rate"
        )
    return (
        f"{measured}: the heads have learned almost nothing; train on more text (`draftheads distill` makes it from "
        "prompts) or with more --epochs"
    )


def verdict_of(metrics: Mapping[str, Any]) -> str:
    """The sentence on a run from the values of its ``metrics.json``, of which earlier versions had fewer."""
    return training_verdict(
        metrics["tokens_per_step_tree"],
        num_steps=metrics["num_steps"],
        num_texts=metrics["num_held_out_texts"],
        num_tokens=metrics.get("num_held_out_tokens"),
        share_in_other_texts=metrics.get("share_in_other_texts"),
    )


def _doubts(num_texts: int | None, num_tokens: int | None, share: float | None) -> list[str]:
    """Why the held-out texts say little about others."""
    found = []
    if num_texts is not None and (num_texts < _FEW_TEXTS or (num_tokens or _FEW_TOKENS) < _FEW_TOKENS):
        tokens = f" with {counted(num_tokens, 'answer token')}" if num_tokens else ""
        found.append(f"there {'is' if num_texts == 1 else 'are'} only {counted(num_texts, 'held-out text')}{tokens}")
    if share is not None and share >= _ALIKE:
        found.append(f"{share:.0%} of the held-out answers is in other texts, too")
    return found
