"""The target reads every text once, and its hidden states are written to a feature store.

Existing shards are kept, so a run that was stopped continues where it was.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from draftheads.data.chat_tokens import EncodedChat, encode_answer, encode_chat, encode_completion
from draftheads.data.features import (
    DOCUMENTS_PER_SHARD,
    Document,
    StoreMeta,
    read_meta,
    shard_path,
    write_meta,
    write_shard,
)
from draftheads.data.json_lines import at_line
from draftheads.data.live_features import fingerprint_of, read_alone
from draftheads.data.records import Record, read_chats
from draftheads.errors import DataError, StorageError
from draftheads.models.chat_template import ChatReader
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress


def load_texts(
    model: ChatReader, paths: Sequence[Path], *, max_length: int, max_tokens: int | None = None
) -> list[EncodedChat]:
    """The chats of all files as tokens, at most about ``max_tokens`` in all.

    Texts are cut after ``max_length`` tokens, or fewer if the model takes fewer. Those without an answer in them are
    left out.

    Raises:
        DataError: a bad line, with its file and line number; or no text at all.
    """
    return load_and_count(model, paths, max_length=max_length, max_tokens=max_tokens)[0]


def load_and_count(
    model: ChatReader, paths: Sequence[Path], *, max_length: int, max_tokens: int | None = None
) -> tuple[list[EncodedChat], int]:
    """The result of :func:`load_texts`, and the number of texts left out."""
    texts: list[EncodedChat] = []
    num_tokens = num_left_out = 0
    max_length = limited(max_length, model)
    own_fingerprint = cache(lambda: tokenizer_fingerprint(model.tokenizer))
    for chat in read_chats(*paths):
        with at_line(chat.path, chat.line_number):
            text = _encoded(model, chat, max_length, own_fingerprint)
        if any(text.loss_mask):
            texts.append(replace(text, source=chat.source))
            num_tokens += len(text.token_ids)
        else:
            num_left_out += 1
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    if not texts and not num_left_out:
        raise DataError(f"no chat in {', '.join(map(str, paths))}")
    if not texts:
        raise DataError(f"no answer within the first {counted(max_length, 'token')} in {', '.join(map(str, paths))}")
    return texts, num_left_out


def limited(length: int, model: ChatReader) -> int:
    """The length, or that of the model's longest text."""
    return min(length, model.max_positions or length)


def _encoded(model: ChatReader, chat: Record, max_length: int, own_fingerprint: Callable[[], str]) -> EncodedChat:
    """The text of a chat, or of tokens that a server recorded."""
    if chat.tokens is not None:
        chat.tokens.check_tokenizer(own_fingerprint())
        return encode_answer(chat.tokens.prompt_ids, chat.tokens.answer_ids, max_length=max_length)
    if not chat.messages:
        return EncodedChat((), ())
    if not chat.is_completion:
        return encode_chat(model, chat.messages, finished=chat.finished, max_length=max_length)
    prompt, completion = (message["content"] for message in chat.messages)
    return encode_completion(model, prompt, completion, finished=chat.finished, max_length=max_length)


def needed_bytes(target: TargetModel, texts: Sequence[EncodedChat], layers: Sequence[int] = ()) -> int:
    """The size of the store of these texts on the disk, approximately."""
    return _num_tokens(texts) * (2 * (len(layers) + 1) * target.hidden_size + 5)


def claim(target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layers: Sequence[int] = ()) -> None:
    """Writes ``meta.json``, which describes the store of these texts, or checks the one that is there.

    Raises:
        DataError: the folder has features of other texts, of another model or of other layers.
    """
    meta = StoreMeta(
        model_id=target.model_id,
        hidden_size=target.hidden_size,
        num_documents=len(texts),
        num_tokens=_num_tokens(texts),
        num_shards=len(_shards(texts)),
        fingerprint=fingerprint_of(target, texts),
        layers=list(layers),
    )
    there = read_meta(folder)
    if there is None:
        write_meta(folder, meta)
        return
    check_stored_layers(folder, there, layers)
    if there != meta:
        raise DataError(
            f"{folder} holds features of {counted(there.num_documents, 'text')} ({counted(there.num_tokens, 'token')}, "
            f"{there.model_id}, fingerprint {there.fingerprint}) but the data and settings give "
            f"{counted(meta.num_documents, 'text')} ({counted(meta.num_tokens, 'token')}, {meta.model_id}, fingerprint "
            f"{meta.fingerprint}): name another folder or delete this one"
        )


def check_stored_layers(folder: Path, meta: StoreMeta, layers: Sequence[int]) -> None:
    """Does a store have what a head reads?

    Raises:
        DataError: it has the inputs of other layers.
    """
    if meta.layers != list(layers):
        there, wanted = (f"of layers {list(of)}" if of else "of the last layer alone" for of in (meta.layers, layers))
        raise DataError(
            f"{folder} holds hidden states {there}, but the head reads those {wanted}: name another folder with "
            "--features, or delete this one"
        )


def build_shards(
    target: TargetModel,
    texts: Sequence[EncodedChat],
    folder: Path,
    progress: Progress,
    layers: Sequence[int] = (),
    *,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Makes the missing shards of the store of these texts; ``progress`` receives the tokens after every text.

    ``layers`` are n layers whose inputs are stored before h_t. ``share`` is as for :func:`missing_shards`.

    Raises:
        StorageError: the disk has too little room, or a shard cannot be written; earlier shards are complete.
    """
    missing = missing_shards(texts, folder, share)
    total = sum(_num_tokens(_part(texts, index)) for index in _shards(texts, share))
    done = total - sum(map(_num_tokens, missing.values()))
    _check_room(folder, sum(needed_bytes(target, part, layers) for part in missing_shards(texts, folder).values()))
    progress.progress(done, total)
    for index, part in missing.items():
        documents = []
        for text in part:
            token_ids = torch.tensor(text.token_ids)
            hidden = read_alone(target, token_ids, layers)
            documents.append(Document(hidden, token_ids, torch.tensor(text.loss_mask)))
            done += len(token_ids)
            progress.progress(done, total)
        write_shard(folder, index, documents, sources=[text.source for text in part])


def missing_shards(
    texts: Sequence[EncodedChat], folder: Path, share: tuple[int, int] = (0, 1)
) -> dict[int, Sequence[EncodedChat]]:
    """The texts of each missing shard among shards r, r + n, r + 2n, … of ``share`` (r, n)."""
    return {index: _part(texts, index) for index in _shards(texts, share) if not shard_path(folder, index).exists()}


def _shards(texts: Sequence[EncodedChat], share: tuple[int, int] = (0, 1)) -> range:
    return range(share[0], -(-len(texts) // DOCUMENTS_PER_SHARD), share[1])


def _part(texts: Sequence[EncodedChat], index: int) -> Sequence[EncodedChat]:
    return texts[index * DOCUMENTS_PER_SHARD : (index + 1) * DOCUMENTS_PER_SHARD]


def _check_room(folder: Path, needed: int) -> None:
    """Fails before hours of work if their result does not fit on the disk."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise StorageError(
            f"{folder}: the hidden states need {needed / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB left: name "
            "another disk with --features, read less with --max-tokens, or store nothing with --features-budget 0"
        )


def _num_tokens(texts: Sequence[EncodedChat]) -> int:
    return sum(len(text.token_ids) for text in texts)
