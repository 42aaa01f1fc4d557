"""What a trained head's tokens per step mean, in one sentence. Imports nothing that is slow to import."""

import math

from draftheads.counts import counted

LITTLE = 1.15  # below it, a step saves less time than verifying a small tree costs
GOOD = 1.8  # the weakest bundled head has 1.91 with a tree of 10 nodes
_MANY_STEPS = 1000  # after so many steps without success, more of the same will not help


def training_verdict(tokens_per_step: float | None, *, num_steps: int | None = None) -> str:
    """One sentence on what tokens per step mean, and what to do next.

    Plain decoding makes 1 token per step. Below 1.15 the heads have learned almost nothing. From 1.15 they are a start,
    and from 1.8 they are good. In our measurements, each doubling of the text adds about 0.1.

    Args:
        tokens_per_step: expected on held-out text; None or NaN if it was not measured.
        num_steps: training steps that the head had, if known. After 1,000 steps without success the settings are
            suspected, not the amount of text.

    >>> training_verdict(2.41)
    '2.41 tokens per step on held-out text (plain decoding: 1): good; `draftheads bench` measures the speed'
    """
    if tokens_per_step is None or math.isnan(tokens_per_step):
        return "tokens per step were not measured, because there is no held-out text: measure with `draftheads bench`"
    tokens_per_step = round(tokens_per_step, 2)  # the class is of the number that is shown
    measured = f"{tokens_per_step:.2f} tokens per step on held-out text (plain decoding: 1)"
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
