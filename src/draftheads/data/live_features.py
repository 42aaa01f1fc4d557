"""Texts whose hidden states are computed on access: for a model that changes, or if the disk has too little room."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from draftheads.data.chat_tokens import EncodedChat
from draftheads.data.features import Document, Documents
from draftheads.models.model import TargetModel


def read_alone(target: TargetModel, token_ids: Tensor, layers: Sequence[int] = ()) -> Tensor:
    """The hidden states of one text: (T,) -> (T, D) bf16, on the CPU; with n layers (T, (n+1)·D), h_t last.

    Texts are never read in batches: their hidden states would depend on their neighbours, so stored ones and those
    computed again would differ. On a CPU this is as fast, since nothing is padded.
    """
    return target.hidden_states(token_ids[None].to(target.device), layers)[0].to("cpu", torch.bfloat16)


def fingerprint_of(target: TargetModel, texts: Sequence[EncodedChat]) -> str:
    """A digest of what hidden states depend on: texts, and the name, type and samples of the weights of the model."""
    digest = hashlib.sha256(json.dumps([target.model_id, str(target.dtype), target.weights_fingerprint]).encode())
    for text in texts:
        digest.update(torch.tensor(text.token_ids, dtype=torch.int32).numpy().tobytes())
        digest.update(torch.tensor([*text.loss_mask, text.is_plain]).numpy().tobytes())
    return digest.hexdigest()[:16]


class LiveStore(Documents):
    """The same as a feature store, but on access the model, as it is then, reads the document."""

    def __init__(self, target: TargetModel, texts: Sequence[EncodedChat], layers: Sequence[int] = ()) -> None:
        self.target, self.layers = target, layers
        self.token_ids = [torch.tensor(text.token_ids) for text in texts]
        self.loss_masks = [torch.tensor(text.loss_mask) for text in texts]
        self.sources = [text.source for text in texts]
        self.is_plain = [text.is_plain for text in texts]
        self.fingerprint = fingerprint_of(target, texts)

    def __getitem__(self, index: int) -> Document:
        token_ids = self.token_ids[index]
        return Document(read_alone(self.target, token_ids, self.layers), token_ids, self.loss_masks[index])
