"""The batches of a training run, and their tensors.

The seed of a run decides all its batches before it starts, so batch n is the same in a resumed run.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from draftheads.data.features import Document, Documents, cut_into_parts
from draftheads.errors import DataError

NUM_MEASURED = 200  # held-out texts on which heads are measured; measuring on more takes long
_WINDOW_BATCHES = 32  # the texts of so many batches are sorted by length: little padding, and still mixed


@dataclass(frozen=True)
class Batch:
    """Texts, padded on the right to the same length."""

    hidden: Tensor  # (B, T, D)
    token_ids: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool, False on padding
    lengths: Tensor  # (B,) int64: tokens of each text, without padding, with what is left out of its prompt


def collate(documents: Sequence[Document], *, skip_prompts: bool) -> Batch:
    """Pads texts to the length of the longest, rounded up.

    ``skip_prompts`` leaves out the tokens before the first position that a head reads. Only for heads that read no
    earlier positions: for them it makes no difference.
    """
    lengths = torch.tensor([len(document.token_ids) for document in documents])
    if skip_prompts:
        documents = [_without_prompt(document) for document in documents]
    names = ("hidden", "token_ids", "loss_mask")
    parts = {name: _padded([getattr(document, name) for document in documents]) for name in names}
    return Batch(**parts, lengths=lengths)


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    """(B, T, …) from B tensors (t, …); T is rounded up."""
    padded = pad_sequence(list(tensors), batch_first=True)
    missing = padded_length(padded.shape[1]) - padded.shape[1]
    return F.pad(padded, (0, 0) * (padded.dim() - 2) + (0, missing))


def padded_length(length: int) -> int:
    """The length to which a text of that length is padded: few lengths, because oneDNN makes a kernel for each size.

    Multiples of 32; of less for short texts, so that padding adds less than a quarter.

    >>> [padded_length(n) for n in (0, 7, 19, 33, 100, 300)]
    [0, 7, 20, 40, 112, 320]
    """
    multiple = min(32, 1 << max(0, length.bit_length() - 3))
    return length + -length % multiple


def choose_texts(
    token_ids: Sequence[Tensor], loss_masks: Sequence[Tensor], *, held_out: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices of the training texts and of the held-out texts of a run, split by :func:`split_held_out`."""
    training, evaluation = split_held_out(token_ids, loss_masks, fraction=held_out, seed=seed)
    if not training:
        raise DataError("only one text: training needs a second one to hold out")
    training = trainable(training, loss_masks)
    if not training:
        raise DataError("no two assistant tokens in a row in any text: give longer answers")
    return training, evaluation


def split_held_out(
    token_ids: Sequence[Tensor], loss_masks: Sequence[Tensor], *, fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices of the training texts and of the held-out texts, the latter in order of their hashes.

    Of every text, ``token_ids`` has (T,) int64 and ``loss_masks`` (T,) bool.

    A text is held out if a hash of its prompt is below a limit, which depends only on ``fraction``. So a text that is
    held out of one set is held out of each set: a head that starts from another head is not measured on the training
    texts of that head. Answers to the same prompt are on the same side. At least one text is held out, and if there are
    two, at least one is not.
    """

    def drawn(ids: Tensor) -> int:
        key = seed.to_bytes(8, "little")
        digest = hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), key=key, digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def place(ids: Tensor, mask: Tensor) -> tuple[int, int]:
        prompt = ids[: int(mask.int().argmax())]
        return drawn(prompt if len(prompt) else ids), drawn(ids)

    places = [place(ids, mask) for ids, mask in zip(token_ids, loss_masks, strict=True)]
    order = sorted(range(len(places)), key=places.__getitem__)
    size = sum(of_prompt < fraction * 2**64 for of_prompt, _ in places)
    size = max(1, min(size, len(order) - 1))
    return sorted(order[size:]), order[:size]


def trainable(documents: Sequence[int], loss_masks: Sequence[Tensor]) -> list[int]:
    """The documents with two assistant tokens in a row: others cannot train a draft head.

    >>> trainable([0, 1], [torch.tensor([True, False, True]), torch.tensor([False, True, True])])
    [1]
    """
    return [i for i in documents if bool((loss_masks[i][1:] & loss_masks[i][:-1]).any())]


def plan_batches(
    documents: Sequence[int], lengths: Sequence[int], *, max_tokens: int, num_epochs: int, seed: int
) -> list[list[int]]:
    """The document indices of every batch of a run, one epoch after the other.

    Each epoch shuffles all documents and cuts them into windows. In a window, documents of similar length form batches.
    Then the batches are shuffled.

    Args:
        documents: indices to train on.
        lengths: tokens of every document of the store.
        max_tokens: of a batch, as for :func:`bucket_by_length`.
        num_epochs: how often each document is used.
        seed: decides all shuffles.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    plan: list[list[int]] = []
    for _ in range(num_epochs):
        order = list(documents)
        rng.shuffle(order)
        batches: list[list[int]] = []
        for window in cut_into_parts(order, [lengths[i] for i in order], _WINDOW_BATCHES * max_tokens):
            groups = bucket_by_length([lengths[i] for i in window], max_tokens)
            batches += [[window[i] for i in group] for group in groups]
        rng.shuffle(batches)
        plan += batches
    return plan


def in_whole_steps(plan: Sequence[list[int]], batches_per_step: int, least_steps: int = 0) -> list[list[int]]:
    """The plan, with its first batches repeated at the end until the last step is full.

    >>> in_whole_steps([[0], [1], [2]], 2)
    [[0], [1], [2], [0]]
    """
    missing = max(-len(plan) % batches_per_step, least_steps * batches_per_step - len(plan))
    return [*plan, *(plan[i % len(plan)] for i in range(missing))]


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in groups of similar length with at most ``max_tokens`` padded tokens; a longer text is its own group.

    >>> bucket_by_length([5, 2, 9, 2], 10)
    [[1, 3], [0], [2]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or (len(groups[-1]) + 1) * padded_length(lengths[index]) > max_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


class PlannedTexts(Dataset[dict[str, Any]]):
    """Batch n of a plan without hidden states, for training that changes the model."""

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
            "lengths": torch.tensor([len(self.store.token_ids[i]) for i in documents]),
            "documents": torch.tensor(documents),
        }

    def texts(self, index: int) -> dict[str, Tensor]:
        """``token_ids`` and ``loss_mask`` of batch n alone."""
        batch = self[index]
        return {name: batch[name] for name in ("token_ids", "loss_mask")}


class PlannedBatches(PlannedTexts):
    """Batch n of a plan: the keyword arguments of a training step, and the indices of its documents."""

    def __init__(self, store: Documents, plan: Sequence[Sequence[int]], *, skip_prompts: bool) -> None:
        super().__init__(store, plan)
        self.skip_prompts = skip_prompts

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = collate([self.store[i] for i in self.plan[index]], skip_prompts=self.skip_prompts)
        return {**vars(batch), "documents": torch.tensor(self.plan[index])}

    def texts(self, index: int) -> dict[str, Tensor]:
        """As above; no hidden states are read."""
        texts = ((self.store.token_ids[i], self.store.loss_masks[i]) for i in self.plan[index])
        bare = [Document(ids.new_empty(len(ids), 1), ids, mask) for ids, mask in texts]
        batch = collate(bare, skip_prompts=self.skip_prompts)
        return {"token_ids": batch.token_ids, "loss_mask": batch.loss_mask}


def _without_prompt(document: Document) -> Document:
    """The part from the position before the first answer token."""
    first = max(0, int(document.loss_mask.int().argmax()) - 1)
    return Document(document.hidden[first:], document.token_ids[first:], document.loss_mask[first:])
