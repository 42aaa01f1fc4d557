"""What a trained head's tokens per step mean, in one sentence. Imports nothing that is slow to import."""

from collections.abc import Mapping
from typing import Any

from draftheads.utils.counts import counted

LITTLE = 1.15  # below it, a step saves less time than verifying a small tree costs
GOOD = 1.8  # the weakest bundled head has 1.91 with a tree of 10 nodes
_MANY_STEPS = 1000  # after so many steps without success, more of the same will not help
_FEW_TEXTS, _FEW_TOKENS = 16, 1000  # of held-out texts; below them, other texts may give quite another number
_ALIKE = 0.3  # of the runs of 8 tokens; 0.1 is usual, and 0.3 to 0.9 if every 12th to 20th word differs


def verdict_of(metrics: Mapping[str, Any]) -> str:
    """One sentence on what a run's tokens per step mean, and what to do next, from the values of ``metrics.json``.

    Plain decoding makes 1 token per step. In our measurements, each doubling of the text adds about 0.1.
    """
    tokens_per_step = round(metrics["tokens_per_step_tree"], 2)  # the class is of the number that is shown
    measured = f"{tokens_per_step:.2f} tokens per step on held-out text (plain decoding: 1)"
    doubts = _doubts(metrics["num_held_out_texts"], metrics["num_held_out_tokens"], metrics["share_in_other_texts"])
    if tokens_per_step >= LITTLE and doubts:
        fix = "train on more and more varied text, and measure with `draftheads bench` on your own prompts"
        return f"{measured}, but {' and '.join(doubts)}, so other texts may give far less: {fix}"
    if tokens_per_step >= GOOD:
        return f"{measured}: good; `draftheads bench` measures the speed"
    if tokens_per_step >= LITTLE:
        return f"{measured}: a start; each doubling of the text adds about 0.1 (`draftheads distill` makes more)"
    if metrics["num_steps"] >= _MANY_STEPS:
        return (
            f"{measured}: the heads have learned almost nothing in {counted(metrics['num_steps'], 'step')}; look at "
            "the learned tokens with `draftheads show-batch`, and try another --learning-rate"
        )
    return (
        f"{measured}: the heads have learned almost nothing; train on more text (`draftheads distill` makes it from "
        "prompts) or with more --epochs"
    )


def _doubts(num_texts: int, num_tokens: int, share: float | None) -> list[str]:
    """Why the held-out texts say little about others; ``share`` of their answers is in other texts, too."""
    doubts = []
    if num_texts < _FEW_TEXTS or num_tokens < _FEW_TOKENS:
        tokens = f" with {counted(num_tokens, 'answer token')}"
        doubts.append(f"there {'is' if num_texts == 1 else 'are'} only {counted(num_texts, 'held-out text')}{tokens}")
    if share is not None and share >= _ALIKE:
        doubts.append(f"{share:.0%} of the held-out answers is in other texts, too")
    return doubts
