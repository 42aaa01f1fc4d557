"""Who learns when, and how much, in training heads and backbone together: numbers of a step, nothing else.

Steps are counted from 0. The first ``num_head_steps`` train the heads alone, the others both (Medusa 3.2.2).
"""

import math
from dataclasses import dataclass
from typing import Literal

from draftheads.train.schedule import rise_and_cosine


@dataclass(frozen=True)
class JointSchedule:
    """The stages of a run of ``num_steps`` steps."""

    num_steps: int
    num_head_steps: int  # of the first stage
    peak: float  # λ0
    rise: Literal["constant", "sine"]
    warmup: float  # part of a stage's steps in which a learning rate rises
    final: float = 0.0  # where a learning rate ends, as part of its highest

    def only_heads(self, step: int) -> bool:
        """Whether the backbone is frozen."""
        return step < self.num_head_steps

    def head_weight(self, step: int) -> float:
        """λ0 of a step: what the heads' loss weighs.

        In the first stage it scales the whole loss, which Adam does not notice; so its moments need not change
        at the second stage's start.

        >>> schedule = JointSchedule(num_steps=5, num_head_steps=2, peak=0.2, rise="sine", warmup=0.0)
        >>> [round(schedule.head_weight(step), 3) for step in range(5)]
        [0.2, 0.2, 0.1, 0.173, 0.2]
        """
        if self.rise == "constant" or self.only_heads(step):
            return self.peak
        part = (step + 1 - self.num_head_steps) / (self.num_steps - self.num_head_steps)
        return self.peak * math.sin(math.pi / 2 * part)

    def head_rate(self, step: int) -> float:
        """The heads' learning rate, as part of its highest: one rise and one cosine over the run."""
        return rise_and_cosine(step, self.num_steps, warmup=self.warmup, final=self.final)

    def backbone_rate(self, step: int) -> float:
        """The backbone's, likewise over the second stage; zero before."""
        if self.only_heads(step):
            return 0.0
        num_steps = self.num_steps - self.num_head_steps
        return rise_and_cosine(step - self.num_head_steps, num_steps, warmup=self.warmup, final=self.final)
