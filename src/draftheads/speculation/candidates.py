"""Candidate draft tokens of all depths, and which of them are selected: for children, and for the tree of a row.

Knows nothing of heads. B rows, M candidates, N nodes of the tree; node 0 is the root.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftheads.cpu.drafts import best_tree
from draftheads.speculation.draft import Draft
from draftheads.speculation.shapes import BestFirst


@dataclass(frozen=True)
class Candidates:
    """Draft tokens of all depths in one list, the root first, parents before children."""

    token_ids: Tensor  # (B, M)
    parents: Tensor  # (B, M): indices in this list
    path_log_probs: Tensor  # (B, M): of the whole path

    @cached_property
    def depths(self) -> Tensor:
        """(B, M): 0 of the root. For rules: the host waits for the deepest."""
        at = torch.arange(self.parents.shape[1], device=self.parents.device).expand_as(self.token_ids)
        depths = torch.zeros_like(at)
        while (below := at > 0).any():
            depths += below
            at = self.parents.expand_as(at).gather(1, at)
        return depths


GrowthRule = Callable[[Candidates, BestFirst], Tensor | None]


def _likely(candidates: Candidates, shape: BestFirst) -> Tensor | None:
    """Those whose path has at least the probability ``threshold``."""
    return None if shape.threshold == 0.0 else candidates.path_log_probs.exp() >= shape.threshold


# Which candidates a growing tree may have, (B, M) bool; None: all. What is below another one is left out, too. A row's
# tree has more nodes where another row's needs them: the most probable of the others. Used only on a CPU: elsewhere the
# host would wait for the number of nodes.
GROWTH_RULES: list[GrowthRule] = [_likely]


def selected(candidates: Candidates, shape: BestFirst, max_depth: int) -> tuple[Draft, Tensor]:
    """The most probable candidates as trees, and their indices (B, N).

    Of equals the first in the list is taken, so a parent comes before its child if no child is more probable. The first
    n nodes are the tree of n nodes.

    Args:
        candidates: of all rows.
        shape: of the trees. They have fewer nodes where a rule allows fewer in all rows.
        max_depth: of any candidate.
    """
    count, priority = min(shape.num_nodes, candidates.token_ids.shape[1]), candidates.path_log_probs
    if (allowed := _allowed(candidates, shape, max_depth)) is not None:
        count = min(count, int(allowed.sum(1).max()))
        ranks = priority.argsort(dim=1, descending=True, stable=True).argsort(1)
        priority = -(ranks + ranks.shape[1] * ~allowed).float()  # the same order, those that are left out last
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


def _allowed(candidates: Candidates, shape: BestFirst, max_depth: int) -> Tensor | None:
    """What all rules allow, (B, M) bool; None: all."""
    if candidates.token_ids.device.type != "cpu":
        return None
    found = [each for rule in GROWTH_RULES if (each := rule(candidates, shape)) is not None]
    if not found:
        return None
    allowed = torch.stack(found).all(0)
    allowed[:, 0] = True
    for _ in range(max_depth):
        allowed = allowed & allowed.gather(1, candidates.parents)
    return allowed


def with_children(
    path_log_probs: Tensor, first: int, beam: int, limit: tuple[int, float] | None
) -> tuple[Tensor, Tensor]:
    """The candidates of the last depth that get children: log-probabilities and places in that depth, (B, W) each.

    A child is never likelier than its parent. So it can be among the N likeliest candidates only if its parent is
    likelier than the last of the N likeliest so far.

    Args:
        path_log_probs: (B, M) of all candidates so far.
        first: of the last depth.
        beam: the most nodes that get children.
        limit: N, and the least total probability of these nodes over all rows, below which there are none. None: all
            of the beam get children, whether the tree can hold these or not.
    """
    last = path_log_probs[:, first:]
    count = last.shape[1]
    if limit is None and beam >= count:
        return last, torch.arange(count, device=last.device).expand_as(last)
    score, place = last.topk(min(beam, count), dim=1)
    if limit is None:
        return score, place
    num_nodes, least = limit
    useful = torch.ones_like(score, dtype=torch.bool)
    if path_log_probs.shape[1] >= num_nodes:
        useful = score > path_log_probs.topk(num_nodes, dim=1).values[:, -1:]
    is_enough = float(score.exp().mul(useful).sum()) >= least
    count = int(useful.sum(1).max()) if is_enough else 0
    return score[:, :count], place[:, :count]


def _best_tree(priority: Tensor, above: Tensor, count: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`draftheads.cpu.drafts.best_tree`."""
    order = priority.sort(dim=1, descending=True, stable=True).indices
    numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, numbers)
    order = order[:, :count]
    parents = place.gather(1, above.gather(1, order))  # (B, N)
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


def merged(draft: Draft, copies: Candidates, shape: BestFirst) -> Draft:
    """The best nodes, root included, of a draft and of a tree of copied tokens with the same root.

    A copied token that the draft has at the same place is that node, with the higher of both probabilities; the others
    are new nodes. Nodes are sorted by the probability of their path, so the first n nodes are the tree of n nodes.

    Args:
        draft: (B, N) with ``path_log_probs`` that do not rise along a path, without nodes that fill up rows.
        copies: (B, 1 + M) the root and the copied tokens. Siblings have different tokens. Log-probabilities are below
            0 and do not rise along a path; minus infinity where there is no copy.
        shape: of the result.
    """
    assert draft.path_log_probs is not None, "merging compares probabilities"
    old, number = draft.num_nodes, copies.token_ids.shape[1] - 1
    same = _same_paths(draft, copies)
    chances = copies.path_log_probs[:, None].masked_fill(~same, -torch.inf).amax(2)
    known = same.any(1)  # (B, 1 + M) whether the draft has that node, the root included
    new = torch.arange(old - 1, old + number, device=known.device)
    place = torch.where(known, same.int().argmax(1), new)  # of each copied token in the list of all candidates
    above = place.gather(1, copies.parents.expand_as(place))

    def behind(values: Tensor, others: Tensor) -> Tensor:
        return torch.cat([values.expand_as(draft.token_ids), others.expand_as(place)[:, 1:]], 1)

    candidates = Candidates(
        token_ids=behind(draft.token_ids, copies.token_ids),
        parents=behind(draft.parents, above),
        path_log_probs=behind(
            torch.maximum(draft.path_log_probs, chances), copies.path_log_probs.masked_fill(known, -torch.inf)
        ),
    )
    tree, order = selected(candidates, shape, max(draft.max_depth, number))
    tree = replace(tree, copied=order >= old)
    return tree if tree.num_nodes <= old else tree.filled_up(candidates.path_log_probs.gather(1, order).isneginf())


def _same_paths(draft: Draft, copies: Candidates) -> Tensor:
    """(B, N, 1 + M) bool: whether a node of the draft and one of the copies have the same tokens from the root on."""
    equal = draft.token_ids[:, :, None] == copies.token_ids[:, None]
    equal[:, 0], equal[:, :, 0] = False, False
    above = draft.parents.expand_as(draft.token_ids)[:, :, None].expand_as(equal)
    other_above = copies.parents.expand_as(copies.token_ids)[:, None].expand_as(equal)
    roots = torch.zeros_like(equal)
    roots[:, 0, 0] = True
    same = roots
    for _ in range(draft.max_depth):
        same = roots | (equal & same.gather(1, above).gather(2, other_above))
    return same
