"""How many tokens to draft at a step: from the acceptance profile, the cost profile and each request's own acceptance.

A table gives the expected tokens and the milliseconds of each kind, depth and size of tree; the fastest is drafted, or
nothing where plain decoding is as fast. A :class:`StepClock` corrects the milliseconds while decoding, where no text
depends on what is drafted. Without one, what is decided depends on tokens and on the two profiles only. On a CPU, a
draft that comes with probabilities is then cut where a further node costs more time than it gains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftheads.decode.acceptance_check import AcceptanceCheck
from draftheads.decode.cost_profile import CostProfile
from draftheads.decode.step_clock import StepClock
from draftheads.decode.step_timer import STEP_TOKENS
from draftheads.speculation.acceptance_profile import KINDS, AcceptanceProfile, Kind
from draftheads.speculation.draft import Context, CopyLimits, Draft
from draftheads.speculation.drafter import Drafter, WrappedDrafter, WrappedSession
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Shape, depth_of, most_nodes_of

Floats = npt.NDArray[np.float64]
Candidate = tuple[Kind, int]  # of drafting: a kind of tree, and its greatest depth

_PRIOR = 4.0  # pseudo-count of the profile in a request's acceptance estimate, in expected draft tokens
_MEMORY = 0.99  # weight that older draft tokens of a request keep, per step with a draft
# The same per step without one. A request none of whose draft tokens is accepted spends at most
# (1 - _FORGETTING) * _PRIOR = 2 % of its time on drafts.
_FORGETTING = 0.995
_SMALLEST_GAIN = 1.05  # over plain decoding, or nothing is drafted
_SMALLEST_GAIN_OF_SEVERAL = 1.10  # the same for several rows, whose costs are known less well
_TEXT_BLOCK = 128  # tokens; tables are made for multiples of it
_SPARE_NODES = 4  # that growing trees are drafted with beyond twice their best size …
_SPARE_COST = 0.03  # … as long as drafting them costs less than this share of a plain step
# tokens that a further level gains, less what verifying them costs, per unit of the probability of the nodes that it
# extends; measured, see "Growing trees stop early" in LOG.md
LEVEL_GAIN = 0.3
_BEHIND = 4  # tokens by which one row must be behind all others to be the one that ends last
# relative speed that cutting growing trees adds: all to one size, divided by the rows; or each row to a size of its own
_CUT_GAIN, _OWN_SIZE_GAIN = 0.05, 0.12
# of the time of a node: attention computes the places by which a tree is smaller than the widest one, too
_PADDING = 0.12
_TRIAL_TOKENS = 12  # of all rows, that a trial verifies at most, if each row has two
_SEVERAL, _REST = 4, 3  # rows; steps without a look at what to draft after one at which drafting was not worth it
_WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # of trees of different sizes


@dataclass
class _Record:
    """Draft tokens of one request; older ones have less weight."""

    accepted: float = 0.0
    expected: float = 0.0

    @property
    def ratio(self) -> float:
        """Accepted draft tokens for each expected one; 1 as long as little is known."""
        return (_PRIOR + self.accepted) / (_PRIOR + self.expected)

    def note(self, accepted: float, expected: float) -> None:
        memory = _MEMORY if expected else _FORGETTING
        self.accepted = memory * self.accepted + accepted
        self.expected = memory * self.expected + expected


@dataclass(frozen=True)
class _Table:
    """What steps of one number of rows gain and cost, by way; entry n-1 is of trees of n nodes."""

    plain: float  # milliseconds of a step without a draft
    gains: dict[Candidate, Floats]  # expected draft tokens that are accepted, per row
    drafting: dict[Candidate, Floats]  # milliseconds
    verifying: Floats  # milliseconds; for more nodes than there are trees, too


class _Step(NamedTuple):
    """What a step was expected to cost."""

    table: _Table  # as it was measured at first
    rows: int
    tokens: int  # of all rows
    drafting: float  # milliseconds; 0: nothing was drafted
    is_trial: bool


class SizePolicy(WrappedDrafter):
    """A drafter that chooses the shape that another drafter fills at each step.

    Args:
        drafter: fills the chosen shapes.
        profile: tokens per step by tree.
        cost: milliseconds by rows and nodes.
        check: receives the accepted draft tokens of each text, and those that the profile expects.
        trees_differ: whether the rows' trees may have different sizes without padding.
        clock: corrects the costs; None: they stay as they are.
    """

    def __init__(
        self,
        drafter: Drafter,
        profile: AcceptanceProfile,
        cost: CostProfile,
        check: AcceptanceCheck | None = None,
        *,
        trees_differ: bool = False,
        clock: StepClock | None = None,
    ) -> None:
        super().__init__(drafter)
        self.default_shape = None
        self.profile = profile
        self.cost = cost
        self.check = check
        self.trees_differ = trees_differ
        self.clock = clock
        self._tables: dict[tuple[int, int], _Table] = {}  # by rows and tokens of the longest text
        self._timed: dict[tuple[int, int], tuple[int, _Table]] = {}  # by table and rows, with the clock's generation
        self._drafting: dict[int, dict[Candidate, Floats]] = {}  # by rows
        self._levels: dict[tuple[int, int], float] = {}  # by rows and nodes
        self._shapes: dict[tuple[Candidate, int], Shape] = {}

    def start(self) -> "SizePolicySession":
        """A session in which nothing is known of the requests."""
        return SizePolicySession(self)

    def table(self, batch: int, text_tokens: int) -> _Table:
        """Of so many rows, the longest of which has so many tokens."""
        text = -(-text_tokens // _TEXT_BLOCK) * _TEXT_BLOCK
        if (batch, text) not in self._tables:
            cost = self.cost
            most = max(len(self.profile.tokens(kind)) for kind in KINDS) + self.extra_nodes
            verifying = np.array([cost.verify(batch, nodes, text) for nodes in range(1, most + 1)])
            plain = float(verifying[0]) + cost.follow(batch)
            self._tables[batch, text] = _Table(plain, self.gains, self._drafting_of(batch), verifying)
        return self._tables[batch, text]

    @cached_property
    def gains(self) -> dict[Candidate, Floats]:
        """Expected draft tokens that are accepted, per row; entry n-1 is of trees of n nodes."""
        ways = [(kind, depth) for kind in KINDS for depth in self.profile.depths(kind)]
        gains = {way: np.array(self.profile.tokens(*way)) - 1.0 for way in ways}
        return {way: by_size for way, by_size in gains.items() if len(by_size) > 1}

    def _drafting_of(self, batch: int) -> dict[Candidate, Floats]:
        if batch not in self._drafting:
            self._drafting[batch] = {
                (kind, depth): np.array(
                    [
                        self.cost.draft(kind, batch, nodes, levels)
                        for nodes, levels in enumerate(self.profile.levels(kind, depth), 1)
                    ]
                )
                for kind, depth in self.gains
            }
        return self._drafting[batch]

    def drafting(self, shape: Shape, batch: int) -> float:
        """Milliseconds of drafting a shape as they were measured."""
        kind: Kind = "dynamic" if isinstance(shape, BestFirst) else "static"
        nodes = most_nodes_of(shape)
        return self.cost.draft(kind, batch, nodes, min(depth_of(shape) or self.profile.depth, nodes - 1))

    def level_cost(self, batch: int, num_nodes: int) -> float:
        """Milliseconds of drafting another level of a growing tree; 0 where they are not known."""
        if (batch, num_nodes) not in self._levels:
            first, second = (self.cost.draft("dynamic", batch, num_nodes, depth) for depth in (1, 2))
            self._levels[batch, num_nodes] = second - first
        return self._levels[batch, num_nodes]

    def cut_gain(self, batch: int) -> float:
        """Relative speed that is expected of cutting growing trees."""
        return _OWN_SIZE_GAIN if self.trees_differ and batch > 1 else _CUT_GAIN / batch

    def shape(self, way: Candidate, num_nodes: int) -> Shape:
        """The best of so many nodes."""
        if (way, num_nodes) not in self._shapes:
            kind, depth = way
            self._shapes[way, num_nodes] = self.profile.shape(kind, num_nodes, depth)
        return self._shapes[way, num_nodes]

    def timed(self, table: _Table, batch: int) -> _Table:
        """The table with the costs that the clock has corrected."""
        if self.clock is None:
            return table
        key, now = (id(table), batch), self.clock.generation
        known = self._timed.get(key)
        if known is not None and known[0] == now:
            return known[1]
        factors = self.clock.verifying(batch * np.arange(1.0, len(table.verifying) + 1))
        drafting = {way: self.clock.drafting * costs for way, costs in table.drafting.items()}
        timed = _Table(float(factors[0]) * table.plain, table.gains, drafting, factors * table.verifying)
        self._timed[key] = now, timed
        return timed

    def choose(
        self, ratios: Floats, table: _Table | None = None, *, cuts: bool = True, needs_draft: bool = False
    ) -> tuple[Shape | None, float, float]:
        """The shape for rows with these ratios, its expected accepted tokens per row, and tokens per millisecond.

        The shape is None if plain decoding is as fast, unless a draft is needed: then it is a small one. ``cuts`` says
        whether growing trees are cut after they are drafted. ``table`` is of these rows; of short texts when left out.
        """
        batch = len(ratios)
        table = table or self.table(batch, 0)
        choice: tuple[Shape | None, float, float] = (None, 0.0, batch / table.plain)
        fastest = 0.0 if needs_draft else (_SMALLEST_GAIN_OF_SEVERAL if batch > 1 else _SMALLEST_GAIN) * choice[2]
        for way, gains in table.gains.items():
            rates = (batch + ratios.sum() * gains) / (table.verifying[: len(gains)] + table.drafting[way])
            most = max(2, _TRIAL_TOKENS // batch) if needs_draft else len(rates)
            best = int(rates[1:most].argmax()) + 1 if len(rates) > 1 else 0
            if not best:
                continue
            rate = float(rates[best]) * (1.0 + (self.cut_gain(batch) if cuts and way[0] == "dynamic" else 0.0))
            if rate > fastest:
                fastest = rate
                choice = (self.shape(way, best + 1), float(gains[best]), float(rates[best]))
        return choice


class SizePolicySession(WrappedSession):
    """The records of one batch, and the drafter's session."""

    def __init__(self, policy: SizePolicy) -> None:
        super().__init__(policy.drafter.start())
        self.policy = policy
        self._put_aside: int | None = 0  # tokens of all rows that the drafter has not read; None: it reads them at once
        self._missed = 0.0  # milliseconds that drafting would have saved since it stopped
        self._rest = 0  # steps of several rows in which nothing is drafted, and nothing looked for
        self.profile, self.cost, self.extra_nodes = policy.profile, policy.cost, policy.extra_nodes
        self.check = policy.check
        self._gains: Sequence[float] = ()  # of this step: expected accepted draft tokens per row by the profile
        self._texts: list[tuple[int, int, float]] = []  # of each row: steps, accepted and expected draft tokens
        self._records: list[_Record] = []
        self._copies: list[_Record] = []  # of tokens that only copies brought
        self._expected: Sequence[float] = ()  # of this step: expected accepted draft tokens per row, without copies
        self._expected_copies: Sequence[float] = ()  # the same of copies
        self._step: _Step | None = None  # this one, for the clock
        self._reads_expected = False  # of this step: whether they come from the device, with the step's tokens

    def propose(self, context: Context, shape: Shape) -> Draft:
        """The drafter's draft, of the size that is fastest, or the root alone; whatever the given shape."""
        if self._rest and len(context.root_ids) == len(self._records):
            return self._resting(context)
        draft, is_drafted = self._proposed(context)
        is_worthless = not is_drafted and draft.num_nodes == 1 and not self._missed
        if len(self._records) >= _SEVERAL and is_worthless:
            self._rest = _REST
        return draft

    def _proposed(self, context: Context) -> tuple[Draft, bool]:
        """As :meth:`propose`, and whether the drafter was to draft."""
        batch = len(context.root_ids)
        for records in (self._records, self._copies):
            records += [_Record() for _ in range(batch - len(records))]
        self._texts += [(0, 0, 0.0)] * (batch - len(self._texts))
        self._expected_copies = (0.0,) * batch
        measured, clock = self.policy.table(batch, context.text_tokens), self._clock_of(context)
        table = measured if clock is None else self.policy.timed(measured, batch)
        ratios = np.array([record.ratio for record in self._records])
        copies = np.array([record.ratio for record in self._copies])
        if context.room is not None and batch > 1:
            copies *= weights(context.room, self.policy.table(1, context.text_tokens).plain, table.plain)
        chosen, gain, rate, is_trial = self._chosen(context, table, ratios, clock)
        self._gains = (gain,) * batch
        self._step = None if clock is None else _Step(measured, batch, batch, 0.0, is_trial)
        if chosen is None and not self.extra_nodes:
            self.session.observe(context)
            self._expected = (0.0,) * batch
            return Draft.on_tree(ROOT_ONLY, context.root_ids[:, None]), False
        filled: Shape = ROOT_ONLY if chosen is None else chosen
        if chosen is not None and not is_trial:
            filled = self._with_spare(chosen, table, context, rate / float(ratios.mean()))
        if is_trial:
            context = replace(context, copies=CopyLimits(0))
        elif self.extra_nodes:  # what gains less than it costs would be cut
            margin = _SMALLEST_GAIN_OF_SEVERAL if batch > 1 else 1.0
            further = table.verifying[1:] - table.verifying[0]
            needed = margin * rate * (table.plain + further) - rate * table.plain
            context = replace(context, copies=CopyLimits(self.extra_nodes, needed.tolist(), copies.tolist()))
        draft = self.session.propose(context, filled)
        if draft.path_log_probs is None or draft.token_ids.device.type != "cpu" or is_trial:
            self._expected = (gain,) * batch
        else:
            draft = self._cut(draft, ratios, copies, rate * (1.0 + self.policy.cut_gain(batch)), table)
            if gain:  # the profile expects less of a tree that was cut
                kind: Kind = "dynamic" if isinstance(filled, BestFirst) else "static"
                self._gains = self._gains_of(draft, self.profile.tokens(kind))
        if self._step is not None:
            tokens = sum(draft.row_nodes or (draft.num_nodes,) * batch)
            drafting = 0.0 if chosen is None else self.policy.drafting(filled, batch)
            self._step = self._step._replace(tokens=tokens, drafting=drafting)
        return draft, chosen is not None

    def _resting(self, context: Context) -> Draft:
        """The roots alone: to look for more takes time at each step, and many rows seldom gain by it."""
        self._rest -= 1
        batch, clock = len(context.root_ids), self._clock_of(context)
        table = self.policy.table(batch, context.text_tokens)
        self._waits(context, table, None, 0.0, 0.0)
        self._gains = self._expected = self._expected_copies = (0.0,) * batch
        self._step = None if clock is None else _Step(table, batch, batch, 0.0, is_trial=False)
        self.session.observe(context)
        return Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])

    def _clock_of(self, context: Context) -> StepClock | None:
        """The clock, unless a row's text depends on what is drafted."""
        rows = context.rows
        return None if rows is not None and (rows.any_typical or rows.any_rejection) else self.policy.clock

    def _chosen(
        self, context: Context, table: _Table, ratios: Floats, clock: StepClock | None
    ) -> tuple[Shape | None, float, float, bool]:
        """As :meth:`SizePolicy.choose`, and whether it is a trial: what is not chosen, the best draft or none."""
        batch, cuts = len(ratios), context.root_ids.device.type == "cpu"
        choice = self.policy.choose(ratios, table, cuts=cuts)
        plain: tuple[Shape | None, float, float] = (None, 0.0, batch / table.plain)
        if clock is not None and choice[0] is not None and clock.is_worse(batch):
            choice = plain
        if clock is not None and clock.may_try:
            is_plain = choice[0] is None
            other = self.policy.choose(ratios, table, cuts=cuts, needs_draft=True) if is_plain else plain
            tokens = batch + float(ratios.sum()) * other[1]
            unread = self._reading(batch) * (self._put_aside or 0) if is_plain else 0.0
            if (other[0] is not None) == is_plain and clock.affords(tokens / other[2] - tokens / choice[2] + unread):
                return *other, True
        chosen, gain, rate = choice
        if self._waits(context, table, chosen, rate, batch + float(ratios.sum()) * gain):
            return *plain, False
        return *choice, False

    def on_time(self, drafting: float, rest: float, num_tokens: int) -> None:
        clock, step, self._step = self.policy.clock, self._step, None
        if clock is None or step is None:
            return
        verifying, nodes = step.table.verifying, step.tokens / step.rows
        expected, measured, of_draft = step.table.plain, drafting + rest, None
        if step.drafting > 0.0 or step.tokens > step.rows:
            if nodes > len(verifying):
                return  # with copies: as many tokens as no profile knows
            expected = float(np.interp(nodes, np.arange(1, len(verifying) + 1), verifying))
            measured, of_draft = rest, (step.drafting, drafting)
        clock.note(
            step.tokens, (expected, measured), of_draft, rows=step.rows, gained=num_tokens, is_trial=step.is_trial
        )

    def _waits(self, context: Context, table: _Table, chosen: Shape | None, rate: float, tokens: float) -> bool:
        """Whether drafting waits, because the drafter would have to read much that was put aside.

        Several rows that are decoded without drafts for a while may end soon. So drafting begins when it would have
        saved as much time as reading takes, as in the ski rental problem: the loss is at most twice the least possible.

        ``chosen`` is the fastest shape by the table (None: plain decoding), ``rate`` its tokens per millisecond, and
        ``tokens`` what a step with it is expected to give.
        """
        batch = len(context.root_ids)
        if not self.policy.drafter.reads_whole_text or context.root_ids.device.type != "cpu":
            return False
        if self._put_aside is None and chosen is not None:
            return False
        self._put_aside = (self._put_aside or 0) + sum(context.counts)
        if chosen is None:
            return False
        self._missed += tokens * (table.plain / batch - 1.0 / rate)
        if batch > 1 and self._missed < self._put_aside * self._reading(batch):
            return True
        self._put_aside, self._missed = None, 0.0
        return False

    def _reading(self, batch: int) -> float:
        """Milliseconds in which the drafter reads a token that was put aside."""
        if not self.policy.drafter.reads_whole_text:
            return 0.0
        return self.cost.draft("dynamic", batch, 2, 1) / (batch * STEP_TOKENS)

    def keep(self, rows: Tensor) -> None:
        kept = rows.tolist()
        if self.check is not None:
            for row in set(range(len(self._texts))).difference(kept):
                self.check.note(*self._texts[row])
        self._records = [self._records[row] for row in kept]
        self._copies = [self._copies[row] for row in kept]
        self._texts = [self._texts[row] for row in kept]
        self._rest = 0
        self.session.keep(rows)

    def on_verify(self, draft: Draft, logits: Tensor) -> Tensor | None:
        """What the drafter's session has to know, and the expected number of accepted tokens where it is not known."""
        asked = self.session.on_verify(draft, logits)
        self._reads_expected = draft.path_log_probs is not None and draft.token_ids.device.type != "cpu"
        if draft.path_log_probs is None or not self._reads_expected:
            return asked
        likely = draft.path_log_probs.float().exp()
        likely[:, 0] = 0.0  # the root is no draft token
        copied = torch.zeros_like(likely) if draft.copied is None else likely * draft.copied
        expected = torch.stack([(likely - copied).sum(1), copied.sum(1)], 1)
        bits = expected.view(torch.int32).long()
        return bits if asked is None else torch.cat([bits, asked], 1)

    def on_read(self, values: Sequence[Sequence[int]]) -> None:
        if self._reads_expected:
            bits = np.array([row[:2] for row in values], dtype=np.int32)
            self._expected, self._expected_copies = bits.view(np.float32).T.tolist()
            values = [row[2:] for row in values]
        self.session.on_read(values)

    def on_accept(self, num_accepted: Sequence[int], num_copied: Sequence[int], are_free: Sequence[bool]) -> None:
        """Records it. The profile expects rows that are free."""
        self.session.on_accept(num_accepted, num_copied, are_free)
        drafted = list(map(sub, num_accepted, num_copied))
        for records, accepted, expected in (
            (self._records, drafted, self._expected),
            (self._copies, num_copied, self._expected_copies),
        ):
            for record, number, most in zip(records, accepted, expected, strict=True):
                record.note(number, most)
        for row, (is_free, gain) in enumerate(zip(are_free, self._gains, strict=False)):
            if is_free and gain:
                steps, before, promised = self._texts[row]
                self._texts[row] = steps + 1, before + drafted[row], promised + gain

    def _cut(self, draft: Draft, ratios: Floats, copies: Floats, rate: float, table: _Table) -> Draft:
        """The first nodes of each row's tree, as many as gain more tokens than their time is worth at that rate.

        A row accepts ``ratios`` times as many of the draft's own tokens as their probabilities say, and ``copies``
        times as many copied ones.
        """
        assert draft.path_log_probs is not None
        likely = draft.path_log_probs.exp().double().cpu().numpy()  # (B, N)
        likely[:, 0] = 0.0  # the root is no draft token
        copied = np.zeros_like(likely) if draft.copied is None else likely * draft.copied.cpu().numpy()
        gains = ratios[:, None] * (likely - copied) + copies[:, None] * copied
        cost = rate * table.verifying[: draft.num_nodes]
        batch = len(gains)
        if self.policy.trees_differ and batch > 1:
            node = (table.verifying[-1] - table.verifying[0]) / (batch * max(1, len(table.verifying) - 1))
            counts = best_sizes(gains, cost, rate * _PADDING * node)
        else:
            counts = np.full(batch, (gains.sum(0).cumsum() - cost).argmax() + 1)
        is_kept = np.arange(draft.num_nodes) < counts[:, None]
        self._expected = ((likely - copied) * is_kept).sum(1).tolist()
        self._expected_copies = (copied * is_kept).sum(1).tolist()
        return draft.cut(counts.tolist())

    @staticmethod
    def _gains_of(draft: Draft, tokens: Sequence[float]) -> list[float]:
        """The draft tokens that a profile (tokens per step by nodes) expects of the nodes that are no copies."""
        nodes = draft.row_nodes or (draft.num_nodes,) * len(draft.token_ids)
        copied = [[False]] * len(nodes) if draft.copied is None else draft.copied.tolist()
        own = [count - sum(row[:count]) for count, row in zip(nodes, copied, strict=True)]
        return [tokens[min(count, len(tokens)) - 1] - 1.0 for count in own]

    def _with_spare(self, shape: Shape, table: _Table, context: Context, rate: float) -> Shape:
        """A growing tree of twice the nodes, for :meth:`_cut` to choose among, where drafting them costs little.

        Only on a CPU: elsewhere the host would have to wait for the probabilities, so nothing is cut.

        It may be as deep as the head was measured. Where levels can be left out
        (:attr:`BestFirst.min_level_probability`) each is drafted only if the tokens that it is likely to gain are worth
        its time. ``rate`` is in tokens per millisecond, as if all requests accepted what the profile expects.
        """
        if not isinstance(shape, BestFirst) or context.root_ids.device.type != "cpu":
            return shape
        way: Candidate = ("dynamic", shape.max_depth or self.profile.depth)
        costs = table.drafting[way]
        most = min(2 * shape.num_nodes + _SPARE_NODES, len(costs))
        limit = costs[shape.num_nodes - 1] + _SPARE_COST * table.plain
        while most > shape.num_nodes and costs[most - 1] > limit:
            most -= 1
        reach = rate * self.policy.level_cost(len(context.root_ids), most) / LEVEL_GAIN
        return replace(self.profile.growing(most), min_level_probability=round(reach, 2))


def best_sizes(gains: Floats, cost: Floats, padding: float = 0.0) -> npt.NDArray[np.int64]:
    """How many nodes each tree gets (B,), root included, if the nodes of all rows compete for the time of a pass.

    A node is taken after those before it in its row, which are its ancestors and likelier nodes.

    Args:
        gains: (B, N) tokens that each node is likely to gain; 0 for the root.
        cost: (N,) what a pass costs, in tokens, if the trees have 1 … N nodes on average.
        padding: what each place costs by which a tree is smaller than the widest one, in tokens.

    >>> best_sizes(np.array([[0, 0.9, 0.8], [0, 0.1, 0.0]]), np.array([0.0, 0.8, 1.6]))
    array([3, 1])
    >>> best_sizes(np.array([[0, 0.9, 0.8], [0, 0.1, 0.0]]), np.array([0.0, 0.8, 1.7]), padding=0.5)
    array([2, 2])
    """
    batch, nodes = gains.shape
    falling = np.minimum.accumulate(gains[:, 1:], axis=1)
    best, sizes = 0.0, np.ones(batch, dtype=np.int64)
    for width in sorted({*_WIDTHS, nodes}):
        if not 1 < width <= nodes:
            continue
        order = np.argsort(-falling[:, : width - 1], axis=None, kind="stable")
        total = np.concatenate([[0.0], gains[:, 1:width].ravel()[order].cumsum()])
        taken = np.arange(len(total))
        net = total - np.interp(1 + taken / batch, np.arange(1, nodes + 1), cost)
        net -= padding * (batch * (width - 1) - taken) * (taken > 0)
        count = int(net.argmax())
        if net[count] > best - cost[0]:
            best = float(net[count]) + cost[0]
            sizes = 1 + np.bincount(order[:count] // (width - 1), minlength=batch)
    return sizes


def weights(room: Sequence[int], one_row: float, all_rows: float) -> Floats:
    """How much a token counts that only one row gains, where no request waits for a place.

    A plain step takes a little longer for each row, but most of its time is there for any number of them. So a row that
    ends sooner saves little, unless it is the last one. What all rows gain counts 1 for each.

    Args:
        room: tokens that each row may still take.
        one_row: milliseconds of a plain step of one row.
        all_rows: the same of all rows together.

    >>> weights([40, 40], 20.0, 22.0).round(2)
    array([0.18, 0.18])
    >>> weights([40, 80], 20.0, 22.0).round(2)
    array([0.18, 1.82])
    >>> weights([40, 80], 10.0, 30.0)
    array([1., 1.])
    """
    batch = len(room)
    share = min(1.0, batch * max(0.0, (all_rows - one_row) / (batch - 1)) / all_rows)
    weight = np.full(batch, share)
    *_, second, first = sorted(room)
    if first - second >= _BEHIND:
        weight[room.index(first)] += batch * (1.0 - share)
    return weight
