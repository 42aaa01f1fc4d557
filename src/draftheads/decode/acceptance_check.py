"""Whether a head's draft tokens are accepted about as often as its profile expects. Said once for an engine.

A tuned copy of the base model can differ little in its weights and still accept half as many draft tokens, and a head
whose layers were read wrongly has none accepted. Steps in which a copy from the text was accepted are not counted, and
neither are requests with other settings than the profile's.
"""

import warnings
from collections import deque
from dataclasses import dataclass, field

from draftheads.errors import BaseModelWarning
from draftheads.utils.counts import counted

_STEPS = 500  # the last ones, of all rows
# accepted draft tokens for each expected one; measured, see "Heads of tuned copies" in research/LOG.md
_LOW = 0.5
_LEAST_EXPECTED = 50.0  # draft tokens: texts differ much, and the steps of one text are alike


@dataclass
class AcceptanceCheck:
    """The last steps with drafts of one head for one model."""

    method: str  # of the head
    head: str  # its name
    model: str  # its name
    is_assumed: bool = False  # whether the profile is that of a head that nobody has measured
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS), init=False)
    is_said: bool = field(default=False, init=False)

    def note(self, accepted: int, expected: float) -> None:
        """A row's step: how many draft tokens of the head were accepted, and how many the profile expects."""
        self.steps.append((accepted, expected))

    def problem(self) -> str | None:
        """What is wrong, the first time that it is asked; None if nothing is."""
        if self.is_said or not self.steps:
            return None
        accepted, expected = map(sum, zip(*self.steps, strict=True))
        if expected < _LEAST_EXPECTED or accepted >= _LOW * expected:
            return None
        self.is_said = True
        steps = counted(len(self.steps), "step")
        measured, usual = (1 + count / len(self.steps) for count in (accepted, expected))
        whose = "a head is assumed to give" if self.is_assumed else "its acceptance profile expects"
        return (
            f"{self.head} gives {measured:.2f} tokens per step with {self.model}, and {whose} {usual:.2f} (the last "
            f"{steps}, without copies): the model or these texts differ from those that it was trained "
            f"for. Train it further: `draftheads train --method {self.method} --start-from {self.head} --model "
            f"{self.model} --data … --out …`"
        )

    def warn(self) -> None:
        """Says once what is wrong. To be called between answers: a warning may be an error.

        Warns:
            BaseModelWarning: far fewer draft tokens are accepted than expected.
        """
        if (problem := self.problem()) is not None:
            warnings.warn(problem, BaseModelWarning, stacklevel=3)
