"""Whether a head's draft tokens are accepted as often as its profile expects. Over the life of an engine, said once.

A tuned copy of the base model can differ little in its weights and still accept half as many draft tokens. Copies from
the text are not counted, and neither are requests with other settings than the profile's. Reads no clock.
"""

import warnings
from dataclasses import dataclass

from draftheads.errors import BaseModelWarning
from draftheads.utils.counts import counted

_MIN_TOKENS = 200  # of steps with a draft, before anything is said
# accepted draft tokens for each expected one; measured, see "Heads of tuned copies" in LOG.md
_LOW = 0.5


@dataclass
class AcceptanceCheck:
    """Counts of one head with one model."""

    method: str  # of the head
    head: str  # its name
    model: str  # its name
    num_steps: int = 0  # with a draft of the head, of all rows
    accepted: int = 0  # its draft tokens in them
    expected: float = 0.0  # of these, by the profile
    is_said: bool = False

    def note(self, num_rows: int, accepted: int, expected: float) -> None:
        """A step of so many rows: the head's accepted draft tokens of all of them, and the expected ones."""
        self.num_steps += num_rows
        self.accepted += accepted
        self.expected += expected

    def warn(self) -> None:
        """Says once what is wrong. To be called between answers, which may be shown as they are decoded.

        Warns:
            BaseModelWarning: far fewer draft tokens are accepted than expected.
        """
        num_tokens = self.num_steps + self.accepted
        if self.is_said or num_tokens < _MIN_TOKENS or self.accepted >= _LOW * self.expected:
            return
        self.is_said = True
        measured, expected = (1 + count / self.num_steps for count in (self.accepted, self.expected))
        warnings.warn(
            f"{self.head} gives {measured:.2f} tokens per step with {self.model}, and its acceptance profile expects "
            f"{expected:.2f} ({counted(num_tokens, 'token')}, without copies): the model or these texts differ from "
            f"those that it was trained for. Train it further: `draftheads train --method {self.method} --start-from "
            f"{self.head} --model {self.model} --data … --out …`",
            BaseModelWarning,
            stacklevel=2,
        )
