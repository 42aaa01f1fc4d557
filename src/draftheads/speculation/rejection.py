"""Acceptance of tokens that were drawn from the drafter's distribution, such that the target's own is kept.

Pure functions of tensors. B rows, V vocabulary, k siblings, L draft tokens of a chain; p the target's distribution, q
the drafter's.
"""

import torch
from torch import Tensor


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
    if not chances:
        return target.new_zeros(len(target), 0), target
    return torch.stack(chances, 1), p


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
    length = token_ids.shape[1]
    weight = target.new_ones(len(target))
    chances, left = [], []
    for i in range(length + 1):
        if i == length:
            left.append(target[:, i])
            if length:
                chances.append(weight)
            break
        rest = (weight[:, None] * target[:, i] - drafter[:, i]).clamp_min(0.0)  # (B, V)
        mass = rest.sum(1)
        left.append(_normed(rest, target[:, i]))
        if i:
            chances.append(torch.where(mass > 0, mass / (mass + 1.0 - weight), 0.0))
        x = token_ids[:, i, None]
        likely, drawn = target[:, i].gather(1, x)[:, 0], drafter[:, i].gather(1, x)[:, 0]
        weight = (weight * torch.where(drawn > 0, likely / drawn, 0.0)).clamp(max=1.0)
    return torch.stack(chances, 1) if chances else target.new_zeros(len(target), 0), torch.stack(left, 1)


def _normed(mass: Tensor, otherwise: Tensor) -> Tensor:
    """(B, V) with rows of sum 1; where there is nothing left, which only rounding can reach, another distribution."""
    total = mass.sum(1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp_min(torch.finfo(mass.dtype).tiny), otherwise)
