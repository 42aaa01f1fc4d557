"""Which tree of draft tokens gains most, from how they ranked the true continuation.

Knows ranks and trees; knows nothing of models. Ranks are (S, K) int64: at position s head i gave the true
token rank r, 0 the best; what was not among the recorded ranks carries a higher one, that of a miss.

Trees T_1, T_2 … have one node more each. The node that is added is the path that was most often the true continuation
(Hydra, section 4: simulated acceptance on recorded text). No path is true more often than its beginning, so each tree
is the best of its size.

>>> ranks = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 0]])
>>> best_tree(ranks, num_nodes=3).paths
((), (0,), (0, 1))
>>> expected_tokens(ranks, best_tree(ranks, num_nodes=3))  # (3 + 3 + 1 + 2) / 4
2.25
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.speculation.tree import Path, Tree

NEVER = 1 << 30  # nodes; no tree is so large
Share = tuple[float, float]  # a count for one prompt, and its divisor: (tokens, steps) or (tokens, seconds)


def path_counts(ranks: Tensor, *, top_k: int) -> Counter[Path]:
    """At how many positions each path of ranks below ``top_k`` is the truth; the root has all of them."""
    counts: Counter[Path] = Counter({(): len(ranks)})
    for depth in range(1, ranks.shape[1] + 1):
        ranks = ranks[ranks[:, depth - 1] < top_k]
        paths, numbers = torch.unique(ranks[:, :depth], dim=0, return_counts=True)
        counts.update(dict(zip(map(tuple, paths.tolist()), numbers.tolist(), strict=True)))
    return counts


def path_shares(ranks: Tensor, probs: Tensor) -> dict[Path, float]:
    """How often each path is kept when the text is sampled: by the target's probabilities of the draft tokens.

    The probability of a path is the share of positions where the text takes the path without its last token, times the
    target's probability of the last token there. This needs fewer texts than to count which tokens were drawn.

    Args:
        ranks: (S, K) of the tokens that were drawn.
        probs: (S, K, R) at each position and depth, if the text took its way there, the target's probability of the
            draft tokens of rank 0 … R-1.
    """
    top_k = probs.shape[2]
    shares: dict[Path, float] = {(): 1.0}
    going = torch.arange(len(ranks))
    for depth in range(ranks.shape[1]):
        # a column in front, since unique() cannot compare rows of length 0
        marked = torch.cat([torch.zeros(len(going), 1, dtype=torch.long), ranks[going, :depth]], 1)
        beginnings, which = torch.unique(marked, dim=0, return_inverse=True)
        sums = torch.zeros(len(beginnings), top_k, dtype=torch.float64)
        sums.index_add_(0, which, probs[going, depth].double())
        means = sums / torch.bincount(which, minlength=len(beginnings))[:, None]
        for beginning, row in zip(map(tuple, beginnings[:, 1:].tolist()), means.tolist(), strict=True):
            taken = shares.get(beginning, 0.0)  # rounding can have made it impossible
            shares.update({(*beginning, rank): taken * mean for rank, mean in enumerate(row) if taken * mean > 0})
        going = going[ranks[going, depth] < top_k]
    return shares


def expected_tokens(ranks: Tensor, tree: Tree) -> float:
    """Mean tokens that a step gains at these positions: one for each node on the true path, the root too."""
    if len(ranks) == 0:
        return 1.0
    counts = path_counts(ranks, top_k=max(tree.ranks) + 1)
    return sum(counts[path] for path in tree.paths) / len(ranks)


def best_tree(ranks: Tensor, num_nodes: int, *, top_k: int = 10) -> Tree:
    """The tree of at most ``num_nodes`` nodes, root included, that gains most at these positions.

    Args:
        ranks: (S, K).
        num_nodes: the tree's size.
        top_k: ranks from here on are misses.
    """
    return Tree.from_paths(joint_order(path_counts(ranks, top_k=top_k), num_nodes))


def joint_order(values: Mapping[Path, float], num_nodes: int) -> list[Path]:
    """The paths of the best tree of ``num_nodes`` nodes in the order in which it grew, root left out.

    Taking the most frequent paths is exact: a path is never the truth more often than the path to its parent,
    so they form a tree. Paths that were never the truth are left out. Ties go to the shallower, then to the
    better-ranked path.
    """
    if num_nodes < 1:
        raise InvalidSettings(f"num_nodes is {num_nodes}; a tree has at least its root")
    best = heapq.nsmallest(num_nodes, values, key=lambda path: (-values[path], len(path), path))
    return [path for path in best if path]


def entries(ranks: Tensor, order: Sequence[Path]) -> Tensor:
    """(S, K) int64: the size of tree from which on the true token at each depth is in it.

    A tree of n nodes accepts the draft token at depth d+1 where entry d is at most n. A token that
    no tree has gets NEVER. So sizes beyond the last path's are allowed: their trees are the last one.

    >>> entries(torch.tensor([[0, 1], [1, 0]]), [(0,), (0, 1)]).clamp_max(9).tolist()
    [[2, 3], [9, 9]]
    """
    size = {path: number for number, path in enumerate(order, 2)}
    table = [[size.get(tuple(row[: depth + 1]), NEVER) for depth in range(len(row))] for row in ranks.tolist()]
    return torch.tensor(table, dtype=torch.long).reshape(ranks.shape)


def simulate(texts: Sequence[Tensor], num_nodes: int) -> tuple[float, float]:
    """Tokens per step of decoding recorded answers with the tree of ``num_nodes`` nodes, and one standard error.

    This is what greedy decoding does: a step accepts the draft tokens that agree with the text, and the next step
    begins behind the token after them. Averages over all positions differ: steps end where a draft token is rejected.

    Args:
        texts: for each answer of m tokens the :func:`entries` at its tokens (m, K), of the draft tokens after each.
        num_nodes: of the tree.

    Returns:
        The ratio of all tokens to all steps, and its standard error, texts taken as independent.
    """
    pairs = []  # tokens and steps
    for text in texts:
        kept = (text <= num_nodes).sum(1).tolist()
        place, count = 0, 0
        while place < len(kept) - 1:
            place += 1 + kept[place]
            count += 1
        if count:
            pairs.append((len(kept) - 1, count))
    return ratio_with_error(pairs)


def ratio_with_error(shares: Sequence[Share], others: Sequence[Share] | None = None) -> tuple[float, float]:
    """The ratio Σa / Σb of pairs (a, b), and its standard error. With ``others``, that ratio over theirs.

    The standard error is the jackknife's: prompts are taken as independent, and each is left out once.

    Args:
        shares: a pair for each prompt. A ratio whose divisors sum to 0 counts as 1.
        others: pairs (c, d) for the same prompts; then the result is (Σa / Σb) / (Σc / Σd).

    >>> ratio_with_error([(10, 5), (30, 10)])[0]
    2.6666666666666665
    >>> ratio_with_error([(10, 5), (30, 10)], [(10, 10), (30, 20)])[0]
    2.0
    """
    ratios = _ratios_with_one_left_out(shares)
    if others is not None:
        ratios = ratios / _ratios_with_one_left_out(others)
    whole, without = ratios[-1], ratios[:-1]
    count = len(without)
    squares = ((without - without.mean()) ** 2).sum() if count else 0.0
    return float(whole), float(np.sqrt(squares * (count - 1) / count)) if count else 0.0


def _ratios_with_one_left_out(shares: Sequence[Share]) -> np.ndarray:
    """(n + 1,): the ratio without the first pair, without the second …, and last the ratio of all."""
    above, below = np.array(shares, dtype=np.float64).reshape(-1, 2).T
    above, below = (np.append(part.sum() - part, part.sum()) for part in (above, below))
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)
