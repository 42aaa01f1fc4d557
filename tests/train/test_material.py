"""What a run learns from, and in which steps: stored or live hidden states, plain text first, accumulated batches."""

import gzip
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import get_scheduler

from draftheads.data import extract
from draftheads.data.extract import build_features, load_texts, needed_bytes
from draftheads.data.live import LiveStore
from draftheads.data.plain_text import load_blocks
from draftheads.errors import DataError, InvalidSettings, MissingDependency, StorageError
from draftheads.models.model import TargetModel
from draftheads.progress import NoProgress
from draftheads.train import run
from draftheads.train.folder import remember
from draftheads.train.material import arrange, read_data
from draftheads.train.measure import measure
from draftheads.train.options import TrainOptions
from draftheads.train.schedule import Stage, rise_and_cosine
from draftheads.train.trainer import find_checkpoint, learning_rate_of
from training_world import EOS, chat_model, counting_chats, distilled_chats, write_chats


class Silent:
    """A reporter."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, what: str) -> None:
        self.stages.append(what)

    def progress(self, done: int, total: int, loss: float | None = None) -> None: ...


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture(scope="module")
def chats(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", distilled_chats(target) + counting_chats(20))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain text: 40 lines of 30 words that count."""
    records = [{"text": " ".join(f"w{(i * 7 + j) % 57}" for j in range(30))} for i in range(40)]
    return write_chats(tmp_path_factory.mktemp("book") / "book.jsonl.gz", records)


def options(out: Path, **changes: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "method": "hydra",
        "num_heads": 2,
        "draft_vocab_size": 0,
        "batch_tokens": 128,
        "max_length": 64,
        "learning_rate": 0.02,
        "log_steps": 1,
        "eval_steps": 10,
        "epochs": 1,
        "precision": "fp32",
    }
    return TrainOptions(out=out, **{**values, **changes})


def lines(out: Path, name: str = "log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


# --- stored or live ---


def test_live_hidden_states_are_the_stored_ones(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    texts = load_texts(target, [chats], max_length=64)
    stored, live = build_features(target, texts, tmp_path, NoProgress()), LiveStore(target, texts)
    assert stored.fingerprint == live.fingerprint
    assert stored.sources == live.sources
    assert stored.sources[4] == f"{chats}:5"
    for index in range(len(texts)):
        assert torch.equal(stored[index].hidden, live[index].hidden)
        assert stored[index].hidden.dtype == live[index].hidden.dtype == torch.bfloat16


def test_without_room_on_the_disk_the_same_head_comes_out(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    for name, budget in (("stored", 1.0), ("live", 0.0)):
        out = tmp_path / name
        run.train_for(target, options(out, data=(chats,), features_budget=budget, keep_features=True), Silent())
        assert (out / "features").exists() == (name == "stored")
    stored, live = tmp_path / "stored", tmp_path / "live"
    assert (stored / "model.safetensors").read_bytes() == (live / "model.safetensors").read_bytes()
    for name in ("log.jsonl", "validation.jsonl"):
        assert lines(stored, name) == lines(live, name)


def test_a_run_may_be_resumed_with_another_budget(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options(tmp_path / "whole", data=(chats,))
    run.train_for(target, whole, Silent())
    parts = options(tmp_path / "parts", data=(chats,), save_steps=4)

    calls = []

    def second_fails(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # after ten steps
            raise KeyError
        return measure(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", second_fails)
        with pytest.raises(KeyError):
            run.train_for(target, parts, Silent())
    assert find_checkpoint(parts.out)
    resumed = options(tmp_path / "parts", data=(chats,), resume=True, features_budget=0.0)
    run.train_for(target, resumed, Silent())
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_too_small_a_disk_is_seen_before_the_work(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = load_texts(target, [chats], max_length=64)
    needed = needed_bytes(target, texts)
    build_features(target, texts, tmp_path / "there", NoProgress())
    made = sum(path.stat().st_size for path in (tmp_path / "there").glob("shard-*"))
    assert 0.9 * made < needed < 1.1 * made
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    monkeypatch.setattr(TargetModel, "hidden_states", None)
    build_features(target, texts, tmp_path / "there", NoProgress())  # complete ones need no room
    message = r"need 0\.00 GB and the disk has 0\.00 GB left: .*--features, .*--max-tokens, .*--features-budget 0"
    with pytest.raises(StorageError, match=message):
        run.train_for(target, options(tmp_path / "out", data=(chats,)), Silent())


# --- plain text ---


def test_plain_text_comes_in_whole_blocks(target: TargetModel, book: Path, tmp_path: Path) -> None:
    tokenizer, length = target.tokenizer, 64
    blocks = load_blocks(tokenizer, [book], eos_ids=target.eos_ids, length=length)
    records = [tokenizer(record["text"])["input_ids"] for record in read_zipped(book)]
    stream = [token for ids in records for token in [*ids, EOS]]
    assert [token for block in blocks for token in block.token_ids] == stream
    assert {len(block.token_ids) for block in blocks[:-1]} == {length}
    assert all(all(block.loss_mask) for block in blocks)
    starts = [0]
    for ids in records:
        starts.append(starts[-1] + len(ids) + 1)
    for number, block in enumerate(blocks):
        first = max(i for i, start in enumerate(starts) if start <= number * length)
        assert block.source == f"{book}:{first + 1}"
    even = load_blocks(tokenizer, [book], eos_ids=target.eos_ids, length=31)  # texts end where blocks end
    assert [block.source for block in even] == [f"{book}:{number}" for number in range(1, 41)]
    few = load_blocks(tokenizer, [book], eos_ids=target.eos_ids, length=length, max_tokens=3 * length - 1)
    assert few == blocks[:3]
    whole = tmp_path / "whole.txt"
    whole.write_text("w1 w2 w3", encoding="utf-8")
    [block] = load_blocks(tokenizer, [whole], eos_ids=target.eos_ids, length=length)
    assert block.token_ids == (*tokenizer("w1 w2 w3")["input_ids"], EOS)


def read_zipped(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": 3}\n', r"bad\.jsonl.*1.*plain text is an object"),
        ('{"text": "\\ud800"}\n', r"bad\.jsonl, line 1: text holds half a character"),
        ('{"text": "w1 w2"}\n{"messages": []}\n', r"bad\.jsonl.*2.*chats go to --data"),
        ("", "no text in"),
    ],
)
def test_plain_text_that_is_none(target: TargetModel, tmp_path: Path, content: str, message: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_blocks(target.tokenizer, [bad], eos_ids=target.eos_ids, length=8)


def test_plain_text_is_learned_first_and_chats_at_a_lower_rate(
    target: TargetModel, chats: Path, book: Path, tmp_path: Path
) -> None:
    settings = options(tmp_path / "out", data=(chats,), text=(book,), warmup=0.1, final_learning_rate=0.1, epochs=2)
    texts = read_data(target, settings)
    material = arrange(LiveStore(target, texts), settings)
    is_plain = [text.loss_mask[0] for text in texts]
    assert 0 < sum(is_plain) < len(texts)
    first, second = material.stages
    kinds = [{is_plain[i] for i in batch} for batch in material.plan]
    assert kinds == [{True}] * first.num_steps + [{False}] * second.num_steps
    assert first.num_steps == pytest.approx(2.5 * second.num_steps, rel=0.01)  # 5 : 2
    assert not any(is_plain[i] for i in material.held_out)
    assert set(material.held_out).isdisjoint(material.training)
    run.train_for(target, settings, Silent())
    rates = [line["learning_rate"] for line in lines(tmp_path / "out")]
    rate = settings.learning_rate
    expected = [
        rate * peak * rise_and_cosine(step, stage.num_steps, warmup=0.1, final=0.1)
        for stage, peak in ((first, 1.0), (second, 0.1))
        for step in range(stage.num_steps)
    ]
    assert rates == pytest.approx(expected, rel=1e-6)
    losses = [line["loss"] for line in lines(tmp_path / "out")]
    assert min(losses[first.num_steps - 5 : first.num_steps]) < 0.8 * losses[0]


def test_plain_text_alone_is_enough(target: TargetModel, book: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", text=(book,), epochs=3)
    report = run.train_for(target, settings, Silent())
    before = lines(tmp_path / "out", "validation.jsonl")[0]
    assert report is not None
    assert sum(report.losses) < 0.8 * sum(before["losses"])


# --- steps ---


@pytest.mark.parametrize("final", [0.0, 0.3])
def test_the_rates_are_those_of_transformers(tmp_path: Path, final: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    settings = {"min_lr_rate": final}
    scheduler = get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=6, num_training_steps=31, scheduler_specific_kwargs=settings
    )
    rate = learning_rate_of(options(tmp_path, data=(tmp_path,), warmup=0.2, final_learning_rate=final), [Stage(31)])
    for step in range(31):
        assert rate(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_accumulated_batches_make_one_step(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """The first step's loss and gradient are the means of its batches'."""
    for name, changes in (("one", {}), ("three", {"accumulate": 3})):
        run.train_for(target, options(tmp_path / name, data=(chats,), learning_rate=1e-12, **changes), Silent())
    one, three = lines(tmp_path / "one"), lines(tmp_path / "three")
    assert len(three) == -(-len(one) // 3)
    for step, line in enumerate(three[:-1]):
        parts = [part["loss"] for part in one[3 * step : 3 * step + 3]]
        assert line["loss"] == pytest.approx(sum(parts) / 3, rel=1e-5)
        assert line["grad_norm"] <= max(part["grad_norm"] for part in one[3 * step : 3 * step + 3]) * 1.001


def test_moments_in_eight_bits(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = chat_model(hidden_size=128)  # smaller tensors are kept in full
    monkeypatch.setattr(run.shutil, "rmtree", lambda *_, **__: None)  # leave the checkpoints
    settings = options(tmp_path / "out", data=(chats,), save_steps=5, learning_rate=0.003)
    small = run.train_for(target, replace(settings, optimizer="adamw-8bit"), Silent())
    full = run.train_for(target, replace(settings, out=tmp_path / "full"), Silent())
    assert small is not None
    assert full is not None
    assert small.losses == pytest.approx(full.losses, rel=0.02)
    newest = max((tmp_path / "out" / "checkpoints").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    state = torch.load(newest / "optimizer.pt", weights_only=False)["state"]
    assert any(tensor.dtype == torch.uint8 for tensor in tensors_in(state))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All of them, however deep in dictionaries."""
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in tensors_in(inner)]
    return [value] if torch.is_tensor(value) else []


@pytest.mark.parametrize(
    ("package", "setting"), [("bitsandbytes", ("optimizer", "adamw-8bit")), ("tensorboard", ("tensorboard", True))]
)
def test_a_missing_package_is_named(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, setting: Any
) -> None:
    real_find = importlib.util.find_spec
    monkeypatch.setattr("draftheads.train.trainer.find_spec", lambda name: None if name == package else real_find(name))
    with pytest.raises(MissingDependency, match=rf"needs {package}: pip install 'draftheads\["):
        run.train_for(chat_model(), options(tmp_path / "out", data=(chats,), **dict([setting])), Silent())


def test_a_tensorboard_shows_the_log(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run.train_for(target, options(out, data=(chats,), tensorboard=True), Silent())
    shown = EventAccumulator(str(out / "tensorboard")).Reload()
    for name, curve, key, place in (
        ("log", "log/loss", "loss", None),
        ("log", "log/head_losses/2", "head_losses", 1),
        ("validation", "validation/tokens_per_step_tree", "tokens_per_step_tree", None),
    ):
        expected = [
            (line["step"], line[key] if place is None else line[key][place]) for line in lines(out, f"{name}.jsonl")
        ]
        found = [(event.step, event.value) for event in shown.Scalars(curve)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_a_tensorboard_goes_on_after_a_stop(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was shown after the last checkpoint is shown once, as it was made the second time."""
    settings = options(tmp_path / "out", data=(chats,), tensorboard=True, save_steps=4, eval_steps=6)

    def fails_at_six(*arguments: Any, **keywords: Any) -> Any:
        if (tmp_path / "out" / "log.jsonl").exists() and len(lines(tmp_path / "out")) >= 6:
            raise KeyError
        return measure(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", fails_at_six)
        with pytest.raises(KeyError):
            run.train_for(target, settings, Silent())
    run.train_for(target, replace(settings, resume=True), Silent())
    shown = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload().Scalars("log/loss")
    assert [event.step for event in shown] == [line["step"] for line in lines(tmp_path / "out")]


def test_errors_come_before_the_model_reads(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading may take hours."""
    run.train_for(target, options(tmp_path / "whole", data=(chats,), save_steps=4, keep_features=True), Silent())
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", ignore=shutil.ignore_patterns("config.json", "features"))
    checkpoint = tmp_path / "parts" / "checkpoints" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}", encoding="utf-8")
    settings = options(tmp_path / "parts", data=(chats,), save_steps=4, resume=True)
    material = arrange(LiveStore(target, read_data(target, settings)), settings)
    remember(replace(settings, resume=False), material, model=target.model_id)
    one = write_chats(tmp_path / "one.jsonl", counting_chats(1))
    monkeypatch.setattr(TargetModel, "hidden_states", lambda *_: pytest.fail("the model was asked"))
    with pytest.raises(InvalidSettings, match=r"learning_rate was 0\.02 and is 0\.5"):
        run.train_for(target, replace(settings, learning_rate=0.5), Silent())
    with pytest.raises(DataError, match="only one text"):
        run.train_for(target, options(tmp_path / "new", data=(one,)), Silent())
    with pytest.raises(InvalidSettings, match="--num-heads is 0"):
        options(tmp_path / "new", data=(one,), num_heads=0)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettings, match="which is a file: name a folder"):
        run.train(options(tmp_path / "file", data=(one,)), Silent())


def test_another_version_of_a_model_has_other_hidden_states(target: TargetModel, chats: Path) -> None:
    texts = load_texts(target, [chats], max_length=64)
    before = LiveStore(target, texts).fingerprint
    assert before == LiveStore(chat_model(), texts).fingerprint
    other = chat_model()
    other.model.model.layers[1].mlp.down_proj.weight += 1.0
    assert LiveStore(other, texts).fingerprint != before


def test_a_model_that_is_spread_needs_stored_features(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", data=(chats,), features_budget=0.0, shard_model=True)
    with pytest.raises(InvalidSettings, match="give a larger budget"):
        run.train_for(target, settings, Silent())
    with pytest.raises(InvalidSettings, match="it goes without --four-bit"):
        options(tmp_path / "out", data=(chats,), four_bit=True, shard_model=True)


def test_heads_for_a_model_in_four_bits(tmp_path: Path) -> None:
    """Medusa-1 reads a quantised copy of its model; the head counts as one for the model itself."""
    folder = tmp_path / "model"
    target = chat_model(hidden_size=64, intermediate_size=128)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    few = write_chats(tmp_path / "few.jsonl", counting_chats(24))  # bitsandbytes is slow without a GPU
    settings = options(tmp_path / "out", data=(few,), model=str(folder), four_bit=True, method="medusa", epochs=2)
    report = run.train(settings, Silent())
    first = lines(tmp_path / "out", "validation.jsonl")[0]
    assert report is not None
    assert sum(report.losses) < 0.9 * sum(first["losses"])
