"""Which texts are trained on together, and their tensors side by side.

Knows a feature store's documents; knows nothing of losses. A run's batches are all decided beforehand by its
seed: batch n is the same whether the run is resumed at n or comes there on its way.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from draftheads.data.features import Document, Documents
from draftheads.errors import DataError

HELD_OUT_AT_MOST = 200
_WINDOW_BATCHES = 32  # texts of that many batches are sorted by length together: little padding, still a mixture


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded on the right."""

    hidden: Tensor  # (B, T, D)
    token_ids: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool, False on padding


def collate(documents: Sequence[Document], *, skip_prompts: bool) -> Batch:
    """Pads texts to the longest of them.

    Args:
        documents: the texts.
        skip_prompts: leave out what comes before the first position that a head reads; for heads that look at
            no position but their own and later ones, to which that makes no difference.
    """
    if skip_prompts:
        documents = [_without_prompt(document) for document in documents]
    return Batch(
        pad_sequence([document.hidden for document in documents], batch_first=True),
        pad_sequence([document.token_ids for document in documents], batch_first=True),
        pad_sequence([document.loss_mask for document in documents], batch_first=True),
    )


def choose_texts(
    token_ids: Sequence[Tensor], loss_masks: Sequence[Tensor], *, held_out: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices of the texts that a run learns from, and of those that are kept apart to measure on.

    Args:
        token_ids: of every text, (T,).
        loss_masks: of every text, (T,) bool.
        held_out: the part kept apart, at most ``HELD_OUT_AT_MOST`` texts.
        seed: decides which.

    Raises:
        DataError: too few texts, or none that a draft head can learn from.
    """
    training, kept_apart = split_held_out(token_ids, loss_masks, fraction=held_out, at_most=HELD_OUT_AT_MOST, seed=seed)
    if not training:
        raise DataError("only one text: training needs another one to measure on")
    training = with_guesses(training, loss_masks)
    if not training:
        raise DataError("no two assistant tokens in a row in any text: give longer answers")
    return training, kept_apart


def split_held_out(
    token_ids: Sequence[Tensor], loss_masks: Sequence[Tensor], *, fraction: float, at_most: int, seed: int
) -> tuple[list[int], list[int]]:
    """Document indices for training and for measuring; at least one held out.

    At random, but the texts themselves decide: what is held out of many texts is held out of a part of them, too, but
    for a few at the border. So a head that starts from another one, and learns from more, is not measured on what that
    one was taught. Answers to the same prompt stand together.

    >>> texts = [torch.tensor([5, n]) for n in range(10)]
    >>> masks = [torch.tensor([False, True])] * 10
    >>> training, held_out = split_held_out(texts, masks, fraction=0.2, at_most=200, seed=0)
    >>> len(training), len(held_out), sorted(training + held_out) == list(range(10))
    (8, 2, True)
    """

    def drawn(ids: Tensor) -> bytes:
        key = seed.to_bytes(8, "little")
        return hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), key=key, digest_size=8).digest()

    def place(index: int) -> tuple[bytes, bytes]:
        ids, mask = token_ids[index], loss_masks[index]
        prompt = ids[: int(mask.int().argmax())]
        return drawn(prompt if len(prompt) else ids), drawn(ids)

    order = sorted(range(len(token_ids)), key=place)
    size = max(1, min(at_most, int(fraction * len(order))))
    return sorted(order[size:]), sorted(order[:size])


def with_guesses(documents: Sequence[int], loss_masks: Sequence[Tensor]) -> list[int]:
    """Those documents in which two assistant tokens follow each other: a draft head learns from no others.

    >>> with_guesses([0, 1], [torch.tensor([True, False, True]), torch.tensor([False, True, True])])
    [1]
    """
    return [i for i in documents if bool((loss_masks[i][1:] & loss_masks[i][:-1]).any())]


def plan_batches(
    documents: Sequence[int], lengths: Sequence[int], *, max_tokens: int, num_epochs: int, seed: int
) -> list[list[int]]:
    """The document indices of every batch of a run, epoch after epoch.

    An epoch is a shuffle of all documents, cut into windows; in a window neighbours in length form batches,
    and the batches are shuffled.

    Args:
        documents: indices to train on.
        lengths: tokens of every document of the store.
        max_tokens: padded size of a batch; a longer text is a batch by itself.
        num_epochs: how often each document comes.
        seed: decides it all.
    """
    chance = random.Random(seed)  # noqa: S311 - nothing secret
    plan: list[list[int]] = []
    for _ in range(num_epochs):
        order = list(documents)
        chance.shuffle(order)
        batches: list[list[int]] = []
        for window in _windows(order, lengths, _WINDOW_BATCHES * max_tokens):
            groups = bucket_by_length([lengths[i] for i in window], max_tokens)
            batches += [[window[i] for i in group] for group in groups]
        chance.shuffle(batches)
        plan += batches
    return plan


def in_whole_steps(plan: Sequence[list[int]], batches_per_step: int) -> list[list[int]]:
    """The plan with enough of its first batches once more at its end to fill the last step.

    >>> in_whole_steps([[0], [1], [2]], 2)
    [[0], [1], [2], [0]]
    """
    missing = -len(plan) % batches_per_step
    return [*plan, *(plan[i % len(plan)] for i in range(missing))]


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in groups of similar length, of at most ``max_tokens`` padded tokens (or one long text alone).

    >>> bucket_by_length([5, 2, 9, 2], 10)
    [[1, 3], [0], [2]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or (len(groups[-1]) + 1) * lengths[index] > max_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


class PlannedBatches(Dataset[dict[str, Any]]):
    """Batch n of a plan: the keyword arguments of a training step, and which documents they are."""

    def __init__(self, store: Documents, plan: Sequence[Sequence[int]], *, skip_prompts: bool) -> None:
        self.store = store
        self.plan = plan
        self.skip_prompts = skip_prompts

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = collate([self.store[i] for i in self.plan[index]], skip_prompts=self.skip_prompts)
        return {**vars(batch), "documents": torch.tensor(self.plan[index])}

    @property
    def sources(self) -> Sequence[str]:
        """Where each document is from."""
        return self.store.sources


class PlannedTexts(Dataset[dict[str, Any]]):
    """Batch n of a plan without hidden states, for training in which the model changes."""

    def __init__(self, store: Documents, plan: Sequence[Sequence[int]]) -> None:
        self.store = store
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = self.plan[index]
        return {
            "token_ids": pad_sequence([self.store.token_ids[i] for i in documents], batch_first=True),  # (B, T)
            "loss_mask": pad_sequence([self.store.loss_masks[i] for i in documents], batch_first=True),  # (B, T)
            "documents": torch.tensor(documents),
        }

    @property
    def sources(self) -> Sequence[str]:
        """Where each document is from."""
        return self.store.sources


def _without_prompt(document: Document) -> Document:
    """From the position that guesses the first answer token on; at least one position remains.

    >>> loss_mask = torch.tensor([False, False, True, True])
    >>> _without_prompt(Document(torch.zeros(4, 1), torch.arange(4), loss_mask)).token_ids
    tensor([1, 2, 3])
    """
    first = max(0, int(document.loss_mask.int().argmax()) - 1)
    return Document(document.hidden[first:], document.token_ids[first:], document.loss_mask[first:])


def _windows(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """``order`` cut into pieces of about that many tokens."""
    windows: list[list[int]] = []
    size = max_tokens
    for index in order:
        if size >= max_tokens:
            windows.append([])
            size = 0
        windows[-1].append(index)
        size += lengths[index]
    return windows
