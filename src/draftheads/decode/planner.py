"""How much to draft at a step: what gives most tokens per millisecond.

Tokens are those that the head's acceptance profile expects, times what the requests themselves accept of it;
milliseconds are measured costs, which follow the steps where no text depends on what is drafted. Nothing is drafted
where plain decoding is as fast. On a CPU a draft is then cut where a further node costs more than it gains.
"""

import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from draftheads.decode.step_costs import Floats, StepCosts
from draftheads.errors import BaseModelWarning
from draftheads.speculation.acceptance_profile import KINDS, AcceptanceProfile, Kind
from draftheads.speculation.draft import Draft
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Shape
from draftheads.utils.counts import counted

_PRIOR = 4.0  # pseudo-count of the profile in a request's acceptance, in expected draft tokens
_MEMORY, _FORGETTING = 0.99, 0.995  # weight of older draft tokens, per step with and without a draft
_SMALLEST_GAIN = 1.03  # over plain decoding, or nothing is drafted
_ALMOST_FREE = 1.05  # times the time of a pass without further nodes
# tokens that a further level gains, less what verifying them costs, per unit of the probability of the nodes that it
# extends; measured, see "Growing trees stop early" in research/LOG.md
LEVEL_GAIN = 0.3
_NEW, _OLD = 0.5, 0.15  # weight of a step in the costs: of a number of tokens not seen for a while, and of others
_SPEED, _DRIFT = 0.05, 0.993  # the same in the machine's speed; what is left per step of other numbers' corrections
_LONG_AGO = 64  # steps
_MOST_CHANGE = math.log(2.0)  # of one step: a pause of the machine is no cost
_LOOKS, _LOOK_EVERY = (16, 32), 128  # steps at which the other way, plain or drafting, is taken to see its time
_STEPS = 500  # of all rows that are compared with the profile, the last ones
# accepted draft tokens for each expected one; measured, see "Heads of tuned copies" in research/LOG.md
_LOW = 0.5
_USELESS, _LEAST_DRAFTS = 0.02, 20  # accepted draft tokens of a draft, and drafts, of a head that is useless
_LEAST_EXPECTED = 50.0  # draft tokens: texts differ much, and the steps of one text are alike


@dataclass
class AcceptanceCheck:
    """Whether a head's draft tokens are accepted about as often as its profile expects, by the last steps of an engine.

    A tuned copy of the base model can differ little in its weights and still accept half as many draft tokens, and a
    head whose layers were read wrongly has none accepted: this is said whatever the profile and the settings of the
    requests are. Of comparisons with the profile, steps in which a copy from the text was accepted are not a part, and
    neither are requests with other settings than the profile's.
    """

    method: str  # of the head
    head: str  # its name
    model: str  # its name
    is_assumed: bool = False  # whether the profile is that of a head that nobody has measured
    # of rows: how many draft tokens of the head were accepted, and how many the profile expects
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS), init=False)
    is_said: bool = field(default=False, init=False)

    num_steps: int = field(default=0, init=False)  # of rows, also without drafts
    drafts: deque[int] = field(default_factory=lambda: deque(maxlen=_STEPS), init=False)  # accepted tokens of each

    def note(self, accepted: Sequence[int], *, are_drafted: bool) -> None:
        """A step was made: how many draft tokens of the head each row accepted, and whether the head drafted."""
        self.num_steps += len(accepted)
        self.drafts.extend(accepted if are_drafted else ())

    @property
    def needs_draft(self) -> bool:
        """Whether so little was drafted yet that nothing would be known of the head after 500 steps."""
        return len(self.drafts) < min(_LEAST_DRAFTS, self.num_steps * _LEAST_DRAFTS / _STEPS)

    def problem(self) -> str | None:
        """What is wrong, the first time that it is asked; None if nothing is."""
        accepted, expected = map(sum, zip((0, 0.0), *self.steps, strict=True))
        is_low = expected >= _LEAST_EXPECTED and accepted < _LOW * expected
        is_useless = self.num_steps >= _STEPS and len(self.drafts) >= _LEAST_DRAFTS
        is_useless = is_useless and sum(self.drafts) <= _USELESS * len(self.drafts)
        if self.is_said or not (is_low or is_useless):
            return None
        self.is_said = True
        if is_low:
            measured, usual = (1 + count / len(self.steps) for count in (accepted, expected))
            whose = "a head is assumed to give" if self.is_assumed else "its acceptance profile expects"
            found = f"{measured:.2f} tokens per step with {self.model}, and {whose} {usual:.2f}"
            place = f"the last {counted(len(self.steps), 'step')}, without copies"
        else:
            found = f"{1 + sum(self.drafts) / len(self.drafts):.2f} tokens per step with {self.model}"
            place = f"its last {counted(len(self.drafts), 'draft')}"
        return (
            f"{self.head} gives {found} ({place}): the model or these texts differ from those that it was trained for, "
            "or its files name other layers of the model than it was trained on. Train it further: `draftheads train "
            f"--method {self.method} --start-from {self.head} --model {self.model} --data … --out …`"
        )

    def warn(self) -> None:
        """Says once what is wrong. To be called between answers: a warning may be an error.

        Warns:
            BaseModelWarning: far fewer draft tokens are accepted than expected.
        """
        if (problem := self.problem()) is not None:
            warnings.warn(problem, BaseModelWarning, stacklevel=3)


@dataclass(frozen=True)
class Way:
    """Trees of one kind and greatest depth; entry n-1 of each array is of n nodes."""

    kind: Kind
    depth: int
    gains: Floats  # expected draft tokens that are accepted, per row
    levels: Sequence[int]


def rates(ways: Sequence[Way], rows: int, passes: Floats, drafting: Floats, ratio: float = 1.0) -> list[Floats]:
    """Expected tokens per millisecond of each way, by nodes; of one node, plain decoding's.

    Args:
        ways: of drafting.
        rows: B.
        passes: milliseconds of a pass with trees of 1, 2, … nodes.
        drafting: milliseconds of drafting 0, 1, … levels.
        ratio: accepted draft tokens for each expected one.
    """
    return [rows * (1.0 + ratio * way.gains) / (passes[: len(way.gains)] + drafting[way.levels]) for way in ways]


class CostCorrection:
    """Follows the time of steps: the machine's speed, and beyond it one factor for each bucket of tokens.

    The speed alone changes no choice. A factor that is not seen for a while goes back to 1.
    """

    def __init__(self) -> None:
        self._speed: float | None = None  # logarithms of measured / expected
        self._buckets: dict[int, float] = {}
        self._seen: dict[int, int] = {}  # at which step
        self._drafting = 0.0
        self.steps = 0

    def note(self, tokens: int, of_pass: tuple[float, float], of_draft: tuple[float, float] | None) -> None:
        """A step of so many tokens: expected and measured milliseconds of the pass, and of drafting."""
        self.steps += 1
        found, bucket = _logarithm(*of_pass), round(math.log2(tokens))
        if self._speed is None:
            self._speed = found
        for other in self._buckets:
            if other != bucket:
                self._buckets[other] *= _DRIFT
        old = self._buckets.get(bucket, 0.0)
        change = max(-_MOST_CHANGE, min(_MOST_CHANGE, found - self._speed - old))
        is_new = self.steps - self._seen.get(bucket, -_LONG_AGO) >= _LONG_AGO
        self._buckets[bucket] = old + (_NEW if is_new else _OLD) * change
        self._seen[bucket] = self.steps
        if not is_new:
            self._speed += _SPEED * max(-_MOST_CHANGE, min(_MOST_CHANGE, found - self._speed))
        if of_draft is not None:
            change = _logarithm(*of_draft) - self._speed - self._drafting
            self._drafting += _OLD * max(-_MOST_CHANGE, min(_MOST_CHANGE, change))

    def passes(self, tokens: Floats) -> Floats:
        """Factors of the costs of passes, on lines between the buckets that were seen."""
        if not self._buckets:
            return np.ones_like(tokens)
        buckets = sorted(self._buckets)
        factors: Floats = np.exp(np.interp(np.log2(tokens), buckets, [self._buckets[each] for each in buckets]))
        return factors

    @property
    def drafting(self) -> float:
        """Factor of the costs of drafting."""
        return math.exp(self._drafting)


class Planner:
    """Chooses shapes for one head, model and machine.

    Args:
        profile: tokens per step by tree.
        costs: milliseconds by tokens and levels.
        check: gets the accepted draft tokens of each step, and those that the profile expects.
        budget: nodes that copies may add to a tree.
        follows: whether costs follow the time of steps: for models whose texts do not depend on what is drafted.
    """

    def __init__(
        self,
        profile: AcceptanceProfile,
        costs: StepCosts,
        check: AcceptanceCheck | None = None,
        *,
        budget: int = 0,
        follows: bool = False,
    ) -> None:
        self.profile, self.costs, self.check, self.budget = profile, costs, check, budget
        self.correction = CostCorrection() if follows else None
        self.ways = ways_of(profile)
        most = max((len(way.gains) for way in self.ways), default=1)
        self._nodes = np.arange(1.0, most + budget + 1)
        self._levels = range(max((max(way.levels) for way in self.ways), default=0) + 1)
        self._measured = lru_cache(maxsize=64)(self._of_rows)  # a method's cache would keep the planner
        self._side: bool | None = None  # whether the last steps drafted
        self._steps_on_side = 0

    def start(self) -> "Plan":
        """A plan of one batch, in which nothing is known of the requests."""
        return Plan(self)

    def costs_now(self, rows: int, *, follows: bool = True) -> tuple[Floats, Floats]:
        """Milliseconds of passes with trees of 1, 2, … nodes, and of drafting 0, 1, … levels."""
        passes, drafting = self._measured(rows)
        if self.correction is None or not follows:
            return passes, drafting
        return passes * self.correction.passes(rows * self._nodes), drafting * self.correction.drafting

    def _of_rows(self, rows: int) -> tuple[Floats, Floats]:
        drafting = np.array([self.costs.draft(rows, levels) for levels in self._levels])
        return self.costs.passes(rows * self._nodes, rows), drafting

    def choose(self, rows: int, ratio: float = 1.0, *, follows: bool = True) -> tuple[Way | None, int, float]:
        """The fastest way, its nodes, and its tokens per millisecond; no way and one node where that is plain decoding.

        Sometimes the other one of drafting and plain decoding, to see how long it takes now.
        """
        passes, drafting = self.costs_now(rows, follows=follows)
        plain = rows / float(passes[0])
        best: tuple[Way | None, int, float] = (None, 1, 0.0)
        for way, by_nodes in zip(self.ways, rates(self.ways, rows, passes, drafting, ratio), strict=True):
            at = int(by_nodes[1:].argmax()) + 1
            if by_nodes[at] > best[2]:
                best = way, at + 1, float(by_nodes[at])
        is_drafting = best[2] > _SMALLEST_GAIN * plain
        if follows and self.correction is not None:
            turns = self._looks(is_drafting) or (not is_drafting and self.check is not None and self.check.needs_draft)
            is_drafting = (best[0] is not None and not is_drafting) if turns else is_drafting
        return best if is_drafting else (None, 1, plain)

    def _looks(self, is_drafting: bool) -> bool:  # noqa: FBT001 - a condition
        self._steps_on_side = self._steps_on_side + 1 if is_drafting == self._side else 0
        self._side = is_drafting
        return self._steps_on_side in _LOOKS or (self._steps_on_side % _LOOK_EVERY == 0 and self._steps_on_side > 0)

    def shape(self, way: Way, num_nodes: int, rows: int, rate: float) -> Shape:
        """The best tree of a way and so many nodes; a level is left out where its likely tokens are not worth it."""
        shape = self.profile.shape(way.kind, num_nodes, way.depth)
        if not isinstance(shape, BestFirst):
            return shape
        level = self.costs.draft(rows, 2) - self.costs.draft(rows, 1)
        return replace(shape, min_level_probability=round(rate * level / LEVEL_GAIN, 2))


class Plan:
    """What a planner knows of the rows of one batch, and what it has decided for this step."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        # of each row's own draft tokens and of those that only copies brought: how many were accepted, and how many
        # were expected; older ones have less weight. No arrays: with few rows numbers are faster
        self._records: list[list[tuple[float, float]]] = []
        self._follows = False
        self._rate = 0.0  # tokens per millisecond
        self._shape: Shape = ROOT_ONLY
        self._levels = 0  # of draft tokens of the head
        self._gain = 0.0  # expected accepted draft tokens per row by the profile
        self._expected: Sequence[Sequence[float]] = ()  # of each row, its own and copied draft tokens

    @property
    def is_drafting(self) -> bool:
        """Whether the head drafts in this step."""
        return self._gain > 0.0

    @property
    def ratios(self) -> list[list[float]]:
        """(B, 2): accepted draft tokens for each expected one, of a row's own and of copied ones."""
        return [[(_PRIOR + accepted) / (_PRIOR + expected) for accepted, expected in row] for row in self._records]

    def shape(self, rows: int, *, may_follow: bool = True, cuts: bool = True) -> tuple[Shape, int]:
        """What is drafted for so many rows in the next step, and how many nodes the trees may have, copies included.

        The shape has one node where nothing is drafted.

        Args:
            rows: B.
            may_follow: false where a row's text depends on what is drafted.
            cuts: whether :meth:`cut` takes nodes away. Where it does not, copies may only use what is almost free.
        """
        self._records += [[(0.0, 0.0), (0.0, 0.0)] for _ in range(rows - len(self._records))]
        planner, self._follows = self.planner, may_follow
        ratio = sum(own for own, _ in self.ratios) / rows
        way, nodes, self._rate = planner.choose(rows, ratio, follows=may_follow)
        self._gain = 0.0 if way is None else float(way.gains[nodes - 1])
        self._levels = 0 if way is None else way.levels[nodes - 1]
        self._shape = ROOT_ONLY if way is None else planner.shape(way, nodes, rows, self._rate)
        if cuts:
            return self._shape, nodes + planner.budget
        passes, _ = planner.costs_now(rows, follows=may_follow)
        free = int(np.searchsorted(passes, _ALMOST_FREE * passes[nodes - 1], side="right")) - nodes
        return self._shape, nodes + min(free, planner.budget)

    def cut(self, draft: Draft) -> Draft:
        """The first nodes of all trees, as many as gain more tokens than their time is worth.

        Only on a CPU, for drafts with probabilities: elsewhere the host would wait for them.
        """
        batch = len(draft.token_ids)
        self._expected = [(self._gain, 0.0)] * batch
        if draft.path_log_probs is None or draft.token_ids.device.type != "cpu":
            return draft
        likely = draft.path_log_probs.double().exp().numpy()  # (B, N)
        likely[:, 0] = 0.0  # the root is no draft token
        copied = np.zeros_like(likely) if draft.copied is None else likely * draft.copied.numpy()
        head = likely - copied
        own, of_copies = np.array(self.ratios).T
        gains = own[:, None] * head + of_copies[:, None] * copied
        passes, _ = self.planner.costs_now(batch, follows=self._follows)
        worth = gains.sum(0).cumsum() - self._rate * passes[: draft.num_nodes]
        count = int(worth.argmax()) + 1
        self._expected = list(zip(*(part[:, :count].sum(1).tolist() for part in (head, copied)), strict=True))
        return draft.first(count)

    def note(
        self,
        draft: Draft,
        num_accepted: Sequence[int],
        num_copied: Sequence[int],
        are_free: Sequence[bool],
        milliseconds: tuple[float, float],
    ) -> None:
        """A step was made.

        Args:
            draft: that was verified.
            num_accepted: draft tokens of each row.
            num_copied: how many of them only a copy brought.
            are_free: whether the row takes the most likely token whatever it is, as in the profile.
            milliseconds: of drafting, and of all else.
        """
        rows = zip(self._records, self._expected, num_accepted, num_copied, are_free, strict=True)
        for record, due, accepted, copied, is_free in rows:
            record[:] = map(_noted, record, (accepted - copied, copied), due)
            # copies that are accepted are in the place of the head's nodes, of which the profile speaks
            is_compared = is_free and not copied and not self.planner.profile.temperature  # greedy ones
            if self._gain and is_compared and self.planner.check is not None:
                # of a tree that was cut
                tokens = self.planner.profile.tokens("dynamic" if isinstance(self._shape, BestFirst) else "static")
                expected = min(self._gain, tokens[min(draft.num_nodes, len(tokens)) - 1] - 1.0)
                self.planner.check.steps.append((accepted, expected))
        passes, drafting = self.planner.costs_now(len(num_accepted), follows=False)
        if self.planner.correction is not None and self._follows and draft.num_nodes <= len(passes):
            of_draft = (float(drafting[self._levels]), milliseconds[0]) if self._levels else None
            of_pass = float(passes[draft.num_nodes - 1]), milliseconds[1] if self._levels else sum(milliseconds)
            self.planner.correction.note(len(num_accepted) * draft.num_nodes, of_pass, of_draft)

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows leave."""
        self._records = [self._records[row] for row in rows]


def _noted(record: tuple[float, float], accepted: float, expected: float) -> tuple[float, float]:
    memory = _MEMORY if expected > 0.0 else _FORGETTING
    return memory * record[0] + accepted, memory * record[1] + expected


def ways_of(profile: AcceptanceProfile) -> list[Way]:
    """All ways of drafting that a profile knows."""
    ways = [
        Way(kind, depth, np.array(profile.tokens(kind, depth)) - 1.0, profile.levels(kind, depth))
        for kind in KINDS
        for depth in profile.depths(kind)
    ]
    return [way for way in ways if len(way.gains) > 1]


def _logarithm(expected: float, measured: float) -> float:
    return math.log(max(1e-3, measured) / max(1e-3, expected))
