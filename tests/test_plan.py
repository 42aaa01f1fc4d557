"""``plan.json``: there and back, every broken one refused by file and place, and the lines between measurements."""

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.checkpoint import PLAN_FILE, read_head, save_head
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, DraftHeadsError, InvalidTree
from draftheads.growth import BestFirst
from draftheads.plan import Choice, Conditions, Cost, Plan, Tuned, read_plan
from draftheads.tree import Tree
from families import tiny_head, tiny_model

CONDITIONS = Conditions("a processor", "cpu", 2, "bfloat16", "fast", "2.9.0", "5.10.0", "0.1.0", "0123456789abcdef")
PATHS = [[0], [0, 0], [1], [0, 0, 0], [0, 1]]
TUNED = Tuned(
    command="draftheads tune tiny head",
    conditions=CONDITIONS,
    temperature=0.0,
    confidence=[1.1, 0.9, 1.0],
    paths=PATHS,
    static_tokens=[1.0, 1.5, 1.8, 1.9, 2.0, 2.0],
    dynamic_tokens=[1.0, 1.6, 1.9, 2.1],
    num_ranks=4,
    beam=2,
    costs=[
        Cost(1, "none", 1, 0.0, 0.010, 0.001),
        Cost(1, "static", 2, 0.001, 0.010, 0.001),
        Cost(1, "static", 6, 0.002, 0.016, 0.002),
        Cost(1, "dynamic", 4, 0.003, 0.012, 0.001),
        Cost(4, "none", 1, 0.0, 0.020, 0.0),
        Cost(4, "static", 2, 0.0, 0.030, 0.0),
        Cost(4, "static", 6, 0.0, 0.070, 0.0),
    ],
    choices=[
        Choice(1, "dynamic", 4, 150.0, 1.6),
        Choice(4, "static", 2, 210.0, 1.1),
        Choice(16, "none", 1, 300.0, 1.0),
    ],
)
PLAN = Plan(Tree.from_paths(PATHS[:3]), {"tokens_per_step": 1.8}, TUNED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good tuned plan, to be broken."""
    PLAN.save(tmp_path / PLAN_FILE)
    return tmp_path / PLAN_FILE


# --- there and back ---


@pytest.mark.parametrize("plan", [PLAN, Plan(PLAN.tree), Plan(Tree.chain(0), {"a": [1, None]})])
def test_a_plan_that_is_read_is_the_one_that_was_saved(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "deep" / PLAN_FILE)
    assert read_plan(tmp_path / "deep" / PLAN_FILE) == plan
    assert read_plan(str(tmp_path / "deep" / PLAN_FILE)) == plan


def test_a_plan_that_is_not_tuned_stays_of_version_1() -> None:
    assert json.loads(PLAN.to_json())["format_version"] == 2
    assert json.loads(replace(PLAN, tuned=None).to_json()) == {
        "format_version": 1,
        "tree": [[0], [1], [0, 0]],
        "num_nodes": 4,
        "measured": {"tokens_per_step": 1.8},
    }


def test_an_old_file_is_read(tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text('{"format_version": 1, "tree": [[0], [1], [0, 0]], "num_nodes": 4}')
    assert read_plan(tmp_path / PLAN_FILE) == Plan(Tree.from_paths([(0,), (1,), (0, 0)]))


def test_whole_numbers_may_stand_where_fractions_do(path: Path) -> None:
    change(path, lambda plan: plan["tuned"].update(temperature=1, confidence=[1, 1, 1]))
    tuned = read_plan(path).tuned
    assert tuned == replace(TUNED, temperature=1.0, confidence=[1.0] * 3)


finite = st.floats(min_value=1e-6, max_value=1e6)
names = st.text(max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any tuned plan."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 8))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < 3)]))
        paths.append((*above, sum(path[:-1] == above for path in paths)))
    count = len(paths) + 1
    grown = draw(st.integers(0, 5))
    kinds: list[Any] = ["none", "static", *(["dynamic"] * (grown > 0))]
    limits = {"none": 1, "static": count, "dynamic": grown}
    choices = []
    for size in sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4))):
        kind = draw(st.sampled_from(kinds))
        choices.append(Choice(size, kind, draw(st.integers(1, limits[kind])), draw(finite), draw(finite)))
    steps = draw(st.sets(st.tuples(st.integers(1, 64), st.sampled_from(kinds[1:]), st.integers(2, 64)), max_size=12))
    steps |= {(size, "none", 1) for size in draw(st.sets(st.integers(1, 64), min_size=1, max_size=4))}
    steps |= {(1, choice.kind, 2) for choice in choices if choice.kind != "none"}
    costs = [Cost(*step, draw(finite), draw(finite), draw(finite)) for step in sorted(steps)]
    conditions = Conditions(
        *(draw(names) for _ in range(2)), draw(st.integers(1, 64)), *(draw(names) for _ in range(6))
    )
    above_one = st.floats(1.0, 10.0)
    return Plan(
        Tree.from_paths(paths),
        draw(st.dictionaries(names, st.one_of(st.none(), st.integers(), names), max_size=3)),
        Tuned(
            command=draw(names),
            conditions=conditions,
            temperature=draw(st.floats(0.0, 2.0)),
            confidence=draw(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)),
            paths=[list(path) for path in paths],
            static_tokens=draw(st.lists(above_one, min_size=count, max_size=count)),
            dynamic_tokens=draw(st.lists(above_one, min_size=grown, max_size=grown)),
            num_ranks=draw(st.integers(1, 20)),
            beam=draw(st.integers(1, 20)),
            costs=costs,
            choices=choices,
        ),
    )


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_any_plan_goes_there_and_back(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    file = tmp_path_factory.getbasetemp() / "any-plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    assert read_plan(file) == plan
    assert read_plan(file).to_json() == plan.to_json()


@settings(max_examples=60, deadline=None)
@given(plan=plans(), batch=st.integers(1, 200), nodes=st.integers(1, 100), kind=st.sampled_from(["static", "dynamic"]))
def test_every_step_has_a_cost_between_those_measured_or_beyond(plan: Plan, batch: int, nodes: int, kind: Any) -> None:
    tuned = plan.tuned
    assert tuned is not None
    if kind not in {cost.kind for cost in tuned.costs}:
        nodes = 1
    seconds = tuned.seconds(kind, batch, nodes)
    assert 0 < seconds < math.inf
    assert seconds >= 0.999 * min(cost.total for cost in tuned.costs)
    assert tuned.choice(batch) in tuned.choices or (tuned.choice(batch).kind == "none" and not tuned.knows(batch))


# --- broken plans ---


def change(path: Path, how: Callable[[Any], object]) -> None:
    raw = json.loads(path.read_text())
    how(raw)
    path.write_text(json.dumps(raw))


def put(*keys: str | int, value: object) -> Callable[[Any], object]:
    """Sets ``plan["tuned"][keys[0]]…``."""

    def how(plan: dict[str, Any]) -> None:
        inner = plan["tuned"]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return how


def drop(*keys: str | int) -> Callable[[Any], object]:
    """Removes ``plan["tuned"][keys[0]]…``."""

    def how(plan: dict[str, Any]) -> None:
        inner = plan["tuned"]
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return how


C, M, T = CheckpointCorrupt, CheckpointMismatch, InvalidTree
BROKEN: dict[str, tuple[Callable[[Any], object], type[DraftHeadsError], str]] = {
    "a newer version": (lambda plan: plan.update(format_version=3), M, "format_version is 3 .* up to 2: upgrade it"),
    "no version": (lambda plan: plan.pop("format_version"), C, "format_version is None"),
    "tuned in a file of version 1": (lambda plan: plan.update(format_version=1), C, "unknown key tuned"),
    "version 2 without it": (lambda plan: plan.pop("tuned"), C, "tuned is missing"),
    "tuned is no object": (lambda plan: plan.update(tuned=[]), C, r"tuned is \[\]; it must be dict"),
    "tuned is null": (lambda plan: plan.update(tuned=None), C, "tuned is None; it must be dict"),
    "a surplus key above": (lambda plan: plan.update(more=1), C, "unknown key more; known are format_version"),
    "a tree that is none": (lambda plan: plan.update(tree=[[0, 0]]), T, r"path \[0, 0\] has no parent"),
    "another number of nodes": (lambda plan: plan.update(num_nodes=5), C, "num_nodes is 5 but the tree has 4"),
    "a surplus key": (put("more", value=1), C, r"unknown key tuned\.more; known are beam"),
    "a surplus condition": (put("conditions", "host", value="x"), C, r"unknown key tuned\.conditions\.host"),
    "a surplus key of a cost": (put("costs", 2, "x", value=1), C, r"unknown key tuned\.costs\[2\]\.x"),
    "a surplus key of a choice": (put("choices", 1, "x", value=1), C, r"unknown key tuned\.choices\[1\]\.x"),
    "conditions that are no object": (
        put("conditions", value="here"),
        C,
        "conditions is 'here'; it must be dict",
    ),
    "costs that are no list": (put("costs", value={}), C, "tuned.costs is {}; it must be list"),
    "a cost that is no object": (put("costs", 0, value=1.5), C, r"tuned\.costs\[0\] is 1\.5; it must be an object"),
    "a choice that is no object": (put("choices", 0, value=None), C, r"tuned\.choices\[0\] is None; .* an object"),
    "threads in words": (put("conditions", "threads", value="two"), C, r"conditions\.threads is 'two'; it must be int"),
    "a version that is null": (put("conditions", "torch", value=None), C, r"conditions\.torch is None; it must be str"),
    "an unknown kind of cost": (
        put("costs", 1, "kind", value="dense"),
        C,
        r"costs\[1\]\.kind is 'dense'; .* 'none'",
    ),
    "an unknown kind of choice": (put("choices", 0, "kind", value=0), C, r"choices\[0\]\.kind is 0; .* or 'dynamic'"),
    "seconds in words": (put("costs", 1, "verify", value="1"), C, r"costs\[1\]\.verify is '1'; it must be float"),
    "half a node": (put("costs", 1, "num_nodes", value=2.5), C, r"costs\[1\]\.num_nodes is 2\.5; it must be int"),
    "true nodes": (put("choices", 1, "num_nodes", value=True), C, r"choices\[1\]\.num_nodes is True; it must be int"),
    "confidence that is no list": (put("confidence", value=1.0), C, r"confidence is 1\.0; it must be a list of float"),
    "confidence in words": (put("confidence", value=["high"]), C, r"confidence is \['high'\]; it must be a list"),
    "no confidence": (put("confidence", value=[]), C, "tuned: confidence must lie between"),
    "confidence next to nothing": (put("confidence", 1, value=1e-300), C, "tuned: confidence must lie between"),
    "confidence of zero": (put("confidence", 1, value=0.0), C, "tuned: confidence must lie between"),
    "confidence below zero": (put("confidence", 1, value=-1.0), C, "tuned: confidence must lie between"),
    "a temperature in words": (put("temperature", value="hot"), C, r"tuned\.temperature is 'hot'; it must be float"),
    "a temperature below zero": (put("temperature", value=-0.5), C, "tuned: temperature must be at least 0"),
    "no ranks": (put("num_ranks", value=0), T, "tuned: num_ranks is 0; it must be at least 1"),
    "no beam": (put("beam", value=0), T, "tuned: beam is 0; it must be at least 1"),
    "paths that are no lists": (
        put("paths", value=[0, 1]),
        C,
        r"paths is \[0, 1\]; it must be a list of a list",
    ),
    "a path without its parent": (put("paths", 0, value=[1]), T, r"path \[0, 0\] has no parent: add \[0\]"),
    "a path before its parent": (put("paths", value=[[0, 0], [0], [1], [2], [3]]), T, r"path \[0, 0\] has no parent"),
    "a path twice": (put("paths", 2, value=[0]), T, r"path \[0\] is there twice"),
    "a negative rank": (put("paths", 4, value=[-1]), T, r"path \[-1\]: every rank must be an integer of at least 0"),
    "the root among the paths": (put("paths", 4, value=[]), C, "tuned: paths must not have the root"),
    "too few paths": (drop("paths", 4), C, "tuned: static_tokens must have one number for each tree"),
    "too few static tokens": (drop("static_tokens", 5), C, "tuned: static_tokens must have one number for each tree"),
    "too many static tokens": (
        lambda plan: plan["tuned"]["static_tokens"].append(2.1),
        C,
        "tuned: static_tokens must have one number for each tree",
    ),
    "less than a token per step": (put("static_tokens", 1, value=0.5), C, "tuned: a step has at least one token"),
    "less than a token of grown trees": (put("dynamic_tokens", 1, value=0), C, "tuned: a step has at least one token"),
    "no choices": (put("choices", value=[]), C, "tuned: choices: batch sizes must be there, be at least 1 and ascend"),
    "batch sizes that fall": (put("choices", 1, "batch_size", value=32), C, "batch sizes must .* ascend"),
    "a batch size twice": (put("choices", 1, "batch_size", value=16), C, "batch sizes must .* ascend"),
    "a batch of none": (put("choices", 0, "batch_size", value=0), C, "batch sizes must be there, be at least 1"),
    "no costs": (put("costs", value=[]), C, "tuned: costs must have steps without guesses"),
    "no plain costs": (
        lambda plan: plan["tuned"].update(costs=[c for c in plan["tuned"]["costs"] if c["kind"] != "none"]),
        C,
        "tuned: costs must have steps without guesses",
    ),
    "plain costs under another name": (
        lambda plan: [c.update(kind="static") for c in plan["tuned"]["costs"] if c["kind"] == "none"],
        C,
        "tuned: costs must have steps without guesses",
    ),
    "a cost of nothing": (
        lambda plan: plan["tuned"]["costs"][1].update(draft=0, verify=0, rest=0),
        C,
        "tuned: costs must be positive",
    ),
    "a negative cost": (put("costs", 1, "verify", value=-1.0), C, "tuned: costs must be positive"),
    "a negative part of a cost": (put("costs", 1, "rest", value=-0.001), C, "tuned: costs must be positive"),
    "a cost of no rows": (put("costs", 1, "batch_size", value=0), C, "tuned: costs are of at least one row and node"),
    "a cost of no nodes": (put("costs", 1, "num_nodes", value=0), C, "tuned: costs are of at least one row and node"),
    "plain steps of two nodes": (put("costs", 0, "num_nodes", value=2), C, "steps without guesses have one node"),
    "a step twice": (put("costs", 2, "num_nodes", value=2), C, "tuned: costs must have each step once"),
    "a choice beyond the trees": (
        put("choices", 1, "num_nodes", value=7),
        C,
        "a choice needs a tree of that many nodes",
    ),
    "a choice beyond grown trees": (put("choices", 0, "num_nodes", value=5), C, "a choice needs a tree of that many"),
    "a choice whose steps nobody measured": (
        lambda plan: plan["tuned"]["costs"].pop(3),
        C,
        "a choice needs measured steps of its kind",
    ),
    "a choice of no nodes": (put("choices", 1, "num_nodes", value=0), C, "a choice needs a tree of that many nodes"),
    "a plain choice of two nodes": (put("choices", 2, "num_nodes", value=2), C, "a choice needs a tree of that many"),
    "grown trees that are not there": (put("dynamic_tokens", value=[]), C, "a choice needs a tree of that many nodes"),
    **{f"no {field.name}": (drop(field.name), C, rf"tuned\.{field.name} is missing") for field in fields(Tuned)},
    **{
        f"no {field.name} of a {place}": (drop(*keys, field.name), C, rf"tuned\.{place}\.{field.name} is missing")
        for kind, place, keys in (
            (Conditions, "conditions", ("conditions",)),
            (Cost, r"costs\[1\]", ("costs", 1)),
            (Choice, r"choices\[2\]", ("choices", 2)),
        )
        for field in fields(kind)
    },
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_plan_is_said(path: Path, case: str) -> None:
    how, error, words = BROKEN[case]
    change(path, how)
    with pytest.raises(error, match=words) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


NUMBERS = [
    ("temperature",),
    ("confidence", 0),
    ("static_tokens", 2),
    ("dynamic_tokens", 2),
    ("costs", 1, "verify"),
    ("costs", 0, "draft"),
    ("choices", 0, "speedup"),
]


@pytest.mark.parametrize("keys", NUMBERS, ids=str)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(path: Path, keys: tuple[str | int, ...], number: str) -> None:
    change(path, put(*keys, value="here"))
    path.write_text(path.read_text().replace('"here"', number))
    with pytest.raises(CheckpointCorrupt, match=f"cannot be read as JSON: {number} is no number") as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "parts",
    [
        {"temperature": math.nan},
        {"confidence": [1.0, math.nan, 1.0]},
        {"confidence": [1.0, math.inf, 1.0]},
        {"static_tokens": [1.0, 1.5, math.nan, 2.0, 2.0, 2.0]},
        {"dynamic_tokens": [1.0, 1.5, math.inf, 2.0]},
        {"costs": [*TUNED.costs, Cost(8, "none", 1, 0.0, math.nan, 0.0)]},
        {"costs": [*TUNED.costs, Cost(8, "none", 1, 0.0, math.inf, 0.0)]},
    ],
    ids=str,
)
def test_nothing_is_tuned_to_what_is_no_number(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"temperature must|confidence must|at least one token|costs must"):
        replace(TUNED, **parts)


# --- a plan in a head's folder ---

HEADS = {
    "confidence of two heads": (put("confidence", value=[1.0, 1.0]), CheckpointCorrupt, "has 2 numbers but .* 3 heads"),
    "too deep": (
        lambda plan: plan["tuned"].update(paths=[[0] * d for d in range(1, 5)], static_tokens=[1, 1, 1, 1, 1]),
        InvalidTree,
        "the tree is 4 deep but the head has 3 heads",
    ),
    "too wide": (put("paths", 4, value=[12]), InvalidTree, "rank 12 is beyond the draft vocabulary of 12"),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_plan_must_be_one_for_its_head(tmp_path: Path, case: str) -> None:
    how, error, words = HEADS[case]
    base = tiny_model("llama")
    save_head(tiny_head("medusa", base, draft_vocab_size=12), tmp_path, base=base)
    PLAN.save(tmp_path / PLAN_FILE)
    assert read_head(tmp_path).plan == PLAN
    change(tmp_path / PLAN_FILE, how)
    with pytest.raises(error, match=words) as caught:
        read_head(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / PLAN_FILE}: ")


# --- what is between measurements ---


@pytest.mark.parametrize(
    ("kind", "batch", "nodes", "expected"),
    [
        ("static", 1, 1, 0.011),  # as measured
        ("static", 1, 2, 0.012),
        ("static", 1, 6, 0.020),
        ("static", 4, 6, 0.070),
        ("dynamic", 1, 4, 0.016),
        ("none", 4, 1, 0.020),
        ("static", 1, 4, 0.016),  # between sizes
        ("static", 1, 3, 0.014),
        ("static", 2, 2, 0.018),  # between batch sizes
        ("static", 3, 2, 0.024),
        ("static", 3, 1, 0.017),
        ("static", 2, 4, 0.016 + (0.050 - 0.016) / 3),  # between both
        ("static", 1, 8, 0.024),  # beyond the largest size
        ("static", 4, 10, 0.110),
        ("static", 8, 2, 0.060),  # beyond the largest batch
        ("static", 6, 1, 0.030),
        ("static", 8, 10, 0.220),  # beyond both
        ("dynamic", 4, 4, 0.016),  # what was measured with fewer rows only
        ("dynamic", 1, 2, 0.016),  # smaller than was measured
    ],
)
def test_a_step_lies_on_the_lines_between_those_measured(kind: Any, batch: int, nodes: int, expected: float) -> None:
    assert TUNED.seconds(kind, batch, nodes) == pytest.approx(expected)


def test_larger_trees_are_not_thought_to_be_cheaper_because_the_last_one_was() -> None:
    costs = [*TUNED.costs, Cost(1, "static", 8, 0.0, 0.015, 0.0)]
    assert replace(TUNED, costs=costs).seconds("static", 1, 12) == pytest.approx(0.015)


def test_the_order_of_costs_does_not_matter() -> None:
    turned = replace(TUNED, costs=TUNED.costs[::-1])
    for batch in (1, 2, 4, 9):
        assert [turned.seconds("static", batch, n) for n in range(1, 9)] == [
            TUNED.seconds("static", batch, n) for n in range(1, 9)
        ]
    assert turned.cost_batch_sizes == [1, 4]
    assert turned.sizes("static") == [2, 6]


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, 1), (2, 4), (3, 4), (4, 4), (5, 4), (7, 4), (8, 16), (9, 16), (16, 16), (32, 16)]
)
def test_the_choice_of_the_nearest_batch_size_counts_and_of_two_that_of_the_larger(batch: int, expected: int) -> None:
    assert TUNED.choice(batch).batch_size == expected
    assert TUNED.knows(batch)


def test_with_far_more_rows_than_were_measured_nothing_is_guessed() -> None:
    assert not TUNED.knows(33)
    assert (TUNED.choice(33).kind, TUNED.choice(33).num_nodes) == ("none", 1)


def test_larger_trees_hold_the_smaller_ones() -> None:
    trees = [TUNED.tree(nodes) for nodes in range(1, 7)]
    assert [tree.num_nodes for tree in trees] == [1, 2, 3, 4, 5, 6]
    assert trees[0] == Tree.chain(0)
    assert trees[-1] == Tree.from_paths(PATHS)
    for small, large in pairwise(trees):
        assert set(small.paths) < set(large.paths)


def test_growing_trees_have_the_tuned_ranks_and_beam() -> None:
    assert TUNED.growing(7) == BestFirst(7, num_ranks=4, beam=2)


def test_differences_name_both_values() -> None:
    assert CONDITIONS.differences(CONDITIONS) == []
    other = replace(CONDITIONS, threads=8, dtype="float32")
    assert CONDITIONS.differences(other) == ["threads 2, here 8", "dtype bfloat16, here float32"]
    assert other.differences(CONDITIONS) == ["threads 8, here 2", "dtype float32, here bfloat16"]
