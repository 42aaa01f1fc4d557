"""How good heads are on text they have not seen: losses, ranks of the true tokens, tokens per step.

Knows learners and documents; knows nothing of optimisation. A grounded head's ranks along the true text are
exactly those it would give when drafting, as long as all guesses before were right; so any tree can be judged
from ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.data.batches import Batch, bucket_by_length, collate
from draftheads.data.features import Documents
from draftheads.errors import DataError
from draftheads.train.learner import Learner
from draftheads.train.objectives import CHUNK_SIZE, find_guesses
from draftheads.tree import Tree
from draftheads.tree_search import expected_tokens

NUM_RANKS = 10  # ranks 0 … 9 are recorded; this number means a miss


@dataclass(frozen=True)
class Measurement:
    """What was seen on held-out text: S positions from which at least one head guesses."""

    losses: Tensor  # (K,) mean training loss
    ranks: Tensor  # (S, K) int64: rank of the true token, NUM_RANKS for a miss
    counts: Tensor  # (S, K) bool: whether the head had something to guess there

    @property
    def joint_ranks(self) -> Tensor:
        """(S', K) ranks where all heads had something to guess, so that the end of a text is no miss.

        Where texts are so short that there are none: all (S, K).
        """
        complete = self.counts.all(1)
        return self.ranks[complete] if complete.any() else self.ranks

    def accuracy(self, num_best: int) -> list[float]:
        """Per head: how often the true token is among its ``num_best`` best guesses."""
        hits = ((self.ranks < num_best) & self.counts).sum(0)
        return [float(share) for share in hits / self.counts.sum(0).clamp_min(1)]

    def tokens_per_step(self, tree: Tree) -> float:
        """Expected tokens that a step with this tree gains."""
        return expected_tokens(self.joint_ranks, tree)


@torch.no_grad()
def measure(learner: Learner, store: Documents, documents: Sequence[int], *, batch_tokens: int) -> Measurement:
    """Losses and ranks on the given documents.

    Raises:
        DataError: they hold no answer of two tokens.
    """
    was_training = learner.training
    learner.eval()  # drops nothing out
    parts = []
    for group in bucket_by_length([store.lengths[i] for i in documents], batch_tokens):
        texts = [store[documents[i]] for i in group]
        parts.append(_measure_batch(learner, collate(texts, skip_prompts=not learner.head.needs_history)))
    learner.train(was_training)
    sums, numbers, ranks, counts = zip(*parts, strict=True)
    losses = torch.stack(sums).sum(0) / torch.stack(numbers).sum(0).clamp_min(1)
    found = Measurement(losses, torch.cat(ranks), torch.cat(counts))
    if len(found.counts) == 0:
        raise DataError(
            f"the {len(documents)} texts kept for measuring have no two assistant tokens in a row: give more data"
        )
    return found


def _measure_batch(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss sums (K,), numbers of losses (K,), ranks (S, K) and counts (S, K), on the CPU."""
    device, dtype = learner.teacher.device, learner.teacher.dtype
    hidden, token_ids = batch.hidden.to(device, dtype), batch.token_ids.to(device)
    loss_mask = batch.loss_mask.to(device)
    features = learner.head(hidden, token_ids).flatten(1, 2)  # (K, B·T, D)
    labels = learner.labels(hidden, token_ids)
    flat_ids = token_ids.flatten()
    ranks = flat_ids.new_full((len(features), len(flat_ids)), NUM_RANKS)
    counts = torch.zeros_like(ranks, dtype=torch.bool)
    sums, numbers = torch.zeros(2, len(features), device=device)
    for chunk in find_guesses(loss_mask, len(features)).chunks(CHUNK_SIZE):
        truth = flat_ids[chunk.positions + 1]
        taught = labels(chunk.positions)
        known, index = learner.in_vocab[truth], learner.draft_index[truth]
        for i in range(len(features)):
            rows = chunk.counts[i].nonzero()[:, 0]
            source = chunk.sources(i)[rows]
            logits = learner.head.logits(features[i, source], i).float()
            better = (logits > logits.gather(1, index[rows, None])).sum(1).clamp_max(NUM_RANKS)
            ranks[i, source] = torch.where(known[rows], better, NUM_RANKS)
            counts[i, source] = True
            has_label = known[rows] | learner.objective.reads_teacher
            sums[i] += learner.objective.loss(logits, taught.rows(rows))[0][has_label].sum()
            numbers[i] += has_label.sum()
    used = counts.any(0)
    return sums.cpu(), numbers.cpu(), ranks[:, used].T.cpu(), counts[:, used].T.cpu()
