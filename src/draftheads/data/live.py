"""Texts whose hidden states are computed when they are asked for: of a model that changes, they cannot be stored.

Knows the target model; knows nothing of heads or training.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch

from draftheads.data.chat import EncodedChat
from draftheads.data.features import Document
from draftheads.target.model import TargetModel


class LiveStore:
    """The same face as a feature store; a document is read by the model as it is now."""

    def __init__(self, target: TargetModel, texts: Sequence[EncodedChat]) -> None:
        self.target = target
        self.token_ids = [torch.tensor(text.token_ids) for text in texts]
        self.loss_masks = [torch.tensor(text.loss_mask) for text in texts]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: int) -> Document:
        token_ids = self.token_ids[index]
        hidden = self.target.hidden_states(token_ids[None].to(self.target.device))[0]
        return Document(hidden.cpu(), token_ids, self.loss_masks[index])

    @cached_property  # asked for once per text of every batch
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(ids) for ids in self.token_ids]

    @property
    def fingerprint(self) -> str:
        """Of the texts: 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for token_ids, loss_mask in zip(self.token_ids, self.loss_masks, strict=True):
            digest.update(token_ids.numpy().tobytes() + loss_mask.numpy().tobytes())
        return digest.hexdigest()[:16]
