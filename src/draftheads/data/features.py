"""Texts with the target's hidden states: on disk, in shards that are not loaded as a whole, or computed on access.

The target reads every text once, and its hidden states are written to a store. Existing shards are kept, so a run that
was stopped continues where it was. A store is a folder::

    meta.json                describes the complete store (StoreMeta)
    shard-00000.safetensors  hidden (T, (n+1)·D) bf16, token_ids (T,) int32, loss_mask (T,) bool, …
    …

``hidden`` is h_t, (T, D); for heads that read the inputs of n layers it is these, and then h_t. A store serves all
heads that read some of its layers. The texts of a shard follow each other along T; ``lengths`` (texts,) int32 has their
lengths, ``is_plain`` (texts,) bool which are plain text. A shard is written whole or not at all.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftheads.data.texts import EncodedChat
from draftheads.errors import CheckpointError, DataError
from draftheads.models.chat_template import date_now, reads_variable
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.files import write_atomic
from draftheads.utils.progress import Progress
from draftheads.utils.strict_json import read_dataclass, read_object

FORMAT_VERSION = 2
TOKENS_PER_SHARD = 4096  # a run that is stopped loses at most the work for about as many
_NUM_CHECKED = 16  # rows of each shard that are looked at when a store is opened
_MOST_SHARDS = 4096  # their files are open at the same time
T = TypeVar("T")


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
    date: str = ""  # that the chat template wrote into the texts, if it writes one
    dtype: str = "bfloat16"
    format_version: int = FORMAT_VERSION

    def __str__(self) -> str:
        texts, tokens = counted(self.num_documents, "text"), counted(self.num_tokens, "token")
        return f"{texts} ({tokens}, {self.model_id}, fingerprint {self.fingerprint})"


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
        fix = "name another folder with --features, or delete this one"
        raise DataError(f"{folder} holds hidden states {there}, but the head reads those {wanted}: {fix}")


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

    def check(self, target: TargetModel) -> None:
        """Raises DataError unless the store was made of the texts in its shards, by this target in this precision."""
        of = zip(self.token_ids, self.loss_masks, self.is_plain, strict=True)
        texts = [EncodedChat(tuple(ids.tolist()), tuple(mask.tolist()), is_plain=plain) for ids, mask, plain in of]
        if (now := fingerprint_of(target, texts)) != self.fingerprint:
            made = f"made of other texts or weights, or in another precision, by {self.meta.model_id}"
            own = f"its shards and {target.model_id} ({target.dtype})"
            prints = f"fingerprint {self.fingerprint}, and now {now} of {own}"
            raise DataError(f"{self.folder} was {made} ({prints}): name another folder or delete this one")

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
        if not hidden[:_NUM_CHECKED].isfinite().all():
            raise DataError(f"{path} has NaN or infinite hidden states: delete it; the same command makes it again")
        self._shards.append(hidden)
        self._starts += [(index, sum(lengths[:i])) for i in range(len(lengths))]
        self.token_ids += token_ids.split(lengths)
        self.loss_masks += loss_mask.split(lengths)
        self.sources += sources
        self.is_plain += is_plain


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


def needed_bytes(target: TargetModel, texts: Sequence[EncodedChat], layers: Sequence[int] = ()) -> int:
    """The size of the store of these texts on the disk, approximately."""
    return _num_tokens(texts) * (2 * (len(layers) + 1) * target.hidden_size + 5)


def has_room(target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layers: Sequence[int] = ()) -> bool:
    """Whether the missing shards of the store of these texts take at most half of the disk that is free."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    needed = sum(needed_bytes(target, part, layers) for part in missing_shards(texts, folder).values())
    return needed <= shutil.disk_usage(there).free / 2


def claim(target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layers: Sequence[int] = ()) -> None:
    """Writes ``meta.json``, which describes the store of these texts, or checks the one that is there.

    That one may have more layers.
    """
    there = read_meta(folder)
    if there is not None:
        check_stored_layers(folder, there, layers)
        layers = there.layers
    meta = StoreMeta(
        model_id=target.model_id,
        hidden_size=target.hidden_size,
        num_documents=len(texts),
        num_tokens=_num_tokens(texts),
        num_shards=len(_parts(texts)),
        fingerprint=fingerprint_of(target, texts),
        layers=list(layers),
        date=there.date if there else date_now() if reads_variable(target, "strftime_now") else "",
    )
    if there is None:
        write_atomic(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())
    elif there != meta:
        fix = "name another folder or delete this one"
        raise DataError(f"{folder} holds features of {there} but the data and settings give {meta}: {fix}")


def build_shards(
    target: TargetModel,
    texts: Sequence[EncodedChat],
    folder: Path,
    progress: Progress,
    *,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Makes the missing shards of a claimed store of these texts; ``progress`` receives the tokens after every text.

    ``share`` is as for :func:`missing_shards`.
    """
    meta, missing = read_meta(folder), missing_shards(texts, folder, share)
    assert meta is not None, "a store is claimed before it is built"
    total = sum(map(_num_tokens, _parts(texts)[share[0] :: share[1]]))
    done = total - sum(map(_num_tokens, missing.values()))
    progress.progress(done, total)
    for index, part in missing.items():
        hidden = []
        for text in part:
            hidden.append(read_alone(target, torch.tensor(text.token_ids), meta.layers))
            done += len(text.token_ids)
            progress.progress(done, total)
        tensors = {
            "hidden": torch.cat(hidden),
            "token_ids": torch.tensor([token for text in part for token in text.token_ids], dtype=torch.int32),
            "loss_mask": torch.tensor([is_said for text in part for is_said in text.loss_mask]),
            "lengths": torch.tensor([len(text.token_ids) for text in part], dtype=torch.int32),
            "is_plain": torch.tensor([text.is_plain for text in part]),
        }
        sources = json.dumps([text.source for text in part])
        write_atomic(shard_path(folder, index), save(tensors, metadata={"sources": sources}))


def missing_shards(
    texts: Sequence[EncodedChat], folder: Path, share: tuple[int, int] = (0, 1)
) -> dict[int, Sequence[EncodedChat]]:
    """The texts of each missing shard among shards r, r + n, r + 2n, … of ``share`` (r, n)."""
    every = list(enumerate(_parts(texts)))[share[0] :: share[1]]
    return {index: part for index, part in every if not shard_path(folder, index).exists()}


def _parts(texts: Sequence[EncodedChat]) -> list[list[EncodedChat]]:
    size = max(TOKENS_PER_SHARD, _num_tokens(texts) // _MOST_SHARDS)
    return cut_into_parts(texts, [len(text.token_ids) for text in texts], size)


def cut_into_parts(items: Sequence[T], sizes: Sequence[int], size: int) -> list[list[T]]:
    """Items in a row, each part as soon as its sizes add up to ``size``.

    >>> cut_into_parts("abcd", [3, 1, 5, 1], 4)
    [['a', 'b'], ['c'], ['d']]
    """
    parts: list[list[T]] = []
    total = size
    for item, own in zip(items, sizes, strict=True):
        if total >= size:
            parts.append([])
            total = 0
        parts[-1].append(item)
        total += own
    return parts


def _num_tokens(texts: Sequence[EncodedChat]) -> int:
    return sum(len(text.token_ids) for text in texts)
