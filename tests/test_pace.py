"""How much is guessed at each step: on a simulated machine, with guesses that are known to hold or not."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.pace import Experience, Pace, _Record, _Timings
from draftheads.decode.sequence import GenerationResult
from draftheads.draft import Context, Draft
from draftheads.errors import InvalidSettings
from draftheads.growth import BestFirst
from draftheads.plan import Choice, Tuned
from draftheads.target.model import TargetModel
from draftheads.tree import Tree
from families import PROMPTS, TREES, Prophet, tiny_head, tiny_model
from pace_world import ACCURACY, PATHS, Load, Scripted, best_fixed, context, gains, seconds, step, tuned

STATIC = tuned()
GROWN = tuned(kind="dynamic")
WORTH = gains()
Cost = Callable[[int, int], float]


def as_expected(row: int, nodes: int) -> float:
    """What was tuned, without chance."""
    return WORTH[nodes - 1]


def never(row: int, nodes: int) -> float:
    return 0.0


def steps(
    pace: Pace,
    count: int,
    batch: int = 1,
    kept: Callable[[int, int], float] = as_expected,
    cost: Cost = seconds,
) -> list[int]:
    """How many nodes were checked at each of so many steps."""
    return [step(pace, batch, kept, cost) for _ in range(count)]


def usual(nodes: Sequence[int]) -> int:
    """The commonest number."""
    return Counter(nodes).most_common(1)[0][0]


def scaled(trees: float = 1.0, plain: float = 1.0) -> Cost:
    """A machine on which steps take so many times as long as tuned."""
    return lambda batch, nodes: seconds(batch, nodes) * (plain if nodes == 1 else trees)


# --- as tuned ---


def test_where_it_goes_as_tuned_the_best_tree_is_drafted() -> None:
    for batch in (1, 2, 4):
        drafter = Scripted()
        nodes = steps(Pace(drafter, STATIC), 300, batch)
        best = STATIC.choice(batch).num_nodes
        assert usual(nodes) == best
        assert nodes.count(best) + nodes.count(1) == 300
        assert drafter.shapes.count(STATIC.tree(best)) == nodes.count(best)


def test_a_plain_step_now_and_then_tells_what_it_takes() -> None:
    nodes = steps(Pace(Scripted(), STATIC), 2000)
    plain = [number for number, count in enumerate(nodes) if count == 1]
    assert nodes[0] > 1, "short answers must not begin with it"
    assert plain[0] <= 20
    gaps = np.diff(plain)
    assert gaps.min() > 16
    assert gaps.max() <= 130
    assert len(plain) / len(nodes) < 0.02


def test_many_rows_decode_plainly_where_that_is_fastest() -> None:
    nodes = steps(Pace(Scripted(), STATIC), 1000, 16)
    assert nodes.count(1) >= 980
    assert nodes[:8] == [1] * 8


def test_a_batch_of_any_size_is_planned() -> None:
    pace = Pace(Scripted(), STATIC)
    for batch in (3, 5, 7, 11, 16, 33, 200, 1):
        pace.keep(torch.tensor([], dtype=torch.long))
        nodes = steps(pace, 3, batch)
        assert max(nodes) <= len(STATIC.static_tokens)
        if batch > 16:
            assert nodes == [1, 1, 1]


def test_nothing_larger_is_drafted_than_was_measured() -> None:
    few = replace(STATIC, costs=[cost for cost in STATIC.costs if cost.num_nodes <= 3])
    assert max(steps(Pace(Scripted(), few), 100, kept=lambda row, nodes: nodes - 1)) == 3


def test_a_plan_without_measured_trees_is_plain_decoding() -> None:
    none = replace(
        STATIC,
        costs=[cost for cost in STATIC.costs if cost.kind == "none"],
        choices=[Choice(1, "none", 1, 30.0, 1.0)],
    )
    for adaptive in (True, False):
        drafter = Scripted()
        assert steps(Pace(drafter, none, adaptive=adaptive), 300) == [1] * 300
        assert drafter.shapes == [None] * 300, "a drafter with a history must hear of every step"


def test_with_far_more_rows_than_were_measured_nothing_is_guessed() -> None:
    cheap = replace(STATIC, choices=[choice for choice in STATIC.choices if choice.batch_size <= 4])
    for adaptive in (True, False):
        drafter = Scripted()
        assert steps(Pace(drafter, cheap, adaptive=adaptive), 50, 9) == [1] * 50
        assert drafter.shapes == [None] * 50


def test_what_one_batch_learned_the_next_one_begins_with() -> None:
    experience = Experience()
    steps(Pace(Scripted(), STATIC, experience=experience), 300, kept=never)
    assert steps(Pace(Scripted(), STATIC, experience=experience), 9, kept=never).count(1) >= 8
    assert steps(Pace(Scripted(), STATIC), 9, kept=never).count(1) < 8
    slow = scaled(trees=4.0)
    experience = Experience()
    steps(Pace(Scripted(), STATIC, experience=experience), 300, cost=slow)
    assert steps(Pace(Scripted(), STATIC, experience=experience), 9, cost=slow).count(1) >= 8


def test_an_engine_hands_on_what_its_batches_learned() -> None:
    model = tiny_model("llama")
    engine = Engine(model, tiny_head("medusa", model, num_heads=4), tuned=STATIC)
    assert engine.paced()._timings is engine.paced()._timings  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_where_a_change_of_size_costs_the_size_stays(kind: Any) -> None:
    """Small trends move the best size; where weights are packed for each size it is kept until another is worth it."""
    sure = [0.8, 0.7, 0.4, 0.3, 0.25, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]

    def sizes(*, any_size: bool) -> set[int]:
        flicker = np.random.default_rng(0)

        def sure_now(row: int) -> Sequence[float]:
            return [value * (0.2 + 0.8 * flicker.random()) for value in sure]

        pace = Pace(Scripted(sure_now), tuned(kind=kind), any_size=any_size)
        nodes = steps(pace, 600, kept=lambda row, nodes: float(flicker.random() < 0.6) * min(2, nodes - 1))
        return set(nodes) - {1}

    assert len(sizes(any_size=False)) <= 2
    assert len(sizes(any_size=True)) > len(sizes(any_size=False))


def test_where_a_change_of_size_costs_a_much_better_size_is_taken() -> None:
    pace = Pace(Scripted(), STATIC, any_size=False)
    before = usual(steps(pace, 200))
    after = usual(steps(pace, 800, cost=lambda batch, nodes: seconds(batch, nodes) + 0.01 * nodes)[200:])
    assert 1 < after < before


# --- guesses that are kept, or not ---


def test_guesses_that_are_never_kept_are_given_up_and_tried_again_after_a_while() -> None:
    drafter = Scripted()
    pace = Pace(drafter, STATIC)
    nodes = steps(pace, 400, kept=never)
    assert nodes[0] > 1
    assert nodes[100:].count(1) >= 0.97 * 300
    assert drafter.shapes.count(None) == nodes.count(1), "it must follow where it does not guess"
    assert any(count > 1 for count in steps(pace, 800, kept=never)), "never tried again"
    # and when guesses hold again, they are made again
    assert usual(steps(pace, 1500)[-200:]) == STATIC.choice(1).num_nodes


def test_guesses_that_are_never_kept_cost_next_to_nothing() -> None:
    pace = Pace(Scripted(), STATIC)
    nodes = steps(pace, 1000, kept=never)
    assert sum(seconds(1, count) for count in nodes) < 1.02 * 1000 * seconds(1, 1)


def test_guesses_that_are_kept_more_or_less_often_make_larger_or_smaller_trees() -> None:
    cheap: Cost = lambda batch, nodes: seconds(batch, nodes) if nodes == 1 else 0.031 + 0.0008 * nodes  # noqa: E731
    plan = tuned(cheap)

    def found(quality: float) -> int:
        kept = lambda row, nodes: quality * WORTH[nodes - 1]  # noqa: E731
        return usual(steps(Pace(Scripted(), plan), 600, 1, kept, cheap)[-200:])

    assert 1 < found(0.2) < found(0.4) < found(1.0) < found(2.5)


def test_a_record_begins_with_the_prior_and_ends_with_what_was_seen() -> None:
    record = _Record()
    assert record.factor(0.7, 8.0) == pytest.approx(0.7)
    factors = []
    for _ in range(300):
        record.note(1.0, 2.0, 0.98)
        factors.append(record.factor(1.0, 8.0))
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx(9 / 10)
    assert factors[-1] == pytest.approx(0.5, abs=0.05)
    for _ in range(4000):
        record.note(0.0, 0.0, 0.98)
    assert record.factor(1.0, 8.0) == pytest.approx(1.0, abs=0.01), "without guesses it is forgotten"


def factors_of(pace: Pace) -> list[float]:
    return [row.factor(1.0, 1.0) for row in pace._rows]


def test_rows_have_records_of_their_own_which_move_with_them() -> None:
    drafter = Scripted()
    pace = Pace(drafter, tuned(lambda batch, nodes: seconds(1, nodes)))
    quality = [0.0, 1.0, 0.5]
    steps(pace, 60, 3, lambda row, nodes: quality[row] * WORTH[nodes - 1])
    bad, good, middling = factors_of(pace)
    assert bad < 0.3 < middling < 0.7 < good
    pace.keep(torch.tensor([2, 1]))  # row 0 left, the last one took its place
    assert factors_of(pace) == [middling, good]
    assert drafter.kept == [[2, 1]]
    pace.keep(torch.tensor([1, 0]))
    assert factors_of(pace) == [good, middling]
    pace.propose(context(4))  # two rows joined
    assert factors_of(pace)[:2] == [good, middling]
    assert factors_of(pace)[2:] == [1.0, 1.0]
    pace.keep(torch.tensor([], dtype=torch.long))
    pace.propose(context(1))
    assert factors_of(pace) == [1.0]


def test_good_rows_pay_for_guesses_that_bad_rows_do_not() -> None:
    """The number of nodes is for all rows, so it counts what they promise together."""
    cost = tuned(lambda batch, nodes: seconds(1, nodes))
    found = {}
    for good in (0, 2, 4):
        pace = Pace(Scripted(), cost)
        kept = lambda row, nodes, good=good: WORTH[nodes - 1] if row < good else 0.0  # noqa: E731
        found[good] = np.mean(steps(pace, 300, 4, kept, lambda batch, nodes: seconds(1, nodes))[-100:])
    assert 1 <= found[0] < found[2] < found[4]


def test_new_rows_are_judged_by_those_before_them() -> None:
    """Where no answer's guesses hold, each new answer must not have to find out anew."""
    pace = Pace(Scripted(), STATIC)
    first = steps(pace, 60, kept=never)
    wasted = []
    for _ in range(10):
        pace.keep(torch.tensor([], dtype=torch.long))
        wasted.append(60 - steps(pace, 60, kept=never).count(1))
    assert max(wasted) < 60 - first.count(1)
    assert sum(wasted) < 0.05 * 600


# --- costs that differ ---


def test_trees_that_cost_more_than_tuned_are_smaller_or_none() -> None:
    pace = Pace(Scripted(), STATIC)
    assert usual(steps(pace, 300, cost=scaled(trees=1.8))[100:]) == 1
    for steep in (
        lambda batch, nodes: seconds(batch, nodes) * (1 + 0.15 * (nodes > 3)),
        lambda batch, nodes: seconds(batch, nodes) + 0.0015 * batch * nodes,  # each node takes longer
    ):
        assert usual(steps(Pace(Scripted(), STATIC), 400, cost=steep)[100:]) in (2, 3)


def test_trees_that_cost_less_than_tuned_are_found_where_none_were_drafted() -> None:
    pace = Pace(Scripted(), STATIC)
    nodes = steps(pace, 600, 16, cost=scaled(trees=0.7))
    assert nodes[0] == 1
    assert usual(nodes[-300:]) > 1


def test_trees_that_became_dear_and_then_cheap_again_are_drafted_again() -> None:
    pace = Pace(Scripted(), STATIC)
    steps(pace, 200)
    assert usual(steps(pace, 200, cost=scaled(trees=2.0))[-100:]) == 1
    assert usual(steps(pace, 1500)[-200:]) == STATIC.choice(1).num_nodes


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.4, 3.0])
def test_a_machine_that_is_slower_or_faster_in_all_changes_nothing(factor: float) -> None:
    for batch in (1, 4, 16):
        expected = steps(Pace(Scripted(), STATIC), 300, batch)
        assert steps(Pace(Scripted(), STATIC), 300, batch, cost=scaled(factor, factor)) == expected


def test_a_machine_that_becomes_slower_changes_nothing_for_long() -> None:
    pace = Pace(Scripted(), STATIC)
    steps(pace, 300)
    nodes = steps(pace, 400, cost=scaled(2.0, 2.0))
    assert usual(nodes[100:]) == STATIC.choice(1).num_nodes
    assert nodes[100:].count(1) < 0.15 * 300


def test_what_few_rows_showed_many_begin_with() -> None:
    dear = scaled(trees=1.8)
    pace = Pace(Scripted(), STATIC)
    assert steps(pace, 1, 4) == [2], "unknown, it is as tuned"
    pace = Pace(Scripted(), STATIC)
    steps(pace, 300, cost=dear)
    assert steps(pace, 8, 4, cost=dear) == [1] * 8


def test_steps_without_guesses_tell_how_fast_the_machine_is_for_trees_not_seen_lately() -> None:
    timings = _Timings({})
    for nodes in (1, 4, 1):
        for _ in range(20):
            timings.note(nodes, 1.0)
    for _ in range(30):
        timings.note(1, 2.0)
    plain, tree = timings.by_size()[[1, 3]]
    assert plain == pytest.approx(2.0, rel=0.1)
    assert tree == pytest.approx(plain, rel=0.05)


def test_steps_without_guesses_tell_nothing_of_trees_just_seen() -> None:
    timings = _Timings({})
    for _ in range(20):
        timings.note(4, 1.3)
    timings.note(1, 1.0)
    plain, tree = timings.by_size()[[1, 3]]
    assert tree == pytest.approx(1.3)
    assert plain < 1.2


def test_a_hiccup_is_no_trend() -> None:
    pace = Pace(Scripted(), STATIC)
    steps(pace, 100)
    pace.propose(context(1))
    pace.note([1], 20.0)
    nodes = steps(pace, 500)
    assert nodes.count(1) <= 5
    assert usual(nodes[-100:]) == STATIC.choice(1).num_nodes


# --- trees that grow ---


def grown(sure: Sequence[float], *, batch: int = 1, count: int = 1) -> tuple[list[int], Scripted]:
    """Nodes at each step, of a head that is always as sure as that."""
    drafter = Scripted(lambda row: sure)
    pace = Pace(drafter, GROWN)
    return steps(pace, count, batch, lambda row, nodes: float(sum(sure[: nodes - 1]))), drafter


def test_growing_trees_are_cut_where_guesses_are_unlikely() -> None:
    best = GROWN.choice(1).num_nodes
    unsure, drafter = grown([0.3, 0.02] + [0.01] * 40)
    assert unsure == [2]
    assert drafter.shapes == [BestFirst(best, num_ranks=4, beam=4)]
    sure, _ = grown([0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65] + [0.01] * 40)
    assert sure == [best]
    assert best > 3
    assert grown([0.5, 0.4] + [0.001] * 40)[0] == [3]


def test_what_was_guessed_is_paid_for_whether_it_is_checked_or_not() -> None:
    """A dear head: its guesses are not dropped to save what they have cost already, only what checking them takes."""
    plan = tuned(kind="dynamic")
    dear = replace(
        plan,
        costs=[replace(c, draft=0.5 * c.total, verify=0.5 * c.total) if c.num_nodes > 1 else c for c in plan.costs],
    )
    sure = [0.3] + [0.09] * 40
    nodes = [steps(Pace(Scripted(lambda row: sure), p), 1, kept=lambda row, nodes: 0.3)[0] for p in (plan, dear)]
    assert nodes[0] < nodes[1] == plan.choice(1).num_nodes


def test_a_cut_step_is_timed_with_all_of_its_drafting() -> None:
    """Else cutting would seem to make steps of that size slower than they were tuned."""
    plan = tuned(kind="dynamic")
    plan = replace(plan, costs=[replace(c, draft=0.001 * c.num_nodes) if c.num_nodes > 1 else c for c in plan.costs])
    pace = Pace(Scripted(lambda row: [0.5, 0.4] + [0.001] * 40), plan)
    best = plan.choice(1).num_nodes
    assert pace.propose(context(1)).num_nodes == 3 < best
    took = float(pace._outlook(1).seconds[2]) + 0.001 * (best - 3)
    pace.note([1], took)
    assert list(pace._timings[1].ratios.values()) == pytest.approx([1.0])


def test_what_was_fastest_on_whole_answers_is_no_slower_than_others_by_their_steps() -> None:
    """Steps are timed one by one, answers as they come: where the two differ, answers are right."""
    cheap: Cost = lambda batch, nodes: 0.03 if nodes == 4 else seconds(batch, nodes)  # noqa: E731
    plan = tuned(cheap)
    plan = replace(plan, choices=[replace(choice, num_nodes=6) for choice in plan.choices])
    assert usual(steps(Pace(Scripted(), plan), 20, cost=seconds)) == 6


def test_a_growing_tree_that_is_not_sure_of_anything_is_not_checked_at_all() -> None:
    drafter = Scripted(lambda row: [0.001] * 40)
    pace = Pace(drafter, GROWN)
    draft = pace.propose(context(1))
    assert draft.num_nodes == 1
    before = {size: dict(timings.ratios) for size, timings in pace._timings.items()}
    pace.note([0], 10.0)  # it drafted: that says nothing of steps without guesses
    assert {size: timings.ratios for size, timings in pace._timings.items()} == before


def test_a_head_that_is_never_sure_is_not_asked_any_more() -> None:
    """To guess and then not to check costs, too."""
    drafter = Scripted(lambda row: [0.001] * 40)
    nodes = steps(Pace(drafter, GROWN), 500, kept=never)
    assert nodes.count(1) == 500
    assert drafter.shapes[100:].count(None) >= 0.97 * 400


def test_growing_trees_of_all_rows_are_cut_at_one_place() -> None:
    sure = {0: [0.9, 0.8, 0.7, 0.6, 0.5] + [0.01] * 40, 1: [0.1] * 45}
    drafter = Scripted(lambda row: sure[row])
    draft = Pace(drafter, GROWN).propose(context(2))
    assert draft.token_ids.shape == (2, draft.num_nodes)
    assert draft.path_log_probs is not None
    assert draft.path_log_probs.shape == draft.token_ids.shape
    assert 3 <= draft.num_nodes <= 6


def test_confidence_that_is_not_kept_counts_less() -> None:
    """A head that says nine in ten and is right once in ten is believed no longer."""
    drafter = Scripted(lambda row: [0.9, 0.8, 0.7, 0.6] + [0.01] * 40)
    nodes = steps(Pace(drafter, GROWN), 400, kept=lambda row, nodes: 0.1 * (nodes > 1))
    assert nodes[0] >= 4
    assert nodes[100:].count(1) >= 0.9 * 300


def test_the_expected_guesses_are_those_of_the_nodes_that_are_checked() -> None:
    """A head that is right about how sure it is keeps a factor of one, however its trees are cut."""
    nodes, _ = grown([0.6, 0.4, 0.2, 0.1] + [0.02] * 40)
    pace = Pace(Scripted(lambda row: [0.6, 0.4, 0.2, 0.1] + [0.02] * 40), GROWN)
    steps(pace, 50, kept=lambda row, count: float(np.sum(([0.6, 0.4, 0.2, 0.1] + [0.02] * 40)[: count - 1])))
    assert nodes[0] > 1
    assert factors_of(pace) == pytest.approx([1.0])


# --- not adaptive ---


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_without_adapting_the_choices_are_followed_whatever_happens(kind: Any) -> None:
    plan = tuned(kind=kind)
    drafter = Scripted(lambda row: [0.001] * 40)
    pace = Pace(drafter, plan, adaptive=False)
    for batch in (1, 2, 3, 4, 6, 8, 11, 16, 40, 1):
        choice = plan.choice(batch)
        shape = plan.tree(choice.num_nodes) if kind == "static" else plan.growing(choice.num_nodes)
        drafter.shapes.clear()
        for number in range(40):
            assert pace.propose(context(batch)).num_nodes == choice.num_nodes
            pace.note([0] * batch, 0.001 if number % 2 else 9.0)
        assert drafter.shapes == [None if choice.kind == "none" else shape] * 40
        pace.keep(torch.tensor([0]))


# --- as a drafter ---


def test_whether_a_history_is_needed_is_the_drafters_affair() -> None:
    drafter = Scripted()
    assert not Pace(drafter, STATIC).needs_history
    drafter.needs_history = True
    assert Pace(drafter, STATIC).needs_history


class Listener(Prophet):
    """A drafter with a history which it checks, and whose trees may change from step to step."""

    @property
    def shape(self) -> Tree:
        return self.tree

    @shape.setter
    def shape(self, shape: Tree) -> None:
        self.tree = shape

    def follow(self, context: Context) -> None:
        self.propose(context)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("room", [1, 3])
def test_a_drafter_with_a_history_hears_of_every_token(
    monkeypatch: pytest.MonkeyPatch, room: int, adaptive: bool
) -> None:
    """Plain steps between others must not leave gaps in what it was told; it checks that itself."""
    model = tiny_model("llama")
    prompts = [*PROMPTS, [4, 5], [22, 3, 9, 4]]
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    plain = ids(Engine(model).generate(prompts, **options))
    listener = Listener(Tree.chain(0), dict(zip(map(tuple, prompts), plain, strict=True)))
    plan = replace(STATIC, choices=[Choice(1, "static", 6, 1.0, 1.0), Choice(3, "none", 1, 1.0, 1.0)])
    engine = Engine(model, max_batch_size=room)
    monkeypatch.setattr(engine, "paced", lambda: Pace(listener, plan, adaptive=adaptive))
    assert ids(engine.generate(prompts, **options)) == plain


# --- a load that changes ---

OFF = {
    "as tuned": (STATIC, seconds, 1.0),
    "trees dearer": (STATIC, scaled(trees=1.3), 1.0),
    "trees cheaper": (STATIC, scaled(trees=1 / 1.3), 1.0),
    "all slower": (STATIC, scaled(2.0, 2.0), 1.0),
    "guesses worse": (STATIC, seconds, 0.7),
    "guesses better": (tuned(worth=[gain / 1.3 for gain in WORTH]), seconds, 1.0),
    "trees dearer and guesses worse": (STATIC, scaled(trees=1.3), 0.7),
    "trees cheaper and guesses better": (tuned(worth=[gain / 1.3 for gain in WORTH]), scaled(trees=1 / 1.3), 1.0),
    "guesses worth nothing": (STATIC, seconds, 0.0),
}
PHASES = [(1, 800), (16, 6000), (1, 800)]  # rows at work, tokens


@pytest.mark.parametrize("case", OFF)
def test_a_load_that_changes_is_decoded_about_as_fast_as_the_best_fixed_tree_of_each_phase(case: str) -> None:
    plan, cost, quality = OFF[case]
    load = Load(Pace(Scripted(), plan), cost=cost, quality=lambda request: quality)
    for batch, tokens in PHASES:
        best, plain = best_fixed(batch, cost, quality)
        speed = load.phase(batch, tokens)
        assert speed > 0.95 * best
        assert speed > 0.97 * plain


def test_a_load_of_good_and_bad_requests_is_faster_than_any_fixed_tree_allows_for() -> None:
    load = Load(Pace(Scripted(), STATIC), quality=lambda request: float(request % 2))
    best, plain = best_fixed(1, seconds, 0.5)
    speed = load.phase(1, 2500)
    assert speed > 0.97 * best
    assert speed > 1.05 * plain


def test_the_simulated_machine_keeps_as_many_guesses_as_the_accuracies_promise() -> None:
    load = Load(Pace(Scripted(), STATIC))
    for nodes in (2, 4, 12, 40):
        mean = np.mean([load._kept(1.0, nodes) for _ in range(4000)])
        assert mean == pytest.approx(WORTH[nodes - 1], abs=0.08)
    assert WORTH[1] == ACCURACY[0][0]
    assert len(PATHS) == len(WORTH) - 1


# --- the text stays the same ---

EIGHT = [*PROMPTS, [4, 5], [22, 3, 9, 4], [8, 8, 8, 8, 8, 8], [20, 19, 18], [6, 21]]


def ids(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def plan_of(kind: Any, *, rows: Sequence[int] = (1, 2, 4)) -> Tuned:
    """For heads of three guesses; another tree for each number of rows, none at all for the last one."""
    paths = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [3], [0, 0, 1]]
    plan = tuned(kind=kind)
    worth = [1.0 + 0.8 * (nodes - 1) ** 0.5 for nodes in range(1, 11)]
    return replace(
        plan,
        confidence=[1.3, 0.8, 1.0],
        paths=paths,
        static_tokens=worth,
        dynamic_tokens=worth if kind == "dynamic" else [],
        costs=[cost for cost in plan.costs if cost.num_nodes <= 8],
        choices=[
            Choice(batch, kind if nodes > 1 else "none", nodes, 1.0, 1.0)
            for batch, nodes in zip(rows, (10, 4, 1), strict=True)
        ],
    )


def settings_of(temperature: float) -> dict[str, Any]:
    return {"ignore_eos": True, "temperature": temperature, "seed": 5}


def answers(engine: Engine, temperature: float = 0.0) -> list[GenerationResult]:
    """Answers of different lengths: rows leave and join at different steps."""
    sequences = [
        engine.sequences([prompt], max_new_tokens=8 + 5 * (number % 4), **settings_of(temperature))[0]
        for number, prompt in enumerate(EIGHT)
    ]
    for _ in engine.run(sequences):
        pass
    return [sequence.result() for sequence in sequences]


def witnessed(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, temperature: float = 0.0
) -> tuple[list[GenerationResult], list[tuple[int, int]]]:
    """The answers, and rows and nodes of each step."""
    seen: list[tuple[int, int]] = []
    propose = Pace.propose

    def told(pace: Pace, context: Context) -> Draft:
        draft = propose(pace, context)
        seen.append((draft.token_ids.shape[0], draft.num_nodes))
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "propose", told)
        return answers(engine, temperature), seen


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3_text"])
def family(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def plain(family: TargetModel) -> dict[float, list[GenerationResult]]:
    return {temperature: answers(Engine(family, max_batch_size=1), temperature) for temperature in (0.0, 1.5)}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(("method", "temperature"), [("medusa", 1.5), ("hydra", 0.0)])
def test_a_plan_only_changes_the_speed(
    monkeypatch: pytest.MonkeyPatch,
    family: TargetModel,
    plain: dict[float, list[GenerationResult]],
    *,
    kind: str,
    adaptive: bool,
    method: str,
    temperature: float,
) -> None:
    head = tiny_head(method, family)
    engine = Engine(family, head, max_batch_size=3, tuned=plan_of(kind), adaptive=adaptive)
    found, shapes = witnessed(monkeypatch, engine, temperature)
    assert ids(found) == ids(plain[temperature])
    assert list(head.confidence) == [1.3, 0.8, 1.0]
    assert {1, 2, 3} == {rows for rows, _ in shapes}
    assert any(nodes > 1 for _, nodes in shapes), "nothing was drafted"
    if not adaptive:
        assert sum(result.num_steps for result in found) < sum(result.num_steps for result in plain[temperature])


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_equal_requests_meet_equal_trees_where_nothing_adapts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = tiny_model("llama")
    head = tiny_head("hydra", model)
    engine = Engine(model, head, max_batch_size=3, tuned=plan_of(kind), adaptive=False)
    first, second = (witnessed(monkeypatch, engine)[1] for _ in range(2))
    assert first == second
    nodes = {1: 10, 2: 4, 3: 1}  # the plan's; three rows are nearer to four
    assert set(first) == set(nodes.items())


@pytest.mark.parametrize("nodes", [1, 10])
def test_the_pace_is_told_the_guesses_that_were_kept_and_the_time(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    told: list[tuple[Sequence[int], float]] = []
    monkeypatch.setattr(Pace, "note", lambda pace, kept, seconds: told.append((list(kept), seconds)))
    model = tiny_model("llama")
    plan = replace(plan_of("static"), choices=[Choice(1, "static" if nodes > 1 else "none", nodes, 1.0, 1.0)])
    engine = Engine(model, tiny_head("hydra", model), max_batch_size=1, tuned=plan, adaptive=False)
    found = answers(engine)
    assert len(told) == sum(result.num_steps for result in found)
    assert all(0 < seconds < 60 for _, seconds in told)
    kept = [count for counts, _ in told for count in counts]
    if nodes == 1:
        assert set(kept) == {0}
    else:
        most = sum(kept) + len(told) + len(found)  # an answer's end may cut off guesses that were kept
        assert most - 3 * len(found) <= sum(len(result.token_ids) for result in found) <= most
        assert max(kept) > 0


def test_a_tuned_plan_is_for_draft_heads() -> None:
    model = tiny_model("llama")
    for drafter in (None, Prophet(TREES["chain"], {})):
        with pytest.raises(InvalidSettings, match=re.escape("a tuned plan is for a draft head")):
            Engine(model, drafter, tuned=STATIC)
