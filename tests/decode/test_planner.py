"""How much is drafted: by expected tokens and milliseconds, by what requests accept, and by how long steps take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.planner import CostCorrection, Plan, Planner, ways_of
from draftheads.decode.step_costs import StepCosts
from draftheads.drafters.mixed import Mixed
from draftheads.errors import InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import Draft
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree
from families import PROMPTS, TREES, by_hand, tiny_head, tiny_model, tiny_profile
from thorough import some

STATIC = tiny_profile(Tree.chain(3), static_tokens=[1.0, 1.6, 1.9, 2.0], dynamic_tokens=[])
BOTH = tiny_profile(
    Tree.chain(3),
    static_tokens=[1.0, 1.6, 1.9, 2.0],
    dynamic_tokens=[1.0 + 1.5 * n / (n + 3) for n in range(24)],
    shallower_tokens=[[1.0 + 0.8 * n / (n + 3) for n in range(24)], [1.0 + 1.2 * n / (n + 3) for n in range(24)]],
)


GROWING = tiny_profile(
    Tree.chain(0), paths=[], static_tokens=[1.0], dynamic_tokens=[1.0 + 1.5 * n / (n + 3) for n in range(24)]
)


def machine(per_token: float, *, per_level: float = 0.2) -> StepCosts:
    """A pass of one token takes 20 ms."""
    passes = [("verify", 1, tokens, 20.0 + per_token * (tokens - 1)) for tokens in (1, 64)]
    return by_hand([*passes, *(("any", 1, levels, per_level * levels) for levels in (1, 2))])


def following(costs: StepCosts, profile: AcceptanceProfile = BOTH) -> Planner:
    """Other tests do not depend on how long steps take."""
    planner = Planner(profile, costs)
    planner.correction = CostCorrection()
    return planner


def by_search(planner: Planner, rows: int, ratio: float = 1.0) -> tuple[str | None, int]:
    """The best kind and number of nodes by looking at all of them."""
    best: tuple[float, str | None, int] = (1.03 * rows / float(planner.costs.passes(rows)), None, 1)
    for way in planner.ways:
        for nodes in range(2, len(way.gains) + 1):
            milliseconds = float(planner.costs.passes(rows * nodes)) + planner.costs.draft(rows, way.levels[nodes - 1])
            rate = rows * (1.0 + ratio * way.gains[nodes - 1]) / milliseconds
            best = max(best, (rate, way.kind, nodes), key=lambda each: each[0])
    return best[1:]


@pytest.mark.parametrize("per_token", [0.0, 0.2, 0.6, 1.5, 5.0, 30.0])
@pytest.mark.parametrize("profile", [STATIC, BOTH], ids=["static", "both"])
def test_the_fastest_tree_is_drafted(profile: AcceptanceProfile, per_token: float) -> None:
    planner = Planner(profile, machine(per_token))
    for rows in (1, 2, 4, 8, 16):
        for ratio in (0.2, 1.0, 1.7):
            way, nodes, rate = planner.choose(rows, ratio)
            assert (way and way.kind, nodes) == by_search(planner, rows, ratio)
            if way is None:
                assert rate == pytest.approx(rows / float(planner.costs.passes(rows)))


def test_further_texts_of_a_batch_cost_more_than_their_tokens() -> None:
    """Three of four, at each number of nodes; of one request nothing is added."""
    of_one = StepCosts(((1, 10.0), (64, 40.0)), ((1, 1, 1.0),))
    alone, several = (
        Planner(tiny_profile(TREES["ragged"]), costs) for costs in (of_one, replace(of_one, of_texts=0.5))
    )
    for rows in (1, 4):
        (before, drafting), (passes, same) = alone.costs_now(rows), several.costs_now(rows)
        assert (passes - before).tolist() == pytest.approx([0.5 * (rows - 1)] * len(passes))
        assert same.tolist() == drafting.tolist()


def test_nothing_is_drafted_where_plain_decoding_is_as_fast() -> None:
    """A gain of 3 % or less is none."""
    profile = tiny_profile(Tree.chain(1), paths=[[0]], static_tokens=[1.0, 1.5], dynamic_tokens=[])
    for milliseconds, is_drafted in ((29.2, False), (29.0, True)):
        costs = by_hand([("verify", 1, 1, 20.0), ("verify", 1, 2, milliseconds)])
        assert (Planner(profile, costs).choose(1)[0] is not None) == is_drafted


def test_levels_are_dear_or_cheap() -> None:
    depths = [Planner(BOTH, machine(0.2, per_level=ms)).choose(1)[0] for ms in (0.1, 2.0, 5.0)]
    assert [way and way.depth for way in depths] == [3, 2, 1]


def test_a_level_is_drafted_only_if_its_tokens_are_worth_its_time() -> None:
    planner = Planner(BOTH, machine(0.2, per_level=3.0))
    way = next(way for way in planner.ways if way.kind == "dynamic" and way.depth == 3)
    shape = planner.shape(way, 8, 1, 0.1)
    assert isinstance(shape, BestFirst)
    assert shape.min_level_probability == pytest.approx(3.0 * 0.1 / 0.3)
    static = next(way for way in planner.ways if way.kind == "static" and way.depth == 3)
    assert planner.shape(static, 3, 1, 0.1) == STATIC.tree(3)


def test_a_head_without_trees_never_drafts() -> None:
    profile = tiny_profile(Tree.chain(0), paths=[], static_tokens=[1.0], dynamic_tokens=[])
    assert ways_of(profile) == []
    assert Planner(profile, machine(0.1)).choose(1) == (None, 1, 0.05)


# --- what requests accept ---


def grown(probabilities: list[list[float]], copied: list[list[bool]] | None = None) -> Draft:
    """Stars of nodes with these probabilities, root included."""
    likely = torch.tensor(probabilities)
    tokens = torch.arange(likely.numel()).view_as(likely)
    draft = Draft.on_tree(Tree.from_paths([(rank,) for rank in range(likely.shape[1] - 1)]), tokens)
    is_copied = None if copied is None else torch.tensor(copied)
    return Draft(**{**vars(draft), "path_log_probs": likely.log(), "copied": is_copied})


def step(plan: Plan, accepted: Callable[[int], list[int]], rows: int = 1, **options: Any) -> int:
    """Nodes of a step whose drafts have the probabilities that the profile expects."""
    shape, _ = plan.shape(rows, **options)
    nodes = shape.num_nodes
    draft = plan.cut(Draft.on_tree(Tree.chain(nodes - 1), torch.zeros(rows, nodes, dtype=torch.long)))
    plan.note(draft, accepted(nodes), [0] * rows, [True] * rows, (0.1, 20.0))
    return nodes


def test_a_request_that_is_never_right_gets_smaller_trees_then_none_and_is_probed() -> None:
    planner = Planner(GROWING, machine(1.2))
    plan = planner.start()
    sizes = [step(plan, lambda _: [0]) for _ in range(1500)]
    assert sizes[0] > 2
    assert any(size > 1 for size in sizes[500:]), "it may have become right"
    lost = planner.costs.passes(sizes[60:]) / planner.costs.passes(1) - 1.0
    assert lost.mean() < 0.02
    sizes = [step(plan, lambda nodes: [min(3, nodes - 1)]) for _ in range(3000)]
    assert sizes[-1] > 2


def test_a_request_better_than_expected_gets_larger_trees() -> None:
    plan = Planner(GROWING, machine(0.4)).start()
    first, *_, last = [step(plan, lambda nodes: [min(3, nodes - 1)]) for _ in range(100)]
    assert last > first


def test_rows_take_their_records_with_them() -> None:
    plan = Planner(GROWING, machine(0.4)).start()
    for _ in range(100):
        step(plan, lambda _: [0, 3], rows=2)
    plan.keep([1])
    good = step(plan, lambda _: [3])
    plan.keep([])
    assert step(plan, lambda _: [0]) < good, "nothing is known of the next one"


@pytest.mark.parametrize(("rate", "nodes"), [(0.05, 4), (0.1, 3), (0.2, 2), (0.9, 1)])
def test_a_draft_is_cut_where_a_node_gains_less_than_its_time_is_worth(rate: float, nodes: int) -> None:
    """Nodes cost 2 ms; they are accepted with 0.9, 0.3 and 0.15."""
    plan = Planner(STATIC, machine(2.0)).start()
    plan.shape(1)
    plan._rate = rate
    assert plan.cut(grown([[1.0, 0.9, 0.3, 0.15]])).num_nodes == nodes


def test_rows_are_cut_together_by_what_they_gain_together() -> None:
    plan = Planner(STATIC, machine(2.0)).start()
    plan.shape(2)
    plan._rate = 0.15  # two nodes cost 0.6
    assert plan.cut(grown([[1.0, 0.5, 0.1], [1.0, 0.5, 0.1]])).num_nodes == 2
    assert plan.cut(grown([[1.0, 0.5, 0.1], [1.0, 0.05, 0.1]])).num_nodes == 1


def test_copies_are_judged_by_what_the_request_accepts_of_copies() -> None:
    plan = Planner(STATIC, machine(2.0), budget=2).start()
    draft = grown([[1.0, 0.6, 0.4]], [[False, True, True]])
    for accepted, nodes in ((2, 3), (0, 1)):
        for _ in range(300):
            plan.shape(1)
            plan._rate = 0.1
            cut = plan.cut(draft)
            plan.note(cut, [accepted], [accepted], [True], (0.1, 20.0))
        assert cut.num_nodes == nodes
    assert plan.ratios[0][0] == pytest.approx(1.0), "copies say nothing of the head"


def test_copies_may_use_what_is_almost_free_where_nothing_is_cut() -> None:
    for per_token, free in ((0.0, 16), (0.3, 3), (5.0, 0)):
        plan = Planner(tiny_profile(Tree.chain(0), paths=[], static_tokens=[1.0]), machine(per_token), budget=16)
        for cuts, expected in ((False, free), (True, 16)):
            shape, nodes = plan.start().shape(1, cuts=cuts)
            assert nodes - shape.num_nodes == expected


# --- how long steps take ---


class World:
    """A machine whose passes take their costs times a factor by tokens, and a head that accepts what is expected."""

    def __init__(self, planner: Planner, rows: int, factor: Callable[[int], float]) -> None:
        self.planner, self.rows, self.factor = planner, rows, factor
        self.plan = planner.start()
        self.accepted = 0.0

    def step(self) -> tuple[int, float]:
        """Nodes, and milliseconds for each token."""
        shape, _ = self.plan.shape(self.rows)
        nodes = shape.num_nodes
        draft = self.plan.cut(Draft.on_tree(Tree.chain(nodes - 1), torch.zeros(self.rows, nodes, dtype=torch.long)))
        tokens = self.rows * nodes
        verifying = self.factor(tokens) * float(self.planner.costs.passes(tokens))
        drafting = self.planner.costs.draft(self.rows, self.plan._levels)
        self.accepted += self.plan._gain
        number = int(self.accepted)
        self.accepted -= number
        self.plan.note(draft, [number] * self.rows, [0] * self.rows, [True] * self.rows, (drafting, verifying))
        return nodes, (verifying + drafting) / (self.rows * (1.0 + self.plan._gain))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_planner_that_is_right_to_draft_drafts(rows: int, noise: float) -> None:
    """Looks at plain decoding are few, also with several rows, and never lead to more plain steps."""
    random = np.random.default_rng(rows)
    world = World(following(machine(0.1)), rows, lambda _: float(np.exp(noise * random.normal())))
    sizes = [world.step()[0] for _ in range(1500)]
    assert sizes[0] > 1
    assert 5 <= sizes.count(1) <= 15


@pytest.mark.parametrize("rows", [1, 8])
def test_it_follows_a_machine_that_changes(rows: int) -> None:
    """Nodes cost three times as much for a while, as beside other programs: plain decoding is faster then."""
    planner = following(machine(0.1))
    dear = machine(4.0)
    world = World(planner, rows, lambda _: 1.0)
    times = {"cheap": [world.step()[1] for _ in range(200)]}
    world.factor = lambda tokens: float(dear.passes(tokens) / planner.costs.passes(tokens))
    times["dear"] = [world.step()[1] for _ in range(400)]
    world.factor = lambda _: 1.0
    times["again"] = [world.step()[1] for _ in range(400)]
    best = {}
    for name, costs in (("cheap", planner.costs), ("dear", dear), ("again", planner.costs)):
        _, _, rate = Planner(BOTH, costs).choose(rows)
        best[name] = 1.0 / rate
    for name, first in (("cheap", 50), ("dear", 250), ("again", 250)):
        assert np.mean(times[name][first:]) < 1.06 * best[name], name


def test_a_machine_that_is_slower_in_all_changes_nothing() -> None:
    planner = following(machine(0.4))
    world = World(planner, 2, lambda _: 1.0)
    before = {world.step()[0] for _ in range(15)}
    world.factor = lambda _: 2.5
    after = [world.step()[0] for _ in range(200)]
    assert max(set(after[40:]), key=after[40:].count) in before


def test_a_pause_of_the_machine_is_no_cost() -> None:
    planner = following(machine(0.4))
    world = World(planner, 1, lambda _: 1.0)
    for number in range(60):
        world.factor = lambda _, slow=number == 40: 200.0 if slow else 1.0
        sizes = [world.step()[0]]
        assert number in (16, 32) or sizes[0] > 1


def test_costs_do_not_follow_where_texts_could_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    engine = Engine(model, tiny_head("hydra", model), profile=BOTH, costs=machine(0.3))
    assert (engine.planner is not None, engine.planner and engine.planner.correction) == (True, None)
    native = Engine(model.sped_up(), tiny_head("hydra", model), profile=BOTH, costs=machine(0.3))
    if native.model.native is not None:
        monkeypatch.setattr(CostCorrection, "note", lambda *_: pytest.fail("a typical row was timed"))
        native.generate(PROMPTS, max_new_tokens=12, acceptance="typical", temperature=0.7)


# --- in the engine ---


@pytest.fixture(scope="module", params=some(["llama", "gemma3_text", "gpt2"], "llama", "gemma3_text"))
def family(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_model(request.param)


@pytest.mark.few(12)
@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "small-llama", "copying"])
@pytest.mark.parametrize("per_token", [0.0, 0.4, 30.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_heads_with_a_planner_equal_plain(family: TargetModel, method: str, per_token: float, batch_size: int) -> None:
    head = Mixed(tiny_head("hydra", family)) if method == "copying" else tiny_head(method, family)
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    expected = Engine(family).generate(PROMPTS, **options)
    engine = Engine(family, head, profile=BOTH, costs=machine(per_token), max_batch_size=batch_size)
    found = engine.generate(PROMPTS, **options)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    if method != "copying":
        assert any(any(result.drafted_by_depth) for result in found) == (per_token < 30.0)


def test_texts_do_not_depend_on_how_long_steps_take() -> None:
    """Sampled and greedy, on a model with native passes, in which costs follow."""
    model = tiny_model("llama").sped_up()
    for settings in ({}, {"temperature": 0.9, "seed": 3}):
        options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, **settings}
        expected = [result.token_ids for result in Engine(model).generate(PROMPTS, **options)]
        for per_token in (0.0, 1.0):
            engine = Engine(model, tiny_head("eagle", model), profile=BOTH, costs=machine(per_token))
            assert [result.token_ids for result in engine.generate(PROMPTS, **options)] == expected


def test_a_profile_needs_costs_and_a_drafter_with_shapes() -> None:
    model = tiny_model("llama")
    head = tiny_head("medusa", model)
    for options in ({"profile": BOTH}, {"costs": machine(1.0)}):
        with pytest.raises(InvalidSettings, match="go together"):
            Engine(model, head, **options)  # type: ignore[arg-type]
    for drafter in (None, Mixed(None)):
        with pytest.raises(InvalidSettings, match="a profile is for a drafter that fills trees"):
            Engine(model, drafter, profile=BOTH, costs=machine(1.0))
        with pytest.raises(InvalidSettings, match="a shape is for a drafter that fills trees"):
            Engine(model, drafter, shape=TREES["chain"])
    with pytest.raises(InvalidSettings, match="give a shape, or a profile"):
        Engine(model, head, shape=TREES["chain"], profile=BOTH, costs=machine(1.0))
