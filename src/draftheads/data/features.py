"""Texts with the target's hidden states on disk, in shards that are not loaded as a whole.

A store is a folder::

    meta.json                describes the complete store (StoreMeta)
    shard-00000.safetensors  hidden (T, (n+1)·D) bf16, token_ids (T,) int32, loss_mask (T,) bool, …
    …

``hidden`` is h_t, (T, D); for heads that read the inputs of n layers it is these, and then h_t. A store serves all
heads that read some of its layers. The texts of a shard follow each other along T; ``lengths`` (texts,) int32 has their
lengths, ``is_plain`` (texts,) bool which are plain text. A shard is written whole or not at all.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftheads.errors import CheckpointError, DataError
from draftheads.utils.counts import counted
from draftheads.utils.files import write_atomic
from draftheads.utils.strict_json import read_dataclass, read_object

FORMAT_VERSION = 2


@dataclass(frozen=True)
class StoreMeta:
    """The content of ``meta.json``."""

    model_id: str  # whose hidden states these are
    hidden_size: int  # D
    num_documents: int
    num_tokens: int
    num_shards: int
    fingerprint: str  # of the texts and the model
    layers: list[int]  # n layers whose inputs are stored before h_t
    dtype: str = "bfloat16"
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Document:
    """One text with its hidden states."""

    hidden: Tensor  # (T, D), or (T, (n+1)·D) with the inputs of n layers before h_t
    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool


class Documents:
    """Texts with hidden states: stored (FeatureStore), or computed on access (LiveStore)."""

    token_ids: list[Tensor]  # per document (T,) int64
    loss_masks: list[Tensor]  # per document (T,) bool
    sources: list[str]  # per document FILE:LINE
    is_plain: list[bool]  # per document: plain text, not a chat
    fingerprint: str  # of the texts and the model

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: int) -> Document:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @cached_property  # read once per text of every batch
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.token_ids]


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_meta(folder: Path, meta: StoreMeta) -> None:
    write_atomic(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())


def read_meta(folder: Path) -> StoreMeta | None:
    """The store's ``meta.json``, or None where there is none."""
    path = folder / "meta.json"
    if not path.exists():
        return None
    try:
        meta = read_dataclass(StoreMeta, read_object(path, newest=FORMAT_VERSION), path, "")
    except CheckpointError as error:
        raise DataError(f"{error}; or delete the folder") from None
    if meta.format_version != FORMAT_VERSION:
        raise DataError(f"{path}: format_version is {meta.format_version}, not {FORMAT_VERSION}: delete the folder")
    return meta


def check_stored_layers(folder: Path, meta: StoreMeta, layers: Sequence[int]) -> None:
    """Does a store have what a head reads?"""
    if not set(layers) <= set(meta.layers):
        there, wanted = (f"of layers {list(of)}" if of else "of the last layer alone" for of in (meta.layers, layers))
        raise DataError(
            f"{folder} holds hidden states {there}, but the head reads those {wanted}: name another folder with "
            "--features, or delete this one"
        )


def write_shard(
    folder: Path, index: int, documents: Sequence[Document], *, sources: Sequence[str], is_plain: Sequence[bool]
) -> None:
    """Writes one shard whole or not at all; ``sources`` and ``is_plain`` as in a store."""
    tensors = {
        "hidden": torch.cat([document.hidden for document in documents]).to(torch.bfloat16),
        "token_ids": torch.cat([document.token_ids for document in documents]).to(torch.int32),
        "loss_mask": torch.cat([document.loss_mask for document in documents]),
        "lengths": torch.tensor([len(document.token_ids) for document in documents], dtype=torch.int32),
        "is_plain": torch.tensor(is_plain),
    }
    write_atomic(shard_path(folder, index), save(tensors, metadata={"sources": json.dumps(list(sources))}))


def stored(folder: Path) -> tuple[int, int]:
    """The number of texts and of tokens in the shards of a store that may be incomplete."""
    num_texts = num_tokens = 0
    for path in folder.glob("shard-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            num_texts += file.get_slice("lengths").get_shape()[0]
            num_tokens += file.get_slice("token_ids").get_shape()[0]
    return num_texts, num_tokens


class FeatureStore(Documents):
    """A complete store. Hidden states are read from disk per document; token ids and masks are kept in memory."""

    def __init__(self, folder: Path, layers: Sequence[int] | None = None) -> None:
        """Opens a store to read h_t with the inputs of ``layers``, by default of all that are there.

        Raises DataError where there is no store, where it is incomplete or damaged, or where it lacks a layer.
        """
        meta = read_meta(folder)
        if meta is None:
            raise DataError(f"{folder}: no meta.json, so this is not a feature store")
        check_stored_layers(folder, meta, meta.layers if layers is None else layers)
        self.folder, self.meta, self.fingerprint = folder, meta, meta.fingerprint
        self._parts = None if layers is None or list(layers) == meta.layers else [*map(meta.layers.index, layers), -1]
        self._shards: list[Any] = []  # the open files' "hidden" slices
        self._starts: list[tuple[int, int]] = []  # per document: shard, first token in it
        self.token_ids, self.loss_masks, self.sources, self.is_plain = [], [], [], []
        for index in range(meta.num_shards):
            self._open(index)
        if len(self) != meta.num_documents:
            raise DataError(
                f"{folder}: {counted(len(self), 'text')} in the shards but meta.json says {meta.num_documents}"
            )

    def __getitem__(self, index: int) -> Document:
        shard, start = self._starts[index]
        token_ids = self.token_ids[index]
        hidden = self._shards[shard][start : start + len(token_ids)]
        if self._parts is not None:
            hidden = hidden.unflatten(1, (-1, self.meta.hidden_size))[:, self._parts].flatten(1)
        return Document(hidden, token_ids, self.loss_masks[index])

    def _open(self, index: int) -> None:
        path = shard_path(self.folder, index)
        if not path.exists():
            raise DataError(f"{path} is missing, the features are not complete: give --data to complete them")
        try:
            file = safe_open(path, framework="pt")
            lengths = file.get_tensor("lengths").tolist()
            token_ids = file.get_tensor("token_ids").long()
            loss_mask = file.get_tensor("loss_mask").bool()
            is_plain = file.get_tensor("is_plain").tolist()
            hidden = file.get_slice("hidden")
            sources = json.loads((file.metadata() or {})["sources"])
        except (OSError, SafetensorError, ValueError, LookupError) as error:
            raise DataError(f"{path}: {error}; delete the damaged shard; the same command makes it again") from None
        sizes = (hidden.get_shape(), len(token_ids), len(loss_mask), sum(lengths), len(sources), len(is_plain))
        width = (len(self.meta.layers) + 1) * self.meta.hidden_size
        expected = ([len(token_ids), width], *(3 * [len(token_ids)]), len(lengths), len(lengths))
        if sizes != expected:
            raise DataError(f"{path}: its parts have sizes {sizes}, expected {expected}")
        self._shards.append(hidden)
        self._starts += [(index, sum(lengths[:i])) for i in range(len(lengths))]
        self.token_ids += token_ids.split(lengths)
        self.loss_masks += loss_mask.split(lengths)
        self.sources += sources
        self.is_plain += is_plain
