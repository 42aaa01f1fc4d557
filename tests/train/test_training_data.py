"""Training data: stored and live hidden states, plain text before chats, and errors before long work."""

import gzip
import json
import os
import shutil
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace

import numpy as np
import pytest

from draftheads.data import features as stores
from draftheads.data.batches import PlannedBatches, split_held_out
from draftheads.data.features import LiveStore, Texts
from draftheads.data.lines import LeftOut
from draftheads.data.texts import EncodedChat, load_blocks, load_texts
from draftheads.errors import DataError, InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.train import run, training_data
from draftheads.train.training_data import has_room, needed_bytes, plan_training, read_texts, rise_and_cosine
from draftheads.utils import machine
from fake_progress import FakeProgress
from training_world import (
    EOS,
    TEMPLATE,
    KilledError,
    build_features,
    chat,
    chat_model,
    chat_options,
    counting_chats,
    lines,
    stop_by_crash,
    train_for,
    train_options,
    write_chats,
)
from vllm_files import extract_as_vllm


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain text: 40 lines of 30 words that count."""
    records = [{"text": " ".join(f"w{(i * 7 + j) % 57}" for j in range(30))} for i in range(40)]
    return write_chats(tmp_path_factory.mktemp("book") / "book.jsonl.gz", records)


# --- stored or live ---


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_data.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))


@pytest.mark.parametrize("method", ["hydra", "eagle3"])
def test_stored_and_live_hidden_states_train_the_same_head(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    """Of the last layer, and of several. A run that was stopped may go on with a full disk."""
    settings = chat_options(tmp_path / "stored", data=(chats,), method=method, save_steps=4)
    train_for(target, settings)
    with pytest.raises(KilledError):
        train_for(target, replace(settings, out=tmp_path / "both"), FakeProgress(6, stop_by_crash, stage="training"))
    shutil.rmtree(tmp_path / "both" / "features")
    fill_the_disk(monkeypatch)
    for name, resume in (("live", False), ("both", True)):
        progress = FakeProgress()
        train_for(target, replace(settings, out=tmp_path / name, resume=resume), progress)
        assert "the disk has too little room for hidden states: they are computed for each batch" in progress.stages
        for file in ("model.safetensors", "log.jsonl", "validation.jsonl"):
            assert (tmp_path / "stored" / file).read_bytes() == (tmp_path / name / file).read_bytes()


@pytest.mark.parametrize("method", ["hydra", "eagle3"])
def test_states_that_vllm_extracted_train_nearly_the_same_head(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    """The model reads none of the texts itself, apart from a few that are compared."""
    own = train_for(target, chat_options(tmp_path / "own", data=(chats,), method=method))
    states = tmp_path / "states"
    extract_as_vllm(target, load_texts(target, [chats], max_length=64), states, [0, 1, 2])
    monkeypatch.delattr(stores, "read_alone")
    found = train_for(target, chat_options(tmp_path / "out", data=(chats,), method=method, features=states))
    assert found.losses == pytest.approx(own.losses, rel=0.02)
    assert not (tmp_path / "out" / "features").exists()


@pytest.mark.parametrize("most", [300, 10**6])
def test_finished_features_are_used_up_to_max_tokens(target: TargetModel, tmp_path: Path, most: int):
    chats = write_chats(tmp_path / "few.jsonl", counting_chats(24))
    store = build_features(target, load_texts(target, [chats], max_length=64), tmp_path / "features")
    settings = chat_options(tmp_path, features=tmp_path / "features", held_out=0.2, max_tokens=most)
    data = plan_training(store, settings)
    used = sorted([*data.training, *data.held_out])
    wanted = load_texts(target, [chats], max_length=64, max_tokens=most)
    assert used == list(range(len(wanted))), "as many as reading the data with that limit gives"


def test_heads_are_measured_on_some_of_many_held_out_texts(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chats = write_chats(tmp_path / "chats.jsonl", counting_chats(24))
    store = LiveStore(target, load_texts(target, [chats], max_length=64))
    settings = chat_options(tmp_path, data=(chats,), held_out=0.5)
    held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.5, seed=settings.seed)[1]
    assert sorted(held_out[:3]) != sorted(held_out)[:3], "the first by their hash are not the first of the file"
    assert plan_training(store, settings).held_out == sorted(held_out)
    monkeypatch.setattr(training_data, "NUM_MEASURED", 3)
    few = plan_training(store, settings)
    assert few.held_out == sorted(held_out[:3]), "the first by their hash, as of any larger set"
    assert set(few.training).isdisjoint(held_out), "those that are not measured are not trained on, either"


def test_a_large_step_is_several_batches(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training_data, "MOST_BATCH_TOKENS", 128)
    store = LiveStore(target, load_texts(target, [chats], max_length=64))
    data = plan_training(store, chat_options(tmp_path, data=(chats,), batch_tokens=300))
    assert (data.batches_per_step, len(data.plan) % 3, data.num_steps) == (3, 0, len(data.plan) // 3)
    assert 64 < max(sum(store.lengths[i] for i in batch) for batch in data.plan) <= 100


def test_hidden_states_take_at_most_half_of_the_free_disk(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = load_texts(target, [chats], max_length=64)
    needed = needed_bytes(target, texts)
    for free, fits in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(training_data.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert has_room(target, texts, tmp_path / "there") == fits
    build_features(target, texts, tmp_path / "there")
    made = sum(path.stat().st_size for path in (tmp_path / "there").glob("shard-*"))
    assert 0.9 * made < needed < 1.1 * made
    fill_the_disk(monkeypatch)
    assert has_room(target, texts, tmp_path / "there"), "complete ones need no room"


# --- plain text ---


def test_plain_text_is_cut_into_blocks_of_equal_length(target: TargetModel, book: Path, tmp_path: Path):
    def blocks_of(paths: list[Path], **options: int) -> list[EncodedChat]:
        return list(load_blocks(target.tokenizer, paths, eos_ids=target.eos_ids, **options))

    blocks = blocks_of([book], length=64)
    texts = [json.loads(line)["text"] for line in gzip.decompress(book.read_bytes()).splitlines()]
    records = target.tokenizer(texts)["input_ids"]
    assert [token for block in blocks for token in block.token_ids] == [id_ for ids in records for id_ in [*ids, EOS]]
    assert {len(block.token_ids) for block in blocks[:-1]} == {64}
    assert all(all(block.loss_mask) for block in blocks)
    starts = list(accumulate((len(ids) + 1 for ids in records), initial=0))
    for number, block in enumerate(blocks):
        first = max(i for i, start in enumerate(starts) if start <= number * 64)
        assert block.source == f"{book}:{first + 1}"
    even = blocks_of([book], length=31)  # texts end where blocks end
    assert [block.source for block in even] == [f"{book}:{number}" for number in range(1, 41)]
    assert blocks_of([book], length=64, max_tokens=3 * 64 - 1) == blocks[:3]
    (tmp_path / "whole.txt").write_text("w1 w2 w3", encoding="utf-8")
    [block] = blocks_of([tmp_path / "whole.txt"], length=64)
    assert block.token_ids == (*target.tokenizer("w1 w2 w3")["input_ids"], EOS)


def test_plain_text_is_learned_first_and_chats_at_a_lower_rate(
    target: TargetModel, chats: Path, book: Path, tmp_path: Path
):
    rates = {"warmup": 0.1, "final_learning_rate": 0.1, "epochs": 2}
    settings = chat_options(tmp_path / "out", data=(chats,), text=(book,), **rates)
    texts = read_texts(target, settings)
    data = plan_training(LiveStore(target, texts), settings)
    is_plain = [text.is_plain for text in texts]
    first, second = data.stages
    kinds = [{is_plain[i] for i in batch} for batch in data.plan]
    assert kinds == [{True}] * first.num_steps + [{False}] * second.num_steps
    assert first.num_steps == pytest.approx(2.5 * second.num_steps, rel=0.01)  # 5 : 2
    assert not any(is_plain[i] or i in data.training for i in data.held_out)
    train_for(target, settings)
    log = lines(tmp_path / "out")
    expected = [
        settings.learning_rate * peak * rise_and_cosine(step, stage.num_steps, warmup=0.1, final=0.1)
        for stage, peak in ((first, 1.0), (second, 0.1))
        for step in range(stage.num_steps)
    ]
    assert [line["learning_rate"] for line in log] == pytest.approx(expected, rel=1e-6)
    losses = [line["loss"] for line in log]
    assert min(losses[first.num_steps - 5 : first.num_steps]) < 0.8 * losses[0]


def test_a_completion_without_a_prompt_is_no_plain_text(target: TargetModel, chats: Path, book: Path, tmp_path: Path):
    """One such line made the run one of two stages, most of it on this line."""
    first, *others = chats.read_text().splitlines(keepends=True)
    beginning = json.dumps({"prompt": "", "completion": "w1 w2 w3 w4"}) + "\n"
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join([first, beginning, *others]))
    for text in ((), (book,)):
        settings = chat_options(tmp_path / "out", data=(data,), text=text)
        texts = read_texts(target, settings)
        number = next(i for i, one in enumerate(texts) if one.token_ids[:4] == (8, 9, 10, 11) and one.loss_mask[0])
        live = LiveStore(target, texts)
        for store in (live, build_features(target, texts, tmp_path / f"features {len(text)}")):
            planned = plan_training(store, settings)
            assert store.is_plain.tolist() == [one.is_plain for one in texts]
            assert not store.is_plain[number]
            assert len(planned.stages) == (2 if text else 1)
            assert sum(number in batch for batch in planned.plan) <= 1
    one_kind = [replace(one, is_plain=False) for one in texts]
    assert LiveStore(target, one_kind).fingerprint != live.fingerprint


def test_plain_text_alone_is_enough(target: TargetModel, book: Path, tmp_path: Path):
    settings = chat_options(tmp_path / "out", text=(book,), epochs=3)
    report = train_for(target, settings)
    before = lines(tmp_path / "out", "validation.jsonl")[0]
    assert sum(report.losses) < 0.8 * sum(before["losses"])
    assert not (tmp_path / "out" / "features").exists(), "they are removed at the end"


# --- steps ---


def test_an_out_that_is_a_file_and_a_single_text_are_errors(target: TargetModel, tmp_path: Path):
    one = write_chats(tmp_path / "one.jsonl", counting_chats(1))
    with pytest.raises(DataError, match="only one text"):
        train_for(target, chat_options(tmp_path / "new", data=(one,)))
    with pytest.raises(InvalidSettings, match="which is a file: name a folder"):
        run.train(chat_options(one, data=(one,)), FakeProgress())


def test_stored_hidden_states_are_those_of_the_texts_and_the_weights(target: TargetModel, chats: Path, tmp_path: Path):
    texts = load_texts(target, [chats], max_length=64)
    before = LiveStore(target, texts).fingerprint
    assert before == LiveStore(chat_model(), texts).fingerprint
    other = chat_model()
    other.model.model.layers[1].mlp.down_proj.weight += 1.0
    assert LiveStore(other, texts).fingerprint != before
    folder = tmp_path / "features"
    build_features(target, texts, folder)
    with pytest.raises(DataError, match="made of other texts or weights"):
        train_for(other, chat_options(tmp_path / "out", features=folder))
    np.memmap(folder / "texts" / "token_ids", np.int32, "r+")[3] += 1
    with pytest.raises(DataError, match="made of other texts or weights"):
        train_for(target, chat_options(tmp_path / "out", data=(chats,), features=folder))


def test_stored_batches_are_read_by_a_thread_while_others_are_computed(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    readers, read = list[str](), PlannedBatches.__getitem__
    monkeypatch.setattr(
        PlannedBatches, "__getitem__", lambda self, i: readers.append(current_thread().name) or read(self, i)
    )
    train_for(target, train_options(tmp_path / "out", features, epochs=1))
    assert len(readers) == len(lines(tmp_path / "out"))
    assert "MainThread" not in readers


# --- texts in arrays ---


def test_texts_are_tokenized_once_and_again_where_something_changed(
    target: TargetModel, chats: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = write_chats(tmp_path / "chats.jsonl", [*counting_chats(8), chat("w1"), {"input_ids": [999]}])
    settings = chat_options(tmp_path / "out", data=(data,), text=(book,))
    left_out, progress = LeftOut(), FakeProgress()
    first = read_texts(target, settings, left_out, progress)
    blocks = load_blocks(target.tokenizer, [book], eos_ids=target.eos_ids, length=64)
    assert list(first) == [*blocks, *load_texts(target, [data], max_length=64)][:-1]
    assert progress.last[:2] == (progress.last[1], progress.last[1])
    assert sorted(map(len, left_out.values())) == [1, 1]
    assert [*first.facts["scripts"]] == ["Latin"]
    written = []
    monkeypatch.setattr(Texts, "write", lambda folder, texts, _: written.append(list(texts)))
    again = LeftOut()
    assert list(read_texts(target, settings, again)) == list(first)
    assert again == left_out
    assert not written
    other = chat_model()
    other.tokenizer.chat_template = TEMPLATE.replace("role", "content")
    read_texts(other, settings)
    for change in ({"max_length": 63}, {"max_tokens": 9}, {"text": ()}, {"data": (chats,)}):
        read_texts(target, replace(settings, **change))
    data.write_bytes(data.read_bytes() + b"\n")
    read_texts(target, settings)
    assert len(written) == 6


def test_texts_of_other_processes_are_the_same(
    target: TargetModel, chats: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also which are left out, and where reading stops."""
    data = write_chats(tmp_path / "chats.jsonl", [*counting_chats(30), chat("w1"), *counting_chats(30), chat("w1")])
    monkeypatch.setattr(machine, "find_cores", lambda: machine.Cores(2, 2, None))
    found, readers = [], set[int]()
    for chunk, most in product((2, 10**6), (None, 300, 10**6)):
        monkeypatch.setattr(machine, "_CHUNK", chunk)
        left_out = LeftOut()
        settings = chat_options(tmp_path / f"{chunk} {most}", data=(data,), text=(book,), max_tokens=most)
        texts = read_texts(target, settings, left_out)
        found.append((chunk, [*texts], left_out))
    for (_, *by_others), (_, *alone) in zip(found[:3], found[3:], strict=True):
        assert by_others == alone
    monkeypatch.setattr(machine, "_CHUNK", 2)
    readers |= {*machine.by_all_cores(lambda _: os.getpid(), range(100))}
    assert len(readers) > 1
    assert os.environ.get("TOKENIZERS_PARALLELISM") is None
