"""What steps really cost: corrections of a cost profile by the time of each step.

Other programs come and go, and a profile may be from a busy minute. The corrections change how much is drafted, and so
are only for models whose texts do not depend on it: those whose passes give the same bits in any tree.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_MEMORY = 0.85  # weight of what was known of a number of tokens when it is timed again
_SPEED_MEMORY = 0.95  # the same of the machine's speed, and of tokens per millisecond
_TRIAL_MEMORY = 0.8  # the same at a trial: there are few of them
_FORGOTTEN = 256  # steps after which a number of tokens counts as never timed
_MOST_CHANGE = math.log(2.0)  # of one step: a pause of the machine is no cost
_MOST_FACTOR = math.log(8.0)
_FEW_STEPS = 8.0  # with a draft: fewer say little of the tokens that drafts gain
_TRIAL_SHARE = 0.01  # of the time may be lost by trying what is not done
_FIRST_TRIAL, _TRIAL_EVERY = 24, 8  # steps before a trial, and between two looks whether it is affordable
_GENERATION = 8  # steps
_MOST_FAILURES = 6  # each doubles what has to be saved for the next trial


@dataclass
class _Rate:
    """Of some rows with or without drafts; older steps have less weight."""

    tokens: float = 0.0
    milliseconds: float = 0.0
    steps: float = 0.0

    def note(self, tokens: int, milliseconds: float, memory: float) -> None:
        self.tokens = memory * self.tokens + tokens
        self.milliseconds = memory * self.milliseconds + milliseconds
        self.steps = memory * self.steps + 1.0


class StepClock:
    """Compares expected and measured milliseconds, by the number of tokens that are verified.

    All costs rise and fall with the machine's speed, so that alone changes no choice. Where drafts have made fewer
    tokens per millisecond than plain decoding, nothing is drafted. What is not done, drafting or plain decoding, is
    tried now and then: a hundredth of the time may be lost by that, and half as much after each trial that failed.
    """

    def __init__(self) -> None:
        self._speed: float | None = None  # logarithm of measured / expected
        self._verifying: dict[int, tuple[float, int]] = {}  # the same beyond the speed, and when it was timed last
        self._drafting: float | None = None
        self._rates: dict[tuple[int, bool], _Rate] = {}  # by rows, and whether there was a draft
        self._steps = 0
        self._side: bool | None = None  # whether the last steps had drafts
        self._steps_on_side, self._looked, self._saved, self._failures = 0, 0, 0.0, 0

    def note(
        self,
        tokens: int,
        verifying: tuple[float, float],
        drafting: tuple[float, float] | None,
        *,
        rows: int,
        gained: int,
        is_trial: bool,
    ) -> None:
        """A step was made.

        Args:
            tokens: that were verified, of all rows.
            verifying: expected and measured milliseconds of all but drafting.
            drafting: the same of drafting; None: nothing was drafted.
            rows: B.
            gained: new tokens, of all rows.
            is_trial: whether it was tried, and not chosen.
        """
        self._steps += 1
        found = _logarithm(*verifying)
        if self._speed is None:
            self._speed = found
        place = _place(tokens)
        known, last = self._verifying.get(place, (0.0, -_FORGOTTEN))
        is_new = self._steps - last >= _FORGOTTEN
        change = found - self._speed - known
        if not is_new:
            change = max(-_MOST_CHANGE, min(_MOST_CHANGE, change))
            self._speed += (1.0 - _SPEED_MEMORY) * change
        known += change if is_new else (1.0 - _MEMORY) * change
        self._verifying[place] = max(-_MOST_FACTOR, min(_MOST_FACTOR, known)), self._steps
        whole = verifying[1]
        if drafting is not None:
            whole += drafting[1]
            found = max(-_MOST_FACTOR, min(_MOST_FACTOR, _logarithm(*drafting) - self._speed))
            old = self._drafting
            self._drafting = found if old is None else old + (1.0 - _MEMORY) * (found - old)
        self._rates.setdefault((rows, drafting is not None), _Rate()).note(
            gained, whole, _TRIAL_MEMORY if is_trial else _SPEED_MEMORY
        )
        self._note_side(whole, is_drafting=drafting is not None, is_trial=is_trial)

    def _note_side(self, milliseconds: float, *, is_drafting: bool, is_trial: bool) -> None:
        if is_trial:
            self._steps_on_side, self._looked, self._saved = 0, 0, 0.0
            self._failures = min(_MOST_FAILURES, self._failures + 1)
        elif is_drafting != self._side:  # it was chosen
            self._side, self._steps_on_side, self._looked = is_drafting, 0, 0
            self._saved, self._failures = 0.0, 0
        else:
            self._steps_on_side += 1
            self._saved += _TRIAL_SHARE * milliseconds

    def is_worse(self, rows: int) -> bool:
        """Whether drafts made fewer tokens per millisecond than plain decoding, for so many rows."""
        drafted, plain = self._rates.get((rows, True)), self._rates.get((rows, False))
        if drafted is None or plain is None or drafted.steps < _FEW_STEPS:
            return False
        return drafted.tokens * plain.milliseconds < plain.tokens * drafted.milliseconds

    @property
    def generation(self) -> int:
        """Changes every few steps: corrections change slowly, and to use them takes time."""
        return self._steps // _GENERATION if self._steps > _GENERATION else -self._steps

    @property
    def may_try(self) -> bool:
        """Whether it is time to look if a trial is affordable."""
        return self._steps_on_side >= max(_FIRST_TRIAL, self._looked + _TRIAL_EVERY)

    def affords(self, milliseconds: float) -> bool:
        """Whether so many may be lost by a trial."""
        self._looked = self._steps_on_side
        return self._saved >= milliseconds * 2.0**self._failures

    def verifying(self, tokens: Floats) -> Floats:
        """Factors of the costs of verifying so many tokens: on lines between those that were timed."""
        if not self._verifying:
            return np.ones_like(tokens)
        places = sorted(self._verifying)
        known = [self._verifying[place][0] for place in places]
        factors: Floats = np.exp(np.interp(np.log2(tokens), places, known))
        return factors

    @property
    def drafting(self) -> float:
        """Factor of the cost of drafting."""
        return 1.0 if self._drafting is None else math.exp(self._drafting)


def _logarithm(expected: float, measured: float) -> float:
    return math.log(max(1e-3, measured) / max(1e-3, expected))


def _place(tokens: int) -> int:
    """Numbers of tokens that count as one: 1, 2, 3 to 5, 6 to 11, 12 to 22, and so on.

    >>> [_place(tokens) for tokens in (1, 2, 3, 5, 6, 11, 12)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return round(math.log2(tokens))
