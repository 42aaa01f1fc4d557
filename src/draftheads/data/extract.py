"""The target reads every text once; its hidden states go to a feature store.

Knows the target model and the store's files; knows nothing of heads. Shards that are already there are kept, so a run that
was killed goes on where it stopped.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftheads.data.batches import bucket_by_length
from draftheads.data.chat import EncodedChat, encode_chat, read_chats
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
    target: TargetModel, paths: Sequence[Path], *, max_length: int, max_tokens: int | None
) -> list[EncodedChat]:
    """The chats of all files, encoded, until ``max_tokens`` tokens are there; texts cut before any answer are left out.

    Raises:
        DataError: a bad line, named by file and line; no text at all.
    """
    texts: list[EncodedChat] = []
    num_tokens = 0
    for chat in (chat for path in paths for chat in read_chats(path)):
        try:
            text = encode_chat(
                target.tokenizer, chat.messages, chat.finished, max_length, eos_ids=target.eos_ids
            )
        except DataError as error:
            raise DataError(f"{chat.path}, line {chat.line}: {error}") from error
        if not any(text.loss_mask):
            continue
        texts.append(text)
        num_tokens += len(text.token_ids)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    if not texts:
        raise DataError(f"no answers within {max_length} tokens in {', '.join(map(str, paths))}")
    return texts


def build_features(
    target: TargetModel, texts: Sequence[EncodedChat], folder: Path, progress: Progress
) -> FeatureStore:
    """The store of these texts, made or completed.

    Raises:
        DataError: the folder holds features of other texts, another model or other settings.
    """
    meta = StoreMeta(
        model_id=target.model_id,
        hidden_size=target.hidden_size,
        num_documents=len(texts),
        num_tokens=sum(len(text.token_ids) for text in texts),
        num_shards=-(-len(texts) // DOCUMENTS_PER_SHARD),
        fingerprint=_fingerprint(target, texts),
    )
    folder.mkdir(parents=True, exist_ok=True)
    there = read_meta(folder)
    if there is not None and there != meta:
        raise DataError(
            f"{folder} holds the features of {there.num_documents} texts ({there.model_id}, {there.fingerprint}) but the data "
            f"and settings ask for {meta.num_documents} ({meta.model_id}, {meta.fingerprint}): name another folder or delete it"
        )
    write_meta(folder, meta)
    done = 0
    for index in range(meta.num_shards):
        part = texts[index * DOCUMENTS_PER_SHARD : (index + 1) * DOCUMENTS_PER_SHARD]
        if not shard_path(folder, index).exists():
            write_shard(
                folder,
                index,
                _read(target, part, lambda tokens, before=done: progress(before + tokens, meta.num_tokens)),
            )
        done += sum(len(text.token_ids) for text in part)
        progress(done, meta.num_tokens)
    return FeatureStore(folder)


def _read(
    target: TargetModel, texts: Sequence[EncodedChat], progress: Callable[[int], None]
) -> list[Document]:
    documents: dict[int, Document] = {}
    done = 0
    for group in bucket_by_length([len(text.token_ids) for text in texts], TOKENS_PER_PASS):
        token_ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(texts[i].token_ids) for i in group], batch_first=True
        )
        hidden = target.hidden_states(token_ids.to(target.device)).to("cpu", torch.bfloat16)
        for row, i in enumerate(group):
            text = texts[i]
            length = len(text.token_ids)
            documents[i] = Document(
                hidden[row, :length], torch.tensor(text.token_ids), torch.tensor(text.loss_mask)
            )
            done += length
        progress(done)
    return [documents[i] for i in range(len(texts))]


def _fingerprint(target: TargetModel, texts: Sequence[EncodedChat]) -> str:
    """Of what the hidden states depend on: the texts, and the model by name, type and a sample of its weights."""
    digest = hashlib.sha256(json.dumps([target.model_id, str(target.dtype)]).encode())
    digest.update(target.weights.lm_head[:64].detach().float().cpu().numpy().tobytes())
    for text in texts:
        digest.update(torch.tensor(text.token_ids, dtype=torch.int32).numpy().tobytes())
        digest.update(torch.tensor(text.loss_mask).numpy().tobytes())
    return digest.hexdigest()[:16]
