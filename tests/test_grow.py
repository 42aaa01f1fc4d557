"""The tree that is grown from ranks is the best of its size."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.search.grow import best_tree, expected_tokens, path_counts
from draftheads.tree import Path, Tree


def slow_expected_tokens(ranks: Tensor, tree: Tree) -> float:
    """By walking down the tree at every position."""
    total = 0
    for row in ranks.tolist():
        path: Path = ()
        total += 1
        for rank in row:
            path = (*path, rank)
            if path not in tree.paths:
                break
            total += 1
    return total / len(ranks)


def all_trees(depth: int, width: int, num_nodes: int) -> Iterator[Tree]:
    every = [path for d in range(1, depth + 1) for path in itertools.product(range(width), repeat=d)]
    for chosen in itertools.combinations(every, num_nodes - 1):
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
            yield Tree.from_paths(chosen)


rank_tables = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 4), min_size=width, max_size=width), min_size=1, max_size=30)
)


@given(rank_tables, st.integers(0, 3), st.integers(1, 3))
def test_expected_tokens_is_the_mean_of_the_walks(table: list[list[int]], depth: int, width: int) -> None:
    tree = Tree.cartesian([width] * min(depth, len(table[0])))
    ranks = torch.tensor(table)
    assert expected_tokens(ranks, tree) == pytest.approx(slow_expected_tokens(ranks, tree))


@given(rank_tables, st.integers(1, 20))
def test_a_grown_tree_counts_as_walked(table: list[list[int]], num_nodes: int) -> None:
    ranks = torch.tensor(table)
    tree = best_tree(ranks, num_nodes, num_ranks=4)
    assert tree.num_nodes <= num_nodes
    assert max(tree.ranks) < 4
    assert expected_tokens(ranks, tree) == pytest.approx(slow_expected_tokens(ranks, tree))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=40), st.integers(1, 5))
def test_no_tree_of_the_size_is_better(table: list[tuple[int, ...]], num_nodes: int) -> None:
    ranks = torch.tensor(table)
    best = max(slow_expected_tokens(ranks, tree) for tree in all_trees(3, 2, num_nodes))
    assert expected_tokens(ranks, best_tree(ranks, num_nodes, num_ranks=2)) == pytest.approx(best)


def test_a_miss_ends_a_path() -> None:
    ranks = torch.tensor([[10, 0], [0, 10]])
    assert path_counts(ranks, num_ranks=10) == {(): 2, (0,): 1}


def test_ties_go_to_the_shallower_then_the_better_rank() -> None:
    ranks = torch.tensor([[1, 0], [0, 0]])
    assert best_tree(ranks, 3).paths == ((), (0,), (1,))


def test_no_positions_give_the_root_alone() -> None:
    none = torch.zeros(0, 4, dtype=torch.long)
    assert best_tree(none, 8) == Tree.chain(0)
    assert expected_tokens(none, Tree.chain(4)) == 1.0


def test_a_tree_without_room_for_its_root_is_an_error() -> None:
    with pytest.raises(InvalidSettings, match="num_nodes is 0"):
        best_tree(torch.zeros(1, 1, dtype=torch.long), 0)
