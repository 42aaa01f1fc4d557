"""Every loss against a slow twin written from the definition, in value and gradient: of rows, and of K heads.

Tolerance: both sides compute in another order. In fp64, 1e-9 is a million roundings; in fp32, 1e-5 is some hundred
roundings of numbers around 1.
"""

from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.settings import LossKind
from draftheads.train.losses import ROW_LOSSES, Labels, depth_weights, find_predictions, head_losses
from slow_losses import slow_loss

K, B, T, D, V = 3, 3, 9, 8, 11
MASKS = {
    "one answer a row": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0]],
    "two turns": [[0, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 1, 0]],
    "everything": [[1] * 9] * 3,
    "a row of nothing": [[0] * 9, [1] * 3 + [0] * 6, [0, 0, 0, 0, 0, 0, 0, 0, 1]],  # nor a third prediction
}


class World:
    """Random features, hidden states and tokens; heads with an lm_head each."""

    def __init__(self, mask: str) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.features = self.normal(K, B * T, D).requires_grad_()
        self.hidden = self.normal(B * T, D)
        self.teacher = self.normal(V, D)
        self.token_ids = torch.randint(V, (B * T,), generator=self.generator)
        self.lm_heads = [self.normal(V, D).requires_grad_() for _ in range(K)]
        self.loss_mask = torch.tensor(MASKS[mask]).bool()
        self.asked: list[tuple[int, int]] = []  # for logits: heads and numbers of rows

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def logits(self, features: Tensor, head: int) -> Tensor:
        self.asked.append((head, len(features)))
        return F.linear(features, self.lm_heads[head])

    def labels(self, positions: Tensor) -> Labels:
        """Every third token is not in the draft vocabulary."""
        text_id = self.token_ids[positions + 1]
        return Labels(F.linear(self.hidden[positions], self.teacher).softmax(-1), text_id, text_id % 3 != 0)

    def losses(self, kind: LossKind = "teacher", **changes: Any) -> tuple[Tensor, Tensor]:
        """The fast ones, with weights of 1 and no trained parameters unless given."""
        usual: dict[str, Any] = {"labels": self.labels, "logits": self.logits, "weights": torch.ones(K)}
        predictions = changes.pop("predictions", find_predictions(self.loss_mask, K))
        return head_losses(self.features, predictions, row_loss=ROW_LOSSES[kind], **{**usual, **changes})

    def slow_losses(self, kind: str) -> list[Tensor]:
        """Position by position, straight from the definition."""
        means = []
        for i in range(K):
            losses = []
            for b, t in product(range(B), range(T - 2 - i)):
                if self.loss_mask[b, t + 1] and self.loss_mask[b, t + 2 + i]:
                    log_probs = self.logits(self.features[i, b * T + t], i).log_softmax(-1)
                    text_id = int(self.token_ids[b * T + t + 2 + i])
                    target = F.linear(self.hidden[b * T + t + 1 + i], self.teacher).softmax(-1)
                    losses.append(slow_loss(kind, log_probs, target, text_id, known=text_id % 3 != 0))
            means.append(torch.stack(losses).mean() if losses else torch.zeros(()))
        return means


@pytest.mark.few(40)
@pytest.mark.parametrize(("chunk_size", "multiple"), [(1, 1), (4, 1), (1000, 1), (4, 3), (1000, 64)])
@pytest.mark.parametrize("kind", get_args(LossKind))
@pytest.mark.parametrize("mask", MASKS)
def test_head_losses_equal_their_slow_twin(mask: str, kind: LossKind, chunk_size: int, multiple: int):
    world = World(mask)
    inputs = [world.features, *world.lm_heads]
    sizes = {"chunk_size": chunk_size, "multiple": multiple}
    loss, means = world.losses(kind, weights=depth_weights(K, 0.8), parameters=world.lm_heads, **sizes)
    slow = world.slow_losses(kind)
    slow_total = sum((0.8**i * mean for i, mean in enumerate(slow)), start=torch.zeros(()))
    torch.testing.assert_close(means, torch.stack(slow).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, slow_total, rtol=1e-5, atol=1e-5)
    # times 3: the gradient from above must reach the gradients that were taken at once
    found = torch.autograd.grad(3 * loss, inputs)
    expected = torch.autograd.grad(3 * slow_total, inputs, materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_predictions_are_those_of_the_definition(mask: str):
    loss_mask = torch.tensor(MASKS[mask]).bool()
    predictions = find_predictions(loss_mask, K)
    found = {
        (i, int(predictions.sources(i)[column]), int(predictions.positions[column]) + 1)
        for i, column in predictions.counts.nonzero().tolist()
    }
    assert found == {
        (i, b * T + t, b * T + t + 2 + i)
        for i, b, t in product(range(K), range(B), range(T))
        if t + 2 + i < T and loss_mask[b, t + 1] and loss_mask[b, t + 2 + i]
    }
    assert predictions.counts.any(0).all()


def test_no_more_logits_exist_than_a_chunk_has_positions():
    world = World("everything")
    world.losses(chunk_size=5, multiple=5)[0].backward()
    num_chunks = -(-find_predictions(world.loss_mask, K).positions.numel() // 5)
    assert world.asked == [(head, 5) for _ in range(num_chunks) for head in range(K)]


def test_only_predictions_that_count_train_a_bias():
    world = World("two turns")
    bias = nn.Parameter(torch.zeros(V))
    loss, _ = world.losses("hard", logits=lambda *given: world.logits(*given) + bias, parameters=[bias])
    found = torch.autograd.grad(loss, bias)[0]
    world.logits = lambda features, head: F.linear(features, world.lm_heads[head], bias)  # type: ignore[method-assign]
    slow = torch.stack(world.slow_losses("hard")).sum()
    torch.testing.assert_close(found, torch.autograd.grad(slow, bias)[0], rtol=1e-5, atol=1e-5)


def test_without_gradients_the_losses_are_the_same():
    world = World("two turns")
    with torch.no_grad():
        without = world.losses()
    torch.testing.assert_close(without, tuple(tensor.detach() for tensor in world.losses()))


def test_heads_with_weight_zero_are_not_computed():
    world = World("two turns")
    weights = torch.tensor([0.0, 0.7] + [0.0] * (K - 2))
    loss, means = world.losses(weights=weights, parameters=world.lm_heads)
    assert {head for head, _ in world.asked} == {1}
    slow = world.slow_losses("teacher")
    torch.testing.assert_close(loss, 0.7 * slow[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(means[1], slow[1].detach(), rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(loss, [world.features, *world.lm_heads])
    expected = torch.autograd.grad(0.7 * slow[1], [world.features, *world.lm_heads], materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- losses of rows ---

REGIMES = {
    "an untrained head": (0.1, 3.0),
    "a sharp head and a flat target": (8.0, 0.1),
    "a flat head and a sharp target": (0.1, 8.0),
    "both sharp": (8.0, 8.0),
    "hopeless": (40.0, 40.0),  # hardly any overlap
}


def row_world(regime: str, *, rows: int = 6) -> tuple[Tensor, Labels]:
    """Logits and labels in fp64; every other text token is unknown."""
    generator = torch.Generator().manual_seed(5)
    sharpness, target_sharpness = REGIMES[regime]
    logits = sharpness * torch.randn(rows, 7, generator=generator, dtype=torch.float64)
    probs = (target_sharpness * torch.randn(rows, 7, generator=generator, dtype=torch.float64)).softmax(-1)
    text_ids = torch.randint(7, (rows,), generator=generator)
    return logits, Labels(probs, text_ids, torch.arange(rows) % 2 == 0)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", get_args(LossKind))
def test_a_row_loss_equals_its_slow_twin(kind: LossKind, regime: str):
    logits, labels = row_world(regime)
    kept = logits.clone()
    losses, gradients = ROW_LOSSES[kind](logits, labels)
    assert torch.equal(logits, kept), "what it is given is not its own to change"
    logits.requires_grad_()
    rows = zip(logits.log_softmax(-1), *vars(labels).values(), strict=True)
    slow = torch.stack([slow_loss(kind, p, q, int(y), known=bool(k)) for p, q, y, k in rows])
    torch.testing.assert_close(losses, slow.detach(), rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(slow.sum(), logits)[0]
    torch.testing.assert_close(gradients, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_huge_logits_are_finite(kind: LossKind):
    labels = Labels(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([1]), torch.tensor([True]))
    losses, gradients = ROW_LOSSES[kind](torch.tensor([[1e4, -1e4, 0.0]]), labels)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradients).all()
    expected = {"hard": 2e4, "teacher": 2e4, "eagle": 2e4, "amphista": 4e4, "dspark": 2e3 + 1.8}
    assert losses.item() == pytest.approx(expected[kind])
