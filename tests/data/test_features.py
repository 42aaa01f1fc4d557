"""The feature store gives back what the target computed, survives being killed and refuses what does not fit."""

import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.data import extract
from draftheads.data.batches import (
    PlannedBatches,
    bucket_by_length,
    collate,
    plan_batches,
    split_held_out,
)
from draftheads.data.chat import EncodedChat
from draftheads.data.extract import build_features, load_texts
from draftheads.data.features import FeatureStore, shard_path
from draftheads.data.live import LiveStore
from draftheads.errors import DataError, StorageError
from draftheads.models.model import TargetModel
from draftheads.progress import NoProgress
from fake_progress import FakeProgress
from training_world import chat, chat_model, counting_chats, write_chats


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "DOCUMENTS_PER_SHARD", 4)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def texts(target: TargetModel, tmp_path: Path) -> list[EncodedChat]:
    return load_texts(target, [write_chats(tmp_path / "chats.jsonl", counting_chats(10))], max_length=64)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_hold_what_the_target_computes_one_by_one(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path
) -> None:
    store = build_features(target, texts, tmp_path / "features", NoProgress())
    assert len(store) == len(texts)
    assert store.meta.num_shards == 3
    assert store.lengths == [len(text.token_ids) for text in texts]
    for document, text in zip(store, texts, strict=True):
        assert document.token_ids.tolist() == list(text.token_ids)
        assert document.loss_mask.tolist() == list(text.loss_mask)
        alone = target.hidden_states(torch.tensor([text.token_ids]))[0]
        # bf16 keeps 8 bits: half a unit in the last place is 1/512 of the number
        torch.testing.assert_close(document.hidden.float(), alone, rtol=1 / 256, atol=1e-4)


def test_progress_counts_every_token_once(target: TargetModel, texts: list[EncodedChat], tmp_path: Path) -> None:
    progress = FakeProgress()
    build_features(target, texts, tmp_path / "features", progress)
    total = sum(len(text.token_ids) for text in texts)
    assert progress.last == (total, total, "")
    assert progress.done == [*accumulate((len(text.token_ids) for text in texts), initial=0)]


def test_an_interrupted_store_is_completed_to_the_same_bytes(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_features(target, texts, tmp_path / "whole", NoProgress())
    done = sum(len(text.token_ids) for text in texts[:5])

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_features(target, texts, tmp_path / "parts", FakeProgress(done, interrupt))
    with pytest.raises(DataError, match=r"shard-00001.safetensors is missing, the features are not complete"):
        FeatureStore(tmp_path / "parts")
    first_made = shard_path(tmp_path / "parts", 0).stat().st_mtime_ns
    build_features(target, texts, tmp_path / "parts", NoProgress())
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert shard_path(tmp_path / "parts", 0).stat().st_mtime_ns == first_made
    monkeypatch.setattr(TargetModel, "hidden_states", None)  # a complete store needs no pass of the model
    build_features(target, texts, tmp_path / "parts", NoProgress())


def test_a_full_disk_leaves_nothing_half_written(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "features"
    build_features(target, texts, folder, NoProgress())
    shard_path(folder, 2).unlink()
    before = contents(folder)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(StorageError, match="no space left"):
            build_features(target, texts, folder, NoProgress())
    assert contents(folder) == before


def test_other_texts_do_not_go_on_in_an_old_store(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path
) -> None:
    build_features(target, texts, tmp_path / "features", NoProgress())
    last = texts[-1]
    for changed in (
        EncodedChat((1, 2, 3), (False, True, True)),
        replace(last, token_ids=(*last.token_ids[:-1], 9)),
        replace(last, loss_mask=(*last.loss_mask[:-1], not last.loss_mask[-1])),
    ):
        with pytest.raises(DataError, match="name another folder or delete this one"):
            build_features(target, [*texts[:-1], changed], tmp_path / "features", NoProgress())
    with pytest.raises(DataError, match="name another folder or delete this one"):
        build_features(chat_model(seed=1), texts, tmp_path / "features", NoProgress())


def damages() -> Iterator[Any]:
    yield pytest.param(lambda folder: (folder / "meta.json").unlink(), "no meta.json", id="no meta")
    yield pytest.param(lambda folder: (folder / "meta.json").write_text("{"), "Expecting", id="no json")
    for key, value in [("format_version", 2), ("num_shards", "3"), ("colour", 1), ("num_documents", 11)]:

        def change(folder: Path, key: str = key, value: object = value) -> None:
            meta = json.loads((folder / "meta.json").read_text())
            (folder / "meta.json").write_text(json.dumps({**meta, key: value}))

        message = "10 texts in the shards" if key == "num_documents" else key
        yield pytest.param(change, message.replace("format_version", "format version 2"), id=key)
    yield pytest.param(lambda folder: shard_path(folder, 1).write_bytes(b"x" * 99), "damaged shard", id="shard")

    def shorten(folder: Path) -> None:
        tensors = load_file(shard_path(folder, 1))
        save_file({**tensors, "loss_mask": tensors["loss_mask"][1:].clone()}, shard_path(folder, 1))

    yield pytest.param(shorten, "have sizes", id="short mask")


@pytest.mark.parametrize(("damage", "message"), list(damages()))
def test_a_damaged_store_is_an_error(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path, damage: Any, message: str
) -> None:
    build_features(target, texts, tmp_path / "features", NoProgress())
    damage(tmp_path / "features")
    with pytest.raises(DataError, match=message):
        FeatureStore(tmp_path / "features")


def test_reading_stops_when_there_are_enough_tokens(target: TargetModel, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl.gz", counting_chats(10))
    every = load_texts(target, [path], max_length=64)
    some = load_texts(target, [path, path], max_length=64, max_tokens=len(every[0].token_ids) + 1)
    assert some == every[:2]


def test_answers_beyond_the_longest_length_are_left_out(target: TargetModel, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [chat("w1 " * 30, "w2"), chat("w1", "w2")])
    assert len(load_texts(target, [path], max_length=20)) == 1
    with pytest.raises(DataError, match="no answer within the first 3 tokens"):
        load_texts(target, [path], max_length=3)


def test_a_line_that_cannot_be_encoded_is_named(target: TargetModel, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [chat("w1", "w2"), chat("w1", "w2")])
    model = chat_model()
    model.tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(DataError, match=r"chats.jsonl, line 1: .* never"):
        load_texts(model, [path], max_length=20)


def test_leaving_out_prompts_keeps_every_answer_and_the_position_before_it(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path
) -> None:
    store = build_features(target, texts, tmp_path / "features", NoProgress())
    whole = collate(list(store), skip_prompts=False)
    short = collate(list(store), skip_prompts=True)
    for row, text in enumerate(texts):
        first = text.loss_mask.index(True) - 1
        length = len(text.token_ids)
        for name in ("hidden", "token_ids", "loss_mask"):
            expected = getattr(whole, name)[row, first:length]
            assert torch.equal(getattr(short, name)[row, : length - first], expected)
        assert not short.loss_mask[row, length - first :].any()


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60))
def test_buckets_hold_everything_once_and_are_no_larger_than_asked(lengths: list[int], size: int) -> None:
    groups = bucket_by_length(lengths, size)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(group for group in groups)
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= size for group in groups)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60), st.integers(0, 5))
def test_a_plan_has_every_document_once_an_epoch(lengths: list[int], size: int, seed: int) -> None:
    documents = list(range(0, len(lengths), 2))
    plan = plan_batches(documents, lengths, max_tokens=size, num_epochs=2, seed=seed)
    again = plan_batches(documents, lengths, max_tokens=size, num_epochs=2, seed=seed)
    assert plan == again
    flat = [i for batch in plan for i in batch]
    assert sorted(flat[: len(documents)]) == sorted(flat[len(documents) :]) == documents


def test_epochs_and_seeds_differ() -> None:
    lengths = [5] * 50
    plan = plan_batches(range(50), lengths, max_tokens=10, num_epochs=2, seed=0)
    assert {tuple(batch) for batch in plan[:25]} != {tuple(batch) for batch in plan[25:]}
    assert plan != plan_batches(range(50), lengths, max_tokens=10, num_epochs=2, seed=1)


def texts_of(numbers: Sequence[int], *, answers: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Texts of a prompt of two tokens and an answer of one, with their loss masks."""
    ids = [torch.tensor([number // 50, number % 50, answer]) for number in numbers for answer in range(answers)]
    return ids, [torch.tensor([False, False, True])] * len(ids)


@pytest.mark.parametrize(("fraction", "number"), [(0.0, 1), (0.05, 5), (0.5, 20)])
def test_some_texts_are_held_out(fraction: float, number: int) -> None:
    training, held_out = split_held_out(*texts_of(range(100)), fraction=fraction, at_most=20, seed=3)
    assert len(held_out) == number
    assert sorted(training + held_out) == list(range(100))


def test_another_seed_holds_out_others() -> None:
    found = {tuple(split_held_out(*texts_of(range(400)), fraction=0.1, at_most=200, seed=n)[1]) for n in range(20)}
    assert len(found) == 20
    often = torch.bincount(torch.tensor(list(found)).flatten(), minlength=400)
    assert often.max() <= 9, "2 are expected, and no text is held out by all seeds"


@pytest.mark.parametrize("at_most", [20, 10_000])
def test_what_was_held_out_is_not_learned_from_when_there_is_more_text(at_most: int) -> None:
    def learned(numbers: Sequence[int]) -> tuple[set[int], set[int]]:
        parts = split_held_out(*texts_of(numbers), fraction=0.05, at_most=at_most, seed=1)
        training, held_out = ({numbers[i] for i in part} for part in parts)
        return training, held_out

    some = list(range(0, 2000, 2))
    before, _ = learned(some)
    after, apart = learned(list(reversed(range(2000))))
    assert len(after) + len(apart) == 2000
    # the hundred of 2,000 that come first are, of half the texts, among the first fifty, but for chance
    assert len(apart & before) <= (0 if at_most == 20 else 15)


def test_answers_to_one_prompt_stand_on_one_side() -> None:
    token_ids, loss_masks = texts_of(range(50), answers=4)
    training, held_out = split_held_out(token_ids, loss_masks, fraction=0.2, at_most=200, seed=0)
    assert len(held_out) == 40
    assert {i // 4 for i in held_out}.isdisjoint(i // 4 for i in training)


def test_answers_without_a_prompt_do_not_stand_on_one_side() -> None:
    token_ids, _ = texts_of(range(400))
    with_prompt, without = torch.tensor([False, False, True]), torch.tensor([True, True, True])
    loss_masks = [with_prompt, without] * 200
    for seed in range(5):
        _, held_out = split_held_out(token_ids, loss_masks, fraction=0.1, at_most=200, seed=seed)
        assert 5 < sum(index % 2 for index in held_out) < 35


def test_plain_text_is_held_out_at_random() -> None:
    token_ids, _ = texts_of(range(100))
    loss_masks = [torch.tensor([True, True, True])] * 100
    _, held_out = split_held_out(token_ids, loss_masks, fraction=0.2, at_most=200, seed=0)
    assert held_out != list(range(20)), "not in the order of the file"


def test_a_batch_says_which_documents_it_is_made_of(
    target: TargetModel, texts: list[EncodedChat], tmp_path: Path
) -> None:
    store = build_features(target, texts, tmp_path / "features", NoProgress())
    batch = PlannedBatches(store, [[3, 1]], skip_prompts=False)[0]
    assert batch["documents"].tolist() == [3, 1]
    assert batch["token_ids"][0, : store.lengths[3]].tolist() == list(texts[3].token_ids)


@pytest.mark.parametrize("kind", ["stored", "live"])
def test_lengths_are_counted_once(target: TargetModel, texts: list[EncodedChat], tmp_path: Path, kind: str) -> None:
    """A plan asks for them once per text: counting them all each time takes hours for a hundred thousand texts."""
    store = (
        LiveStore(target, texts) if kind == "live" else build_features(target, texts, tmp_path / "store", NoProgress())
    )
    assert store.lengths is store.lengths
    assert store.lengths == [len(text.token_ids) for text in texts]
