"""Losses: of each row of logits with its gradient in closed form, and of K heads at once, chunk by chunk.

Pure functions of tensors. Letters: K heads, B texts of T tokens (S = B·T flat positions), D hidden size, V' draft
vocabulary; of n rows: z logits of a head, p = softmax(z), q the target's distribution over V', y the token of the text.

Head i reads position t and predicts x_{t+2+i}; the target predicts the same token from p = t+1+i. Chunks are of
positions p: the labels at p serve all K heads, each of which reads its own position p-1-i.

A prediction counts iff x_{t+1} and x_{t+2+i} are both the assistant's, and so lie inside the text. Tensors as wide as
the vocabulary exist for one chunk at a time: their gradients are computed at once, so no logits are kept for backward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.settings import LossKind

NUM_ROWS = 64  # oneDNN makes a kernel for each number of rows: chunks can be filled up to a multiple of this
CHUNK_SIZE = 512  # measured on 2 cores at V' = 8192: 256 is 25 % slower, 1024 no faster


@dataclass(frozen=True)
class Labels:
    """The labels of n predictions; None where the loss does not use them."""

    probs: Tensor | None = None  # (n, V') q, rows that sum to 1
    token_ids: Tensor | None = None  # (n,) y in 0 … V'-1; meaningless where not known
    known: Tensor | None = None  # (n,) bool: the text's token is in the draft vocabulary

    def rows(self, index: Tensor) -> Self:
        return type(self)(*(None if field is None else field[index] for field in vars(self).values()))


RowLoss = Callable[[Tensor, Labels], tuple[Tensor, Tensor]]  # logits (n, V') -> losses (n,), gradients (n, V')
HeadLogits = Callable[[Tensor, int], Tensor]  # features (n, D) of head i -> logits (n, V')
LabelMaker = Callable[[Tensor], Labels]  # of flat positions (n,)


def text_loss(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """-log p_y, and its gradient p - 1_y (Medusa, equation 1)."""
    token_ids = _given(labels.token_ids)
    log_probs = logits.log_softmax(-1)
    losses = -log_probs.gather(1, token_ids[:, None])[:, 0]
    gradients = log_probs.exp_()
    gradients[torch.arange(len(token_ids), device=token_ids.device), token_ids] -= 1
    return losses, gradients


def teacher_loss(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """-Σ_v q_v log p_v, and its gradient p - q (Hydra, appendix A.1)."""
    probs = _given(labels.probs)
    log_probs = logits.log_softmax(-1)
    losses = -_row_dot(probs, log_probs)
    return losses, log_probs.exp_().sub_(probs)


def amphista_loss(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """CE(q, p) + CE(y, p), Amphista equations 7 to 9; the second part only where the head knows the token.

    The paper does not give the weights of the two parts, λ1 and λ2.
    """
    aligned, from_teacher = teacher_loss(logits, labels)
    of_text, from_text = text_loss(logits, labels)
    weight = _given(labels.known).to(of_text.dtype)  # (n,)
    return aligned + weight * of_text, from_teacher + weight[:, None] * from_text


def dspark_loss(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """0.1 · CE(y, p) + 0.9 · ‖p - q‖₁ (DSpark); the first part only where the head knows the token.

    With m = [p < q], the gradient of ½ ‖p - q‖₁ is p (Σ_v p_v m_v - m).
    """
    probs = _given(labels.probs)
    of_text, from_text = text_loss(logits, labels)
    drafted = logits.softmax(-1)
    short = (drafted < probs).to(drafted.dtype)  # m: where the head has less probability than the target
    distance = (drafted - probs).abs().sum(-1)
    from_distance = 2 * drafted * (_row_dot(drafted, short)[:, None] - short)
    weight = 0.1 * _given(labels.known).to(of_text.dtype)  # (n,)
    return weight * of_text + 0.9 * distance, weight[:, None] * from_text + 0.9 * from_distance


ROW_LOSSES: dict[LossKind, RowLoss] = {
    "teacher": teacher_loss,
    "hard": text_loss,
    "amphista": amphista_loss,
    "dspark": dspark_loss,
    "eagle": teacher_loss,  # its loss on features is the learner's
}


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """(n, V'), (n, V') -> (n,), in one pass."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def _given(field: Tensor | None) -> Tensor:
    assert field is not None, "a loss reads labels that were not made"
    return field


@dataclass(frozen=True)
class Predictions:
    """The tokens that heads predict: P positions p, whose next token at least one head predicts."""

    positions: Tensor  # (P,) int64 flat positions p: the target reads x_{p+1} from h_p
    counts: Tensor  # (K, P) bool: head i predicts x_{p+1}, from flat position p-1-i

    @property
    def numbers(self) -> Tensor:
        """(K,) predictions of each head."""
        return self.counts.sum(1)

    def sources(self, head_index: int) -> Tensor:
        """(P,) flat positions that head i reads; valid indices without meaning where it does not count."""
        return (self.positions - 1 - head_index).clamp_min(0)

    def only(self, known: Tensor) -> Self:
        """The predictions at positions where ``known``, (P,) bool, is True."""
        return type(self)(self.positions[known], self.counts[:, known])

    def behind(self, places: Tensor, length: int, numbers: Sequence[int]) -> Self:
        """Only predictions behind positions (B, A) of texts of ``length`` tokens, of head i the first numbers[i]."""
        none = places.new_zeros(len(places), length, dtype=torch.bool)
        are_read = [none.scatter(1, places[:, :number], value=True).flatten() for number in numbers]
        counts = torch.stack([part & are_read[i][self.sources(i)] for i, part in enumerate(self.counts)])
        return type(self)(self.positions, counts).only(counts.any(0))

    def chunks(self, size: int, multiple: int = 1) -> Iterator[Self]:
        """The same predictions, at most ``size`` positions at a time.

        Some that do not count are added, so that the number of positions is a multiple of ``multiple``.
        """
        for start in range(0, len(self.positions), size):
            positions, counts = self.positions[start : start + size], self.counts[:, start : start + size]
            missing = -len(positions) % multiple
            yield type(self)(F.pad(positions, (0, missing)), F.pad(counts, (0, missing)))


def find_predictions(loss_mask: Tensor, num_heads: int) -> Predictions:
    """All predictions that count in a batch with this (B, T) loss mask, False on padding.

    In the example the assistant's tokens are x_1 … x_3, so x_2 is predicted from x_0, and x_3 from x_1 (by head 0) and
    from x_0 (by head 1):

    >>> predictions = find_predictions(torch.tensor([[False, True, True, True]]), 2)
    >>> predictions.positions.tolist(), predictions.counts.int().tolist()
    ([1, 2], [[1, 1], [0, 1]])
    """
    is_next = F.pad(loss_mask[:, 1:], (0, 1))  # [b, t]: x_{t+1} is the assistant's
    before = [F.pad(is_next, (1 + i, 0))[:, : is_next.shape[1]] for i in range(num_heads)]  # [b, t]: is_next[b, t-1-i]
    counts = (is_next & torch.stack(before)).flatten(1)  # (K, S)
    positions = counts.any(0).nonzero()[:, 0]
    return Predictions(positions, counts[:, positions])


def random_places(loss_mask: Tensor, count: int) -> Tensor:
    """At most so many positions (B, A) of each text at random, none twice, before two tokens of the assistant.

    Texts with fewer have others, too; nothing is predicted there.

    >>> random_places(torch.tensor([[True, True, True, True]]), 2).sort().values.tolist()
    [[0, 1]]
    """
    can = F.pad(loss_mask[:, 1:], (0, 1)) & F.pad(loss_mask[:, 2:], (0, 2))
    chances = torch.rand(can.shape, device=can.device).masked_fill(~can, -1.0)
    return chances.topk(min(count, max(1, int(can.sum(1).max()))), dim=1).indices


def precedes_answer(loss_mask: Tensor) -> Tensor:
    """(P,) flat positions p whose next token, in the same text, is the assistant's.

    >>> precedes_answer(torch.tensor([[False, True, True], [True, False, True]])).tolist()
    [0, 1, 4]
    """
    return F.pad(loss_mask[:, 1:], (0, 1)).flatten().nonzero()[:, 0]


def depth_weights(num_heads: int, decay: float) -> Tensor:
    """λ_i / λ_0 = decay^i, (K,): the weights relative to the first head's, which is decay in Medusa's equation 1.

    All parts of a loss of heads alone have these weights, so their ratios are those of the papers. Where the loss
    has a part of the model, the first head's weight matters (:class:`draftheads.train.joint.JointLearner`).

    >>> depth_weights(3, 0.5).tolist()
    [1.0, 0.5, 0.25]
    """
    return decay ** torch.arange(num_heads, dtype=torch.float32)


def head_losses(
    features: Tensor,
    predictions: Predictions,
    *,
    labels: LabelMaker,
    row_loss: RowLoss,
    logits: HeadLogits,
    weights: Tensor,
    numbers: Tensor | None = None,
    parameters: Sequence[Tensor] = (),
    chunk_size: int = CHUNK_SIZE,
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """The depth-weighted loss of K heads, and each head's mean loss.

    Args:
        features: (K, S, D) of all flat positions.
        predictions: which of them count.
        labels: makes the labels of some positions.
        row_loss: the loss of each row of logits.
        logits: a head's logits from its features, each row by itself.
        weights: (K,) λ.
        numbers: (K,) what each head's sum is divided by: its predictions in all batches of a step, if these are a part
            of them. Its predictions here when left out.
        parameters: trained tensors that ``logits`` depends on (such as an lm_head of each head).
        chunk_size: positions whose logits exist at the same time.
        multiple: chunks are filled up to a multiple of so many positions, with some that do not count; ``labels`` is
            called for these, too.

    Returns:
        The loss Σ λ_i · sum over head i's predictions / ``numbers``, differentiable in ``features`` and
        ``parameters``; and these means (K,), not differentiable. Those of all batches of a step add up to those of one
        large batch. A head without predictions adds nothing; without any the loss is 0. The mean of a head with
        λ_i = 0 stays 0.
    """
    numbers = (predictions.numbers if numbers is None else numbers).clamp_min(1)
    shares = (weights.to(features) / numbers).tolist()  # weight of a single loss
    sums = torch.zeros(len(numbers), device=features.device)
    trained = (features, *parameters) if torch.is_grad_enabled() else ()
    gradients = [torch.zeros_like(tensor) for tensor in trained]
    for chunk in predictions.chunks(chunk_size, multiple):
        chunk_labels = labels(chunk.positions)
        for i, share in enumerate(shares):
            if not share:  # it trains nothing
                continue
            rows = chunk.counts[i].nonzero()[:, 0]
            source = chunk.sources(i)
            with torch.enable_grad():
                inputs = features.detach()[i, source].requires_grad_()
                head_logits = logits(inputs, i)
            # rows that do not count are computed, too: they are few, and skipping them would copy the labels
            losses, slopes = row_loss(head_logits.detach().float(), chunk_labels)
            sums[i] += losses[rows].sum()
            if trained:
                slopes[~chunk.counts[i]] = 0.0
                parts = torch.autograd.grad(
                    head_logits, (inputs, *parameters), slopes.to(head_logits.dtype), allow_unused=True
                )
                gradients[0][i, source[rows]] = parts[0][rows] * share
                for total, part in zip(gradients[1:], parts[1:], strict=True):
                    if part is not None:  # another head's parameter
                        total.add_(part, alpha=share)
    means = sums / numbers
    loss: Tensor = _WithGradients.apply((means * weights.to(means)).sum(), gradients, *trained)  # type: ignore[no-untyped-call]
    return loss, means


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients for some tensors are known already; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * outer for gradient in ctx.saved_tensors)
