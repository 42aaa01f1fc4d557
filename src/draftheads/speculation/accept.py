"""Acceptance: which path of a verified tree is accepted, and the next token. Tensors in, an AcceptResult out.

* exact — the token at every node is chosen as plain decoding would choose it (argmax, or a draw from the processed
  distribution), and the walk continues at the child that equals it. Greedy rows have the text of plain decoding, and
  sampled rows the target's distribution. If the context determines the draft, no other lossless rule accepts more: a
  node cannot be accepted with a higher probability than the target gives its path.
* rejection, block — for draft tokens that were drawn (``Sampled`` shapes). They keep the target's
  distribution and accept more. On other drafts, and for greedy rows, they are exact.
* typical — keeps draft tokens that are likely enough, p(x) > min(ε, δ·exp(−H(p))) (Medusa section 3.3.1).
  It does **not** keep the distribution. The longest path wins, among equals the likelier. As in the paper, the token
  after it is the most likely one, so no random number is used.

B rows, N nodes, V vocabulary, P = depth of the tree + 1. Of drawn tokens: k siblings, L draft tokens of a chain; p the
target's distribution, q the drafter's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.sampling import (
    RowSettings,
    SeenTokens,
    choose,
    draw,
    most_likely,
    penalised,
    per_row,
    probabilities,
)

# logits (B, V) at nodes (B,) -> scores (B, V), which may depend on the text up to there
Processed = Callable[[Tensor, Tensor], Tensor]


def accept(
    draft: Draft,
    logits: Tensor,
    rows: RowSettings,
    uniforms: Tensor,
    seen: SeenTokens | None = None,
    *,
    rejection_uniforms: Tensor | None = None,
    processed: Processed | None = None,
) -> AcceptResult:
    """The verdict on every row.

    Args:
        draft: the tree that was verified. Its nodes are determined by the context, or drawn with other random numbers
            than those given here.
        logits: (B, N, V) the target's logits at each node.
        rows: settings of the B rows.
        uniforms: (B, P) float64 in [0, 1): for each place after the root, that place's random number.
        seen: (B, V), tokens of the text including the root; needed when a row has a penalty.
        rejection_uniforms: (B, :func:`num_rejection_uniforms`) float64 in [0, 1), for drafts that were drawn, where
            a row asks for rejection.
        processed: changes logits before penalties; called for few nodes, unless a row accepts otherwise than exactly.
    """
    verdict = None if rows.all_typical else _exact(draft, logits, rows, uniforms, seen, processed=processed)
    if processed is not None and (rows.any_typical or rows.any_rejection):
        nodes = torch.zeros_like(draft.token_ids[:, 0])
        logits = torch.stack([processed(logits[:, n], nodes + n) for n in range(draft.num_nodes)], 1)
    if verdict is None:
        return _longest_typical(draft, logits, rows, seen)
    if rows.any_typical:
        verdict = _where(rows.typical, _longest_typical(draft, logits, rows, seen), verdict)
    if rows.any_rejection and draft.sampled:
        assert rejection_uniforms is not None, "rejection needs uniform numbers"
        rejection = _by_sibling(draft, logits, rows, rejection_uniforms, seen)
        is_chain = draft.max_siblings <= 1
        by_sibling = rows.rejection if is_chain else rows.rejection | rows.block
        verdict = _where(by_sibling, rejection, verdict)
        if is_chain:
            verdict = _where(rows.block, _longest_block(draft, logits, rows, rejection_uniforms, seen), verdict)
    return verdict


def num_rejection_uniforms(draft: Draft) -> int:
    """How many random numbers rejection needs for each row: at each depth one for each sibling and one more."""
    return (draft.max_depth + 1) * (draft.max_siblings + 1)


def _where(chosen: Tensor, first: AcceptResult, second: AcceptResult) -> AcceptResult:
    """The first verdict for the rows that are chosen, the second for the others."""
    return AcceptResult(
        torch.where(chosen[:, None], first.path, second.path),
        torch.where(chosen, first.num_accepted, second.num_accepted),
        torch.where(chosen, first.next_ids, second.next_ids),
    )


# depth, nodes (B,), tokens (B, V) of the text -> whether a child is accepted, which one, and the next token if none
Decide = Callable[[int, Tensor, SeenTokens | None], tuple[Tensor, Tensor, Tensor]]


def _walk(draft: Draft, seen: SeenTokens | None, decide: Decide) -> AcceptResult:
    """From the root into the child that is accepted, until there is none."""
    batch = torch.arange(len(draft.token_ids), device=draft.token_ids.device)
    node = torch.zeros_like(batch)
    going = torch.ones_like(batch, dtype=torch.bool)
    num_accepted = torch.ones_like(batch)
    path = node[:, None].repeat(1, draft.max_depth + 1)
    next_ids = node
    for depth in range(draft.max_depth + 1):
        is_accepted, child, following = decide(depth, node, seen)
        next_ids = torch.where(going, following, next_ids)
        going = going & is_accepted
        if depth == draft.max_depth or (going.device.type == "cpu" and not going.any()):
            break
        node = torch.where(going, child, node)
        path[:, depth + 1] = node
        num_accepted = num_accepted + going
        if seen is not None:
            seen = seen.and_then(draft.token_ids[batch, node], going)
    return AcceptResult(path, num_accepted, next_ids)


def _exact(
    draft: Draft,
    logits: Tensor,
    rows: RowSettings,
    uniforms: Tensor,
    seen: SeenTokens | None,
    *,
    processed: Processed | None,
) -> AcceptResult:
    """Choose at the node, and step into the child that was chosen."""
    on_host = logits.device.type == "cpu"  # to read them waits for no device
    if on_host and seen is None and not (rows.any_sampled or rows.any_penalty or processed):
        return accept_greedy(draft, most_likely(logits))
    batch = torch.arange(len(logits), device=logits.device)
    below_root = draft.depths > 0

    def decide(depth: int, node: Tensor, seen: SeenTokens | None) -> tuple[Tensor, Tensor, Tensor]:
        at = logits[batch, node] if processed is None else processed(logits[batch, node], node)
        chosen = choose(at, rows, seen, uniforms[:, depth])
        child = (draft.parents == node[:, None]) & (draft.token_ids == chosen[:, None]) & below_root  # (B, N)
        return child.any(1), child.int().argmax(1), chosen

    return _walk(draft, seen, decide)


def accept_greedy(draft: Draft, best: Tensor) -> AcceptResult:
    """The verdict on rows that take the most likely token, which ``best`` (B, N) has for each node; on a CPU."""
    batch = len(best)
    parts = (best, draft.token_ids, draft.parents.expand(batch, -1), draft.depths.expand(batch, -1))
    paths, counts, following = [], [], []
    for chosen, tokens, parents, depths in zip(*(part.tolist() for part in parts), strict=True):
        children = {(parents[n], tokens[n]): n for n in range(len(tokens) - 1, -1, -1) if depths[n]}  # the first counts
        path = [0]
        while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(child)
        counts.append(len(path))
        following.append(chosen[path[-1]])
        paths.append(path + [0] * (draft.max_depth + 1 - len(path)))
    return AcceptResult(torch.tensor(paths), torch.tensor(counts), torch.tensor(following))


def _by_sibling(
    draft: Draft, logits: Tensor, rows: RowSettings, uniforms: Tensor, seen: SeenTokens | None
) -> AcceptResult:
    """Try the children in turn; step into the first that is accepted, or draw from what is left."""
    batch = torch.arange(len(logits), device=logits.device)
    places = torch.arange(draft.num_nodes, 0, -1, device=logits.device)
    uniforms = uniforms.view(len(logits), draft.max_depth + 1, -1)
    width = min(draft.max_siblings, draft.num_nodes)

    def decide(depth: int, node: Tensor, seen: SeenTokens | None) -> tuple[Tensor, Tensor, Tensor]:
        assert draft.probs is not None
        assert draft.log_probs is not None
        p = probabilities(penalised(logits[batch, node], rows, seen), rows)
        is_child = (draft.parents == node[:, None]) & (draft.depths > 0)
        order = (is_child * places).expand(len(logits), -1).topk(width, dim=1)  # the first child first
        children = order.indices  # (B, k)
        present = (order.values > 0) & (draft.log_probs.gather(1, children) > -torch.inf)
        tokens = draft.token_ids.gather(1, children)
        chances, left = sibling_chances(p, draft.probs[batch, node].double(), tokens, present)
        accepted = uniforms[:, depth, :width] < chances
        child = children[batch, accepted.int().argmax(1)] if width else node
        return accepted.any(1), child, draw(left, uniforms[:, depth, -1])

    return _walk(draft, seen, decide)


def _longest_block(
    draft: Draft, logits: Tensor, rows: RowSettings, uniforms: Tensor, seen: SeenTokens | None
) -> AcceptResult:
    """The longest beginning of a chain that is accepted, and a draw from what is left there."""
    assert draft.probs is not None
    assert draft.log_probs is not None
    batch = torch.arange(len(logits), device=logits.device)
    length = draft.num_nodes - 1
    nodes = torch.arange(length + 1, device=logits.device)
    p = probabilities(penalised(logits, rows, _seen_at(draft, seen, batch[:, None], nodes)), rows)  # (B, L + 1, V)
    chances, left = block_chances(p, draft.probs[:, :-1].double(), draft.token_ids[:, 1:])
    present = (draft.log_probs[:, 1:] > -torch.inf).int().cumprod(1).bool()
    uniforms = uniforms.view(len(logits), length + 1, -1)
    kept = (uniforms[:, :length, 0] < chances) & present  # (B, L)
    steps = torch.arange(1, length + 1, device=logits.device)
    count = (kept * steps).amax(1) if length else torch.zeros_like(batch)
    path = torch.where(nodes <= count[:, None], nodes, 0)
    return AcceptResult(path, count + 1, draw(left[batch, count], uniforms[batch, count, -1]))


def _longest_typical(draft: Draft, logits: Tensor, rows: RowSettings, seen: SeenTokens | None) -> AcceptResult:
    """Judge nodes by their parents' distributions, then keep the deepest node whose whole path passed."""
    batch = torch.arange(len(logits), device=logits.device)
    ancestors = draft.ancestors.expand(len(logits), -1, -1)
    likelihood, kept = (_judged_reached if logits.device.type == "cpu" else _judged_all)(draft, logits, rows, seen)
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
    next_ids = most_likely(penalised(logits[batch, node], rows, _seen_at(draft, seen, batch, node)))
    return AcceptResult(path, num_accepted, next_ids)


def _judged_all(draft: Draft, logits: Tensor, rows: RowSettings, seen: SeenTokens | None) -> tuple[Tensor, Tensor]:
    """(B, N): p(x) at each node's parent, and whether the whole path is typical. The host reads nothing."""
    parents = draft.parents.expand_as(draft.token_ids)
    batch, nodes = (torch.arange(count, device=parents.device) for count in parents.shape)
    probs, threshold = _thresholds(penalised(logits, rows, _seen_at(draft, seen, batch[:, None], nodes)), rows)
    likelihood = probs[batch[:, None], parents, draft.token_ids]
    is_typical = (likelihood > threshold.gather(1, parents)) & (draft.depths > 0)
    is_typical[:, 0] = True  # the root is decided
    return likelihood, (is_typical[:, None] | ~draft.ancestors).all(-1)


def _judged_reached(draft: Draft, logits: Tensor, rows: RowSettings, seen: SeenTokens | None) -> tuple[Tensor, Tensor]:
    """The same of nodes below typical ones only, depth by depth; p(x) of the others is 1."""
    parents = draft.parents.expand_as(draft.token_ids)
    likelihood, kept = torch.ones(parents.shape), torch.zeros_like(parents, dtype=torch.bool)
    kept[:, 0] = True
    for depth in range(1, draft.max_depth + 1):
        is_reached = (draft.depths == depth) & kept.gather(1, parents) & rows.typical[:, None]
        row, node = is_reached.nonzero(as_tuple=True)
        if not len(row):
            break
        above, place = (row * draft.num_nodes + parents[row, node]).unique(return_inverse=True)
        of, at = above // draft.num_nodes, above % draft.num_nodes  # (F,) each parent's row and node, once
        own = rows.at(of)
        probs, threshold = _thresholds(penalised(logits[of, at], own, _seen_at(draft, seen, of, at)), own)
        likelihood[row, node] = probs[place, draft.token_ids[row, node]]
        kept[row, node] = likelihood[row, node] > threshold[place]
    return likelihood, kept


def _thresholds(scores: Tensor, rows: RowSettings) -> tuple[Tensor, Tensor]:
    """Of penalised logits (B, …, V): their probabilities, and min(ε, δ·exp(−H)) (B, …)."""
    # not in fp64, which takes longer than a plain step; nothing is drawn from it
    probs = probabilities(scores, rows, dtype=torch.float32)
    terms = probs * probs.clamp_min(1e-30).log()  # three times as fast as torch.special.entr
    # threads share the sum of a row that is alone, which rounds it otherwise: so there are always two
    entropy = -terms.expand(max(2, len(terms)), *terms.shape[1:]).sum(-1)[: len(terms)]
    return probs, torch.minimum(per_row(rows.epsilon, entropy), per_row(rows.delta, entropy) * (-entropy).exp())


def _seen_at(draft: Draft, seen: SeenTokens | None, row: Tensor, node: Tensor) -> SeenTokens | None:
    """(…, V): the text and the tokens on the paths of nodes (…) of rows (…); None without ``seen``."""
    if seen is None:
        return None
    on_path = draft.ancestors.expand(len(draft.token_ids), -1, -1)[row, node][..., 1:].int()
    below = draft.token_ids[row][..., 1:].expand_as(on_path)  # the root is in the text already
    counts = seen.in_answer[row].expand(*on_path.shape[:-1], -1).scatter_add(-1, below, on_path)
    return SeenTokens(seen.in_prompt[row], counts)


def sibling_chances(target: Tensor, drafter: Tensor, token_ids: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Siblings are tried in the order in which they were drawn, each against what the ones before it left.

    Recursive rejection without replacement (RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024): x is accepted with
    chance min(1, p(x) / q(x)); if it is not, p becomes norm(max(p - q, 0)), and q loses x and is normed. One sibling
    alone is speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

    Args:
        target: (B, V) float64 p at the parent.
        drafter: (B, V) float64 q there, that the first sibling was drawn from.
        token_ids: (B, k) int64 the siblings.
        present: (B, k) bool which of them there are; none after one that is not.

    Returns:
        Chances (B, k) that a sibling is accepted if none before it was, and the distribution (B, V) of the next token
        if none is.
    """
    chances = []
    p, q = target, drafter
    for x, there in zip(token_ids.unbind(1), present.unbind(1), strict=True):
        likely, drawn = p.gather(1, x[:, None])[:, 0], q.gather(1, x[:, None])[:, 0]
        chances.append(torch.where(there & (drawn > 0), (likely / drawn).clamp(max=1.0), 0.0))
        p = torch.where(there[:, None], _normed((p - q).clamp_min(0.0), p), p)
        q = torch.where(there[:, None], _normed(q.scatter(1, x[:, None], 0.0), q), q)
    return torch.stack(chances, 1) if chances else target.new_zeros(len(target), 0), p


def block_chances(target: Tensor, drafter: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """A chain is judged as a whole: the longest beginning that its own uniform number accepts is kept.

    Block verification (Sun et al. 2024), which never keeps less than token by token: with w_0 = 1 and
    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), and the mass r_i = Σ_x max(w_i p - q, 0) that is left after token i, the
    first i tokens are accepted with chance h_i = r_i / (r_i + 1 - w_i), all L of them with h_L = w_L.

    Args:
        target: (B, L + 1, V) float64 p at the root and at each draft token.
        drafter: (B, L, V) float64 q at the root and at each draft token but the last.
        token_ids: (B, L) int64 the draft tokens.

    Returns:
        h (B, L), and the distribution (B, L + 1, V) of the next token if 0 … L draft tokens are kept.
    """
    weight = target.new_ones(len(target))
    chances, left = [], []
    for i, x in enumerate(token_ids[..., None].unbind(1)):
        rest = (weight[:, None] * target[:, i] - drafter[:, i]).clamp_min(0.0)  # (B, V)
        mass = rest.sum(1)
        left.append(_normed(rest, target[:, i]))
        chances.append(torch.where(mass > 0, mass / (mass + 1.0 - weight), 0.0))
        likely, drawn = target[:, i].gather(1, x)[:, 0], drafter[:, i].gather(1, x)[:, 0]
        weight = (weight * torch.where(drawn > 0, likely / drawn, 0.0)).clamp(max=1.0)
    return torch.stack([*chances, weight], 1)[:, 1:], torch.stack([*left, target[:, -1]], 1)  # without h_0


def _normed(mass: Tensor, otherwise: Tensor) -> Tensor:
    """(B, V) with rows of sum 1; where there is nothing left, which only rounding can reach, another distribution."""
    total = mass.sum(1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp_min(torch.finfo(mass.dtype).tiny), otherwise)
