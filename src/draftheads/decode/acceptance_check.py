"""Whether a head's draft tokens are accepted as often as its profile expects. Over the life of an engine, said once.

A tuned copy of the base model can differ little in its weights and still accept half as many draft tokens. Copies from
the text are not counted, and neither are requests with other settings than the profile's. Reads no clock.

Texts differ much, and the steps of one text are alike. So whole texts are compared, by a test that may look after each
of them (betting on a bounded mean, Waudby-Smith and Ramdas 2024): if texts accept on average at least half of what is
expected, ``against`` ever exceeds n with a probability of at most 1/n.
"""

import warnings
from dataclasses import dataclass

from draftheads.errors import BaseModelWarning
from draftheads.utils.counts import counted

# accepted draft tokens for each expected one; measured, see "Heads of tuned copies" in research/LOG.md
_LOW = 0.5
_BET = 1.8  # below 2: no text alone decides
_SURE = 100.0
_LEAST_EXPECTED = 4.0  # draft tokens: shorter texts are put together


@dataclass
class AcceptanceCheck:
    """Counts of one head with one model."""

    method: str  # of the head
    head: str  # its name
    model: str  # its name
    num_texts: int = 0  # that have ended
    num_steps: int = 0  # with a draft of the head, of all texts
    accepted: int = 0  # its draft tokens in them
    expected: float = 0.0  # of these, by the profile
    against: float = 1.0  # how many times likelier the texts are if the head does not fit
    short: tuple[int, float] = (0, 0.0)  # accepted and expected in texts that are too short to be compared alone
    is_said: bool = False

    def note(self, num_steps: int, accepted: int, expected: float) -> None:
        """A text has ended: its steps with a draft of the head, the accepted draft tokens and the expected ones."""
        self.num_texts += bool(num_steps)
        self.num_steps += num_steps
        self.accepted += accepted
        self.expected += expected
        accepted, expected = self.short[0] + accepted, self.short[1] + expected
        if expected >= _LEAST_EXPECTED:
            self.against *= 1.0 + _BET * (_LOW - min(1.0, accepted / expected))
            accepted, expected = 0, 0.0
        self.short = accepted, expected

    def problem(self) -> str | None:
        """What is wrong, the first time that it is asked; None if nothing is."""
        if self.is_said or self.against < _SURE:
            return None
        self.is_said = True
        measured, expected = (1 + count / self.num_steps for count in (self.accepted, self.expected))
        return (
            f"{self.head} gives {measured:.2f} tokens per step with {self.model}, and its acceptance profile expects "
            f"{expected:.2f} ({counted(self.num_texts, 'text')}, without copies): the model or these texts differ from "
            f"those that it was trained for. Train it further: `draftheads train --method {self.method} --start-from "
            f"{self.head} --model {self.model} --data … --out …`"
        )

    def warn(self) -> None:
        """Says once what is wrong. To be called between answers: a warning may be an error.

        Warns:
            BaseModelWarning: far fewer draft tokens are accepted than expected.
        """
        if (problem := self.problem()) is not None:
            warnings.warn(problem, BaseModelWarning, stacklevel=3)
