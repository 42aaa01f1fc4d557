"""Trees: whatever builds one, its nodes, parents, depths and masks say the same; and what is no tree is refused."""

import itertools
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.errors import InvalidTree
from draftheads.speculation.draft import Draft, tree_tensors
from draftheads.speculation.tree import Path, Tree


def with_ancestors(paths: list[Path]) -> list[Path]:
    return sorted({path[:length] for path in paths for length in range(1, len(path) + 1)})


path_lists = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5).map(tuple), max_size=12).map(with_ancestors)
trees = path_lists.map(Tree.from_paths)


@settings(deadline=None)
@given(path_lists, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_paths_does_not_matter(paths: list[Path], random: Random, root: bool) -> None:
    shuffled = [*paths, ()] if root else list(paths)
    random.shuffle(shuffled)
    tree = Tree.from_paths(shuffled)
    assert tree == Tree.from_paths(paths)
    assert tree.paths == tuple(sorted([(), *paths], key=lambda path: (len(path), path)))


@settings(deadline=None)
@given(trees)
def test_parents_depths_masks_tensors_and_json_say_what_the_paths_say(tree: Tree) -> None:
    assert Tree.from_json(tree.to_json()) == tree
    assert [tuple(path) for path in json.loads(tree.to_json())] == list(tree.paths[1:])
    assert (tree.parents[0], tree.ranks[0]) == (-1, 0)
    for node in range(1, tree.num_nodes):
        assert 0 <= tree.parents[node] < node
        assert tree.paths[node] == (*tree.paths[tree.parents[node]], tree.ranks[node])
    assert list(tree.depths) == [len(path) for path in tree.paths] == sorted(tree.depths)
    assert (tree.max_depth, tree.num_nodes) == (max(tree.depths), len(tree.paths))
    assert tree.ancestor_mask.dtype == torch.bool
    assert tree.ancestor_mask.tolist() == [[path[: len(other)] == other for other in tree.paths] for path in tree.paths]
    parents, depths, ancestors = tree_tensors(tree, torch.device("cpu"))
    assert parents.tolist() == [[max(parent, 0) for parent in tree.parents]]
    assert depths.tolist() == [list(tree.depths)]
    assert torch.equal(ancestors[0], tree.ancestor_mask)
    draft = Draft.on_tree(tree, torch.zeros(2, tree.num_nodes, dtype=torch.long))
    assert (draft.num_nodes, draft.max_depth, draft.sampled) == (tree.num_nodes, tree.max_depth, False)
    assert draft.parents is parents, "the tensors of a tree are made once"


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4))
def test_cartesian_holds_every_combination(widths: list[int]) -> None:
    tree = Tree.cartesian(widths)
    sizes = list(itertools.accumulate(widths, lambda size, width: size * width, initial=1))
    assert [tree.depths.count(depth) for depth in range(len(widths) + 1)] == sizes
    assert tree.num_nodes == sum(sizes)
    assert all(rank < width for path in tree.paths for rank, width in zip(path, widths, strict=False))
    assert tree == Tree.from_paths(tree.paths)
    chain = Tree.chain(len(widths))
    assert chain == Tree.cartesian([1] * len(widths))
    assert chain.parents == tuple(range(-1, len(widths)))


def test_no_paths_are_the_root_alone() -> None:
    assert Tree.from_paths([]) == Tree.from_json("[]") == Tree.cartesian([]) == Tree.chain(0)


# --- what is no tree ---

NO_JSON = ["", "[[0]", "{}", "3", "null", '"[[0]]"', "[0]", "[[0], 1]", '["00"]', "[" * 100_000, "[[[0]]]"]
DISORDER = [(), ((0,),), ((), (1,), (0,)), ((), (0,), (0, 0), (1,)), ((), (0,), (0,)), ((), (0, 0))]


@pytest.mark.parametrize(
    ("make", "argument", "named"),
    [
        *((Tree.from_paths, [(0,), (0, rank)], str([0, rank])) for rank in (-1, 1.0, "0", None, True)),
        *((Tree.from_paths, [(0,), path], f"{list(path)} has no") for path in ((1, 1), (1, 0), (0, 0, 0))),
        *((Tree.from_paths, paths, "twice") for paths in ([(0,), (1,), (0,)], [(), (0,), ()])),
        *((Tree.cartesian, widths, str(widths)) for widths in ([0], [2, 0], [3, -1, 2])),
        (Tree.chain, -1, "root"),
        *((Tree.from_json, text, "") for text in NO_JSON),
        *((Tree, paths, "") for paths in DISORDER),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_tree(make: Callable[[Any], Tree], argument: Any, named: str) -> None:
    with pytest.raises(InvalidTree) as caught:
        make(argument)
    assert named in str(caught.value)
