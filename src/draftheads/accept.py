"""Acceptance: which path of a checked tree is kept, and what comes after it. Tensors in, a Verdict out.

* exact — the token at every node is chosen just as plain decoding would choose it (argmax, or a draw from the processed
  distribution), and the walk goes on into the child that equals it. Greedy rows give plain's text and sampled rows the
  target's distribution. For drafts fixed by their context no other lossless rule keeps more, since the probability
  of keeping a node cannot exceed the target's own probability of its path.
* typical — keeps draft tokens that are likely enough, p(x) > min(ε, δ·exp(−H(p))) (Medusa section 3.3.1).
  It does **not** keep the distribution. The longest path wins, among equals the likelier.

B rows, N nodes, V vocabulary, P = depth of the tree + 1.
"""

import torch
from torch import Tensor

from draftheads.draft import Draft, Verdict
from draftheads.sampling import RowSettings, choose, penalised, probabilities


def accept(draft: Draft, logits: Tensor, rows: RowSettings, uniforms: Tensor, seen: Tensor | None = None) -> Verdict:
    """The verdict on every row.

    Args:
        draft: the tree that was checked; its nodes must be fixed by the context (``sampled`` is False).
        logits: (B, N, V) the target's logits at each node.
        rows: settings of the B rows.
        uniforms: (B, P) float64 in [0, 1): for each place after the root, that place's random number.
        seen: (B, V) bool, tokens of the text including the root; needed when a row has a repetition penalty.
    """
    assert not draft.sampled, "sampled drafts need a rejection rule"
    exact = _walk(draft, logits, rows, uniforms, seen)
    if not rows.any_typical:
        return exact
    typical = _longest_typical(draft, logits, rows, uniforms, seen)
    chosen = rows.typical
    return Verdict(
        torch.where(chosen[:, None], typical.path, exact.path),
        torch.where(chosen, typical.num_accepted, exact.num_accepted),
        torch.where(chosen, typical.next_ids, exact.next_ids),
    )


def _walk(draft: Draft, logits: Tensor, rows: RowSettings, uniforms: Tensor, seen: Tensor | None) -> Verdict:
    """Choose at the node, step into the child that was chosen, until there is none."""
    batch = torch.arange(len(logits), device=logits.device)
    node = torch.zeros_like(batch)
    going = torch.ones_like(batch, dtype=torch.bool)
    num_accepted = torch.ones_like(batch)
    path = node[:, None].repeat(1, draft.max_depth + 1)
    next_ids = node
    below_root = draft.depths > 0
    for depth in range(draft.max_depth + 1):
        chosen = choose(logits[batch, node], rows, seen, uniforms[:, depth])
        next_ids = torch.where(going, chosen, next_ids)
        child = (draft.parents == node[:, None]) & (draft.token_ids == chosen[:, None]) & below_root  # (B, N)
        going = going & child.any(1)
        if depth == draft.max_depth or (going.device.type == "cpu" and not going.any()):
            break
        node = torch.where(going, child.int().argmax(1), node)
        path[:, depth + 1] = node
        num_accepted = num_accepted + going
        if seen is not None:
            seen = seen.clone()
            seen[batch, chosen] |= going
    return Verdict(path, num_accepted, next_ids)


def _longest_typical(draft: Draft, logits: Tensor, rows: RowSettings, uniforms: Tensor, seen: Tensor | None) -> Verdict:
    """Judge every node by its parent's distribution, then keep the deepest node whose whole path passed."""
    batch = torch.arange(len(logits), device=logits.device)
    parents = draft.parents.expand_as(draft.token_ids)
    ancestors = draft.ancestors.expand(len(logits), -1, -1)
    seen_nodes = None if seen is None else _seen_at_nodes(draft, ancestors, seen)
    probs = probabilities(penalised(logits, rows, seen_nodes), rows)  # (B, N, V)
    entropy = torch.special.entr(probs).sum(-1)  # (B, N)
    threshold = torch.minimum(rows.epsilon[:, None], rows.delta[:, None] * (-entropy).exp())
    likelihood = probs[batch[:, None], parents, draft.token_ids]  # (B, N)
    is_typical = likelihood > threshold.gather(1, parents)
    is_typical[:, 0] = True  # the root is decided
    kept = (is_typical[:, None] | ~ancestors).all(-1)
    log_path = (likelihood.log().masked_fill(draft.depths == 0, 0.0)[:, None] * ancestors).nan_to_num(0.0).sum(-1)
    depths = draft.depths.expand_as(kept).masked_fill(~kept, -1)
    deepest = depths.amax(1, keepdim=True)
    node = log_path.masked_fill(depths < deepest, -torch.inf).argmax(1)
    num_accepted = deepest[:, 0] + 1
    steps = torch.arange(draft.max_depth + 1, device=logits.device)
    # the path's nodes by depth: node indices grow along a path, so sorting its ancestors lists them
    on_path = ancestors[batch, node].int() * torch.arange(draft.num_nodes, 0, -1, device=logits.device)
    path = draft.num_nodes - on_path.topk(min(draft.max_depth + 1, draft.num_nodes), dim=1).values
    path = torch.where(steps < num_accepted[:, None], path, 0)
    next_ids = choose(logits[batch, node], rows, _row(seen_nodes, batch, node), uniforms[batch, num_accepted - 1])
    return Verdict(path, num_accepted, next_ids)


def _seen_at_nodes(draft: Draft, ancestors: Tensor, seen: Tensor) -> Tensor:
    """(B, N, V) bool: the text and the tokens on each node's own path."""
    nodes = draft.num_nodes
    tokens = draft.token_ids[:, None].expand(-1, nodes, nodes)
    on_path = torch.zeros(*ancestors.shape[:2], seen.shape[-1], dtype=torch.int32, device=seen.device)
    return seen[:, None] | (on_path.scatter_add_(2, tokens, ancestors.int()) > 0)


def _row(seen_nodes: Tensor | None, batch: Tensor, node: Tensor) -> Tensor | None:
    return None if seen_nodes is None else seen_nodes[batch, node]
