"""What a head is taught: cross-entropy with the text or with the target's own distribution, over the draft vocabulary.

Pure functions of tensors. Alphabet: K heads, B texts of T tokens (S = B·T flat positions), D hidden size, V' draft vocabulary.
Head i reads position t and guesses x_{t+2+i}; the target guesses the same token from p = t+1+i. Work goes by *p*: the target's
labels at p serve all K heads, each of which reads its own position p-1-i.

The guess counts iff x_{t+1} and x_{t+2+i} are both the assistant's (and so lie inside the text).

Vocabulary-wide tensors exist for one chunk of positions at a time. Their gradients are taken at once, so no chunk's logits are
kept for the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import DataError

HeadLogits = Callable[[Tensor, int], Tensor]  # features (n, D) of head i -> logits (n, V')


@dataclass(frozen=True)
class Guesses:
    """Who guesses what: P positions p, whose next token is a target of at least one head."""

    positions: Tensor  # (P,) int64 flat positions p: the target reads x_{p+1} from h_p
    counts: Tensor  # (K, P) bool: head i guesses x_{p+1}, from flat position p-1-i

    @property
    def num_heads(self) -> int:
        """K."""
        return len(self.counts)

    def sources(self, head_index: int) -> Tensor:
        """(P,) the flat positions that head i reads; meaningless (but in range) where it does not count."""
        return (self.positions - 1 - head_index).clamp_min(0)

    def only(self, known: Tensor) -> "Guesses":
        """The guesses of those positions for which ``known``, (P,) bool, is True."""
        return Guesses(self.positions[known], self.counts[:, known])

    def chunks(self, size: int) -> Iterator["Guesses"]:
        """The same guesses, at most ``size`` positions at a time."""
        for start in range(0, len(self.positions), size):
            part = slice(start, start + size)
            yield Guesses(self.positions[part], self.counts[:, part])


def find_guesses(loss_mask: Tensor, num_heads: int) -> Guesses:
    """All guesses that count in a batch with this (B, T) loss mask, False on padding.

    >>> guesses = find_guesses(torch.tensor([[False, True, True, True]]), 2)
    >>> guesses.positions.tolist(), guesses.counts.int().tolist()  # x_2 from x_0; x_3 from x_1 (head 0) and x_0 (head 1)
    ([1, 2], [[1, 1], [0, 1]])
    """
    batch, length = loss_mask.shape
    said_next = torch.zeros_like(loss_mask)  # [b, t]: x_{t+1} is the assistant's
    said_next[:, :-1] = loss_mask[:, 1:]
    counts = torch.zeros(num_heads, batch, length, dtype=torch.bool, device=loss_mask.device)
    for i in range(min(num_heads, length - 1)):
        counts[i, :, 1 + i :] = said_next[:, 1 + i :] & said_next[:, : length - 1 - i]
    flat = counts.flatten(1)
    positions = flat.any(0).nonzero()[:, 0]
    return Guesses(positions, flat[:, positions])


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-Σ_v q_v log softmax(z)_v and its gradient softmax(z) - q.

    Args:
        logits: (n, V') z.
        labels: (n, V') q, rows that sum to 1.

    Returns:
        Losses (n,) and gradients (n, V').
    """
    log_probs = logits.log_softmax(-1)
    losses = -torch.bmm(labels[:, None], log_probs[:, :, None])[
        :, 0, 0
    ]  # one pass, where (q * log p).sum() takes three
    return losses, log_probs.exp_().sub_(labels)


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(z)_y and its gradient softmax(z) - 1_y.

    Args:
        logits: (n, V') z.
        labels: (n,) int64 y in 0 … V'-1.

    Returns:
        Losses (n,) and gradients (n, V').
    """
    log_probs = logits.log_softmax(-1)
    losses = -log_probs.gather(1, labels[:, None])[:, 0]
    gradient = log_probs.exp_()
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
    return losses, gradient


def depth_weights(num_heads: int, decay: float) -> Tensor:
    """λ_i = decay^(i+1)… Medusa counts heads from 1 and section 3.2 takes 0.8^k; the first head weighs 1 here.

    >>> depth_weights(3, 0.5).tolist()
    [1.0, 0.5, 0.25]
    """
    return decay ** torch.arange(num_heads, dtype=torch.float32)


LabelMaker = Callable[
    [Tensor], Tensor
]  # flat positions (n,) -> (n, V') distributions or (n,) int64 draft token indices


def head_losses(
    features: Tensor,
    guesses: Guesses,
    labels: LabelMaker,
    logits: HeadLogits,
    *,
    weights: Tensor,
    parameters: Sequence[Tensor] = (),
    chunk_size: int = 512,
) -> tuple[Tensor, Tensor]:
    """The depth-weighted loss of K heads, and each head's mean loss.

    Args:
        features: (K, S, D) of all flat positions.
        guesses: which of them count.
        labels: makes the labels of some positions.
        logits: a head's logits from its features.
        weights: (K,) λ.
        parameters: what ``logits`` depends on and is trained (an lm_head of the heads' own).
        chunk_size: positions whose logits exist at the same time.

    Returns:
        The loss Σ λ_i · mean over head i's guesses, differentiable in ``features`` and ``parameters``; and the means (K,), not
        differentiable.

    Raises:
        DataError: no guess counts.
    """
    if not guesses.counts.any():
        raise DataError("an empty loss mask: the batch has no two assistant tokens in a row to learn from")
    job = _Job(guesses, labels, logits, weights, chunk_size, differentiate=torch.is_grad_enabled())
    return _AtOnce.apply(job, features, *parameters)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Job:
    guesses: Guesses
    labels: LabelMaker
    logits: HeadLogits
    weights: Tensor
    chunk_size: int
    differentiate: bool


class _AtOnce(torch.autograd.Function):
    """Loss and gradients in one sweep over the chunks; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, job: _Job, features: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        sums, counts, gradients = _sweep(job, features, parameters)
        means = sums / counts.clamp_min(1)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(means)
        return (means * job.weights.to(means)).sum(), means

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * outer[0] for gradient in ctx.saved_tensors)


def _sweep(job: _Job, features: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss sums (K,), guess counts (K,) and the gradients of the weighted mean loss for features and parameters."""
    counts = job.guesses.counts.sum(1)
    scales = (job.weights.to(features) / counts.clamp_min(1)).tolist()  # what a single loss weighs
    sums = features.new_zeros(len(counts), dtype=torch.float32)
    gradients = [torch.zeros_like(tensor) for tensor in (features, *parameters)] if job.differentiate else []
    for chunk in job.guesses.chunks(job.chunk_size):
        labels = job.labels(chunk.positions)
        loss_of = soft_cross_entropy if labels.ndim == 2 else hard_cross_entropy
        for i in range(chunk.num_heads):
            rows, others, source = (
                chunk.counts[i].nonzero()[:, 0],
                (~chunk.counts[i]).nonzero()[:, 0],
                chunk.sources(i),
            )
            with torch.enable_grad():
                inputs = features[i, source].detach().requires_grad_()
                logits = job.logits(inputs, i)
            # all rows of the chunk, though some do not count: they are few, and selecting the others would copy (n, V')
            losses, slope = loss_of(logits.detach().float(), labels)
            sums[i] += losses[rows].sum()
            if job.differentiate:
                slope.index_fill_(0, others, 0.0)
                found = torch.autograd.grad(
                    logits, (inputs, *parameters), slope.to(logits.dtype), allow_unused=True
                )
                gradients[0][i, source[rows]] += found[0][rows] * scales[i]
                for total, part in zip(gradients[1:], found[1:], strict=True):
                    if part is not None:
                        total.add_(part * scales[i])
    return sums, counts, gradients
