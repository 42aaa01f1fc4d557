"""Which texts are trained on together, and their tensors side by side.

Knows a feature store's documents; knows nothing of losses. A run's batches are all decided beforehand by its seed: batch n is
the same whether the run is resumed at n or comes there on its way.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from draftheads.data.features import Document, FeatureStore

_WINDOW_BATCHES = (
    32  # texts of that many batches are sorted by length together: little padding, still a mixture
)


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded on the right."""

    hidden: Tensor  # (B, T, D)
    token_ids: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool, False on padding


def collate(documents: Sequence[Document]) -> Batch:
    """Pads the texts to the longest."""
    return Batch(
        pad_sequence([document.hidden for document in documents], batch_first=True),
        pad_sequence([document.token_ids for document in documents], batch_first=True),
        pad_sequence([document.loss_mask for document in documents], batch_first=True),
    )


def split_held_out(
    num_documents: int, *, fraction: float, at_most: int, seed: int
) -> tuple[list[int], list[int]]:
    """Document indices for training and for measuring, by chance but decided by ``seed``; at least one of each.

    >>> training, held_out = split_held_out(10, fraction=0.2, at_most=200, seed=0)
    >>> len(training), len(held_out), sorted(training + held_out) == list(range(10))
    (8, 2, True)
    """
    order = list(range(num_documents))
    random.Random(seed).shuffle(order)
    size = max(1, min(at_most, int(fraction * num_documents), num_documents - 1))
    return sorted(order[size:]), sorted(order[:size])


def plan_batches(
    documents: Sequence[int], lengths: Sequence[int], *, max_tokens: int, num_epochs: int, seed: int
) -> list[list[int]]:
    """The document indices of every batch of a run, epoch after epoch.

    An epoch is a shuffle of all documents, cut into windows; in a window neighbours in length form batches of at most
    ``max_tokens`` padded tokens (or one long text), and the batches are shuffled.

    Args:
        documents: indices to train on.
        lengths: tokens of every document of the store.
    """
    chance = random.Random(seed)
    plan: list[list[int]] = []
    for _ in range(num_epochs):
        order = list(documents)
        chance.shuffle(order)
        batches: list[list[int]] = []
        for window in _windows(order, lengths, _WINDOW_BATCHES * max_tokens):
            batches += _buckets(window, lengths, max_tokens)
        chance.shuffle(batches)
        plan += batches
    return plan


class PlannedBatches(Dataset[dict[str, Any]]):
    """Batch n of a plan as the keyword arguments of a training step."""

    def __init__(self, store: FeatureStore, plan: Sequence[Sequence[int]]) -> None:
        self.store = store
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = collate([self.store[i] for i in self.plan[index]])
        documents = torch.tensor(self.plan[index])
        return {
            "hidden": batch.hidden,
            "token_ids": batch.token_ids,
            "loss_mask": batch.loss_mask,
            "documents": documents,
        }


def _windows(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    windows: list[list[int]] = [[]]
    size = 0
    for index in order:
        if size > max_tokens:
            windows.append([])
            size = 0
        windows[-1].append(index)
        size += lengths[index]
    return windows


def _buckets(documents: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    by_length = sorted(documents, key=lengths.__getitem__)
    return [
        [by_length[i] for i in group]
        for group in bucket_by_length([lengths[i] for i in by_length], max_tokens)
    ]


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups of indices of neighbouring lengths whose padded size is at most ``max_tokens`` (or one long text alone).

    >>> bucket_by_length([5, 2, 9, 2], 10)
    [[1, 3], [0], [2]]
    """
    groups: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups[-1] and (len(groups[-1]) + 1) * lengths[index] > max_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups
