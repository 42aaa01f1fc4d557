"""Texts of a run in arrays, and their hidden states: on disk, mapped and not loaded, or computed on access.

The target reads every text once, and its hidden states are written to a store. Existing ones are kept, so a run that
was stopped continues where it was. A store is a folder::

    meta.json          describes the complete store (StoreMeta)
    texts/             the texts (Texts)
    shard-00000.bf16   hidden states (T, (n+1)·D) of the texts of a shard
    …

A row is h_t, (D,); for heads that read the inputs of n layers it is these, and then h_t. A store serves all heads that
read some of its layers. The texts of a shard follow each other along T. A shard grows until it has all its texts.
"""

import hashlib
import json
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftheads.data.texts import EncodedChat
from draftheads.errors import CheckpointError, DataError
from draftheads.models.chat_template import date_now, reads_variable
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.files import append_synced, atomic_directory, write_atomic
from draftheads.utils.progress import Progress
from draftheads.utils.strict_json import read_dataclass, read_object

FORMAT_VERSION = 3
TOKENS_PER_SHARD = 4096  # at least; a run that is stopped loses at most the work for about as many
_NUM_CHECKED = 16  # rows of each shard that are looked at when a store is opened
_MOST_SHARDS = 512  # their files are mapped at the same time
_ARRAYS = {"token_ids": np.int32, "loss_mask": np.bool_, "starts": np.int64, "is_plain": np.bool_, "places": np.int64}
T = TypeVar("T")


class Texts(Sequence[EncodedChat]):
    """Texts that follow each other in arrays, in memory or mapped from files that all processes of a host share.

    Attributes:
        token_ids: (T,) int32, of all texts.
        loss_mask: (T,) bool.
        starts: (N + 1,) int64, where each text begins, and the end.
        is_plain: (N,) bool, which are plain text and not chats.
        places: (2·N,) int64, of each text its file and its line.
        facts: the names of the ``files``, and what else was written beside them.
        folder: that has the files; None: the arrays are in memory.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], folder: Path | None = None) -> None:
        self.token_ids, self.loss_mask, self.starts, self.is_plain, self.places = map(arrays.__getitem__, _ARRAYS)
        self.facts, self.folder = facts, folder
        self.fingerprints: dict[str, str] = {}  # see :func:`fingerprint_of`

    @classmethod
    def of(cls, texts: Iterable[EncodedChat]) -> "Texts":
        """The same texts in arrays in memory, if they are in none."""
        if isinstance(texts, cls):
            return texts
        ids, masks = BytesIO(), BytesIO()
        arrays, files = _collected(texts, ids, masks)
        parts = {"token_ids": ids.getvalue(), "loss_mask": masks.getvalue(), **arrays}
        return cls({name: np.frombuffer(parts[name], kind) for name, kind in _ARRAYS.items()}, {"files": files})

    @classmethod
    def write(cls, folder: Path, texts: Iterable[EncodedChat], facts: Mapping[str, Any] | None = None) -> None:
        """Writes texts one by one, all or nothing; ``facts`` are JSON values, as they are at the end."""
        with atomic_directory(folder, replace=True) as staged:
            with (staged / "token_ids").open("wb") as ids, (staged / "loss_mask").open("wb") as masks:
                arrays, files = _collected(texts, ids, masks)
            for name, values in arrays.items():
                (staged / name).write_bytes(values)
            (staged / "texts.json").write_text(json.dumps({"files": files, **(facts or {})}), encoding="utf-8")

    @classmethod
    def open(cls, folder: Path) -> "Texts":
        """Maps what :meth:`write` wrote; raises DataError where it is damaged."""
        try:
            facts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
            arrays = {name: np.asarray(np.memmap(folder / name, kind, "r")) for name, kind in _ARRAYS.items()}
            texts = cls(arrays, {"files": [], **facts}, folder)
            sizes = [len(texts.token_ids), len(texts.loss_mask), len(texts.is_plain), len(texts.places) // 2]
            expected, problem = [*2 * [int(texts.starts[-1])], *2 * [len(texts)]], ""
        except (OSError, ValueError, TypeError) as error:
            sizes, expected, problem = [], [], str(error)
        if problem or sizes != expected:
            problem = problem or f"its parts have sizes {sizes}, expected {expected}"
            raise DataError(f"{folder} is damaged: {problem}; delete it; the same command makes it again")
        return texts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> EncodedChat:  # type: ignore[override]  # no slices
        ids, mask = (tuple(part.tolist()) for part in self.part(index))
        return EncodedChat(ids, mask, self.source(index), is_plain=bool(self.is_plain[index]))

    def part(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and loss mask of one text."""
        index = range(len(self))[index]  # raises IndexError
        own = slice(self.starts[index], self.starts[index + 1])
        return self.token_ids[own], self.loss_mask[own]

    def source(self, index: int) -> str:
        """``FILE:LINE`` of a text."""
        file, line = self.places[2 * index : 2 * index + 2].tolist()
        name: str = self.facts["files"][file]
        return f"{name}:{line}" if line else name


def _collected(texts: Iterable[EncodedChat], ids: BinaryIO, masks: BinaryIO) -> tuple[dict[str, bytes], list[str]]:
    """Writes tokens and masks; returns the arrays that have a few numbers for each text, and the names of files."""
    starts, plain, places, files = array("q", [0]), bytearray(), array("q"), dict[str, int]()
    for text in texts:
        ids.write(array("i", text.token_ids).tobytes())
        masks.write(bytes(text.loss_mask))
        starts.append(starts[-1] + len(text.token_ids))
        plain.append(text.is_plain)
        file, _, line = text.source.rpartition(":")
        file, line = (file, line) if line.isdecimal() else (text.source, "0")
        places.extend((files.setdefault(file, len(files)), int(line)))
    return {"starts": starts.tobytes(), "is_plain": bytes(plain), "places": places.tobytes()}, [*files]


@dataclass(frozen=True)
class StoreMeta:
    """The content of ``meta.json``."""

    model_id: str  # whose hidden states these are
    hidden_size: int  # D
    num_documents: int
    num_tokens: int
    shards: list[int]  # the first text of each
    fingerprint: str  # of the texts and the model
    layers: list[int]  # n layers whose inputs are stored before h_t
    date: str = ""  # that the chat template wrote into the texts, if it writes one
    dtype: str = "bfloat16"
    format_version: int = FORMAT_VERSION

    @property
    def row_bytes(self) -> int:
        """Of the hidden states of one token."""
        return 2 * (len(self.layers) + 1) * self.hidden_size

    def __str__(self) -> str:
        texts, tokens = counted(self.num_documents, "text"), counted(self.num_tokens, "token")
        return f"{texts} ({tokens}, {self.model_id}, fingerprint {self.fingerprint})"


@dataclass(frozen=True)
class Document:
    """One text with its hidden states."""

    hidden: Tensor  # (T, D), or (T, (n+1)·D) with the inputs of n layers before h_t
    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool


class _Each(Sequence[T]):
    """A value of every document, made on access."""

    def __init__(self, number: int, value: Callable[[int], T]) -> None:
        self._number, self._value = number, value

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> T:  # type: ignore[override]  # no slices
        return self._value(range(self._number)[index])


class Documents:
    """Texts with hidden states: stored (FeatureStore), or computed on access (LiveStore)."""

    texts: Texts
    fingerprint: str  # of the texts and the model

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Document:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @property
    def token_ids(self) -> Sequence[Tensor]:
        """Per document (T,) int64."""
        return _Each(len(self), lambda index: torch.from_numpy(self.texts.part(index)[0].astype(np.int64)))

    @property
    def loss_masks(self) -> Sequence[Tensor]:
        """Per document (T,) bool."""
        return _Each(len(self), lambda index: torch.from_numpy(self.texts.part(index)[1].copy()))

    @property
    def sources(self) -> Sequence[str]:
        """Per document ``FILE:LINE``."""
        return _Each(len(self), self.texts.source)

    @property
    def is_plain(self) -> np.ndarray:
        """(N,) bool: plain text, not a chat."""
        return self.texts.is_plain

    @cached_property  # read once per text of every batch
    def lengths(self) -> list[int]:
        lengths: list[int] = np.diff(self.texts.starts).tolist()
        return lengths


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.bf16"


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
    if (meta := read_meta(folder)) is None:
        return 0, 0
    texts = Texts.open(folder / "texts")
    parts = [(first, _end_in(folder, meta, texts, index)) for index, first in enumerate(meta.shards)]
    return sum(end - first for first, end in parts), sum(int(texts.starts[end] - texts.starts[i]) for i, end in parts)


def _texts_of(meta: StoreMeta, index: int) -> tuple[int, int]:
    """The first text of a shard, and that of the next one."""
    return meta.shards[index], [*meta.shards, meta.num_documents][index + 1]


def _end_in(folder: Path, meta: StoreMeta, texts: Texts, index: int) -> int:
    """The first text that a shard lacks, or that of the next shard."""
    first, end = _texts_of(meta, index)
    path = shard_path(folder, index)
    rows = path.stat().st_size // meta.row_bytes if path.exists() else 0
    return first + bisect_right((texts.starts[first + 1 : end + 1] - texts.starts[first]).tolist(), rows)


class FeatureStore(Documents):
    """A complete store. Hidden states are read from disk per document."""

    def __init__(self, folder: Path, layers: Sequence[int] | None = None) -> None:
        """Opens a store to read h_t with the inputs of ``layers``, by default of all that are there.

        Raises DataError where there is no store, where it is incomplete or damaged, or where it lacks a layer.
        """
        meta = read_meta(folder)
        if meta is None:
            fix = "give a folder of `draftheads train --features`; files of vLLM are read by train alone, with --data"
            raise DataError(f"{folder}: no meta.json, so this is not a feature store: {fix}")
        check_stored_layers(folder, meta, meta.layers if layers is None else layers)
        self.folder, self.meta, self.fingerprint = folder, meta, meta.fingerprint
        self._parts = None if layers is None or list(layers) == meta.layers else [*map(meta.layers.index, layers), -1]
        self.texts = Texts.open(folder / "texts")
        if len(self) != meta.num_documents or meta.shards != sorted({0, *meta.shards} & {*range(len(self))}):
            raise DataError(f"{folder}: {counted(len(self), 'text')} are there but meta.json says {meta.num_documents}")
        self._shards = list(map(self._mapped, range(len(meta.shards))))  # (T, (n+1)·D) int16

    def __getitem__(self, index: int) -> Document:
        shard, starts = bisect_right(self.meta.shards, index) - 1, self.texts.starts
        own = slice(*(starts[index : index + 2] - starts[self.meta.shards[shard]]))
        hidden = torch.from_numpy(np.array(self._shards[shard][own])).view(torch.bfloat16)
        if self._parts is not None:
            hidden = hidden.unflatten(1, (-1, self.meta.hidden_size))[:, self._parts].flatten(1)
        return Document(hidden, self.token_ids[index], self.loss_masks[index])

    def last_states(self, most: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of the longest text of each shard: where it is, its tokens, and up to ``most`` of its last h_t (n, D)."""
        for number, shard in enumerate(self._shards):
            first, end = _texts_of(self.meta, number)
            index = max(range(first, end), key=self.lengths.__getitem__)
            stop = int(self.texts.starts[index + 1] - self.texts.starts[first])
            rows = shard[stop - min(most, self.lengths[index]) : stop, -self.meta.hidden_size :]
            name = f"{shard_path(self.folder, number)} ({self.sources[index]})"
            yield name, self.token_ids[index], torch.from_numpy(np.array(rows)).view(torch.bfloat16)

    def check(self, target: TargetModel) -> None:
        """Raises DataError unless the store was made of the texts in it, by this target in this precision."""
        if (now := fingerprint_of(target, self.texts)) != self.fingerprint:
            made = f"made of other texts or weights, or in another precision, by {self.meta.model_id}"
            own = f"its texts and {target.model_id} ({target.dtype})"
            prints = f"fingerprint {self.fingerprint}, and now {now} of {own}"
            raise DataError(f"{self.folder} was {made} ({prints}): name another folder or delete this one")

    def _mapped(self, index: int) -> np.ndarray:
        path, (first, end) = shard_path(self.folder, index), _texts_of(self.meta, index)
        if not path.exists() or (found := _end_in(self.folder, self.meta, self.texts, index)) < end:
            there = f"has {found - first} of {counted(end - first, 'text')}" if path.exists() else "is missing"
            raise DataError(f"{path} {there}, the features are not complete: give --data to complete them")
        rows = int(self.texts.starts[end] - self.texts.starts[first])
        if path.stat().st_size != (expected := rows * self.meta.row_bytes):
            fix = "delete the damaged shard; the same command makes it again"
            raise DataError(f"{path} has {path.stat().st_size:,} bytes, expected {expected:,}: {fix}")
        shard = np.asarray(np.memmap(path, np.int16, "r")).reshape(rows, -1)
        if not torch.from_numpy(np.array(shard[:_NUM_CHECKED])).view(torch.bfloat16).isfinite().all():
            raise DataError(f"{path} has NaN or infinite hidden states: delete it; the same command makes it again")
        return shard


def read_alone(target: TargetModel, token_ids: Tensor, layers: Sequence[int] = ()) -> Tensor:
    """The hidden states of one text: (T,) -> (T, D) bf16, on the CPU; with n layers (T, (n+1)·D), h_t last.

    Texts are never read in batches: their hidden states would depend on their neighbours, so stored ones and those
    computed again would differ. On a CPU this is as fast, since nothing is padded.
    """
    return target.hidden_states(token_ids[None].to(target.device), layers)[0].to("cpu", torch.bfloat16)


def fingerprint_of(target: TargetModel, texts: Sequence[EncodedChat]) -> str:
    """A digest of what hidden states depend on: texts, and the name, type and samples of the weights of the model."""
    texts, model = Texts.of(texts), json.dumps([target.model_id, str(target.dtype), target.weights_fingerprint])
    if model not in texts.fingerprints:
        digest = hashlib.sha256(model.encode())
        for (start, end), is_plain in zip(pairwise(texts.starts.tolist()), texts.is_plain.tolist(), strict=True):
            digest.update(texts.token_ids[start:end].tobytes())
            digest.update(texts.loss_mask[start:end].tobytes() + bytes([is_plain]))
        texts.fingerprints[model] = digest.hexdigest()[:16]
    return texts.fingerprints[model]


class LiveStore(Documents):
    """The same as a feature store, but on access the model, as it is then, reads the document."""

    def __init__(self, target: TargetModel, texts: Sequence[EncodedChat], layers: Sequence[int] = ()) -> None:
        self.target, self.layers = target, layers
        self.texts = Texts.of(texts)
        self.fingerprint = fingerprint_of(target, self.texts)

    def __getitem__(self, index: int) -> Document:
        token_ids = self.token_ids[index]
        return Document(read_alone(self.target, token_ids, self.layers), token_ids, self.loss_masks[index])


def claim(target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layers: Sequence[int] = ()) -> None:
    """Writes ``meta.json`` and the texts of a store, or checks those that are there, which may have more layers."""
    texts, there = Texts.of(texts), read_meta(folder)
    if there is not None:
        check_stored_layers(folder, there, layers)
        layers = there.layers
    meta = StoreMeta(
        model_id=target.model_id,
        hidden_size=target.hidden_size,
        num_documents=len(texts),
        num_tokens=int(texts.starts[-1]),
        shards=there.shards if there else first_of_shards(np.diff(texts.starts).tolist()),
        fingerprint=fingerprint_of(target, texts),
        layers=list(layers),
        date=there.date if there else date_now() if reads_variable(target, "strftime_now") else "",
    )
    if there is None:
        if texts.folder is None:
            Texts.write(folder / "texts", texts)
        else:
            with atomic_directory(folder / "texts", replace=True) as staged:
                shutil.copytree(texts.folder, staged, dirs_exist_ok=True)
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
    """Completes a claimed store of these texts; ``progress`` receives the tokens after every text.

    Of ``share`` (r, n) only the shards r, r + n, r + 2n, … are completed.
    """
    meta, texts = read_meta(folder), Texts.of(texts)
    assert meta is not None, "a store is claimed before it is built"
    starts: list[int] = texts.starts.tolist()
    own = {index: _texts_of(meta, index) for index in range(share[0], len(meta.shards), share[1])}
    begun = {index: _end_in(folder, meta, texts, index) for index in own}
    total = sum(starts[end] - starts[first] for first, end in own.values())
    done = sum(starts[begun[index]] - starts[first] for index, (first, _) in own.items())
    progress.progress(done, total)
    for index, (first, end) in own.items():
        missing = range(begun[index], end)
        for part in cut_into_parts(missing, [starts[i + 1] - starts[i] for i in missing], TOKENS_PER_SHARD):
            hidden = []
            for i in part:
                hidden.append(read_alone(target, torch.from_numpy(texts.part(i)[0].astype(np.int64)), meta.layers))
                done += starts[i + 1] - starts[i]
                progress.progress(done, total)
            rows = torch.cat(hidden).view(torch.int16).numpy().tobytes()
            append_synced(shard_path(folder, index), rows, offset=(starts[part[0]] - starts[first]) * meta.row_bytes)


def first_of_shards(lengths: Sequence[int]) -> list[int]:
    """The first text of each shard, of texts with these lengths."""
    size = max(TOKENS_PER_SHARD, sum(lengths) // _MOST_SHARDS)
    return [part[0] for part in cut_into_parts(range(len(lengths)), lengths, size)]


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
