"""Candidate draft tokens: the best ones of each row become its tree. Knows nothing of heads.

B rows, M candidates, N nodes of the tree; node 0 is the root.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.cpu.native_growth import best_tree
from draftheads.speculation.draft import Draft


@dataclass(frozen=True)
class Candidates:
    """Draft tokens of all depths in one list, the root first, parents before children."""

    token_ids: Tensor  # (B, M)
    parents: Tensor  # (B, M): indices in this list
    path_log_probs: Tensor  # (B, M): of the whole path


def best_nodes(candidates: Candidates, priority: Tensor, count: int, max_depth: int) -> tuple[Draft, Tensor]:
    """The tree of the ``count`` candidates of highest priority, and their indices (B, N).

    Of equals the first in the list is better, so a parent comes before its child if no child has a higher priority.
    The first n nodes are the tree of n nodes.

    Args:
        candidates: of all rows.
        priority: (B, M), never higher than the parent's.
        count: N.
        max_depth: of any candidate.
    """
    max_depth = min(max_depth, count - 1)
    order, parents, depths, ancestors = best_tree(priority, candidates.parents, count) or _best_tree(
        priority, candidates.parents, count, max_depth
    )
    draft = Draft(
        token_ids=candidates.token_ids.gather(1, order),
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        max_depth=max_depth,
        path_log_probs=candidates.path_log_probs.gather(1, order),
    )
    return draft, order


def _best_tree(priority: Tensor, parents: Tensor, count: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`draftheads.cpu.native_growth.best_tree`."""
    order = priority.sort(dim=1, descending=True, stable=True).indices
    numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, numbers)
    order = order[:, :count]
    parents = place.gather(1, parents.gather(1, order))  # (B, N)
    ancestors = ancestors_of(parents, max_depth)
    return order, parents, ancestors.sum(2) - 1, ancestors


def ancestors_of(parents: Tensor, max_depth: int) -> Tensor:
    """(B, N, N) bool: [n, m] says that m lies on the path from the root to n, n included. The root is its own parent.

    >>> ancestors_of(torch.tensor([[0, 0, 1]]), 2).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    """
    itself = torch.eye(parents.shape[1], device=parents.device)
    reached = itself + itself[parents]  # in one step up or none; each squaring doubles the steps
    for _ in range(max(0, max_depth - 1).bit_length()):
        reached = (reached @ reached).clamp_max_(1.0)
    return reached > 0
