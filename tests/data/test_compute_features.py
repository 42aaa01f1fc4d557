"""Hidden states are computed once, kept, and completed after a stop."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from draftheads.data import compute_features
from draftheads.data.chat_tokens import EncodedChat
from draftheads.data.compute_features import left_out_lines, load_texts
from draftheads.data.features import FeatureStore, shard_path
from draftheads.errors import DataError
from draftheads.models.model import TargetModel
from fake_progress import FakeProgress
from think_world import think_model
from training_world import (
    TEMPLATE,
    build_features,
    chat,
    chat_model,
    chat_tokenizer,
    counting_chats,
    write_chats,
)


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
    with pytest.raises(DataError, match=r"shard-00001.safetensors"):
        FeatureStore(tmp_path / "parts")
    first_made = shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    progress = FakeProgress()
    build_features(target, texts, tmp_path / "parts", progress)
    assert 0 < progress.done[0] < progress.last[0], "what is there counts as done"
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == first_made
    monkeypatch.setattr(TargetModel, "hidden_states", None)  # a complete store needs no pass of the model
    build_features(target, texts, tmp_path / "parts")


def test_shards_have_a_few_thousand_tokens_and_are_not_too_many(monkeypatch: pytest.MonkeyPatch):
    def tokens_of_shards(lengths: list[int]) -> list[int]:
        texts = [EncodedChat((1,) * length, (True,) * length) for length in lengths]
        parts = compute_features.missing_shards(texts, Path("nowhere"))
        assert [text for part in parts.values() for text in part] == texts
        return [sum(len(text.token_ids) for text in part) for part in parts.values()]

    monkeypatch.setattr(compute_features, "TOKENS_PER_SHARD", 4096)
    assert tokens_of_shards([2048] * 5) == [4096, 4096, 2048]
    assert tokens_of_shards([5000, 10, 5000]) == [5000, 5010]
    monkeypatch.setattr(compute_features, "_MOST_SHARDS", 10)
    assert len(tokens_of_shards([1000] * 1000)) == 10


def test_a_store_of_other_texts_is_an_error(target: TargetModel, texts: list[EncodedChat], store: FeatureStore):
    last = texts[-1]
    for changed in (
        EncodedChat((1, 2, 3), (False, True, True)),
        replace(last, token_ids=(*last.token_ids[:-1], 9)),
        replace(last, loss_mask=(*last.loss_mask[:-1], not last.loss_mask[-1])),
    ):
        with pytest.raises(DataError, match=str(store.folder)):
            build_features(target, [*texts[:-1], changed], store.folder)
    with pytest.raises(DataError, match=str(store.folder)):
        build_features(chat_model(seed=1), texts, store.folder)


def test_reading_stops_at_max_tokens(target: TargetModel, tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl.gz", counting_chats(10))
    every = load_texts(target, [path], max_length=64)
    some = load_texts(target, [path, path], max_length=64, max_tokens=len(every[0].token_ids) + 1)
    assert some == every[:2]


REFUSING = "{% if messages[0].content == 'w9' %}{{ raise_exception('no w9') }}{% endif %}" + TEMPLATE


def test_chats_that_cannot_be_learned_are_counted_by_their_reasons(tmp_path: Path):
    records = [
        chat("w9", "w2"),
        chat("w1", "w2"),
        chat("w1"),
        chat("w9", "w3"),
        chat("w1 " * 30, "w2"),
        chat("w3", "w4"),
    ]
    path = write_chats(tmp_path / "chats.jsonl", records)
    model = TargetModel(chat_model().model, chat_tokenizer(REFUSING), "tiny-chat")
    left_out: dict[str, list[str]] = {}
    texts = load_texts(model, [path], max_length=20, left_out=left_out)
    assert [text.source for text in texts] == [f"{path}:2", f"{path}:6"]
    assert [[place.rpartition(":")[2] for place in places] for places in left_out.values()] == [
        ["1", "4"],
        ["3"],
        ["5"],
    ]
    first = left_out_lines(left_out)[0]
    assert first.startswith("2 chats")
    assert first.endswith(f"no w9 (the first is {path}:1)")
    with pytest.raises(DataError, match=r"2 chats .* no w9 .*chats.jsonl:1\)$"):
        load_texts(model, [write_chats(path, [chat("w9", "w2"), chat("w9", "w2")])], max_length=20)


def test_each_turn_whose_history_the_template_changes_is_a_text(tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl", [chat("w1", "<think> w8 </think> w2", "w3", "w4"), chat("w5", "w6")])
    texts = load_texts(think_model("optional"), [path], max_length=64)
    assert [text.source.rpartition(":")[2] for text in texts] == ["1", "1", "2"]
    assert not any(text.earlier for text in texts)
    # of a chat that is cut, the texts with an answer stay
    short = load_texts(think_model("optional"), [path], max_length=len(texts[0].token_ids))
    assert short[0] == texts[0]
    assert [text.source for text in short] == [texts[0].source, texts[2].source]
