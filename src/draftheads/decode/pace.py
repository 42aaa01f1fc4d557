"""How much to guess at this step: from what was tuned, from the rows at work, and from how it has gone so far.

The number of nodes n is the one that promises most tokens per second, none at all where that is plain decoding. What a
tree of n nodes brings was measured when the head was tuned, and so was what a step costs; while decoding both are
corrected: by row, how many guesses were kept of those expected; by size of step, how long it took. Where trees grow at
each step, the head's own confidence says what this very tree brings, and a guess is checked as long as it promises more
tokens than its seconds bring elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftheads.draft import Context, Draft, Drafter
from draftheads.growth import Shape
from draftheads.plan import Kind, Tuned
from draftheads.tree import Tree

Floats = npt.NDArray[np.float64]

_PRIOR_GUESSES = 4.0  # kept guesses that "as expected" weighs as much as
_MEMORY = 0.95  # of a row's guesses, per step: the last twenty steps count
_FORGETTING = 0.98  # the same in steps without guesses, so that a row that was left alone is tried again
_SMALLEST_GAIN = 1.02  # over plain decoding, or none is drafted
_SPEED_WEIGHT = 0.1  # of a new step in how fast this machine is against the tuned one
_CORRECTION_WEIGHT = 0.1  # of a new step in what steps of its size take against others
_PLAIN_EVERY = 128  # steps: then one without guesses, to know what it takes by now
_PLAIN = Tree.chain(0)


class ShapedDrafter(Drafter, Protocol):
    """A drafter that can be told what to fill."""

    shape: Shape


@dataclass
class _Row:
    """What came of a row's guesses lately."""

    kept: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """Guesses kept for each that was expected."""
        return (_PRIOR_GUESSES + self.kept) / (_PRIOR_GUESSES + self.expected)

    def note(self, kept: float, expected: float) -> None:
        memory = _MEMORY if expected else _FORGETTING
        self.kept = memory * self.kept + kept
        self.expected = memory * self.expected + expected


@dataclass(frozen=True)
class _Outlook:
    """For trees of 1, 2, … nodes at a batch size."""

    kind: Kind
    gains: Floats  # expected guesses kept, per row and step
    seconds: Floats  # of a step, as tuned


class Pace:
    """A drafter that decides for another one what it fills at each step.

    With ``adaptive`` off it follows the plan's choices by the number of rows alone, so that the same requests always
    meet the same trees.
    """

    def __init__(self, drafter: ShapedDrafter, tuned: Tuned, *, adaptive: bool = True) -> None:
        self.drafter = drafter
        self.tuned = tuned
        self.adaptive = adaptive
        self._rows: list[_Row] = []
        self._outlooks: dict[int, _Outlook] = {}
        self._speed = 1.0  # seconds here for each tuned one
        self._corrections: dict[tuple[int, int], float] = {}  # by powers of two of rows and nodes
        self._since_plain = 0
        self._expected: Sequence[float] = ()  # of this step's guesses, per row
        self._nodes = 1  # of this step

    @property
    def needs_history(self) -> bool:
        """As the drafter's."""
        return self.drafter.needs_history

    def propose(self, context: Context) -> Draft:
        """The drafter's guesses, as many as pay, or the root alone."""
        batch = len(context.root_ids)
        self._rows += [_Row() for _ in range(batch - len(self._rows))]
        draft = self._planned(context) if self.adaptive else self._as_tuned(context)
        if draft is None:
            self.drafter.follow(context)
            draft = Draft.on_tree(_PLAIN, context.root_ids[:, None])
            self._expected = (0.0,) * batch
        self._nodes = draft.num_nodes
        return draft

    def follow(self, context: Context) -> None:
        """As the drafter does."""
        self.drafter.follow(context)

    def keep(self, rows: Tensor) -> None:
        """Rows left or moved."""
        self._rows = [self._rows[row] for row in rows.tolist()]
        self.drafter.keep(rows)

    def note(self, num_kept: Sequence[int], seconds: float) -> None:
        """How the last step went: guesses kept per row, and how long it took."""
        for row, kept, expected in zip(self._rows, num_kept, self._expected, strict=True):
            row.note(kept, expected)
        batch, nodes = len(num_kept), self._nodes
        outlook = self._outlook(batch)
        tuned = float(outlook.seconds[min(nodes, len(outlook.seconds)) - 1])
        ratio = min(max(seconds / tuned, 0.1), 10.0)  # a hiccup must not count as a trend
        size = _size(batch, nodes)
        correction = self._corrections.get(size, 1.0)
        self._corrections[size] = correction + _CORRECTION_WEIGHT * (ratio / self._speed - correction)
        self._speed += _SPEED_WEIGHT * (ratio - self._speed)

    def _as_tuned(self, context: Context) -> Draft | None:
        choice = self.tuned.choice(len(context.root_ids))
        if choice.num_nodes == 1:
            return None
        self._expected = (0.0,) * len(context.root_ids)
        self.drafter.shape = self._shape(choice.kind, choice.num_nodes)
        return self.drafter.propose(context)

    def _planned(self, context: Context) -> Draft | None:
        batch = len(context.root_ids)
        outlook = self._outlook(batch)
        factors = np.array([row.factor for row in self._rows])
        seconds = outlook.seconds * self._correction(batch, len(outlook.seconds)) * self._speed
        rates = (batch + factors.sum() * outlook.gains) / seconds
        best = int(rates.argmax()) + 1
        self._since_plain += 1
        if rates[best - 1] < _SMALLEST_GAIN * rates[0] or self._since_plain > _PLAIN_EVERY:
            self._since_plain = 0
            return None
        if outlook.kind == "static":
            self.drafter.shape = self._shape("static", best)
            self._expected = (factors * 0 + outlook.gains[best - 1]).tolist()
            return self.drafter.propose(context)
        budget = min(2 * best, len(rates))
        self.drafter.shape = self._shape("dynamic", budget)
        draft = self.drafter.propose(context)
        assert draft.path_log_probs is not None, "grown trees come with their probabilities"
        likely = draft.path_log_probs.exp().double().cpu().numpy()  # (B, N), 1 for the root
        promised = (factors @ likely).cumsum()
        nodes = int((promised - rates[best - 1] * seconds[: len(promised)]).argmax()) + 1
        self._expected = (likely[:, :nodes].sum(1) - 1.0).tolist()
        return draft.first(nodes)

    def _outlook(self, batch: int) -> _Outlook:
        """By measured steps, as far as they go."""
        if batch not in self._outlooks:
            kind = self.tuned.choice(batch).kind
            if kind == "none":  # if ever any is drafted here, it is what pays elsewhere
                kind = next((c.kind for c in reversed(self.tuned.choices) if c.kind != "none"), "static")
            count = min(len(self.tuned.tokens(kind)), max([1, *self.tuned.sizes(kind)]))
            gains = np.array(self.tuned.tokens(kind)[:count]) - 1.0
            seconds = np.array([self.tuned.seconds(kind, batch, nodes) for nodes in range(1, count + 1)])
            self._outlooks[batch] = _Outlook(kind, gains, seconds)
        return self._outlooks[batch]

    def _correction(self, batch: int, count: int) -> Floats:
        """What steps of 1, 2, … nodes take against what was tuned, the machine's speed aside."""
        return np.array([self._corrections.get(_size(batch, nodes), 1.0) for nodes in range(1, count + 1)])

    def _shape(self, kind: Kind, num_nodes: int) -> Shape:
        return self.tuned.growing(num_nodes) if kind == "dynamic" else self.tuned.tree(num_nodes)


def _size(batch: int, nodes: int) -> tuple[int, int]:
    """Steps that are alike.

    >>> _size(3, 8) == _size(2, 15), _size(3, 8) == _size(3, 1)
    (True, False)
    """
    return batch.bit_length(), nodes.bit_length()
