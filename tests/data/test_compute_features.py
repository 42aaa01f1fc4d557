"""Hidden states are computed once, kept, and completed after a stop."""

import errno
import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from draftheads.data.chat_tokens import EncodedChat
from draftheads.data.compute_features import load_texts
from draftheads.data.features import FeatureStore, shard_path
from draftheads.errors import DataError, StorageError
from draftheads.models.model import TargetModel
from fake_progress import FakeProgress
from training_world import build_features, chat, chat_model, counting_chats, write_chats


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_have_the_hidden_states_of_single_texts(
    target: TargetModel, texts: list[EncodedChat], store: FeatureStore
):
    assert len(store) == len(texts)
    assert store.meta.num_shards == 3
    assert store.lengths == [len(text.token_ids) for text in texts]
    for document, text in zip(store, texts, strict=True):
        assert document.token_ids.tolist() == list(text.token_ids)
        assert document.loss_mask.tolist() == list(text.loss_mask)
        alone = target.hidden_states(torch.tensor([text.token_ids]))[0]
        # bf16 keeps 8 bits: half a unit in the last place is 1/512 of the number
        torch.testing.assert_close(document.hidden.float(), alone, rtol=1 / 256, atol=1e-4)


def test_progress_counts_every_token_once(target: TargetModel, texts: list[EncodedChat], tmp_path: Path):
    progress = FakeProgress()
    build_features(target, texts, tmp_path / "features", progress)
    total = sum(len(text.token_ids) for text in texts)
    assert progress.last == (total, total, "")
    assert progress.done == [*accumulate((len(text.token_ids) for text in texts), initial=0)]


def test_an_interrupted_store_is_completed_to_the_same_bytes(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    build_features(target, texts, tmp_path / "whole")
    done = sum(len(text.token_ids) for text in texts[:5])

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_features(target, texts, tmp_path / "parts", FakeProgress(done, interrupt))
    with pytest.raises(DataError, match=r"shard-00001.safetensors is missing, the features are not complete"):
        FeatureStore(tmp_path / "parts")
    first_made = shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    build_features(target, texts, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == first_made
    monkeypatch.setattr(TargetModel, "hidden_states", None)  # a complete store needs no pass of the model
    build_features(target, texts, tmp_path / "parts")


def test_a_full_disk_leaves_nothing_half_written(
    target: TargetModel, texts: list[EncodedChat], store: FeatureStore, monkeypatch: pytest.MonkeyPatch
):
    shard_path(store.folder, 2).unlink()
    before = contents(store.folder)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(StorageError, match="no space left"):
            build_features(target, texts, store.folder)
    assert contents(store.folder) == before


def test_a_store_of_other_texts_is_an_error(target: TargetModel, texts: list[EncodedChat], store: FeatureStore):
    last = texts[-1]
    for changed in (
        EncodedChat((1, 2, 3), (False, True, True)),
        replace(last, token_ids=(*last.token_ids[:-1], 9)),
        replace(last, loss_mask=(*last.loss_mask[:-1], not last.loss_mask[-1])),
    ):
        with pytest.raises(DataError, match="name another folder or delete this one"):
            build_features(target, [*texts[:-1], changed], store.folder)
    with pytest.raises(DataError, match="name another folder or delete this one"):
        build_features(chat_model(seed=1), texts, store.folder)


def test_reading_stops_at_max_tokens(target: TargetModel, tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl.gz", counting_chats(10))
    every = load_texts(target, [path], max_length=64)
    some = load_texts(target, [path, path], max_length=64, max_tokens=len(every[0].token_ids) + 1)
    assert some == every[:2]


def test_texts_without_an_answer_in_max_length_are_left_out(target: TargetModel, tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl", [chat("w1 " * 30, "w2"), chat("w1", "w2")])
    assert len(load_texts(target, [path], max_length=20)) == 1
    with pytest.raises(DataError, match="no answer within the first 3 tokens"):
        load_texts(target, [path], max_length=3)


def test_an_error_of_encoding_names_the_line(target: TargetModel, tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl", [chat("w1", "w2"), chat("w1", "w2")])
    model = chat_model()
    model.tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(DataError, match=r"chats.jsonl, line 1: .* never"):
        load_texts(model, [path], max_length=20)
