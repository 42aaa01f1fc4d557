"""Trees that grow for each row, against slow searches over every candidate, and properties of all of them."""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft_paths import Tokens, paths_of
from draftheads.errors import InvalidTree
from draftheads.speculation.candidates import Candidates
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.growing import fill
from draftheads.speculation.shapes import BestFirst
from families import propose
from slow_heads import random_context, random_head

LINES = 97  # of the tables


@dataclass(frozen=True)
class Node:
    """A guess, by the tokens on its path."""

    tokens: Tokens
    log_prob: float  # of the whole path


ROOT = Node((), 0.0)


@dataclass(frozen=True)
class TableHead:
    """Guesses fixed by a row number, the root and, if it reads them, the guesses above: a line of a table for each."""

    table: Tensor  # (lines, V') logits
    temperatures: Sequence[float]
    reads_path: bool
    stepped: list[int] = field(default_factory=list)  # how many nodes it steps down to, at each level

    def begin(self, context: Context, depth: int) -> Tensor:
        return (context.last_hidden[:, :1].long() * 31 + context.root_ids[:, None]) % len(self.table)

    def predict(self, state: Tensor, depth: int) -> Tensor:
        return self.table[(state + 7 * depth) % len(self.table)]

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        self.stepped.append(token_ids.shape[1])
        return (state.gather(1, parents) * 13 + token_ids + 1) % len(self.table) if self.reads_path else state

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids * 3 + 2


@dataclass(frozen=True)
class World:
    """A guesser, the rows that it sees, and how many depths it knows."""

    head: TableHead
    context: Context

    @property
    def num_rows(self) -> int:
        return len(self.context.root_ids)

    @property
    def depth(self) -> int:
        return len(self.head.temperatures)

    def depth_of(self, shape: BestFirst) -> int:
        return min(shape.max_depth or self.depth, self.depth)

    def grow(self, shape: BestFirst) -> Draft:
        shape = replace(shape, temperatures=tuple(self.head.temperatures))
        self.head.stepped.clear()
        begin = partial(self.head.begin, self.context)
        return fill(self.head, shape, self.context, begin=begin, max_depth=self.depth)

    def children(self, row: int, parent: Node, top_k: int) -> list[Node]:
        """What the table says, line by line; the best first."""
        line = int(self.context.last_hidden[row, 0]) * 31 + int(self.context.root_ids[row])
        for token in parent.tokens if self.head.reads_path else ():
            line = line * 13 + token + 1
        depth = len(parent.tokens)
        logits = self.head.table[(line + 7 * depth) % LINES].double() / self.head.temperatures[depth]
        found = enumerate(logits.log_softmax(-1).tolist())
        nodes = [Node((*parent.tokens, guess * 3 + 2), parent.log_prob + log_prob) for guess, log_prob in found]
        return sorted(nodes, key=lambda node: -node.log_prob)[:top_k]


def slow_best_first(world: World, row: int, shape: BestFirst) -> list[Node]:
    """Takes the likeliest known guess, and then knows its children."""
    known, found = [(0.0, 0, ROOT)], list[Node]()
    counter = itertools.count(1)
    while known and len(found) < shape.num_nodes:
        node = heapq.heappop(known)[2]
        found.append(node)
        if len(node.tokens) < world.depth_of(shape):
            for child in world.children(row, node, shape.top_k):
                heapq.heappush(known, (-child.log_prob, next(counter), child))
    return found


def slow_beam(world: World, row: int, shape: BestFirst) -> list[Node]:
    """EAGLE-2: the likeliest of each depth are expanded, and of all that were found the likeliest are kept."""
    found = level = [ROOT]
    for _ in range(world.depth_of(shape)):
        below = [child for node in level for child in world.children(row, node, shape.top_k)]
        found = found + below
        level = sorted(below, key=lambda node: -node.log_prob)[: shape.beam]
    return sorted(found, key=lambda node: -node.log_prob)[: shape.num_nodes]


def nodes_of(draft: Draft, row: int) -> list[Node]:
    """A row's nodes in order, without those that fill it up."""
    paths = paths_of(draft, row)
    assert len(set(paths)) == len(paths), "a guess is there twice"
    assert draft.max_depth <= draft.num_nodes - 1
    return list(map(Node, paths, draft.path_log_probs[row, : len(paths)].tolist()))


def assert_equal(found: Sequence[Node], expected: Sequence[Node]) -> None:
    assert [node.tokens for node in found] == [node.tokens for node in expected]
    assert [node.log_prob for node in found] == pytest.approx([node.log_prob for node in expected], abs=1e-4)


@st.composite
def worlds(draw: st.DrawFn, *, ties: bool | None = None) -> World:
    num_rows, num_tokens, depth = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    table = 2.0 * torch.randn(LINES, num_tokens, generator=generator)
    if draw(st.booleans()) if ties is None else ties:
        table = table.round() * draw(st.sampled_from([0.0, 1.0, 200.0]))  # 200: all other guesses are impossible
    roots = torch.randint(0, 9, (num_rows,), generator=generator)
    rows = torch.arange(num_rows, dtype=torch.float32)[:, None, None]
    context = Context(rows, roots[:, None], torch.ones_like(roots), roots)
    return World(TableHead(table, (1.0, 0.5, 2.0, 1.7)[:depth], draw(st.booleans())), context)


best_first_rules = st.builds(
    BestFirst,
    st.integers(1, 40),
    top_k=st.integers(1, 7),
    beam=st.integers(1, 7),
    max_depth=st.none() | st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
)


# --- against slow searches ---


@settings(deadline=None, max_examples=150)
@given(worlds(ties=False), best_first_rules)
def test_trees_grow_by_best_first_search_or_from_a_beam(world: World, shape: BestFirst) -> None:
    """A head that does not read the path grows by the search whatever the beam is, one that does from the beam."""
    shape = replace(shape, threshold=0.0)
    draft = world.grow(shape)
    slow = slow_beam if world.head.reads_path else slow_best_first
    for row in range(world.num_rows):
        assert_equal(nodes_of(draft, row), slow(world, row, shape))
    wide = replace(shape, beam=10_000)
    draft = world.grow(wide)
    for row in range(world.num_rows):
        assert_equal(nodes_of(draft, row), slow_best_first(world, row, wide))


@settings(deadline=None)
@given(worlds(ties=True), best_first_rules)
def test_trees_of_equal_guesses_hang_together(world: World, shape: BestFirst) -> None:
    draft = world.grow(shape)
    assert draft.num_nodes <= shape.num_nodes
    for row in range(world.num_rows):
        nodes = nodes_of(draft, row)
        known = {node.tokens: node for node in nodes}
        for node in nodes[1:]:
            every = {child.tokens: child for child in world.children(row, known[node.tokens[:-1]], 99)}
            assert node.log_prob == pytest.approx(every[node.tokens].log_prob, rel=1e-6, abs=1e-3)
        totals = [node.log_prob for node in nodes]
        assert totals[0] == 0.0
        assert totals == sorted(totals, reverse=True)
        assert max(len(node.tokens) for node in nodes) <= world.depth_of(shape)


@settings(deadline=None)
@given(worlds(), best_first_rules, st.sampled_from([0.001, 0.03, 0.2, 0.6, 0.999]))
def test_a_threshold_leaves_out_what_is_unlikely_in_all_rows(world: World, shape: BestFirst, threshold: float) -> None:
    every = world.grow(replace(shape, threshold=0.0))
    found = world.grow(replace(shape, threshold=threshold))
    # a probability that rounding may put on either side counts for neither
    chances = [[math.exp(node.log_prob) for node in nodes_of(every, row)] for row in range(world.num_rows)]
    surely, likely = (
        max(sum(chance >= threshold + margin for chance in row) for row in chances) for margin in (1e-6, -1e-6)
    )
    assert surely <= found.num_nodes <= likely
    for row in range(world.num_rows):
        assert nodes_of(found, row) == nodes_of(every.first(found.num_nodes), row)


def test_logits_in_half_precision_are_normed_in_single_precision() -> None:
    world = world_of([[0.0, 1.0, 3.0]], 1)
    table = world.head.table.bfloat16()
    draft = replace(world, head=replace(world.head, table=table)).grow(BestFirst(4))
    assert draft.path_log_probs[0, 1:].tolist() == pytest.approx(table[0].float().log_softmax(-1).flip(0).tolist())


def test_a_rule_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for candidates that the native library finds, and for copies: all trees are selected in one place."""

    def at_most_two_deep(candidates: Candidates, shape: BestFirst) -> Tensor:
        return candidates.depths <= 2

    def likely(candidates: Candidates, shape: BestFirst) -> Tensor:
        return candidates.path_log_probs >= math.log(0.3)

    head, context = random_head("hydra"), random_context(2)
    head.speed_up()
    shape = BestFirst(24, temperatures=(0.05,) * 3)
    usual = propose(head, context, shape)
    monkeypatch.setattr("draftheads.speculation.candidates.GROWTH_RULES", [at_most_two_deep, likely])
    found = propose(head, context, shape)
    allowed = (usual.path_log_probs >= math.log(0.3)) & (usual.depths <= 2)
    assert found.num_nodes == int(allowed.sum(1).max()) < usual.num_nodes
    assert torch.equal(found.token_ids, usual.first(found.num_nodes).token_ids)


@settings(deadline=None)
@given(worlds(), best_first_rules, st.integers(2, 5))
def test_candidates_that_a_rule_leaves_out_come_last(world: World, shape: BestFirst, divisor: int) -> None:
    seen: list[Candidates] = []

    def not_divided(candidates: Candidates, shape: BestFirst) -> Tensor:
        seen.append(candidates)
        return candidates.token_ids % divisor > 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftheads.speculation.candidates.GROWTH_RULES", [not_divided])
        found = world.grow(shape)
    sizes = []
    for row in range(world.num_rows):
        ids, parents, log_probs = (
            part[row].tolist() for part in (seen[0].token_ids, seen[0].parents, seen[0].path_log_probs)
        )
        allowed = [True]
        for token, parent in list(zip(ids, parents, strict=True))[1:]:
            allowed.append(allowed[parent] and token % divisor > 0)
        order = sorted(range(len(ids)), key=lambda node: (not allowed[node], -log_probs[node]))[: found.num_nodes]
        assert found.token_ids[row].tolist() == [ids[node] for node in order]
        assert found.path_log_probs[row].tolist() == [log_probs[node] for node in order]
        sizes.append(sum(allowed))
    assert found.num_nodes == min(shape.num_nodes, max(sizes))


# --- levels that are left out ---


def world_of(table: list[list[float]], depth: int = 3, *, reads_path: bool = True) -> World:
    """Two rows that see the same."""
    ones = torch.ones(2, dtype=torch.long)
    context = Context(torch.zeros(2, 1, 1), ones[:, None], ones, ones)
    return World(TableHead(torch.tensor(table), (1.0,) * depth, reads_path), context)


def test_a_level_is_left_out_where_all_its_nodes_come_too_late() -> None:
    """Each node has children of probabilities 0.5, 0.3 and 0.2.

    After the first level the four best are 1, 0.5, 0.3 and 0.2, so the children of 0.5 and 0.3 can be among them. Of
    these 0.25 is the best and the last of the four: the third level is left out. In a tree of six, 0.15 is the last.
    """
    world = world_of([[math.log(p) for p in (0.5, 0.3, 0.2)]], 3)
    for nodes, stepped in {2: [], 3: [1], 4: [2], 6: [3, 1]}.items():
        world.grow(BestFirst(nodes, beam=9))
        assert world.head.stepped == stepped


@pytest.mark.parametrize(("min_level_probability", "further"), [(0.0, 2), (0.49, 2), (0.51, 1), (0.99, 1), (1.01, 0)])
def test_a_level_is_drafted_if_enough_probability_reaches_it(min_level_probability: float, further: int) -> None:
    """Of two equal rows a child of probability 0.5 is followed: 1.0 reach the second level, 0.5 the third."""
    world = world_of([[math.log(p) for p in (0.5, 0.1, 0.1, 0.1, 0.1, 0.1)]], 3)
    draft = world.grow(BestFirst(30, beam=1, min_level_probability=min_level_probability))
    assert world.head.stepped == [1] * further
    assert draft.num_nodes == 1 + 6 * (1 + further)


def test_each_field_of_a_rule_changes_the_tree() -> None:
    """A field that nothing reads would be ignored in silence."""
    head, context, rule = random_head("hydra"), random_context(2), BestFirst(24, top_k=6, beam=4)
    changes: dict[str, Any] = {"num_nodes": 23, "top_k": 2, "beam": 1, "max_depth": 2, "threshold": 0.3}
    changes |= {"temperatures": (0.1,) * 3, "min_level_probability": 9.0}
    assert [*changes] == [each.name for each in fields(BestFirst)]
    trees = [propose(head, context, replace(rule, **{name: value})) for name, value in changes.items()]
    usual = [paths_of(propose(head, context, rule), row) for row in range(2)]
    same = [name for name, tree in zip(changes, trees, strict=True) if [paths_of(tree, 0), paths_of(tree, 1)] == usual]
    assert not same


# --- certain, impossible and equal draft tokens ---


@pytest.mark.parametrize("reads_path", [False, True])
def test_draft_tokens_that_are_certain_impossible_or_equal(reads_path: bool) -> None:
    draft = world_of([[0.0, 300.0, 0.0]], reads_path=reads_path).grow(BestFirst(4))
    for row in range(2):
        assert nodes_of(draft, row) == [Node((5,) * depth, 0.0) for depth in range(4)], "after their parents"
    world = world_of([[1.0, -math.inf, 0.0]], 2, reads_path=reads_path)
    totals = [node.log_prob for node in nodes_of(world.grow(BestFirst(13, beam=9)), 0)]
    assert [math.isfinite(total) for total in totals] == [True] * 7 + [False] * 6
    equal = world_of([[0.5] * 3], reads_path=reads_path)
    assert [len(path) for path in paths_of(equal.grow(BestFirst(13)), 0)] == [0] + [1] * 3 + [2] * 9


# --- shapes that cannot be ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_nodes", 0), ("num_nodes", -3), ("top_k", 0), ("beam", 0), ("max_depth", 0)),
        *(("threshold", 1.0), ("threshold", -0.1), ("threshold", math.nan)),
        *(("min_level_probability", -0.1), ("min_level_probability", math.inf)),
    ],
)
def test_an_impossible_rule_is_named_with_its_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidTree) as caught:
        BestFirst(**{"num_nodes": 4, name: value})
    assert f"{name} is {value}" in str(caught.value)
