"""How much to guess at this step: from what was tuned, from the rows at work, and from how it has gone so far.

The number of nodes n is the one that promises most tokens per second, none at all where that is plain decoding. What a
tree of n nodes brings was measured when the head was tuned, and so was what a step costs; while decoding both are
corrected: by row, how many guesses were kept of those expected; by size of step, how long it took. As only what is
done is seen, a step without guesses is tried now and then among those with, and one with guesses among those without.
Where trees grow at each step, the head's own confidence says what this very tree brings, and a guess is checked as long
as it promises more tokens than its seconds bring elsewhere.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftheads.draft import Context, Draft, Drafter
from draftheads.growth import Shape
from draftheads.plan import Kind, Tuned
from draftheads.tree import Tree

Floats = npt.NDArray[np.float64]

_OWN_PRIOR = 8.0  # expected guesses that "as in all rows so far" weighs as much as, in a row's record
_OWN_MEMORY = 0.98  # of a row's guesses, per step: the last fifty steps count
_COMMON_PRIOR = 2.0  # the same of "as tuned" in the record of all rows
_COMMON_MEMORY = 0.995
_FORGETTING = 0.997  # of both in steps without guesses, so that rows that were left alone are tried again
_SMALLEST_GAIN = 1.02  # over plain decoding, or none is drafted
_WEIGHT = 0.1  # of a new step in what steps of its size take; the first ones weigh more
_FADING = 0.01  # per step: of how the cost of other trees differed from its own
_TRY_AFTER = 16  # steps with guesses: then one without, to know what it takes; and the other way round
_TRY_EVERY = 128  # steps at most, when each try has doubled the wait
_WORTH_A_TRY = 0.7  # of plain decoding's speed; guesses that promise less are not tried
_BEHIND_CHOICE = 1.01  # what was found fastest on whole answers is so much faster than others, at least
_CHANGE_OF_SIZE = 1.1  # how much faster another size must promise to be where a change costs
_NUM_SIZES = 16  # powers of two of nodes
_PLAIN = Tree.chain(0)


class ShapedDrafter(Drafter, Protocol):
    """A drafter that can be told what to fill."""

    shape: Shape


@dataclass
class _Record:
    """What came of guesses lately."""

    kept: float = 0.0
    expected: float = 0.0

    def factor(self, prior: float, weight: float) -> float:
        """Guesses kept for each that was expected; at first the prior, which weighs as much as some guesses."""
        return (weight * prior + self.kept) / (weight + self.expected)

    def note(self, kept: float, expected: float, memory: float) -> None:
        memory = memory if expected else _FORGETTING
        self.kept = memory * self.kept + kept
        self.expected = memory * self.expected + expected


class _Timings:
    """Seconds for each tuned one, by size of step (powers of two of nodes), of steps with about as many rows."""

    def __init__(self, ratios: dict[int, float]) -> None:
        self.ratios = ratios
        self.counts: Counter[int] = Counter()
        self.since_plain: list[int] = []  # sizes of the steps since the last one without guesses
        self.plain_steps = 0  # since the last one with guesses
        self.tries = 0  # steps with guesses after many without

    def by_size(self) -> Floats:
        """The ratios of all sizes; where there were no such steps, hopefully, the lower one of their neighbours."""
        if not self.ratios:
            return np.ones(_NUM_SIZES)
        known, sizes = sorted(self.ratios), np.arange(_NUM_SIZES)
        ratios = np.array([self.ratios[size] for size in known])
        above = ratios[np.searchsorted(known, sizes).clip(max=len(known) - 1)]
        below = ratios[(np.searchsorted(known, sizes, side="right") - 1).clip(min=0)]
        lower: Floats = np.minimum(above, below)
        return lower

    def is_due(self, *, plain: bool) -> bool:
        """Is it long ago that a step without guesses, or with them, was timed?"""
        steps, tries = (len(self.since_plain), self.counts[1]) if plain else (self.plain_steps, self.tries)
        return steps >= min(_TRY_EVERY, _TRY_AFTER << min(tries, 8))

    def note(self, nodes: int, ratio: float) -> None:
        """A step took so many times what was tuned."""
        size = nodes.bit_length()
        before = float(self.by_size()[size]) if self.ratios else ratio
        ratio = min(max(ratio, before / 2), before * 2)  # a hiccup must not count as a trend
        self.ratios[size] = before + max(_WEIGHT, 1 / (2 + self.counts[size])) * (ratio - before)
        self.counts[size] += 1
        others = set(self.ratios) - {1, size}
        if nodes > 1:
            self.since_plain.append(size)
            self.plain_steps = 0
        else:
            others -= set(self.since_plain)
            for other in others:  # the machine changes for all
                self.ratios[other] *= self.ratios[1] / before
            self.since_plain = []
            self.plain_steps += 1
        for other in others:  # nothing holds for ever
            self.ratios[other] += _FADING * (self.ratios[size] - self.ratios[other])


@dataclass(frozen=True)
class _Outlook:
    """For trees of 1, 2, … nodes at a batch size."""

    kind: Kind
    gains: Floats  # expected guesses kept, per row and step
    seconds: Floats  # of a step, as tuned
    drafting: Floats  # of that, what guessing takes
    sizes: npt.NDArray[np.int64]  # powers of two


@dataclass
class Experience:
    """What a pace learns that holds beyond its rows: one batch leaves it to the next."""

    guesses: _Record = field(default_factory=_Record)  # of a mean row
    sureness: _Record = field(default_factory=_Record)  # of growing trees: promised by the head of what was tuned
    timings: dict[int, _Timings] = field(default_factory=dict)  # by powers of two of rows


class Pace:
    """A drafter that decides for another one what it fills at each step.

    Args:
        drafter: what guesses.
        tuned: what is known of it.
        adaptive: off, the plan's choices are followed by the number of rows alone, so that equal requests meet equal
            trees.
        any_size: whether a step may have another size than the last one at no cost. Where weights are packed for each
            number of rows it may not: then a size is kept unless another one is clearly better.
        experience: of earlier batches; it grows.
    """

    def __init__(
        self,
        drafter: ShapedDrafter,
        tuned: Tuned,
        *,
        adaptive: bool = True,
        any_size: bool = True,
        experience: Experience | None = None,
    ) -> None:
        self.drafter = drafter
        self.tuned = tuned
        self.adaptive = adaptive
        self.any_size = any_size
        experience = experience or Experience()
        self._rows: list[_Record] = []
        self._all = experience.guesses
        self._sureness = experience.sureness
        self._outlooks: dict[int, _Outlook] = {}
        self._timings = experience.timings
        self._held: dict[int, int] = {}  # nodes, by rows, where a change of size costs
        self._expected: Sequence[float] = ()  # of this step's guesses, per row
        self._nodes = 1  # of this step; 0 where none of what was guessed is checked
        self._cost = 0.0  # seconds, as tuned

    def fresh(self) -> Self:
        """For other rows; what was learned beyond rows is shared."""
        experience = Experience(self._all, self._sureness, self._timings)
        options: dict[str, Any] = {"adaptive": self.adaptive, "any_size": self.any_size, "experience": experience}
        return type(self)(self.drafter.fresh(), self.tuned, **options)

    @property
    def needs_history(self) -> bool:
        """As the drafter's."""
        return self.drafter.needs_history

    def propose(self, context: Context) -> Draft:
        """The drafter's guesses, as many as pay, or the root alone."""
        batch = len(context.root_ids)
        self._rows += [_Record() for _ in range(batch - len(self._rows))]
        draft = self._planned(context) if self.adaptive else self._as_tuned(context)
        if draft is None:
            self.drafter.follow(context)
            draft = Draft.on_tree(_PLAIN, context.root_ids[:, None])
            self._expected = (0.0,) * batch
            self._nodes = 1
            self._cost = float(self._outlook(batch).seconds[0]) if self.adaptive else 0.0
            self._sureness.note(0.0, 0.0, _COMMON_MEMORY)
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
        if not self.adaptive:
            return
        batch = len(num_kept)
        for row, kept, expected in zip(self._rows, num_kept, self._expected, strict=True):
            row.note(kept, expected, _OWN_MEMORY)
        self._all.note(sum(num_kept) / batch, sum(self._expected) / batch, _COMMON_MEMORY)
        if self._nodes:
            self._timing(batch).note(self._nodes, seconds / self._cost)

    def _as_tuned(self, context: Context) -> Draft | None:
        choice = self.tuned.choice(len(context.root_ids))
        if choice.num_nodes == 1:
            return None
        self.drafter.shape = self._shape(choice.kind, choice.num_nodes)
        return self.drafter.propose(context)

    def _planned(self, context: Context) -> Draft | None:
        batch = len(context.root_ids)
        if not self.tuned.knows(batch):
            return None
        outlook, timings = self._outlook(batch), self._timing(batch)
        prior = self._all.factor(1.0, _COMMON_PRIOR)
        factors = np.array([row.factor(prior, _OWN_PRIOR) for row in self._rows])
        seconds = outlook.seconds * timings.by_size()[outlook.sizes]
        sureness = self._sureness.factor(1.0, _COMMON_PRIOR)
        rates = (batch + factors.sum() * sureness * outlook.gains) / seconds
        best = int(rates.argmax()) + 1
        if not self.any_size:
            held = self._held.get(batch, best)
            best = self._held[batch] = best if rates[best - 1] > _CHANGE_OF_SIZE * rates[held - 1] else held
        if rates[best - 1] < _SMALLEST_GAIN * rates[0]:
            best = int(rates[1:].argmax()) + 2 if len(rates) > 1 else 1
            if not timings.is_due(plain=False) or rates[best - 1] < _WORTH_A_TRY * rates[0]:
                return None
            timings.tries += 1
            timings.plain_steps = 0
        if best == 1 or timings.is_due(plain=True):
            return None
        if outlook.kind == "static":
            self.drafter.shape = self._shape("static", best)
            self._expected = (sureness * float(outlook.gains[best - 1]),) * batch
            self._nodes = best
            self._cost = float(outlook.seconds[best - 1])
            return self.drafter.propose(context)
        self.drafter.shape = self._shape("dynamic", best)
        draft = self.drafter.propose(context)
        assert draft.path_log_probs is not None, "grown trees come with their probabilities"
        likely = draft.path_log_probs.exp().double().cpu().numpy()  # (B, N), 1 for the root
        self._sureness.note(float(likely[:, 1:best].sum()) / batch, float(outlook.gains[best - 1]), _COMMON_MEMORY)
        promised = (factors @ likely).cumsum()
        checking = (outlook.seconds - outlook.drafting)[: len(promised)] * (seconds / outlook.seconds)[: len(promised)]
        worth = promised - rates[best - 1] * checking
        nodes = int(worth.argmax()) + 1 if self.any_size else len(promised)
        self._expected = (likely[:, :nodes].sum(1) - 1.0).tolist()
        self._nodes = nodes if nodes > 1 else 0
        self._cost = float(
            outlook.seconds[nodes - 1] - outlook.drafting[nodes - 1] + outlook.drafting[len(promised) - 1]
        )
        return draft.first(nodes)

    def _outlook(self, batch: int) -> _Outlook:
        """By measured steps, as far as they go."""
        if batch not in self._outlooks:
            choice = self.tuned.choice(batch)
            kind = choice.kind
            if kind == "none":  # if ever any is drafted here, it is what pays elsewhere
                kind = next((c.kind for c in reversed(self.tuned.choices) if c.kind != "none"), "static")
            count = min(len(self.tuned.tokens(kind)), max([1, *self.tuned.sizes(kind)]))
            gains = np.array(self.tuned.tokens(kind)[:count]) - 1.0
            seconds = np.array([self.tuned.seconds(kind, batch, nodes) for nodes in range(1, count + 1)])
            sizes = np.array([nodes.bit_length() for nodes in range(1, count + 1)])
            if 1 < choice.num_nodes <= count:  # whole answers said that none is faster than this one
                others = np.arange(1, count + 1) > 1
                others[choice.num_nodes - 1] = False
                fastest = (1.0 + gains[choice.num_nodes - 1]) / seconds[choice.num_nodes - 1]
                slower = _BEHIND_CHOICE * (1.0 + gains) / fastest
                seconds = np.where(others, np.maximum(seconds, slower), seconds)
            drafting = np.array([self.tuned.seconds(kind, batch, nodes, "draft") for nodes in range(1, count + 1)])
            self._outlooks[batch] = _Outlook(kind, gains, seconds, drafting, sizes)
        return self._outlooks[batch]

    def _timing(self, batch: int) -> _Timings:
        """Begins with what is known of the number of rows that is nearest."""
        size = batch.bit_length()
        if size not in self._timings:
            nearest = min(self._timings, key=lambda known: abs(known - size), default=None)
            self._timings[size] = _Timings({} if nearest is None else dict(self._timings[nearest].ratios))
        return self._timings[size]

    def _shape(self, kind: Kind, num_nodes: int) -> Shape:
        return self.tuned.growing(num_nodes) if kind == "dynamic" else self.tuned.tree(num_nodes)
