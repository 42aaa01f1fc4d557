"""How good heads are on text they have not seen: losses, ranks of the true tokens, tokens per step.

Knows learners and documents; knows nothing of optimisation. A grounded head's ranks along the true text are exactly those it
would give when drafting, as long as all guesses before were right; so any tree can be judged from the ranks alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.data.batches import bucket_by_length, collate
from draftheads.data.features import FeatureStore
from draftheads.errors import DataError
from draftheads.search.grow import expected_tokens
from draftheads.train.learner import Learner
from draftheads.train.objectives import find_guesses, hard_cross_entropy, soft_cross_entropy
from draftheads.tree import Tree

NUM_RANKS = 10  # ranks 0 … 9 are recorded; this number means a miss
CHUNK_SIZE = 512


@dataclass(frozen=True)
class Measurement:
    """What was seen on held-out text: S positions from which at least one head guesses."""

    losses: Tensor  # (K,) mean training loss
    ranks: Tensor  # (S, K) int64: rank of the true token, NUM_RANKS for a miss
    counts: Tensor  # (S, K) bool: whether the head had something to guess there

    @property
    def complete(self) -> Tensor:
        """(S', K) the ranks where all heads had something to guess, so not cut by the end of a text."""
        return self.ranks[self.counts.all(1)]

    def accuracy(self, num_best: int) -> list[float]:
        """Per head: how often the true token is among its ``num_best`` best guesses."""
        hits = ((self.ranks < num_best) & self.counts).sum(0)
        return (hits / self.counts.sum(0).clamp_min(1)).tolist()  # type: ignore[no-any-return]

    def tokens_per_step(self, tree: Tree) -> float:
        """Expected tokens a step gains with this tree."""
        return expected_tokens(self.complete, tree)


@torch.no_grad()
def measure(
    learner: Learner, store: FeatureStore, documents: Sequence[int], *, batch_tokens: int
) -> Measurement:
    """Losses and ranks on the given documents.

    Raises:
        DataError: they hold no answer of two tokens.
    """
    device = learner.teacher.device
    parts = []
    for group in bucket_by_length([store.lengths[i] for i in documents], batch_tokens):
        batch = collate([store[documents[i]] for i in group])
        parts.append(
            _measure_batch(
                learner, *(part.to(device) for part in (batch.hidden, batch.token_ids, batch.loss_mask))
            )
        )
    sums, numbers, ranks, counts = zip(*parts, strict=True)
    counted = torch.cat(counts)
    if len(counted) == 0:
        raise DataError("the held-out texts have no two assistant tokens in a row; give more data")
    return Measurement((sum(sums) / sum(numbers).clamp_min(1)).cpu(), torch.cat(ranks).cpu(), counted.cpu())


def _measure_batch(
    learner: Learner, hidden: Tensor, token_ids: Tensor, loss_mask: Tensor
) -> tuple[Tensor, ...]:
    """Loss sums (K,), numbers of losses (K,), ranks (S, K) and counts (S, K)."""
    hidden = hidden.to(learner.depth_weights.dtype)
    features = learner.head(hidden, token_ids).flatten(1, 2)  # (K, B·T, D)
    flat_ids = token_ids.flatten()
    num_heads = len(features)
    _, labels = learner.task(hidden, token_ids, loss_mask)
    ranks = flat_ids.new_full((num_heads, len(flat_ids)), NUM_RANKS)
    counts = torch.zeros_like(ranks, dtype=torch.bool)
    sums, numbers = features.new_zeros(num_heads), features.new_zeros(num_heads)
    for chunk in find_guesses(loss_mask, num_heads).chunks(CHUNK_SIZE):
        truth = flat_ids[chunk.positions + 1]
        known, index, taught = learner.in_vocab[truth], learner.draft_index[truth], labels(chunk.positions)
        loss_of = soft_cross_entropy if taught.ndim == 2 else hard_cross_entropy
        has_label = torch.ones_like(known) if taught.ndim == 2 else known
        for i in range(num_heads):
            rows = chunk.counts[i].nonzero()[:, 0]
            source = chunk.sources(i)[rows]
            logits = learner.head.logits(features[i, source], i).float()
            better = (logits > logits.gather(1, index[rows, None])).sum(1).clamp_max(NUM_RANKS)
            ranks[i, source] = torch.where(known[rows], better, NUM_RANKS)
            counts[i, source] = True
            losses, _ = loss_of(logits, taught[rows])
            sums[i] += losses[has_label[rows]].sum()
            numbers[i] += has_label[rows].sum()
    used = counts.any(0)
    return sums, numbers, ranks[:, used].T, counts[:, used].T
