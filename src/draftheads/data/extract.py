"""The target reads every text once; its hidden states go to a feature store.

Knows the target model and the store's files; knows nothing of heads. Shards that are already there are kept,
so a run that was killed goes on where it stopped.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.data.batches import bucket_by_length
from draftheads.data.chat import ChatReader, EncodedChat, encode_chat, read_chats
from draftheads.data.features import (
    DOCUMENTS_PER_SHARD,
    Document,
    FeatureStore,
    StoreMeta,
    read_meta,
    shard_path,
    write_meta,
    write_shard,
)
from draftheads.errors import DataError
from draftheads.target.model import TargetModel

TOKENS_PER_PASS = 4096

Progress = Callable[[int, int], None]  # tokens done, tokens in all


def load_texts(
    model: ChatReader, paths: Sequence[Path], *, max_length: int, max_tokens: int | None = None
) -> list[EncodedChat]:
    """The chats of all files, encoded, until ``max_tokens`` tokens are there.

    Texts whose answers all lie behind ``max_length`` are left out.

    Raises:
        DataError: a bad line, named by file and line; no text at all.
    """
    return load_and_count(model, paths, max_length=max_length, max_tokens=max_tokens)[0]


def load_and_count(
    model: ChatReader, paths: Sequence[Path], *, max_length: int, max_tokens: int | None = None
) -> tuple[list[EncodedChat], int]:
    """What :func:`load_texts` gives, and how many texts were left out."""
    texts: list[EncodedChat] = []
    num_tokens = num_left_out = 0
    for chat in chain.from_iterable(map(read_chats, paths)):
        try:
            text = encode_chat(
                model.tokenizer,
                chat.messages,
                finished=chat.finished,
                max_length=max_length,
                eos_ids=model.eos_ids,
            )
        except DataError as error:
            raise DataError(str(error), path=chat.path, line_number=chat.line_number) from error
        if any(text.loss_mask):
            texts.append(text)
            num_tokens += len(text.token_ids)
        else:
            num_left_out += 1
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    if not texts:
        raise DataError(f"no answer within the first {max_length} tokens in {', '.join(map(str, paths))}")
    return texts, num_left_out


def build_features(target: TargetModel, texts: Sequence[EncodedChat], folder: Path, progress: Progress) -> FeatureStore:
    """The store of these texts, made or completed.

    Raises:
        DataError: the folder holds features of other texts or of another model.
        StorageError: a shard cannot be written; those before it are complete.
    """
    meta = StoreMeta(
        model_id=target.model_id,
        hidden_size=target.hidden_size,
        num_documents=len(texts),
        num_tokens=sum(len(text.token_ids) for text in texts),
        num_shards=-(-len(texts) // DOCUMENTS_PER_SHARD),
        fingerprint=_fingerprint(target, texts),
    )
    _claim(folder, meta)
    done = 0
    for index in range(meta.num_shards):
        part = texts[index * DOCUMENTS_PER_SHARD : (index + 1) * DOCUMENTS_PER_SHARD]
        if not shard_path(folder, index).exists():
            write_shard(folder, index, _read(target, part, progress, done, meta.num_tokens))
        done += sum(len(text.token_ids) for text in part)
        progress(done, meta.num_tokens)
    return FeatureStore(folder)


def _claim(folder: Path, meta: StoreMeta) -> None:
    """Says in the folder what it is to hold, unless it says so already."""
    there = read_meta(folder)
    if there is None:
        write_meta(folder, meta)
    elif there != meta:
        raise DataError(
            f"{folder} holds features of {there.num_documents} texts ({there.num_tokens} tokens, "
            f"{there.model_id}, fingerprint {there.fingerprint}) but the data and settings give "
            f"{meta.num_documents} texts ({meta.num_tokens} tokens, {meta.model_id}, fingerprint "
            f"{meta.fingerprint}): name another folder or delete this one"
        )


def _read(
    target: TargetModel, texts: Sequence[EncodedChat], progress: Progress, done: int, total: int
) -> list[Document]:
    """The texts with their hidden states, read in groups of similar length."""
    documents: dict[int, Document] = {}
    for group in bucket_by_length([len(text.token_ids) for text in texts], TOKENS_PER_PASS):
        token_ids = [torch.tensor(texts[i].token_ids) for i in group]
        hidden = _hidden_states(target, pad_sequence(token_ids, batch_first=True))
        for row, i in enumerate(group):
            length = len(token_ids[row])
            documents[i] = Document(hidden[row, :length], token_ids[row], torch.tensor(texts[i].loss_mask))
            done += length
        progress(done, total)
    return [documents[i] for i in range(len(texts))]


def _hidden_states(target: TargetModel, token_ids: Tensor) -> Tensor:
    return target.hidden_states(token_ids.to(target.device)).to("cpu", torch.bfloat16)


def _fingerprint(target: TargetModel, texts: Sequence[EncodedChat]) -> str:
    """Of what the hidden states depend on: the texts, and the model by name, type and some of its weights."""
    digest = hashlib.sha256(json.dumps([target.model_id, str(target.dtype)]).encode())
    digest.update(target.weights.lm_head[:64].detach().float().cpu().numpy().tobytes())
    for text in texts:
        digest.update(torch.tensor(text.token_ids, dtype=torch.int32).numpy().tobytes())
        digest.update(torch.tensor(text.loss_mask).numpy().tobytes())
    return digest.hexdigest()[:16]
