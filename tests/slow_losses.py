"""Row losses, written term by term from their definitions."""

import math

import torch
from torch import Tensor

ETA = 3.0


def slow_loss(kind: str, log_probs: Tensor, target: Tensor, said: int, *, known: bool) -> Tensor:
    """One row, term by term; differentiable."""
    probs = log_probs.exp()
    cross = -sum((q * log_p for q, log_p in zip(target, log_probs, strict=True)), start=torch.zeros(()))
    entropy = -sum((q * q.log() for q in target if q > 0), start=torch.zeros(()))
    accepted = sum((torch.minimum(p, q) for p, q in zip(probs, target, strict=True)), start=torch.zeros(()))
    share = math.exp(-ETA * float(accepted.detach()))
    return {
        "hard": lambda: -log_probs[said],
        "teacher": lambda: cross,
        "kl": lambda: cross - entropy,
        "tv": lambda: 1 - accepted,
        "nla": lambda: -accepted.log(),
        "lk": lambda: share * (cross - entropy) + (1 - share) * (1 - accepted),
        "amphista": lambda: cross - (log_probs[said] if known else 0.0),
        "dspark": lambda: 0.9 * (probs - target).abs().sum() - (0.1 * log_probs[said] if known else 0.0),
    }[kind]()
