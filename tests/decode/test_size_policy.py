"""How much is drafted: by hand-made profiles and costs, without a clock."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pytest
import torch

from draftheads.decode.acceptance_check import AcceptanceCheck
from draftheads.decode.cost_profile import CostPoint, CostProfile
from draftheads.decode.engine import Engine
from draftheads.decode.size_policy import LEVEL_GAIN, SizePolicy, SizePolicySession, best_sizes
from draftheads.decode.step_clock import StepClock
from draftheads.drafters.copying import Copying as TextCopying
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Shape
from draftheads.speculation.tree import Tree
from families import PROMPTS, TREES, PlantedDrafter, by_hand, tiny_head, tiny_model, tiny_profile
from scheduler_world import join
from thorough import some

pytestmark = pytest.mark.usefixtures("one_thread")
# 0.6 tokens for the first draft token, ever fewer for the next ones
GAINS = np.cumsum([0.0, *(0.6 * 0.8**n for n in range(23))])
SIBLINGS = Tree.from_paths([(rank,) for rank in range(23)])
STATIC = tiny_profile(SIBLINGS, static_tokens=[round(float(1 + gain), 4) for gain in GAINS], dynamic_tokens=[])
BETTER = [1.0, *(1.02 * tokens for tokens in STATIC.static_tokens[1:])]
GROWING = tiny_profile(Tree.chain(0), dynamic_tokens=STATIC.static_tokens)


def machine(per_node: float, *, plain: float = 20.0, draft: float = 1.0) -> CostProfile:
    """A step takes so many milliseconds, and so many more for each further node of all rows."""
    return by_hand(
        [
            *(("verify", rows, nodes, plain + per_node * (rows * nodes - 1)) for rows in (1, 16) for nodes in (1, 32)),
            ("static", 1, 2, draft),
            ("dynamic", 1, 2, draft),
        ]
    )


class Scripted(Drafter, DraftSession):
    """A drafter whose tokens mean nothing; it keeps what it was asked for."""

    default_shape: Shape | None = ROOT_ONLY

    def __init__(self, likely: Callable[[int], Sequence[float]] | None = None) -> None:
        self.likely = likely or (lambda row: [0.6 * 0.8**n for n in range(40)])  # path probabilities of a row's nodes
        self.asked: list[Shape | None] = []  # per step; None where it was to follow
        self.kept: list[list[int]] = []

    def start(self) -> Self:
        return self

    def propose(self, context: Context, shape: Shape) -> Draft:
        self.asked.append(shape)
        batch = len(context.root_ids)
        if isinstance(shape, Tree):
            return Draft.on_tree(shape, torch.zeros(batch, shape.num_nodes, dtype=torch.long))
        assert isinstance(shape, BestFirst)
        return grown(batch, shape.num_nodes, self.likely)

    def observe(self, context: Context) -> None:
        self.asked.append(None)

    def keep(self, rows: torch.Tensor) -> None:
        self.kept.append(rows.tolist())


def grown(batch: int, nodes: int, likely: Callable[[int], Sequence[float]]) -> Draft:
    rows = torch.tensor([[1.0, *likely(row)][:nodes] for row in range(batch)])
    draft = Draft.on_tree(Tree.chain(rows.shape[1] - 1), torch.zeros(rows.shape, dtype=torch.long))
    return Draft(**{**vars(draft), "path_log_probs": rows.log()})


class Copying(Scripted):
    """One that adds two copied nodes to what it is asked for."""

    extra_nodes = 2

    def __init__(self, copied: Sequence[float]) -> None:
        super().__init__()
        self.copied = copied

    def propose(self, context: Context, shape: Shape) -> Draft:
        self.asked.append(shape)
        nodes = shape.num_nodes
        assert isinstance(nodes, int)
        drafted = sorted([*self.likely(0)[: nodes - 1], *self.copied], reverse=True)
        return grown(len(context.root_ids), 1 + len(drafted), lambda _: drafted)


def context(batch: int) -> Context:
    zeros = torch.zeros(batch, 1, dtype=torch.long)
    return Context(torch.zeros(batch, 1, 1), zeros, torch.ones(batch, dtype=torch.long), zeros[:, 0])


def policy(profile: AcceptanceProfile, cost: CostProfile, drafter: Any = None) -> SizePolicySession:
    """A session; the drafter is its own session."""
    return SizePolicy(drafter or Scripted(), profile, cost).start()


def chosen(profile: AcceptanceProfile, cost: CostProfile, rows: int = 1) -> Any:
    """The shape, None for plain decoding."""
    return policy(profile, cost).policy.choose(np.ones(rows))[0]


def num_drafted(session: SizePolicySession, rows: int = 1) -> int:
    return session.propose(context(rows), ROOT_ONLY).num_nodes


def note(
    session: SizePolicySession, accepted: Sequence[int], copied: Sequence[int] = (), are_free: Sequence[bool] = ()
) -> None:
    """What a step accepted; without copies, if they are left out."""
    session.on_accept(accepted, copied or [0] * len(accepted), are_free)


def sizes(one: SizePolicySession, steps: int, accepted: Callable[[int, int], float], batch: int = 1) -> list[int]:
    """Nodes of each step; ``accepted`` says of a row and a number of nodes how many draft tokens are accepted."""
    found = []
    for _ in range(steps):
        found.append(num_drafted(one, batch))
        note(one, [accepted(row, found[-1]) for row in range(batch)])
    return found


def test_the_check_is_told_what_the_head_gains_without_copies_in_rows_that_count() -> None:
    check = AcceptanceCheck("scripted", "scripted", "tiny")
    session = SizePolicy(Scripted(), STATIC, machine(0.01), check).start()
    session.propose(context(3), ROOT_ONLY)
    _, gain, _ = session.policy.choose(np.ones(3))
    note(session, [5, 2, 4], [4, 0, 0], [True, True, False])
    assert check.num_texts == 0, "no text has ended"
    session.keep(torch.tensor([2]))
    assert check.num_texts == 2
    session.keep(torch.tensor([], dtype=torch.long))  # a row that does not count
    assert check.num_texts == 2
    assert (check.num_steps, check.accepted, check.expected) == (2, 3, pytest.approx(2 * gain))
    expensive = SizePolicy(Scripted(), STATIC, machine(100.0), check).start()
    expensive.propose(context(1), ROOT_ONLY)
    note(expensive, [0], [0], [True])
    expensive.keep(torch.tensor([], dtype=torch.long))
    assert check.num_steps == 2, "nothing was drafted"


class ReadingAll(Scripted):
    """One that reads the whole text."""

    needs_history = reads_whole_text = True


@pytest.mark.parametrize(
    ("rows", "prompt", "reads_all", "waits"),
    [(4, 1, True, 0), (4, 2, True, 1), (4, 5, True, 7), (4, 5, False, 0), (1, 5, True, 0)],
)
def test_drafting_of_several_rows_begins_when_it_would_have_saved_what_reading_takes(
    rows: int, prompt: int, reads_all: bool, waits: int
) -> None:
    """Four rows save 20 ms in a step and need 40 / 12 ms to read a token; each step puts four more aside."""
    draft_time = 20.0 * GAINS[-1] - 20.0
    cost = by_hand(
        [("verify", 1, 1, 20.0), ("verify", 4, 1, 20.0), *(("dynamic", n, 2, n / 4 * draft_time) for n in (1, 4))]
    )
    drafter = ReadingAll() if reads_all else Scripted()
    session = policy(GROWING, cost, drafter)
    for step in range(20):
        tokens = torch.zeros(rows, prompt if step == 0 else 1, dtype=torch.long)
        counts = torch.full((rows,), tokens.shape[1])
        session.propose(Context(torch.zeros(*tokens.shape, 1), tokens, counts, tokens[:, 0]), ROOT_ONLY)
        note(session, session._expected)
    assert [shape is None for shape in drafter.asked] == [True] * waits + [False] * (20 - waits)


@pytest.mark.parametrize(("reads_all", "trials"), [(True, 0), (False, 1)])
def test_a_trial_of_a_head_that_must_read_the_text_first_costs_that_too(reads_all: bool, trials: int) -> None:
    drafter = ReadingAll() if reads_all else Scripted()
    cost = by_hand([("verify", 1, 1, 20.0), ("verify", 1, 24, 60.0), ("dynamic", 1, 2, 40.0)])
    one = SizePolicy(drafter, GROWING, cost, clock=StepClock()).start()
    for _ in range(400):
        one.propose(context(1), ROOT_ONLY)
        note(one, [0.0])
        one.on_time(1.0, 20.0, 1)
    assert (sum(shape is not None for shape in drafter.asked) > 0) == bool(trials)


@pytest.mark.parametrize(("rows", "looks"), [(3, 12), (4, 3)])
def test_many_rows_for_which_nothing_is_worth_it_are_looked_at_now_and_then(rows: int, looks: int) -> None:
    drafter = Copying([0.0, 0.0])
    session = policy(tiny_profile(Tree.chain(0), static_tokens=[1.0], dynamic_tokens=[]), machine(1.0), drafter)
    for _ in range(12):
        assert session.propose(context(rows), ROOT_ONLY).num_nodes == 1
        session.on_accept([0] * rows, [0] * rows, [True] * rows)
    assert sum(shape is not None for shape in drafter.asked) == looks
    session.keep(torch.arange(rows - 1))  # other rows have other costs
    session.propose(context(rows - 1), ROOT_ONLY)
    assert drafter.asked[-1] is not None


def test_a_head_that_reads_nothing_does_not_wait_for_the_text_that_copies_need() -> None:
    model = tiny_model("llama")
    session = SizePolicy(TextCopying(tiny_head("medusa", model)), GROWING, machine(0.01)).start()
    tokens = torch.arange(4, 84).view(1, 80).expand(4, -1)
    here = Context(torch.zeros(4, 80, model.hidden_size), tokens, torch.full((4,), 80), tokens[:, 0])
    assert session.propose(here, ROOT_ONLY).num_nodes > 1


def best_size(cost: CostProfile, batch: int = 1, ratio: float = 1.0) -> int:
    """By trying them all."""
    rates = [
        batch * (1 + ratio * gain) / (cost.verify(batch, n) + (cost.draft("static", batch, n) if n > 1 else 0.0))
        for n, gain in enumerate(GAINS, 1)
    ]
    best = int(np.argmax(rates)) + 1
    return best if rates[best - 1] > (1.05 if batch == 1 else 1.10) * rates[0] else 1


def as_expected(row: int, nodes: int) -> float:
    return float(GAINS[nodes - 1])


def never(row: int, nodes: int) -> float:
    return 0.0


# --- the table ---


@pytest.mark.parametrize("per_node", [0.05, 0.5, 1.5, 4.0, 30.0])
@pytest.mark.parametrize("batch", [1, 3, 16, 40])
def test_the_fastest_tree_is_drafted(per_node: float, batch: int) -> None:
    cost = machine(per_node)
    one = policy(STATIC, cost)
    expected = best_size(cost, batch)
    assert num_drafted(one, batch) == expected
    assert one.session.asked == [None if expected == 1 else STATIC.tree(expected)]


def test_a_gain_of_less_than_five_percent_is_none() -> None:
    barely = tiny_profile(Tree.chain(1), static_tokens=[1.0, 1.5], dynamic_tokens=[])
    for milliseconds, nodes in ((14.2, 2), (14.4, 1)):  # 1.5 / 14.2 is 1.056 of 1 / 10, 1.5 / 14.4 is 1.042
        cost = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 2, milliseconds), ("static", 1, 2, 0.0)])
        assert num_drafted(policy(barely, cost)) == nodes


def test_growing_trees_count_for_more_in_small_batches() -> None:
    """They are cut step by step, which their average size in the profile does not show."""
    both = tiny_profile(SIBLINGS, static_tokens=BETTER, dynamic_tokens=STATIC.static_tokens)
    assert [type(chosen(both, machine(0.1), rows)) for rows in (1, 4)] == [BestFirst, Tree]


def test_the_better_kind_of_tree_is_drafted() -> None:
    both = tiny_profile(SIBLINGS, static_tokens=STATIC.static_tokens, dynamic_tokens=BETTER)
    assert isinstance(chosen(both, machine(0.5)), BestFirst)
    points = [(p.part, p.rows, p.nodes, p.milliseconds) for p in machine(0.5).points if p.part != "dynamic"]
    assert isinstance(chosen(both, by_hand([*points, ("dynamic", 1, 2, 9.0)])), Tree)


def test_a_head_without_trees_never_drafts() -> None:
    nothing = tiny_profile(Tree.chain(0), dynamic_tokens=[])
    assert sizes(policy(nothing, machine(0.1)), 3, never) == [1, 1, 1]


def test_what_a_step_without_a_draft_costs_the_drafter_counts() -> None:
    cost = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 2, 14.5), ("static", 1, 2, 0.0), ("follow", 1, 1, 0.3)])
    barely = tiny_profile(Tree.chain(1), static_tokens=[1.0, 1.5], dynamic_tokens=[])
    assert num_drafted(policy(barely, cost)) == 2


def test_nothing_is_drafted_for_many_rows_where_a_disturbed_point_made_it_seem_cheap() -> None:
    """As measured on a machine of two cores: 16 rows of one node seem to cost as much as 16 of two nodes."""
    points = [
        *[(1, 1, 25.9), (1, 4, 36.0), (1, 8, 39.8), (1, 12, 50.6), (1, 16, 60.8), (1, 24, 77.1), (1, 32, 84.1)],
        *[(4, 1, 31.6), (4, 2, 37.3), (4, 4, 68.1), (4, 8, 82.3), (16, 1, 98.7), (16, 2, 97.0), (16, 4, 168.4)],
    ]
    cost = by_hand([*(("verify", *point) for point in points), ("dynamic", 1, 2, 1.2), ("dynamic", 1, 8, 4.4)])
    hydra = tiny_profile(Tree.chain(0), dynamic_tokens=[1.0, 1.48, 1.73, 1.87, 1.95, 2.01, 2.07, 2.11, 2.14, 2.16])
    assert [chosen(hydra, cost, rows) is None for rows in (1, 2, 8, 16)] == [False, False, True, True]


# --- depth ---


def by_depth(kind: str) -> AcceptanceProfile:
    """Each level down to the sixth gains 0.6 times what the one above gains."""
    chain = [round(sum(0.6**d for d in range(depth + 1)), 4) for depth in range(7)]
    deep = [[chain[min(depth, n)] + 0.005 * n for n in range(24)] for depth in range(1, 7)]
    if kind == "static":
        return tiny_profile(Tree.chain(6), 6, static_tokens=chain, dynamic_tokens=[])
    return tiny_profile(Tree.chain(0), 6, dynamic_tokens=deep[-1], shallower_tokens=deep[:-1])


def head_that_pays(level: float, rows: int = 1) -> CostProfile:
    """So many milliseconds of drafting for each level, and as many times that as there are rows."""
    return CostProfile(
        (
            *(CostPoint("verify", r, n, 20.0 + 0.2 * (r * n - 1)) for r in {1, rows} for n in (1, 32)),
            *(
                CostPoint(kind, r, depth + 1, r * level * depth, depth=depth)
                for kind in ("static", "dynamic")
                for r in {1, rows}
                for depth in (1, 3)
            ),
        )
    )


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_trees_are_deep_where_a_level_is_cheap_and_shallow_where_it_is_dear(kind: str) -> None:
    profile = by_depth(kind)
    depths = []
    for level in (0.01, 0.5, 2.0, 5.0, 9.0, 40.0):
        cost = head_that_pays(level)
        shape, gain, rate = policy(profile, cost).policy.choose(np.ones(1))
        rates = {
            (depth, n): profile.tokens(kind, depth)[n - 1] / (cost.verify(1, n) + level * min(depth, n - 1))
            for depth in range(1, 7)
            for n in range(2, len(profile.tokens(kind, depth)) + 1)
        }
        if shape is None:
            depths.append(0)
            assert max(rates.values()) < 1.05 / cost.verify(1, 1)
            continue
        assert rate == pytest.approx(max(rates.values()))
        found = shape.max_depth or 6
        assert gain + 1 == pytest.approx(profile.tokens(kind, found)[shape.num_nodes - 1])
        depths.append(found)
    assert depths[0] == 6
    assert depths == sorted(depths, reverse=True)
    assert len(set(depths)) >= 4
    assert depths[-1] == 0


def test_the_depth_depends_on_the_number_of_rows() -> None:
    alone, together = (chosen(by_depth("dynamic"), head_that_pays(1.0, rows=16), rows) for rows in (1, 8))
    assert (together.max_depth or 6) < (alone.max_depth or 6)


def test_each_level_is_drafted_only_if_its_tokens_are_worth_its_time() -> None:
    one = policy(by_depth("dynamic"), head_that_pays(3.0))
    shape, _, rate = one.policy.choose(np.ones(1))
    assert shape.max_depth is not None
    one.propose(context(1), ROOT_ONLY)
    (asked,) = one.session.asked
    assert asked.num_nodes > shape.num_nodes
    assert asked.max_depth is None, "as deep as the head was measured"
    assert asked.min_level_probability == pytest.approx(3.0 * rate / LEVEL_GAIN, abs=0.005)


def test_a_tree_on_an_accelerator_is_the_one_that_the_profiles_choose() -> None:
    """There no level is left out and no node is cut, because the host would wait for the probabilities."""
    one = policy(by_depth("dynamic"), head_that_pays(3.0))
    shape, _, rate = one.policy.choose(np.ones(1))
    here = context(1)
    there = replace(here, root_ids=here.root_ids.to("meta"))
    assert one._with_spare(shape, one.policy.table(1, 0), there, rate) == shape


def test_levels_cost_what_they_cost_the_rows_together() -> None:
    one = policy(by_depth("dynamic"), head_that_pays(0.2, rows=4))
    one.policy.choose(np.ones(4))
    assert [one.policy.level_cost(rows, 8) for rows in (1, 4)] == pytest.approx([0.2, 0.8])


def test_levels_must_reach_more_where_a_request_accepts_less_than_expected() -> None:
    one = policy(by_depth("dynamic"), head_that_pays(0.5))
    reaches = []
    for _ in range(10):
        one.propose(context(1), ROOT_ONLY)
        note(one, [0])
        reaches.append(one.session.asked[-1].min_level_probability)
    assert reaches[-1] > reaches[0] > 0


def test_a_profile_without_lower_depths_is_drafted_as_deep_as_it_was_measured() -> None:
    old = replace(by_depth("dynamic"), shallower_tokens=[])
    assert chosen(old, head_that_pays(0.5)).max_depth is None
    assert chosen(old, head_that_pays(9.0)).num_nodes == 2, "only a smaller tree is shallower"


# --- one number per request ---


def test_a_request_as_predictable_as_expected_keeps_its_tree() -> None:
    cost = machine(0.5)
    assert set(sizes(policy(STATIC, cost), 300, as_expected)) == {best_size(cost)}


def test_a_request_that_is_never_right_gets_smaller_trees_then_none_and_is_probed() -> None:
    cost = machine(1.5)
    found = sizes(policy(STATIC, cost), 2000, never)
    first_plain = found.index(1)
    assert found[0] == best_size(cost) > 2
    assert found[:first_plain] == sorted(found[:first_plain], reverse=True)
    later = found[first_plain:]
    assert 1 < max(later) <= found[0] - 2, "probes are small"
    gaps = np.diff(np.flatnonzero(np.array(later) > 1))
    assert gaps.max() < 100, "it is probed again and again"


@pytest.mark.parametrize("per_node", [0.3, 0.6, 1.0, 1.5, 3.0, 6.0])
def test_probes_of_a_hopeless_request_cost_at_most_three_percent(per_node: float) -> None:
    cost = machine(per_node, draft=0.0)
    found = sizes(policy(STATIC, cost), 4000, never)[1000:]
    spent = sum(cost.verify(1, nodes) for nodes in found)
    assert spent / (len(found) * cost.verify(1, 1)) < 1.03


def test_a_request_that_becomes_predictable_gets_its_trees_back() -> None:
    cost = machine(1.0)
    one = policy(STATIC, cost)
    assert sizes(one, 600, never)[-1] <= 2
    found = sizes(one, 600, as_expected)
    assert found[-1] >= best_size(cost) - 1
    assert np.mean(found[-100:]) > best_size(cost, ratio=0.8) - 0.5


def test_a_request_better_than_expected_gets_larger_trees() -> None:
    cost = machine(0.5)
    found = sizes(policy(STATIC, cost), 200, lambda row, nodes: 2 * as_expected(row, nodes))
    assert found[-1] > found[0] == best_size(cost)


def test_rows_take_their_records_with_them() -> None:
    cost = machine(1.5)
    one = policy(STATIC, cost)
    sizes(one, 100, lambda row, nodes: as_expected(row, nodes) if row else 0.0, batch=2)
    ratios = [record.ratio for record in one._records]
    assert ratios[0] < 0.4
    assert ratios[1] == pytest.approx(1.0, abs=0.01)
    one.keep(torch.tensor([1]))
    assert one.session.kept == [[1]]
    assert num_drafted(one) == best_size(cost, ratio=ratios[1])
    note(one, [1])
    assert num_drafted(policy(STATIC, cost)) == best_size(cost)


def test_a_row_that_joins_begins_as_expected() -> None:
    one = policy(STATIC, machine(1.5))
    sizes(one, 100, never)
    one.propose(context(2), ROOT_ONLY)
    assert [round(record.ratio, 3) for record in one._records][1] == 1.0


# --- cutting a draft ---


def test_a_grown_draft_is_cut_where_a_node_gains_less_than_its_time_is_worth() -> None:
    cost = machine(1.0)
    best = best_size(cost)
    rate = (1 + GAINS[best - 1]) / (cost.verify(1, best) + 1.0)  # tokens a millisecond
    for likely in ([0.9] * 40, [0.9, 0.5, 0.01, 0.01] + [0.0] * 40, [1e-4] * 40):
        one = policy(GROWING, cost, Scripted(lambda _, likely=likely: likely))
        found = num_drafted(one)
        drafted = one.session.asked[-1].num_nodes
        assert drafted > best, "a few more than are best on average, to choose among"
        worth = [sum(likely[: n - 1]) - rate * cost.verify(1, n) for n in range(1, drafted + 1)]
        assert found == int(np.argmax(worth)) + 1
        assert one._expected == pytest.approx([sum(likely[: found - 1])], abs=1e-5)
    assert found == 1, "the last draft is not worth verifying"


def test_no_spare_nodes_where_drafting_them_costs() -> None:
    dear = by_hand([row for n in (1, 64) for row in (("verify", 1, n, 20.0 + n), ("dynamic", 1, n, 2.0 * n))])
    one = policy(GROWING, dear, Scripted(lambda _: [0.5] * 64))
    one.propose(context(1), ROOT_ONLY)
    assert one.session.asked == [chosen(GROWING, dear)]
    assert one.session.asked != [None]


def test_rows_are_cut_together_by_what_they_gain_together() -> None:
    unsure, sure = (Scripted(lambda row, fall=fall: [0.5 / (1 + fall * row)] * 40) for fall in (9, 0))
    few, many = (num_drafted(policy(GROWING, machine(0.4), drafter), 2) for drafter in (unsure, sure))
    assert many >= few > 1


def test_a_request_that_is_never_right_is_cut_more() -> None:
    cost = machine(1.0)
    one = policy(GROWING, cost)
    found = sizes(one, 40, never)
    assert found[0] > found[5] > found[-1]


# --- a drafter that adds copies ---


def test_copies_are_verified_also_where_no_tree_is_worth_it() -> None:
    cost = machine(20.0)
    assert best_size(cost) == 1
    sure = policy(GROWING, cost, Copying([0.99, 0.98]))
    cheap = policy(GROWING, machine(12.0), Copying([0.99, 0.98]))
    assert num_drafted(sure) == 1, "a node costs a whole step"
    assert num_drafted(cheap) == 3
    assert cheap.session.asked == [Tree.chain(0)]
    assert cheap._expected == pytest.approx([1.97])
    unsure = policy(GROWING, machine(12.0), Copying([0.3, 0.1]))
    assert num_drafted(unsure) == 1


def test_copies_come_on_top_of_a_tree_and_are_cut_with_it() -> None:
    cost = machine(0.5)
    best = best_size(cost)
    assert num_drafted(policy(GROWING, cost, Copying([0.99, 0.98]))) == best + 2
    assert num_drafted(policy(GROWING, cost, Copying([0.0, 0.0]))) <= best


def test_what_copies_gain_says_nothing_of_the_drafter() -> None:
    one = policy(GROWING, machine(0.5))
    for _ in range(5):
        one.propose(context(1), ROOT_ONLY)
        one._expected, one._expected_copies = (1.0,), (2.0,)
        note(one, [4], [3])
    assert one._records[0].ratio == 1.0
    assert one._copies[0].ratio > 1.2


def test_copied_nodes_are_cut_by_what_a_row_accepts_of_copies() -> None:
    likely = Scripted(lambda _: [0.5] * 40)
    kept = []
    for never_copied in (False, True):
        one = policy(GROWING, machine(0.5), likely)
        one.propose(context(1), ROOT_ONLY)
        if never_copied:
            one._copies[0].note(0.0, 60.0)
        draft = replace(grown(1, 12, likely.likely), copied=torch.arange(12)[None] > 5)
        kept.append(
            one._cut(draft, np.ones(1), np.array([one._copies[0].ratio]), 0.25, one.policy.table(1, 0)).num_nodes
        )
        assert len(one._expected_copies) == 1
    assert kept == [12, 6]


def test_of_the_last_rows_a_copy_counts_where_the_row_ends_last() -> None:
    """Six tokens for 30 ms where four rows make four in 20: a gain, but the other rows end later."""
    model = tiny_model("llama")
    drafter = TextCopying(tiny_head("medusa", model), odds=((0.99, 0.98, 0.97, 0.96, 0.95),) * 2)
    cost = by_hand([("verify", rows, nodes, 20.0 + 0.7 * (nodes - 1)) for rows in (1, 4) for nodes in (1, 20)])
    text = torch.tensor([[*range(4, 10), *range(4, 8)]])
    ids = torch.cat([text, torch.arange(50, 80).view(3, 10)])
    here = Context(torch.zeros(4, 10, model.hidden_size), ids, torch.full((4,), 10), torch.tensor([8, 90, 91, 92]))
    nodes = []
    for room in (None, [40, 40, 40, 40], [80, 40, 40, 40], [40, 80, 80, 80]):
        session = SizePolicy(drafter, tiny_profile(Tree.chain(0), dynamic_tokens=[1.0]), cost).start()
        nodes.append(session.propose(replace(here, room=room), ROOT_ONLY).num_nodes > 1)
    assert nodes == [True, False, True, False]


def test_the_engine_says_when_no_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rooms = tiny_model("llama"), []
    proposed = SizePolicySession.propose

    def propose(self: SizePolicySession, here: Context, shape: Shape) -> Draft:
        rooms.append(None if here.room is None else list(here.room))
        return proposed(self, here, shape)

    monkeypatch.setattr(SizePolicySession, "propose", propose)
    engine = Engine(model, tiny_head("hydra", model), profile=STATIC, cost=machine(100.0), max_batch_size=2)
    engine.generate([[5, 6], [7, 8, 9], [4, 4]], max_new_tokens=3, ignore_eos=True)
    assert rooms == [None, None, [2], [1]], "the third request joins when the others have ended"


# --- in the engine ---


class Random(PlantedDrafter):
    """A shaped drafter that plants true tokens; its growing trees are chains with probabilities."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], *, seed: int = 0) -> None:
        super().__init__(Tree.chain(0), answers, seed=seed)

    def propose(self, context: Context, shape: Shape) -> Draft:
        if isinstance(shape, Tree):
            return super().propose(context, shape)
        draft = super().propose(context, Tree.chain(shape.num_nodes - 1))
        likely = torch.rand(draft.token_ids.shape, generator=self.generator).sort(dim=1, descending=True).values
        return Draft(**{**vars(draft), "path_log_probs": likely.log()})


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3_text", "mixtral"])
def family(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_model(request.param)


BOTH = tiny_profile(Tree.from_paths([*TREES["cartesian"].paths[1:], (3,), (4,)]), num_heads=3)


@pytest.mark.few(3)
@pytest.mark.parametrize("batch_size", some([1, 2], 2))
@pytest.mark.parametrize("per_node", some([0.1, 1.0], 1.0))
@pytest.mark.parametrize("method", some(["medusa", "hydra", "eagle", "amphista"], "medusa", "eagle"))
def test_heads_with_profiles_equal_plain(family: TargetModel, method: str, per_node: float, batch_size: int) -> None:
    """Requests join and leave: there are more than are decoded together, and they end at different times."""
    head = tiny_head(method, family, num_heads=4)
    profile = tiny_profile(TREES["cartesian"], num_heads=head.config.num_heads)
    prompts = [*PROMPTS, [4, 4], [7, 8, 9, 10]]
    plain = Engine(family, max_batch_size=batch_size).generate(prompts, max_new_tokens=24)
    engine = Engine(family, head, max_batch_size=batch_size, profile=profile, cost=machine(per_node))
    results = engine.generate(prompts, max_new_tokens=24)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("batch_size", some([1, 3], 3))
def test_any_accepted_path_equals_plain(family: TargetModel, kind: str, batch_size: int) -> None:
    plain = Engine(family, max_batch_size=batch_size).generate(PROMPTS, max_new_tokens=40)
    answers = {tuple(p): r.token_ids for p, r in zip(PROMPTS, plain, strict=True)}
    profile = tiny_profile(TREES["cartesian"], **({"dynamic_tokens": []} if kind == "static" else {}))
    engine = Engine(family, Random(answers), max_batch_size=batch_size, profile=profile, cost=machine(0.2))
    results = engine.generate(PROMPTS, max_new_tokens=40)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert max(result.tokens_per_step for result in results) > 1.2


def test_sampled_text_equals_plain() -> None:
    model = tiny_model("llama")
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.9, "seed": 5}
    plain = Engine(model).generate(PROMPTS, **settings)
    engine = Engine(model, tiny_head("hydra", model), profile=BOTH, cost=machine(0.3))
    assert [r.token_ids for r in engine.generate(PROMPTS, **settings)] == [r.token_ids for r in plain]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}])
def test_texts_do_not_depend_on_the_clock(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time steps take, and so whatever trees are drafted, native models give the same text."""
    monkeypatch.setattr("draftheads.decode.engine.StepClock", StepClock)
    model = tiny_model("llama").sped_up()
    if model.native is None:
        pytest.skip("the native library is off, or was not built: no C++ compiler")
    plain = Engine(model).generate(PROMPTS, max_new_tokens=40, **settings)
    sizes = set()
    for seed in range(4):
        engine = Engine(model, tiny_head("hydra", model), profile=BOTH, cost=machine(0.3))
        assert engine.policy is not None
        assert engine.policy.clock is not None
        times = np.random.default_rng(seed).random(10_000) ** 4
        clock = iter((0.001 * times).cumsum().tolist())
        monkeypatch.setattr("draftheads.decode.batch.time.perf_counter", lambda clock=clock: next(clock))
        results = engine.generate(PROMPTS, max_new_tokens=40, **settings)
        monkeypatch.undo()
        monkeypatch.setattr("draftheads.decode.engine.StepClock", StepClock)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        sizes.add(sum(result.num_steps for result in results))
    assert len(sizes) > 1, "the times changed what was drafted"


def test_no_clock_is_read_where_texts_could_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.decode.engine.StepClock", StepClock)
    model = tiny_model("llama")
    assert Engine(model, tiny_head("hydra", model), profile=BOTH, cost=machine(0.3)).policy.clock is None
    native = model.sped_up()
    engine = Engine(native, tiny_head("hydra", native), profile=BOTH, cost=machine(0.3))
    if engine.policy.clock is not None:
        monkeypatch.setattr(engine.policy.clock, "note", lambda *_, **__: pytest.fail("a typical row was timed"))
        engine.generate(PROMPTS, max_new_tokens=12, acceptance="typical", temperature=0.7)


def test_equal_requests_take_equal_steps() -> None:
    model = tiny_model("llama")
    engine = Engine(model, tiny_head("hydra", model), profile=BOTH, cost=machine(0.3))
    drafted: list[list[int]] = []
    for _ in range(2):
        batch = engine.batch()
        join(batch, engine.requests([PROMPTS[1]], max_new_tokens=30))
        drafted.append([])
        while batch.requests:
            before = batch.runner.verify
            batch.runner.verify = lambda rows, draft: (drafted[-1].append(draft.num_nodes), before(rows, draft))[1]  # noqa: B023
            batch.step()
            batch.runner.verify = before
    assert drafted[0] == drafted[1]


def test_profiles_come_in_pairs_and_for_drafters_with_shapes() -> None:
    model = tiny_model("llama")
    head = tiny_head("medusa", model)
    for options in ({"profile": BOTH}, {"cost": machine(1.0)}):
        with pytest.raises(InvalidSettings, match="go together"):
            Engine(model, head, **options)
    for drafter in (None, PromptLookup()):
        with pytest.raises(InvalidSettings, match="profiles are for a drafter that fills trees"):
            Engine(model, drafter, profile=BOTH, cost=machine(1.0))
        with pytest.raises(InvalidSettings, match="a shape is for a drafter that fills trees"):
            Engine(model, drafter, shape=TREES["chain"])
    with pytest.raises(InvalidSettings, match="give a shape, or profiles"):
        Engine(model, head, shape=TREES["chain"], profile=BOTH, cost=machine(1.0))


def test_a_long_text_makes_drafts_smaller() -> None:
    """Attention of every node reads the whole text."""
    long = [("verify", 1, 1, 25.0, 1024), ("verify", 1, 32, 25.0 + 31 * 8.0, 1024)]
    cost = by_hand([*((p.part, p.rows, p.nodes, p.milliseconds) for p in machine(0.5).points), *long])
    one = policy(STATIC, cost)
    short = num_drafted(one)
    note(one, [1])
    after_long = one.propose(replace(context(1), text_tokens=1024), ROOT_ONLY).num_nodes
    assert 1 < after_long < short


def test_several_rows_draft_only_for_a_tenth_more() -> None:
    """A gain of 7 % is enough for one row and not for two."""
    profile = tiny_profile(Tree.chain(1), static_tokens=[1.0, 1.28], dynamic_tokens=[])
    cost = by_hand([("verify", rows, nodes, 10.0 * 1.2 ** (nodes - 1)) for rows in (1, 2) for nodes in (1, 2)])
    assert [chosen(profile, cost, rows) is not None for rows in (1, 2)] == [True, False]


def test_a_drafter_that_watches_gets_the_logits_and_what_it_asked_for() -> None:
    asked = torch.tensor([[3, 4]])

    class Watching(Scripted):
        seen: Sequence[object] = ()

        def on_verify(self, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
            self.seen = (*self.seen, draft, logits)
            return asked

        def on_read(self, values: Sequence[Sequence[int]]) -> None:
            self.seen = (*self.seen, values)

    drafter = Watching()
    one = policy(STATIC, machine(0.5), drafter)
    draft, logits = one.propose(context(1), ROOT_ONLY), torch.zeros(1, 1, 4)
    assert one.on_verify(draft, logits) is asked
    one.on_read([[3, 4]])
    assert drafter.seen == (draft, logits, [[3, 4]])
    assert policy(STATIC, machine(0.5), Scripted()).on_verify(draft, logits) is None  # others need not watch


def test_the_batches_of_an_engine_share_tables() -> None:
    model = tiny_model("llama")
    engine = Engine(model, tiny_head("hydra", model), profile=STATIC, cost=machine(0.2))
    one, other = (engine.batch().session for _ in range(2))
    assert one.policy.table(2, 100) is other.policy.table(2, 100)
    engine.drafter = tiny_head("medusa", model)
    assert engine.batch().session.policy.drafter is engine.drafter


# --- trees of different sizes ---


@pytest.mark.parametrize("seed", range(20))
def test_nodes_of_all_rows_compete_for_the_time_of_a_pass(seed: int) -> None:
    """As many as the best of all possible sizes gains, if each further node and each unused place costs the same."""
    generator = np.random.default_rng(seed)
    gains = np.zeros((3, 5))
    gains[:, 1:] = -np.sort(-generator.random((3, 4)), axis=1)
    per_node, padding = 0.9 * generator.random(), 0.3 * generator.random() * (seed % 2)
    cost = 1.0 + 3 * per_node * np.arange(5)

    def worth(sizes: Sequence[int]) -> float:
        gained = sum(float(gains[row, :size].sum()) for row, size in enumerate(sizes))
        return gained - per_node * (sum(sizes) - 3) - padding * (3 * max(sizes) - sum(sizes))

    sizes = best_sizes(gains, cost, padding)
    assert worth(sizes.tolist()) == pytest.approx(max(worth(each) for each in itertools.product(range(1, 6), repeat=3)))


def test_a_node_is_taken_after_those_before_it() -> None:
    """Also where a copied token behind an unlikely one counts more."""
    assert best_sizes(np.array([[0.0, 0.1, 0.5], [0.0, 0.5, 0.4]]), np.array([0.0, 0.7, 1.4])).tolist() == [1, 3]


@pytest.mark.parametrize("trees_differ", [False, True])
def test_rows_get_as_many_nodes_as_their_tokens_are_likely(trees_differ: bool) -> None:
    likely = [[0.9 * 0.95**n for n in range(40)], [0.02] * 40, [0.5 * 0.4**n for n in range(40)]]
    policy = SizePolicy(Scripted(likely.__getitem__), GROWING, machine(0.4), trees_differ=trees_differ)
    session = policy.start()
    draft = session.propose(context(3), ROOT_ONLY)
    if not trees_differ:
        assert draft.row_nodes is None
        return
    assert draft.row_nodes is not None
    sure, none, unsure = draft.row_nodes
    assert sure > unsure > none == 1
    expected = [sum(row[: count - 1]) for row, count in zip(likely, draft.row_nodes, strict=True)]
    assert session._expected == pytest.approx(expected, rel=1e-5)


def test_a_gain_of_cutting_counts_only_where_trees_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.decode.size_policy._CUT_GAIN", 1e6)
    policy = SizePolicy(Scripted(), GROWING, machine(100.0))
    assert isinstance(policy.choose(np.ones(1))[0], BestFirst)
    assert policy.choose(np.ones(1), cuts=False)[0] is None
