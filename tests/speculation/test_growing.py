"""Trees that grow for each row, against slow searches over every candidate, and properties of all of them."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.errors import InvalidTree
from draftheads.heads.base import DraftHead
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.growing import fill
from draftheads.speculation.shapes import BestFirst, BestPaths
from draftheads.speculation.tree import Tree
from families import propose
from slow_heads import DRAFT_VOCAB, KINDS, METHODS, K, V, random_context, random_head, slow_features, slow_logits

ROWS = 4
CONFIDENCE = (0.6, 1.7, 3.0)
Tokens = tuple[int, ...]  # below the root


@dataclass(frozen=True)
class Node:
    """A guess, by the tokens on its path."""

    tokens: Tokens
    log_prob: float  # of the whole path


Guesses = Callable[[Tokens], list[tuple[float, int]]]  # the children of a node: log-probability and token, best first
ROOT = Node((), 0.0)


# --- slow twins: one row, one node at a time ---


def guesses_of(head: DraftHead, context: Context, row: int) -> Guesses:
    """What a head thinks of one row, by the papers' formulas."""
    hidden = context.hidden[row, int(context.num_accepted[row]) - 1]
    ids = DRAFT_VOCAB.tolist() if head.config.draft_vocab_size else list(range(V))

    @cache
    def guesses(tokens: Tokens) -> list[tuple[float, int]]:
        i = len(tokens)
        features = slow_features(head, i, hidden, [int(context.root_ids[row]), *tokens])
        log_probs = (slow_logits(head, i, features).double() / CONFIDENCE[i]).log_softmax(-1)
        return sorted(zip(log_probs.tolist(), ids, strict=True), reverse=True)

    return guesses


def children(guesses: Guesses, parent: Node, top_k: int) -> list[Node]:
    return [
        Node((*parent.tokens, token), parent.log_prob + log_prob) for log_prob, token in guesses(parent.tokens)[:top_k]
    ]


def slow_best_first(guesses: Guesses, shape: BestFirst, depth: int) -> list[Node]:
    """Takes the likeliest known guess, and then knows its children."""
    known, found = [(0.0, 0, ROOT)], list[Node]()
    counter = itertools.count(1)
    while known and len(found) < shape.num_nodes:
        node = heapq.heappop(known)[2]
        found.append(node)
        if len(node.tokens) < depth:
            for child in children(guesses, node, shape.top_k):
                heapq.heappush(known, (-child.log_prob, next(counter), child))
    return found


def slow_beam(guesses: Guesses, shape: BestFirst, depth: int) -> list[Node]:
    """EAGLE-2: the likeliest of each depth are expanded, and of all that were found the likeliest are kept."""
    found = level = [ROOT]
    for _ in range(depth):
        below = [child for node in level for child in children(guesses, node, shape.top_k)]
        found = found + below
        level = sorted(below, key=lambda node: -node.log_prob)[: shape.beam]
    return sorted(found, key=lambda node: -node.log_prob)[: shape.num_nodes]


def slow_paths(guesses: Guesses, shape: BestPaths) -> list[list[Node]]:
    """Every whole path, best first."""
    paths = [[ROOT]]
    for width in shape.widths:
        paths = [[*path, child] for path in paths for child in children(guesses, path[-1], width)]
    return sorted(paths, key=lambda path: -path[-1].log_prob)


def merged(paths: Sequence[Sequence[Node]]) -> list[Node]:
    """The nodes of some paths in their order, each once."""
    return list(dict.fromkeys(node for path in paths for node in path))


# --- drafts, read node by node ---


def nodes_of(draft: Draft, row: int) -> list[Node]:
    """A row's nodes in order. Follows parents only, and holds everything else against them.

    Nodes that only fill up the row stand behind the others and see no more than the root.
    """
    parents, depths = (part.expand_as(draft.token_ids)[row].tolist() for part in (draft.parents, draft.depths))
    tokens, ancestors = draft.token_ids[row].tolist(), draft.ancestors[row]
    paths: list[Tokens] = [()]
    above = [{0}]
    assert (parents[0], depths[0]) == (0, 0)
    filling = [node for node in range(1, draft.num_nodes) if depths[node] == 0]
    size = draft.num_nodes - len(filling)
    assert filling == list(range(size, draft.num_nodes))
    for node in filling:
        assert parents[node] == 0
        assert set(ancestors[node].nonzero()[:, 0].tolist()) == {0, node}
    for node in range(1, size):
        assert parents[node] < node, "a child before its parent"
        paths.append((*paths[parents[node]], tokens[node]))
        above.append(above[parents[node]] | {node})
        assert depths[node] == len(paths[node])
    assert len(set(paths)) == len(paths), "a guess is there twice"
    assert [set(mask.nonzero()[:, 0].tolist()) for mask in ancestors[:size]] == above
    assert max(depths) <= draft.max_depth <= draft.num_nodes - 1
    return list(map(Node, paths, draft.path_log_probs[row, :size].tolist()))


def assert_equal(found: Sequence[Node], expected: Sequence[Node]) -> None:
    assert [node.tokens for node in found] == [node.tokens for node in expected]
    assert [node.log_prob for node in found] == pytest.approx([node.log_prob for node in expected], abs=1e-4)


def proposed(head: DraftHead, shape: BestFirst | BestPaths, context: Context) -> Draft:
    if not shape.temperatures:
        shape = replace(shape, temperatures=CONFIDENCE)
    with torch.no_grad():
        draft = propose(head, context, shape)
    assert torch.equal(draft.token_ids[:, 0], context.root_ids)
    assert not draft.sampled
    return draft


def confident(method: str, kind: str) -> tuple[DraftHead, Context]:
    return random_head(method, **KINDS[kind]), random_context(ROWS)


# --- heads against the twins ---

BEST_FIRST = {
    "small": BestFirst(9, top_k=4, beam=3),
    "root": BestFirst(1),
    "deep": BestFirst(20, top_k=2, beam=2),
    "flat": BestFirst(12, top_k=7, beam=7, max_depth=1),
    "shallow": BestFirst(30, top_k=6, beam=2, max_depth=2),
    "greedy": BestFirst(12, top_k=5, beam=1),
    "large": BestFirst(60, top_k=8, beam=8),
}


@pytest.mark.few(18)
@pytest.mark.parametrize("shape", BEST_FIRST)
@pytest.mark.parametrize("kind", ["shared", "own", "trimmed", "trimmed, low rank"])
@pytest.mark.parametrize(("method", "slow"), [("medusa", slow_best_first), ("hydra", slow_beam)])
def test_trees_grow_by_best_first_search_or_from_a_beam(method: str, slow: Any, kind: str, shape: str) -> None:
    """A head that does not read the path grows by the search whatever the beam is, one that does from the beam."""
    (head, context), rule = confident(method, kind), BEST_FIRST[shape]
    draft = proposed(head, rule, context)
    for row in range(ROWS):
        assert_equal(nodes_of(draft, row), slow(guesses_of(head, context, row), rule, rule.max_depth or K))


@pytest.mark.parametrize("kind", ["shared", "trimmed"])
@pytest.mark.parametrize(("top_k", "num_nodes"), [(3, 20), (6, 33)])
def test_a_wide_beam_finds_what_best_first_search_finds(kind: str, top_k: int, num_nodes: int) -> None:
    head, context = confident("hydra", kind)
    wide = BestFirst(num_nodes, top_k=top_k, beam=top_k**2)
    draft = proposed(head, wide, context)
    narrow = proposed(head, replace(wide, beam=2), context)
    for row in range(ROWS):
        assert_equal(nodes_of(draft, row), slow_best_first(guesses_of(head, context, row), wide, K))
    assert not torch.equal(draft.token_ids, narrow.token_ids), "the beam makes no difference"


BEST_PATHS = {
    "paper": BestPaths(),
    "one path": BestPaths((4, 3, 2), 1),
    "chain": BestPaths((1, 1, 1), 1),
    "shallow": BestPaths((5,), 3),
    "narrow first": BestPaths((1, 3, 6), 7),
    "all": BestPaths((3, 2, 2), 12),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("shape", BEST_PATHS)
@pytest.mark.parametrize("kind", ["shared", "trimmed", "trimmed, own, deep"])
@pytest.mark.parametrize("method", METHODS)
def test_the_best_paths_are_those_of_the_full_tree(method: str, kind: str, shape: str) -> None:
    """Rows whose paths share more nodes have fewer of them."""
    (head, context), rule = confident(method, kind), BEST_PATHS[shape]
    draft = proposed(head, rule, context)
    paths = [slow_paths(guesses_of(head, context, row), rule) for row in range(ROWS)]
    best = [merged(found[: rule.num_paths]) for found in paths]
    assert draft.num_nodes == max(map(len, best))
    for row in range(ROWS):
        assert_equal(nodes_of(draft, row), best[row])


def test_rows_whose_paths_have_fewer_nodes_are_filled_up() -> None:
    """In the test above there are such rows."""
    head, context = confident("hydra", "shared")
    paths = [slow_paths(guesses_of(head, context, row), BestPaths()) for row in range(ROWS)]
    assert len({len(merged(found[:5])) for found in paths}) > 1


@pytest.mark.parametrize("shape", [BestFirst(14, top_k=5, beam=3), BestPaths()])
@pytest.mark.parametrize("method", METHODS)
def test_rows_grow_as_if_alone(method: str, shape: BestFirst | BestPaths) -> None:
    head, context = confident(method, "shared")
    together = proposed(head, shape, context)
    every = [nodes_of(together, row) for row in range(ROWS)]
    for row in range(ROWS):
        alone = nodes_of(proposed(head, shape, context.keep([row])), 0)
        assert_equal(every[row], alone)
    assert len({tuple(node.tokens for node in nodes) for nodes in every}) == ROWS, "each row has its own tree"


@pytest.mark.parametrize("method", METHODS)
def test_a_head_grows_where_it_is_confident(method: str) -> None:
    """Dividing by more makes it less sure of a depth, and the tree flatter."""
    head, context = confident(method, "shared")
    shape = BestFirst(16, top_k=V, beam=16)
    shapes = [replace(shape, temperatures=(divisor,) * K) for divisor in (0.2, 1.0, 20.0)]
    depths = [int(proposed(head, one, context).depths.sum()) for one in shapes]
    assert depths[0] > depths[1] > depths[2]


@pytest.mark.parametrize("shape", [BestFirst(24), BestPaths()])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_in_half_precision_grows_whole_trees(method: str, shape: BestFirst | BestPaths) -> None:
    """Its logits are often equal, but how sure it is of them is counted in single precision."""
    head, context = confident(method, "own")
    context = replace(context, hidden=context.hidden.bfloat16())
    draft = proposed(head.bfloat16(), shape, context)
    with torch.no_grad():
        logits = head.predict(head.begin(head.start().root(context), K), 0)[:, 0]
    assert logits.dtype == torch.bfloat16
    expected = (logits.double() / CONFIDENCE[0]).log_softmax(-1)
    for row in range(ROWS):
        for node in nodes_of(draft, row):
            if len(node.tokens) == 1:
                assert node.log_prob == pytest.approx(float(expected[row, node.tokens[0]]), abs=1e-5)


# --- properties, on guessers that know a table ---


@dataclass(frozen=True)
class TableHead:
    """Guesses fixed by a row number, the root and, if it reads them, the guesses above: a line of a table for each."""

    table: Tensor  # (lines, V') logits
    temperatures: Sequence[float]
    reads_path: bool

    def begin(self, context: Context, depth: int) -> Tensor:
        return (context.last_hidden[:, :1].long() * 31 + context.root_ids[:, None]) % len(self.table)

    def predict(self, state: Tensor, depth: int) -> Tensor:
        return self.table[(state + 7 * depth) % len(self.table)]

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
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

    def grow(self, shape: BestFirst | BestPaths) -> Draft:
        shape = replace(shape, temperatures=tuple(self.head.temperatures))
        begin = partial(self.head.begin, self.context)
        return fill(self.head, shape, self.context, begin=begin, max_depth=self.depth)


@st.composite
def worlds(draw: st.DrawFn, *, ties: bool | None = None) -> World:
    num_rows, num_tokens, depth = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    table = 2.0 * torch.randn(97, num_tokens, generator=generator)
    if draw(st.booleans()) if ties is None else ties:
        table = table.round() * draw(st.sampled_from([0.0, 1.0, 200.0]))  # 200: all other guesses are impossible
    roots = torch.randint(0, 9, (num_rows,), generator=generator)
    rows = torch.arange(num_rows, dtype=torch.float32)[:, None, None]
    context = Context(rows, roots[:, None], torch.ones_like(roots), roots)
    return World(TableHead(table, (1.0, 0.5, 2.0, 1.0)[:depth], draw(st.booleans())), context)


def best_first_rules() -> st.SearchStrategy[BestFirst]:
    return st.builds(
        BestFirst,
        st.integers(1, 40),
        top_k=st.integers(1, 7),
        beam=st.integers(1, 7),
        max_depth=st.none() | st.integers(1, 4),
        threshold=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    )


def best_paths_rules(world: World) -> st.SearchStrategy[BestPaths]:
    """As deep as there are depths, as wide as there are tokens, at most."""
    width = st.integers(1, world.head.table.shape[1])
    widths = st.lists(width, min_size=1, max_size=world.depth).map(tuple)
    return widths.flatmap(lambda found: st.builds(BestPaths, st.just(found), st.integers(1, math.prod(found))))


@settings(deadline=None)
@given(worlds(), best_first_rules())
def test_nodes_grown_best_first_hang_together_and_fall_in_probability(world: World, shape: BestFirst) -> None:
    draft = world.grow(shape)
    assert draft.num_nodes <= shape.num_nodes
    for row in range(world.num_rows):
        nodes = nodes_of(draft, row)
        known = {node.tokens: node.log_prob for node in nodes}
        guesses = table_guesses(world, row)
        for node in nodes[1:]:
            *above, token = node.tokens
            own = next(log_prob for log_prob, guess in guesses(tuple(above)) if guess == token)
            assert node.log_prob == pytest.approx(known[tuple(above)] + own, rel=1e-6, abs=1e-3)
        totals = [node.log_prob for node in nodes]
        assert totals[0] == 0.0
        assert totals == sorted(totals, reverse=True)
        assert max(len(node.tokens) for node in nodes) <= min(shape.max_depth or world.depth, world.depth)


@settings(deadline=None)
@given(worlds(), st.data())
def test_nodes_of_best_paths_hang_together_and_hold_every_best_path(world: World, data: st.DataObject) -> None:
    shape = data.draw(best_paths_rules(world))
    draft = world.grow(shape)
    assert draft.max_depth == len(shape.widths)
    for row in range(world.num_rows):
        nodes = nodes_of(draft, row)
        assert sum(len(node.tokens) == len(shape.widths) for node in nodes) >= shape.num_paths


@settings(deadline=None)
@given(worlds(), best_first_rules(), st.integers(1, 12))
def test_the_first_nodes_are_the_tree_of_so_few_nodes(world: World, shape: BestFirst, num_nodes: int) -> None:
    """So trees are nested. With equal probabilities the smaller search may come upon another guess."""
    large, small = world.grow(shape), world.grow(replace(shape, num_nodes=min(num_nodes, shape.num_nodes)))
    first = large.first(num_nodes)
    assert first.max_depth == small.max_depth
    for row in range(world.num_rows):
        nodes, expected = nodes_of(first, row), nodes_of(small, row)
        totals = [node.log_prob for node in expected]
        assert [node.log_prob for node in nodes] == pytest.approx(totals, abs=1e-4)
        if all(before - after > 1e-3 for before, after in itertools.pairwise(totals)):
            # the last one's equals may stand behind it
            assert_equal(nodes[:-1], expected[:-1])


@settings(deadline=None)
@given(worlds(), best_first_rules(), st.integers(1, 12), st.integers(1, 12))
def test_cutting_twice_is_cutting_once(world: World, shape: BestFirst, some: int, others: int) -> None:
    draft = world.grow(shape)
    twice, once = draft.first(some).first(others), draft.first(min(some, others))
    assert twice.max_depth == once.max_depth
    for name in ("token_ids", "parents", "depths", "ancestors", "path_log_probs"):
        assert torch.equal(getattr(twice, name), getattr(once, name))
    assert draft.first(draft.num_nodes) is draft


@settings(deadline=None)
@given(worlds(), best_first_rules(), st.sampled_from([0.001, 0.03, 0.2, 0.6, 0.999]))
def test_the_threshold_leaves_out_what_is_unlikely_in_every_row(
    world: World, shape: BestFirst, threshold: float
) -> None:
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


@settings(deadline=None)
@given(worlds(), best_first_rules(), st.data())
def test_asking_for_more_than_there_is_gives_all(world: World, shape: BestFirst, data: st.DataObject) -> None:
    widths = data.draw(best_paths_rules(world)).widths
    every = world.grow(BestPaths(widths, math.prod(widths)))
    assert every.num_nodes == Tree.cartesian(widths).num_nodes
    ranks = min(shape.top_k, world.head.table.shape[1])
    unbounded = replace(shape, num_nodes=10_000, beam=10_000, threshold=0.0)
    depth = min(shape.max_depth or world.depth, world.depth)
    assert world.grow(unbounded).num_nodes == Tree.cartesian([ranks] * depth).num_nodes


# --- levels that are left out ---


@dataclass(frozen=True)
class CountingHead(TableHead):
    """One that notes how many nodes it steps down to, per level."""

    stepped: list[int]

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        self.stepped.append(token_ids.shape[1])
        return super().descend(state, depth, parents, token_ids)


def counted(world: World, shape: BestFirst) -> tuple[Draft, list[int]]:
    """The draft, and the nodes that the head stepped down to."""
    head = CountingHead(world.head.table, world.head.temperatures, world.head.reads_path, [])
    return replace(world, head=head).grow(shape), head.stepped


@settings(deadline=None)
@given(worlds(ties=False), best_first_rules())
def test_levels_that_cannot_change_the_tree_are_left_out(world: World, shape: BestFirst) -> None:
    whole, all_levels = counted(world, replace(shape, min_level_probability=None))
    draft, levels = counted(world, shape)
    for row in range(world.num_rows):
        assert_equal(nodes_of(draft, row), nodes_of(whole, row))
    assert len(levels) <= len(all_levels)
    assert all(few <= many for few, many in zip(levels, all_levels, strict=False))


def test_a_level_is_left_out_where_all_its_nodes_come_too_late() -> None:
    """Each node has children of probabilities 0.5, 0.3 and 0.2.

    After the first level the four best are 1, 0.5, 0.3 and 0.2, so the children of 0.5 and 0.3 can be among them. Of
    these 0.25 is the best and the last of the four: the third level is left out. In a tree of six, 0.15 is the last.
    """
    world = world_of([[math.log(p) for p in (0.5, 0.3, 0.2)]], 3)
    found = {nodes: counted(world, BestFirst(nodes, beam=9))[1] for nodes in (2, 3, 4, 6)}
    assert found == {2: [], 3: [1], 4: [2], 6: [3, 1]}


@dataclass(frozen=True)
class RowHead(TableHead):
    """One whose guesses depend on the row alone."""

    def begin(self, context: Context, depth: int) -> Tensor:
        return context.last_hidden[:, :1].long()

    def predict(self, state: Tensor, depth: int) -> Tensor:
        return self.table[state]

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        return state.gather(1, parents)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_sure_row_keeps_its_depth_beside_an_unsure_one(order: tuple[int, int]) -> None:
    """The sure row has one likely child at each node, the other has none: only the first needs further levels."""
    sure, unsure = [math.log(p) for p in (0.91, 0.04, 0.03, 0.02)], [math.log(p) for p in (0.28, 0.26, 0.24, 0.22)]
    ones = torch.ones(2, dtype=torch.long)
    context = Context(torch.tensor(order).float()[:, None, None], ones[:, None], ones, ones)
    world = World(RowHead(torch.tensor([sure, unsure]), (1.0,) * 4, reads_path=True), context)
    draft, whole = (world.grow(BestFirst(6, beam=4, min_level_probability=reach)) for reach in (0.0, None))
    depths = {}
    for row, kind in enumerate(order):
        assert_equal(nodes_of(draft, row), nodes_of(whole, row))
        depths[kind] = max(len(node.tokens) for node in nodes_of(draft, row))
    assert depths == {0: 4, 1: 2}


@pytest.mark.parametrize(("min_level_probability", "further"), [(0.0, 2), (0.49, 2), (0.51, 1), (0.99, 1), (1.01, 0)])
def test_a_level_is_drafted_if_enough_probability_reaches_it(min_level_probability: float, further: int) -> None:
    """Of two equal rows a child of probability 0.5 is followed: 1.0 reach the second level, 0.5 the third."""
    world = world_of([[math.log(p) for p in (0.5, 0.1, 0.1, 0.1, 0.1, 0.1)]], 3)
    draft, stepped = counted(world, BestFirst(30, beam=1, min_level_probability=min_level_probability))
    assert stepped == [1] * further
    assert draft.num_nodes == 1 + 6 * (1 + further)


def world_of(table: list[list[float]], depth: int = 3, *, reads_path: bool = True) -> World:
    """Rows that all see the same."""
    ones = torch.ones(2, dtype=torch.long)
    return World(
        TableHead(torch.tensor(table), (1.0,) * depth, reads_path),
        Context(torch.zeros(2, 1, 1), ones[:, None], ones, ones),
    )


@pytest.mark.parametrize("reads_path", [False, True])
def test_certain_draft_tokens_come_after_their_parents(reads_path: bool) -> None:
    """All on the path have probability 1."""
    draft = world_of([[0.0, 300.0, 0.0]], reads_path=reads_path).grow(BestFirst(4))
    for row in range(2):
        nodes = nodes_of(draft, row)
        assert [node.tokens for node in nodes] == [(), (5,), (5, 5), (5, 5, 5)]
        assert [node.log_prob for node in nodes] == [0.0] * 4


@pytest.mark.parametrize("reads_path", [False, True])
def test_impossible_draft_tokens_come_last(reads_path: bool) -> None:
    world = world_of([[1.0, -math.inf, 0.0]], 2, reads_path=reads_path)
    totals = [node.log_prob for node in nodes_of(world.grow(BestFirst(13, beam=9)), 0)]
    assert [math.isfinite(total) for total in totals] == [True] * 7 + [False] * 6
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("reads_path", [False, True])
@pytest.mark.parametrize("shape", [BestFirst(13), BestPaths((2, 2, 2), 5)])
def test_draft_tokens_of_equal_probability(shape: BestFirst | BestPaths, reads_path: bool) -> None:
    """Of two hundred thousand trees it must be one, and shallow guesses are likelier than deep ones."""
    draft = world_of([[0.5] * 3], reads_path=reads_path).grow(shape)
    depths = [len(node.tokens) for node in nodes_of(draft, 0)]
    if isinstance(shape, BestFirst):
        assert depths == [0] + [1] * 3 + [2] * 9
    else:
        assert len(depths) == Tree.cartesian(shape.widths).num_nodes, "all paths are among the best"


def test_a_path_is_as_good_as_its_end_and_a_node_as_its_best_path() -> None:
    """The likelier guess of the two at the root has the worse paths, and its sibling is not averaged over."""
    lines = torch.zeros(97, 2)
    world = world_of(lines.tolist(), 2)
    start = int(world.head.begin(world.context, 2)[0, 0])
    below = [
        int(world.head.descend(torch.tensor([[start]]), 0, torch.tensor([[0]]), torch.tensor([[t]]))) for t in (2, 5)
    ]
    lines[start] = torch.tensor([0.6, 0.4]).log()
    lines[below[0] + 7] = torch.tensor([0.5, 0.5]).log()
    lines[below[1] + 7] = torch.tensor([0.99, 0.01]).log()
    world = world_of(lines.tolist(), 2)
    # 0.6 · 0.5 twice, against 0.4 · 0.99 and 0.4 · 0.01
    assert [node.tokens for node in nodes_of(world.grow(BestPaths((2, 2), 1)), 0)] == [(), (5,), (5, 2)]
    found = {node.tokens for node in nodes_of(world.grow(BestPaths((2, 2), 2)), 0)}
    assert {(), (5,), (5, 2), (2,)} < found
    assert (5, 5) not in found


@pytest.mark.parametrize("above", [0, 1, 2])
def test_the_last_node_of_a_depth_has_a_child_if_the_child_is_most_probable(above: int) -> None:
    """Below a path of certain guesses four are nearly alike, and the last of them has a certain child."""
    lines = torch.zeros(97, 4)
    world = world_of(lines.tolist(), above + 2)
    state = world.head.begin(world.context, above + 2)[:1]
    for depth in range(above + 2):
        line = (state + 7 * depth) % len(lines)
        lines[line] = torch.tensor([0.0, -0.01, -0.02, -0.03]) if depth == above else torch.tensor([300.0, 0, 0, 0])
        token = 11 if depth == above else 2  # the last or the first of the four
        state = world.head.descend(state, depth, torch.zeros(1, 1, dtype=torch.long), torch.tensor([[token]]))
    world = world_of(lines.tolist(), above + 2)
    path = (2,) * above
    expected = [path[:depth] for depth in range(above + 1)]
    expected += [(*path, 2), (*path, 5), (*path, 8), (*path, 11), (*path, 11, 2)]
    assert [node.tokens for node in nodes_of(world.grow(BestFirst(len(expected))), 0)] == expected


def table_guesses(world: World, row: int) -> Guesses:
    """What the table says, line by line."""
    head, start = world.head, int(world.context.last_hidden[row, 0]) * 31 + int(world.context.root_ids[row])

    def guesses(tokens: Tokens) -> list[tuple[float, int]]:
        line = start % len(head.table)
        for token in tokens if head.reads_path else ():
            line = (line * 13 + token + 1) % len(head.table)
        depth = len(tokens)
        logits = head.table[(line + 7 * depth) % len(head.table)].double() / head.temperatures[depth]
        log_probs = enumerate(logits.log_softmax(-1).tolist())
        return sorted(((log_prob, draft_id * 3 + 2) for draft_id, log_prob in log_probs), reverse=True)

    return guesses


@settings(deadline=None)
@given(worlds(ties=False), best_first_rules())
def test_no_tree_of_so_many_nodes_is_likelier(world: World, shape: BestFirst) -> None:
    """With a beam that is wide enough. Equal guesses are left aside: any of them may have the children."""
    shape = replace(shape, beam=10_000, threshold=0.0)
    draft = world.grow(shape)
    for row in range(world.num_rows):
        best = slow_best_first(table_guesses(world, row), shape, min(shape.max_depth or world.depth, world.depth))
        totals = [node.log_prob for node in best]
        assert [node.log_prob for node in nodes_of(draft, row)] == pytest.approx(totals, abs=1e-3)


# --- numbers that no rule can have ---


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        *(
            (lambda name=name, value=value: BestFirst(**{"num_nodes": 4, name: value}), f"{name} is {value}; {rule}")
            for name, values, rule in (
                ("num_nodes", (0, -3), "it must be at least 1"),
                ("top_k", (0,), "it must be at least 1"),
                ("beam", (0,), "it must be at least 1"),
                ("max_depth", (0,), "it must be at least 1"),
                ("threshold", (1.0, -0.1, math.nan), "it must be at least 0 and below 1"),
                ("min_level_probability", (-0.1, math.inf), "it must be at least 0, or None"),
            )
            for value in values
        ),
        (lambda: BestPaths(num_paths=0), "num_paths is 0; it must be at least 1"),
        (lambda: BestPaths(()), "widths []: at least one, and every one at least 1"),
        (lambda: BestPaths((3, 0)), "widths [3, 0]: at least one, and every one at least 1"),
        (lambda: BestPaths((3, 2), 7), "num_paths is 7 but widths [3, 2] have 6 paths"),
    ],
)
def test_an_impossible_rule_is_named_with_its_numbers(rule: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidTree) as caught:
        rule()
    assert str(caught.value) == said


@pytest.mark.parametrize("method", METHODS)
def test_shapes_that_the_head_cannot_fill(method: str) -> None:
    head = random_head(method, draft_vocab_size=len(DRAFT_VOCAB))
    for deep in (BestFirst(9, max_depth=4), BestPaths((2, 2, 2, 2))):
        with pytest.raises(InvalidTree, match="the tree is 4 deep but the head has 3 heads: cut the tree or train"):
            propose(head, random_context(2), deep)
    for wide in (BestPaths((9, 2)), BestPaths((2, 2, 9))):
        with pytest.raises(InvalidTree, match="rank 8 is beyond the draft vocabulary of 8"):
            propose(head, random_context(2), wide)
    assert proposed(head, BestPaths((8, 1, 8), 64), random_context(2)).num_nodes == 1 + 8 + 8 + 64
    assert proposed(head, BestFirst(600, top_k=9, beam=64), random_context(2)).num_nodes == 1 + 8 + 64 + 512
