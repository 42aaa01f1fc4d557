"""A chain of copied tokens merged into a drafted tree. Tensors in, a Draft out.

B rows, N nodes of the draft, L copied tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from draftheads.candidates import Candidates, best_nodes
from draftheads.draft import Draft


def merged(draft: Draft, tokens: Tensor, log_probs: Tensor, num_nodes: int) -> Draft:
    """The best ``num_nodes`` nodes, root included, of a draft and a chain below its root.

    A copied token that the draft has at the same place is that node, with the higher of both probabilities; the others
    are new nodes. Nodes are sorted by the probability of their path, so the first n nodes are the tree of n nodes.

    Args:
        draft: with ``path_log_probs`` that do not rise along a path, without nodes that fill up rows.
        tokens: (B, L) the chain.
        log_probs: (B, L) below 0, of the chain up to each token, falling along it; minus infinity where there is none.
        num_nodes: of the result at most; less where draft and chain have fewer.
    """
    assert draft.path_log_probs is not None, "merging compares probabilities"
    old, length = draft.num_nodes, tokens.shape[1]
    depths = draft.depths.expand_as(draft.token_ids)
    in_chain = depths.clamp_max(length)  # the place of each depth in the chain, the root at 0
    ids = torch.cat([draft.token_ids[:, :1], tokens], 1).gather(1, in_chain)
    chances = torch.cat([torch.zeros_like(log_probs[:, :1]), log_probs], 1).gather(1, in_chain)
    equal = (draft.token_ids == ids) & (depths <= length)
    elsewhere = (draft.ancestors > equal[:, None]).any(2)  # (B, N) whether the path leaves the chain
    shared = torch.maximum(draft.path_log_probs, chances.masked_fill(elsewhere, -torch.inf))
    reached, deepest = depths.masked_fill(elsewhere, -1).max(1, keepdim=True)  # where the two part
    steps = torch.arange(1, length + 1, device=tokens.device)
    found = Candidates(
        token_ids=torch.cat([draft.token_ids, tokens], 1),
        parents=torch.cat(
            [
                draft.parents.expand_as(draft.token_ids),
                torch.where(steps == reached + 1, deepest, steps + (old - 2)),
            ],
            1,
        ),
        path_log_probs=torch.cat([shared, log_probs.masked_fill(steps <= reached, -torch.inf)], 1),
    )
    count = min(num_nodes, old + length)
    tree, order = best_nodes(found, found.path_log_probs, count, max(draft.max_depth, length))
    tree = replace(tree, copied=order >= old)
    return tree if count <= old else tree.filled_up(found.path_log_probs.gather(1, order).isneginf())
