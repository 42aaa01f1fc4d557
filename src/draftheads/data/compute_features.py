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
    Document,
    StoreMeta,
    check_stored_layers,
    read_meta,
    shard_path,
    write_meta,
    write_shard,
)
from draftheads.data.json_lines import at_line
from draftheads.data.live_features import fingerprint_of, read_alone
from draftheads.data.records import Record, read_chats
from draftheads.errors import DataError, StorageError, UnlearnableChat
from draftheads.models.chat_template import ChatReader
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress

TOKENS_PER_SHARD = 4096  # a run that is stopped loses at most the work for about as many
_MOST_SHARDS = 4096  # their files are open at the same time
LeftOut = dict[str, list[str]]  # FILE:LINE of chats that nothing can be learned from, by the reason


def load_texts(
    model: ChatReader,
    paths: Sequence[Path],
    *,
    max_length: int,
    max_tokens: int | None = None,
    left_out: LeftOut | None = None,
) -> list[EncodedChat]:
    """The chats of all files as tokens, at most about ``max_tokens`` in all.

    Texts are cut after ``max_length`` tokens, or fewer if the model takes fewer. Chats that nothing can be learned from
    are left out, and added to ``left_out``.
    """
    texts: list[EncodedChat] = []
    num_tokens = 0
    left_out = {} if left_out is None else left_out
    max_length = limited(max_length, model)
    own_fingerprint = cache(lambda: tokenizer_fingerprint(model.tokenizer))
    for chat in read_chats(*paths):
        reason = f"no answer within the first {counted(max_length, 'token')}"
        found: list[EncodedChat] = []
        with at_line(chat.path, chat.line_number):
            try:
                last = _encoded(model, chat, max_length, own_fingerprint)
                found = [replace(text, source=chat.source, earlier=()) for text in (*last.earlier, last)]
            except UnlearnableChat as error:
                reason = str(error)
        found = [text for text in found if any(text.loss_mask)]
        texts += found
        num_tokens += sum(len(text.token_ids) for text in found)
        if not found:
            left_out.setdefault(reason, []).append(chat.source)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    if not texts:
        what = "no chat to learn from" if left_out else "no chat"
        raise DataError(": ".join([f"{what} in {', '.join(map(str, paths))}", *left_out_lines(left_out)]))
    return texts


def left_out_lines(left_out: LeftOut) -> list[str]:
    """What to tell of chats that were left out.

    >>> left_out_lines({"no answer": ["a.jsonl:3", "a.jsonl:7"]})
    ['2 chats were left out: no answer (the first is a.jsonl:3)']
    """
    return [
        f"{counted(len(places), 'chat')} {'was' if len(places) == 1 else 'were'} left out: {reason} "
        f"(the first is {places[0]})"
        for reason, places in sorted(left_out.items(), key=lambda item: -len(item[1]))
    ]


def limited(length: int, model: ChatReader) -> int:
    """The length, or that of the model's longest text."""
    return min(length, model.max_positions or length)


def _encoded(model: ChatReader, chat: Record, max_length: int, own_fingerprint: Callable[[], str]) -> EncodedChat:
    """The text of a chat, or of tokens that a server recorded."""
    if chat.tokens is not None:
        chat.tokens.check_tokenizer(own_fingerprint())
        return encode_answer(chat.tokens.prompt_ids, chat.tokens.answer_ids, max_length=max_length)
    if chat.problem:
        raise UnlearnableChat(chat.problem)
    if not chat.is_completion:
        return encode_chat(
            model,
            chat.messages,
            finished=chat.finished,
            max_length=max_length,
            tools=chat.tools,
            is_generated=chat.is_generated,
        )
    prompt, completion = (message["content"] for message in chat.messages)
    return encode_completion(model, prompt, completion, finished=chat.finished, max_length=max_length)


def needed_bytes(target: TargetModel, texts: Sequence[EncodedChat], layers: Sequence[int] = ()) -> int:
    """The size of the store of these texts on the disk, approximately."""
    return _num_tokens(texts) * (2 * (len(layers) + 1) * target.hidden_size + 5)


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
    )
    if there is None:
        write_meta(folder, meta)
    elif there != meta:
        raise DataError(
            f"{folder} holds features of {counted(there.num_documents, 'text')} ({counted(there.num_tokens, 'token')}, "
            f"{there.model_id}, fingerprint {there.fingerprint}) but the data and settings give "
            f"{counted(meta.num_documents, 'text')} ({counted(meta.num_tokens, 'token')}, {meta.model_id}, fingerprint "
            f"{meta.fingerprint}): name another folder or delete this one"
        )


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
    meta = read_meta(folder)
    assert meta is not None, "a store is claimed before it is built"
    layers = meta.layers
    missing = missing_shards(texts, folder, share)
    total = sum(map(_num_tokens, _parts(texts)[share[0] :: share[1]]))
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
        sources, is_plain = [text.source for text in part], [text.is_plain for text in part]
        write_shard(folder, index, documents, sources=sources, is_plain=is_plain)


def missing_shards(
    texts: Sequence[EncodedChat], folder: Path, share: tuple[int, int] = (0, 1)
) -> dict[int, Sequence[EncodedChat]]:
    """The texts of each missing shard among shards r, r + n, r + 2n, … of ``share`` (r, n)."""
    every = list(enumerate(_parts(texts)))[share[0] :: share[1]]
    return {index: part for index, part in every if not shard_path(folder, index).exists()}


def _parts(texts: Sequence[EncodedChat]) -> list[list[EncodedChat]]:
    size = max(TOKENS_PER_SHARD, _num_tokens(texts) // _MOST_SHARDS)
    parts: list[list[EncodedChat]] = []
    num_tokens = size
    for text in texts:
        if num_tokens >= size:
            parts.append([])
            num_tokens = 0
        parts[-1].append(text)
        num_tokens += len(text.token_ids)
    return parts


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
