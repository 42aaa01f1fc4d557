"""Every row loss against a slow twin written from the definition, in value and gradient, in named regimes.

Tolerance: both sides compute in fp64, so 1e-9 is a million roundings.
"""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from draftheads.settings import LossKind
from draftheads.train.losses import Labels, objective, two_part
from slow_losses import slow_loss

V = 7
REGIMES = {
    "an untrained head": (0.1, 3.0),
    "a sharp head and a flat target": (8.0, 0.1),
    "a flat head and a sharp target": (0.1, 8.0),
    "both sharp": (8.0, 8.0),
    "hopeless": (40.0, 40.0),  # hardly any overlap
}


def world(regime: str, *, rows: int = 6) -> tuple[Tensor, Labels]:
    """Logits and labels in fp64; every other text token is unknown."""
    generator = torch.Generator().manual_seed(5)
    sharpness, target_sharpness = REGIMES[regime]
    logits = sharpness * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    probs = (target_sharpness * torch.randn(rows, V, generator=generator, dtype=torch.float64)).softmax(-1)
    text_ids = torch.randint(V, (rows,), generator=generator)
    return logits, Labels(probs, text_ids, torch.arange(rows) % 2 == 0)


def parts(labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
    assert labels.probs is not None
    assert labels.token_ids is not None
    assert labels.known is not None
    return labels.probs, labels.token_ids, labels.known


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", get_args(LossKind))
def test_a_row_loss_equals_its_slow_twin(kind: LossKind, regime: str) -> None:
    logits, labels = world(regime)
    kept = logits.clone()
    losses, gradients = objective(kind).loss(logits, labels)
    assert torch.equal(logits, kept), "what it is given is not its own to change"
    probs, text_ids, known = parts(labels)
    logits.requires_grad_()
    rows = zip(logits.log_softmax(-1), probs, text_ids, known, strict=True)
    slow = torch.stack([slow_loss(kind, p, q, int(y), known=bool(k)) for p, q, y, k in rows])
    torch.testing.assert_close(losses, slow.detach(), rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(slow.sum(), logits)[0]
    torch.testing.assert_close(gradients, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("kind", "bits"), [("kl", 0.0), ("tv", 0.0), ("nla", 0.0), ("lk", 0.0), ("teacher", 1.75)])
def test_a_perfect_head_has_no_gradient_and_no_loss_but_the_entropy_of_its_teacher(kind: LossKind, bits: float) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    losses, gradients = objective(kind).loss(probs.log(), Labels(probs))
    assert losses.item() == pytest.approx(bits * math.log(2), abs=1e-6)
    assert gradients.abs().max() < 1e-6


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_huge_logits_are_finite(kind: LossKind) -> None:
    labels = Labels(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([1]), torch.tensor([True]))
    losses, gradients = objective(kind).loss(torch.tensor([[1e4, -1e4, 0.0]]), labels)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradients).all()
    expected = {"hard": 2e4, "teacher": 2e4, "kl": 2e4, "tv": 1.0, "lk": 2e4, "amphista": 4e4, "dspark": 2e3 + 1.8}
    if kind in expected:
        assert losses.item() == pytest.approx(expected[kind])


def test_the_parts_of_amphistas_loss_have_weights() -> None:
    logits, labels = world("both sharp")
    (soft, soft_slopes), (hard, hard_slopes) = (objective(kind).loss(logits, labels) for kind in ("teacher", "hard"))
    known = parts(labels)[2].double()
    losses, gradients = objective("amphista", alignment_weight=0.5, lm_weight=3.0).loss(logits, labels)
    torch.testing.assert_close(losses, 0.5 * soft + 3.0 * known * hard)
    torch.testing.assert_close(gradients, 0.5 * soft_slopes + 3.0 * known[:, None] * hard_slopes)
    torch.testing.assert_close(two_part(logits, labels, lm_weight=0.0)[0], soft)


def test_the_lk_loss_goes_from_divergence_to_acceptance() -> None:
    logits, labels = world("an untrained head")
    kl, tv = (objective(kind).loss(logits, labels)[0] for kind in ("kl", "tv"))
    torch.testing.assert_close(objective("lk", lk_eta=0.0).loss(logits, labels)[0], kl)
    torch.testing.assert_close(objective("lk", lk_eta=1e6).loss(logits, labels)[0], tv)


def test_labels_of_some_rows() -> None:
    _, labels = world("both sharp")
    some = labels.rows(torch.tensor([4, 1]))
    for field, whole in zip(parts(some), parts(labels), strict=True):
        assert torch.equal(field, whole[[4, 1]])
    assert Labels(parts(labels)[0]).rows(torch.tensor([0])).token_ids is None


def test_only_the_hard_loss_needs_no_teacher() -> None:
    assert [kind for kind in get_args(LossKind) if not objective(kind).reads_teacher] == ["hard"]
