"""Copies merged into drafts: against dictionaries, node by node, and what holds of every merged tree."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft_paths import Tokens, paths_of
from draftheads.speculation.candidates import Candidates, ancestors_of, merged, selected
from draftheads.speculation.draft import Draft
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree

Row = dict[Tokens, float]  # a tree by the tokens of its paths, with the log-probability of each
ROOT = 9
FEW = 4  # so few tokens that copies often meet the draft


@st.composite
def rows(draw: st.DrawFn, num_nodes: int, *, equal: bool) -> Row:
    """A tree of so many nodes, in an order in which it could have grown; probabilities do not rise along a path."""
    tree: Row = {(): 0.0}
    while len(tree) < num_nodes:
        parent = draw(st.sampled_from(sorted(tree)))
        free = [token for token in range(FEW) if (*parent, token) not in tree]
        if free:
            fall = draw(st.sampled_from([0.0, 0.5]) if equal else st.floats(0.01, 3.0))
            tree[(*parent, draw(st.sampled_from(free)))] = tree[parent] - fall
    return tree


@st.composite
def copied_rows(draw: st.DrawFn, most: int, *, equal: bool) -> Row:
    """Copies: a tree of up to so many tokens below the root, all less probable than the root."""
    number = draw(st.integers(0, most))
    tree = draw(rows(1 + number, equal=equal))
    return {path: value - 0.25 * bool(path) for path, value in tree.items()}


def copies_of(trees: list[Row], most: int) -> Candidates:
    """Rows of copies, filled up with tokens of probability 0."""
    token_ids, parents, log_probs = [], [], []
    for tree in trees:
        paths, filling = list(tree), [0] * (1 + most - len(tree))
        token_ids.append([*(path[-1] if path else ROOT for path in paths), *filling])
        parents.append([*(paths.index(path[:-1]) for path in paths), *filling])
        log_probs.append([*tree.values(), *[-math.inf] * len(filling)])
    return Candidates(*map(torch.tensor, (token_ids, parents, log_probs)))


def draft_of(trees: list[Row]) -> Draft:
    """Rows of equal size as a draft, nodes in the order of the dictionary."""
    paths = [list(tree) for tree in trees]
    parents = torch.tensor([[row.index(path[:-1]) for path in row] for row in paths])
    depths = torch.tensor([[len(path) for path in row] for row in paths])
    return Draft(
        token_ids=torch.tensor([[path[-1] if path else ROOT for path in row] for row in paths]),
        parents=parents,
        depths=depths,
        ancestors=torch.tensor([[[node[: len(m)] == m for m in row] for node in row] for row in paths]),
        max_depth=int(depths.max()),
        path_log_probs=torch.tensor([list(tree.values()) for tree in trees]),
    )


def slow_merged(tree: Row, copies: Row, num_nodes: int) -> list[tuple[Tokens, float]]:
    """Path and log-probability of the nodes that are kept."""
    found = dict(tree)
    for path, log_prob in copies.items():
        found[path] = max(found.get(path, -math.inf), log_prob)
    order = sorted(found, key=lambda path: -found[path])  # stable
    return [(path, found[path]) for path in order[:num_nodes]]


def distinct(tree: Row, copies: Row) -> bool:
    """Whether no two nodes are so close that float32, which the draft has, sees one value."""
    values = [value for _, value in slow_merged(tree, copies, len(tree) + len(copies))]
    return all(before - after > 1e-5 for before, after in pairwise(values))


@pytest.mark.parametrize("equal", [False, True])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_merging_equals_merging_dictionaries(equal: bool, data: st.DataObject) -> None:
    batch, size, most = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 7))
    num_nodes = data.draw(st.integers(1, 16))
    trees = [data.draw(rows(size, equal=equal)) for _ in range(batch)]
    copies = [data.draw(copied_rows(most, equal=equal)) for _ in range(batch)]
    found = merged(draft_of(trees), copies_of(copies, most), BestFirst(num_nodes))
    assert found.num_nodes == min(num_nodes, size + most)
    for row, (tree, own) in enumerate(zip(trees, copies, strict=True)):
        expected = slow_merged(tree, own, num_nodes)
        paths = paths_of(found, row)
        kept = len(paths)
        assert kept == len(expected)
        values = found.path_log_probs[row].tolist()
        assert values[:kept] == pytest.approx([value for _, value in expected], abs=1e-5)
        assert values[kept:] == [-math.inf] * (found.num_nodes - kept)
        assert not found.copied[row, kept:].any()
        assert len(set(paths)) == kept, "no two siblings have the same token"
        if distinct(tree, own):  # of equals either may be kept
            assert paths == [path for path, _ in expected]
        assert found.copied[row, :kept].tolist() == [path not in tree for path in paths]


def test_a_static_tree_of_all_rows_becomes_one_of_each_row() -> None:
    tree = Tree.from_paths([(0,), (1,), (0, 0)])
    draft = Draft.on_tree(tree, torch.tensor([[9, 1, 2, 3], [9, 2, 1, 3]]))
    draft = replace(draft, path_log_probs=torch.tensor([[0.0, -1.0, -3.0, -2.0]]).expand(2, -1))
    found = merged(draft, copies_of([{(): 0.0, (2,): -0.5, (2, 5): -0.6}] * 2, 2), BestFirst(4))
    assert [paths_of(found, row) for row in range(2)] == [[(), (2,), (2, 5), (1,)], [(), (2,), (2, 5), (2, 3)]]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_ancestors_by_squaring(data: st.DataObject) -> None:
    tree = data.draw(rows(data.draw(st.integers(1, 12)), equal=False))
    draft = draft_of([tree, tree])
    for depth in (draft.max_depth, 11):  # a depth that is too large is no harm
        assert torch.equal(ancestors_of(draft.parents, depth), draft.ancestors)
    chain = torch.arange(300).sub(1).clamp_min(0)[None]
    assert torch.equal(ancestors_of(chain, 299)[0], torch.ones(300, 300, dtype=torch.bool).tril())


def test_of_equals_the_parent_stands_before_its_child() -> None:
    zeros: Tensor = torch.zeros(1, 4)
    found = Candidates(torch.tensor([[9, 1, 2, 3]]), torch.tensor([[0, 0, 1, 2]]), zeros)
    draft, order = selected(found, BestFirst(3), 3)
    assert order.tolist() == [[0, 1, 2]]
    assert paths_of(draft, 0) == [(), (1,), (1, 2)]
