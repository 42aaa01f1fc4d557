"""Losses of predictions: a loss and its gradient for each row of logits, in closed form.

Pure functions of tensors. Letters: n predictions, V' draft vocabulary, z logits of a head, p = softmax(z), q the
target's distribution over V', y the token of the text. Each loss takes logits (n, V') and its labels, q (n, V') with
rows that sum to 1 or y (n,) int64 in 0 … V'-1, and returns losses (n,) and gradients for the logits (n, V').
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from draftheads.settings import LK_ETA, LossKind


@dataclass(frozen=True)
class Labels:
    """The labels of n predictions; None where the objective does not use them."""

    probs: Tensor | None = None  # (n, V') q
    token_ids: Tensor | None = None  # (n,) y; meaningless where not known
    known: Tensor | None = None  # (n,) bool: the text's token is in the draft vocabulary

    def rows(self, index: Tensor) -> Self:
        return type(self)(*(None if field is None else field[index] for field in vars(self).values()))


RowLoss = Callable[[Tensor, Labels], tuple[Tensor, Tensor]]  # logits (n, V') -> losses (n,), gradients (n, V')


@dataclass(frozen=True)
class Objective:
    """A row loss, and whether it works without the text's tokens."""

    loss: RowLoss
    reads_teacher: bool


def objective(
    kind: LossKind, *, alignment_weight: float = 1.0, lm_weight: float = 1.0, lk_eta: float = LK_ETA
) -> Objective:
    """The objective of that name.

    Args:
        kind: ``teacher`` (soft cross-entropy, Hydra appendix A), ``hard`` (cross-entropy with the text, Medusa equation
            1), ``kl``, ``tv`` (total variation), ``nla`` (negative log-acceptance), ``lk`` (hybrid LK), ``amphista``,
            ``dspark``.
        alignment_weight: λ1 of ``amphista``, for the teacher's part.
        lm_weight: λ2 of ``amphista``, for the text's part.
        lk_eta: η of ``lk``.
    """
    if kind == "hard":
        return Objective(
            lambda logits, labels: hard_cross_entropy(logits, _given(labels.token_ids)), reads_teacher=False
        )
    if kind == "amphista":
        both = partial(two_part, alignment_weight=alignment_weight, lm_weight=lm_weight)
        return Objective(both, reads_teacher=True)
    if kind == "dspark":
        return Objective(text_and_distance, reads_teacher=True)
    row_losses: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "teacher": soft_cross_entropy,
        "kl": kl_divergence,
        "tv": total_variation,
        "nla": negative_log_acceptance,
        "lk": partial(lk_hybrid, eta=lk_eta),
    }
    from_teacher = row_losses[kind]
    return Objective(lambda logits, labels: from_teacher(logits, _given(labels.probs)), reads_teacher=True)


def hard_cross_entropy(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """-log p_y, and its gradient p - 1_y."""
    log_probs = logits.log_softmax(-1)
    losses = -log_probs.gather(1, token_ids[:, None])[:, 0]
    gradients = log_probs.exp_()
    gradients[torch.arange(len(token_ids), device=token_ids.device), token_ids] -= 1
    return losses, gradients


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """-Σ_v q_v log p_v, and its gradient p - q."""
    log_probs = logits.log_softmax(-1)
    losses = -_row_dot(probs, log_probs)
    return losses, log_probs.exp_().sub_(probs)


def kl_divergence(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p), the soft cross-entropy less q's entropy: the same gradient, and 0 where the head is perfect."""
    losses, gradients = soft_cross_entropy(logits, probs)
    return losses + torch.special.xlogy(probs, probs).sum(-1), gradients


def total_variation(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """½ Σ_v |p_v - q_v| = 1 - α, the probability that sampling rejects the draft token; α = Σ_v min(p_v, q_v).

    With m = [p < q], its gradient is p (Σ_v p_v m_v - m).
    """
    drafted = logits.softmax(-1)
    losses = 0.5 * (drafted - probs).abs().sum(-1)
    return losses, _rejection_gradient(drafted, probs)


def negative_log_acceptance(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """-log α: the optimum of total variation, with gradients that do not vanish at low acceptance (LK losses, 2026)."""
    drafted = logits.softmax(-1)
    accepted = torch.minimum(drafted, probs).sum(-1).clamp_min(torch.finfo(logits.dtype).tiny)  # (n,) α
    return -accepted.log(), _rejection_gradient(drafted, probs) / accepted[:, None]


def lk_hybrid(logits: Tensor, probs: Tensor, *, eta: float = LK_ETA) -> tuple[Tensor, Tensor]:
    """λ·KL + (1-λ)·TV with λ = exp(-η α), itself not differentiated: KL first, acceptance later (LK losses, 2026)."""
    divergence, from_divergence = kl_divergence(logits, probs)
    rejected, from_rejection = total_variation(logits, probs)
    share = torch.exp(-eta * (1.0 - rejected))  # (n,) λ
    losses = share * divergence + (1 - share) * rejected
    return losses, share[:, None] * from_divergence + (1 - share)[:, None] * from_rejection


def two_part(
    logits: Tensor, labels: Labels, *, alignment_weight: float = 1.0, lm_weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """λ1 · CE(q, p) + λ2 · CE(y, p), Amphista equations 7 to 9; the second part only where the head knows the token."""
    aligned, from_teacher = soft_cross_entropy(logits, _given(labels.probs))
    text_loss, from_text = hard_cross_entropy(logits, _given(labels.token_ids))
    weight = lm_weight * _given(labels.known).to(text_loss.dtype)  # (n,)
    losses = alignment_weight * aligned + weight * text_loss
    return losses, alignment_weight * from_teacher + weight[:, None] * from_text


def text_and_distance(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """0.1 · CE(y, p) + 0.9 · ‖p - q‖₁ (DSpark); the first part only where the head knows the token."""
    text_loss, from_text = hard_cross_entropy(logits, _given(labels.token_ids))
    rejected, from_rejection = total_variation(logits, _given(labels.probs))
    weight = 0.1 * _given(labels.known).to(text_loss.dtype)  # (n,)
    return weight * text_loss + 1.8 * rejected, weight[:, None] * from_text + 1.8 * from_rejection


def _rejection_gradient(drafted: Tensor, probs: Tensor) -> Tensor:
    """Of 1 - Σ_v min(p_v, q_v) for the logits of p: (n, V'), (n, V') -> (n, V')."""
    short = (drafted < probs).to(drafted.dtype)  # m: where the head has less probability than the target
    return drafted * (_row_dot(drafted, short)[:, None] - short)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """(n, V'), (n, V') -> (n,), in one pass."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def _given(field: Tensor | None) -> Tensor:
    assert field is not None, "an objective reads labels that were not made"
    return field
