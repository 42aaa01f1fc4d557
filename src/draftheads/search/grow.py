"""Which tree of guesses pays, from how the heads' guesses ranked the true continuation.

Knows ranks and trees; knows nothing of models. Ranks are (S, K) int64: at position s head i gave the true
token rank r, 0 the best; what was not among the recorded ranks carries a higher one, that of a miss.

>>> ranks = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 0]])
>>> best_tree(ranks, num_nodes=3).paths
((), (0,), (0, 1))
>>> expected_tokens(ranks, best_tree(ranks, num_nodes=3))  # (3 + 3 + 1 + 2) / 4
2.25
"""

import heapq
from collections import Counter

import torch
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.tree import Path, Tree


def path_counts(ranks: Tensor, *, num_ranks: int) -> Counter[Path]:
    """At how many positions each path of ranks below ``num_ranks`` is the truth; the root has all of them."""
    counts: Counter[Path] = Counter({(): len(ranks)})
    for depth in range(1, ranks.shape[1] + 1):
        ranks = ranks[ranks[:, depth - 1] < num_ranks]
        paths, numbers = torch.unique(ranks[:, :depth], dim=0, return_counts=True)
        counts.update(dict(zip(map(tuple, paths.tolist()), numbers.tolist(), strict=True)))
    return counts


def expected_tokens(ranks: Tensor, tree: Tree) -> float:
    """Mean tokens that a step gains at these positions: one for each node on the true path, the root too."""
    if len(ranks) == 0:
        return 1.0
    counts = path_counts(ranks, num_ranks=max(tree.ranks) + 1)
    return sum(counts[path] for path in tree.paths) / len(ranks)


def best_tree(ranks: Tensor, num_nodes: int, *, num_ranks: int = 10) -> Tree:
    """The tree of at most ``num_nodes`` nodes, root included, that gains most at these positions.

    Taking the most frequent paths is exact: a path is never the truth more often than the path to its parent,
    so they form a tree. Paths that were never the truth are left out. Ties go to the shallower, then to the
    better-ranked path.

    Args:
        ranks: (S, K).
        num_nodes: the tree's size.
        num_ranks: ranks from here on are misses.

    Raises:
        InvalidSettings: no room for the root.
    """
    if num_nodes < 1:
        raise InvalidSettings(f"num_nodes is {num_nodes}; a tree has at least its root")
    counts = path_counts(ranks, num_ranks=num_ranks)
    best = heapq.nsmallest(num_nodes, counts, key=lambda path: (-counts[path], len(path), path))
    return Tree.from_paths(path for path in best if path)
