"""The tree that is grown from ranks is the best of its size, and decoding with it is foreseen step by step."""

import itertools
from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.search.tree_search import (
    best_tree,
    entries,
    expected_tokens,
    joint_order,
    path_counts,
    path_shares,
    simulate,
)
from draftheads.speculation.tree import Path, Tree
from observed_heads import steps_through

pytestmark = pytest.mark.usefixtures("one_thread")
DEPTH, MOST_NODES = 3, 8  # of the trees that are searched through
WIDTH = 3  # of the trees of sampled texts


@lru_cache
def paths_of(width: int) -> list[Path]:
    """All paths of a full tree, the root left out."""
    return [path for depth in range(1, DEPTH + 1) for path in itertools.product(range(width), repeat=depth)]


@lru_cache
def every_tree(width: int) -> list[Tensor]:
    """Of 1 … MOST_NODES nodes: each (trees, paths), 1 where the path is in the tree. Each grows by one node."""
    paths = paths_of(width)
    parent = [paths.index(path[:-1]) if len(path) > 1 else None for path in paths]
    trees, found = {0}, []
    for _ in range(MOST_NODES):
        found.append(torch.tensor([[tree >> i & 1 for i in range(len(paths))] for tree in sorted(trees)]).double())
        trees = {
            tree | 1 << i
            for tree in trees
            for i, above in enumerate(parent)
            if not tree >> i & 1 and (above is None or tree >> above & 1)
        }
    return found


def best_by_search(width: int, values: Mapping[Path, float]) -> list[float]:
    """For trees of 1 … MOST_NODES nodes: what the best one is worth, the root as 1."""
    worth = torch.tensor([values.get(path, 0.0) for path in paths_of(width)], dtype=torch.float64)
    return [1.0 + float((trees @ worth).max()) for trees in every_tree(width)]


def test_ties_go_to_the_shallower_then_the_better_rank_and_no_positions_give_the_root_alone() -> None:
    assert best_tree(torch.tensor([[1, 0], [0, 0]]), 3).paths == ((), (0,), (1,))
    none = torch.zeros(0, 4, dtype=torch.long)
    assert best_tree(none, 8) == Tree.chain(0)
    assert expected_tokens(none, Tree.chain(4)) == 1.0
    with pytest.raises(InvalidSettings, match="num_nodes is 0"):
        best_tree(none, 0)


small_tables = st.integers(2, 3).flatmap(
    lambda width: st.tuples(
        st.just(width), st.lists(st.tuples(*[st.integers(0, width)] * DEPTH), min_size=1, max_size=40)
    )
)


@settings(max_examples=40, deadline=None)
@given(small_tables)
def test_joint_trees_are_the_best_of_all_trees_of_their_size(case: tuple[int, list[tuple[int, ...]]]) -> None:
    width, table = case
    on_truth = {path: sum(row[: len(path)] == path for row in table) / len(table) for path in paths_of(width)}
    ranks = torch.tensor(table)
    order = joint_order(path_counts(ranks, top_k=width), MOST_NODES)
    for num_nodes, best in enumerate(best_by_search(width, on_truth), 1):
        tree = best_tree(ranks, num_nodes, top_k=width)
        assert tree == Tree.from_paths(order[: num_nodes - 1]), "trees are nested"
        assert tree.num_nodes <= num_nodes
        assert expected_tokens(ranks, tree) == pytest.approx(best)
    promised = expected_tokens(ranks, Tree.from_paths(joint_order(path_counts(ranks, top_k=width), 45)))
    assert promised == sum(path_counts(ranks, top_k=width).values()) / len(ranks), "every path that was true is there"


# --- shares of sampled texts ---


def slow_shares(ranks: list[list[int]], probs: list[list[list[float]]]) -> dict[Path, float]:
    """Of every path of guesses: how often its beginning is kept, times the mean chance of its last guess there."""
    shares: dict[Path, float] = {(): 1.0}
    for depth in range(DEPTH):
        for path in itertools.product(range(WIDTH), repeat=depth):
            there = [row[depth] for taken, row in zip(ranks, probs, strict=True) if tuple(taken[:depth]) == path]
            for rank in range(WIDTH if there and path in shares else 0):
                shares[*path, rank] = shares[path] * sum(row[rank] for row in there) / len(there)
    return {path: share for path, share in shares.items() if share > 0}


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**20), st.booleans())
def test_shares_are_means_of_the_target_s_own_probabilities(number: int, seed: int, is_certain: bool) -> None:
    chance = torch.Generator().manual_seed(seed)
    every = torch.randn(number, DEPTH, WIDTH + 1, generator=chance).mul(3).softmax(-1).mul(8).floor().div(8)
    ranks = torch.randint(0, WIDTH + 1, (number, DEPTH), generator=chance)  # the last one is a miss
    probs = torch.nn.functional.one_hot(ranks, WIDTH + 1).float() if is_certain else every
    shares = path_shares(ranks, probs[:, :, :WIDTH])
    assert shares == pytest.approx(slow_shares(ranks.tolist(), probs.tolist()))
    assert all(share <= shares[path[:-1]] + 1e-9 for path, share in shares.items() if path)
    if is_certain:
        assert shares == pytest.approx({path: n / number for path, n in path_counts(ranks, top_k=WIDTH).items()})


# --- decoding, simulated ---

answers = st.lists(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=12), min_size=1, max_size=6)


def as_ranks(answer: list[tuple[int, ...]]) -> Tensor:
    """(m, 3), also of an answer without tokens."""
    return torch.tensor(answer, dtype=torch.long).reshape(-1, 3)


@settings(max_examples=50, deadline=None)
@given(answers, st.integers(1, 14))
def test_simulated_decoding_takes_the_steps_of_a_walk(told: list[list[tuple[int, ...]]], num_nodes: int) -> None:
    order = joint_order(path_counts(torch.cat([as_ranks(answer) for answer in told]), top_k=3), 10)
    tree = set(order[: num_nodes - 1])
    steps = sum(steps_through(answer, tree) for answer in told)
    tokens = sum(max(0, len(answer) - 1) for answer in told)
    found, _ = simulate([entries(as_ranks(answer), order) for answer in told], num_nodes)
    assert found == pytest.approx(tokens / steps if steps else 1.0)


def test_answers_without_a_step_count_for_nothing() -> None:
    none, one = torch.zeros(0, 2, dtype=torch.long), torch.full((1, 2), 2)
    some = torch.tensor([[2, 9], [9, 9], [9, 9]])
    assert simulate([], 4) == (1.0, 0.0)
    assert simulate([none, one], 4) == (1.0, 0.0)
    assert simulate([some], 4) == (2.0, 0.0)  # the first step keeps a guess, and what comes after it ends the answer
    assert simulate([none, some, one], 4) == (2.0, 0.0)
    assert entries(none, [(0,)]).shape == (0, 2)
