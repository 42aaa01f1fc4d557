"""Copied tokens merged into a drafted tree. B rows, N nodes of the draft, M copied tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from draftheads.speculation.candidates import Candidates, best_nodes
from draftheads.speculation.draft import Draft


def merged(draft: Draft, copies: Candidates, num_nodes: int) -> Draft:
    """The best ``num_nodes`` nodes, root included, of a draft and of a tree of copied tokens with the same root.

    A copied token that the draft has at the same place is that node, with the higher of both probabilities; the others
    are new nodes. Nodes are sorted by the probability of their path, so the first n nodes are the tree of n nodes.

    Args:
        draft: with ``path_log_probs`` that do not rise along a path, without nodes that fill up rows.
        copies: (B, 1 + M) the root and the copied tokens. Siblings have different tokens. Log-probabilities are below
            0 and do not rise along a path; minus infinity where there is no copy.
        num_nodes: of the result at most; less where draft and copies have fewer.
    """
    assert draft.path_log_probs is not None, "merging compares probabilities"
    old, number = draft.num_nodes, copies.token_ids.shape[1] - 1
    same = _same_paths(draft, copies)
    chances = copies.path_log_probs[:, None].masked_fill(~same, -torch.inf).amax(2)
    known = same.any(1)  # (B, 1 + M) whether the draft has that node, the root included
    new = torch.arange(old - 1, old + number, device=known.device)
    place = torch.where(known, same.int().argmax(1), new)  # of each copied token in the list of all candidates
    candidates = Candidates(
        token_ids=torch.cat([draft.token_ids, copies.token_ids[:, 1:]], 1),
        parents=torch.cat(
            [draft.parents.expand_as(draft.token_ids), place.gather(1, copies.parents.expand_as(place))[:, 1:]], 1
        ),
        path_log_probs=torch.cat(
            [
                torch.maximum(draft.path_log_probs, chances),
                copies.path_log_probs.masked_fill(known, -torch.inf)[:, 1:],
            ],
            1,
        ),
    )
    count = min(num_nodes, old + number)
    tree, order = best_nodes(candidates, candidates.path_log_probs, count, max(draft.max_depth, number))
    tree = replace(tree, copied=order >= old)
    return tree if count <= old else tree.filled_up(candidates.path_log_probs.gather(1, order).isneginf())


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
