"""What steps really cost: corrections of a cost profile by the time of each step.

Other programs come and go, and a profile may be from a busy minute. The corrections change how much is drafted, and so
are only for models whose texts do not depend on it: those whose passes give the same bits in any tree.
"""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_MEMORY = 0.85  # weight of what was known of a number of tokens when it is timed again
_SPEED_MEMORY = 0.95  # the same of the machine's speed
_FORGOTTEN = 256  # steps after which a number of tokens counts as never timed
_MOST_CHANGE = math.log(2.0)  # of one step: a pause of the machine is no cost
_MOST_FACTOR = math.log(8.0)
_FIRST_TRIAL, _LAST_TRIAL = 32, 1024  # steps after which what is not done is tried


class StepClock:
    """Compares expected and measured milliseconds, by the number of tokens that are verified.

    All costs rise and fall with the machine's speed, so that alone changes no choice. What is not done, drafting or
    plain decoding, is tried now and then: after 32 steps, and half as often each time that it was not better.
    """

    def __init__(self) -> None:
        self._speed: float | None = None  # logarithm of measured / expected
        self._verifying: dict[int, tuple[float, int]] = {}  # the same beyond the speed, and when it was timed last
        self._drafting: float | None = None
        self._steps = 0
        self._side: bool | None = None  # whether the last steps had drafts
        self._steps_on_side, self._trial_after = 0, _FIRST_TRIAL

    def note(
        self, tokens: int, verifying: tuple[float, float], drafting: tuple[float, float] | None, *, is_trial: bool
    ) -> None:
        """A step was made.

        Args:
            tokens: that were verified, of all rows.
            verifying: expected and measured milliseconds of all but drafting.
            drafting: the same of drafting; None: nothing was drafted.
            is_trial: whether it was tried, and not chosen.
        """
        self._steps += 1
        found = math.log(max(1e-3, verifying[1]) / max(1e-3, verifying[0]))
        if self._speed is None:
            self._speed = found
        place = _place(tokens)
        known, last = self._verifying.get(place, (0.0, -_FORGOTTEN))
        is_new = self._steps - last >= _FORGOTTEN
        change = found - self._speed - known
        if not is_new:
            change = max(-_MOST_CHANGE, min(_MOST_CHANGE, change))
        known += change if is_new else (1.0 - _MEMORY) * change
        self._verifying[place] = max(-_MOST_FACTOR, min(_MOST_FACTOR, known)), self._steps
        if not is_new:
            self._speed += (1.0 - _SPEED_MEMORY) * change
        if drafting is not None and drafting[0] > 0.0:
            found = math.log(max(1e-3, drafting[1]) / drafting[0]) - self._speed
            found = max(-_MOST_FACTOR, min(_MOST_FACTOR, found))
            old = self._drafting
            self._drafting = found if old is None else old + (1.0 - _MEMORY) * (found - old)
        self._note_side(is_drafting=drafting is not None, is_trial=is_trial)

    def _note_side(self, *, is_drafting: bool, is_trial: bool) -> None:
        if is_trial:
            self._steps_on_side = 0
            self._trial_after = min(_LAST_TRIAL, 2 * self._trial_after)
        elif is_drafting != self._side:  # it was chosen
            self._side, self._steps_on_side, self._trial_after = is_drafting, 0, _FIRST_TRIAL
        else:
            self._steps_on_side += 1

    @property
    def wants_trial(self) -> bool:
        """Whether it is time to try what is not done: a draft, or a step without one."""
        return self._steps_on_side >= self._trial_after

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


def _place(tokens: int) -> int:
    """Numbers of tokens that count as one: 1, 2, 3 to 5, 6 to 11, 12 to 22, and so on.

    >>> [_place(tokens) for tokens in (1, 2, 3, 5, 6, 11, 12)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return round(math.log2(tokens))
