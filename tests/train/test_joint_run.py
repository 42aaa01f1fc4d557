"""Joint training runs: learning rates and stages, results, and resuming."""

import json
import math
import signal
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftheads.cli import commands
from draftheads.cli import train as command
from draftheads.data.batches import split_held_out
from draftheads.data.features import LiveStore
from draftheads.data.texts import load_texts
from draftheads.errors import InvalidSettings, MissingDependency, NonFiniteLoss
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from draftheads.train.joint import TUNINGS
from draftheads.train.learner import Learner
from draftheads.train.new_head import new_head
from draftheads.train.options import MergeOptions
from draftheads.train.report import Report, measure
from draftheads.train.run import train
from draftheads.train.trainer import TrainingInterrupted
from fake_progress import FakeProgress
from families import tiny_model
from joint_world import joint_options, on_disk, train_jointly_for
from thorough import some_rows
from training_world import (
    VOCAB,
    KilledError,
    chat_model,
    chat_tokenizer,
    counting_chats,
    lines,
    stop_by_crash,
    stop_by_ctrl_c,
    without_time,
    write_chats,
)


def assert_same_files(one: Path, other: Path) -> None:
    """The same head and adapter to the byte."""
    for name in ("head/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "kind"), [("medusa", "text"), ("hydra", "original"), ("medusa", "direct")])
def test_a_run_tunes_the_model_and_its_heads(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: str
):
    target = chat_model()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    counting = write_chats(tmp_path / "counting.jsonl", counting_chats(100))
    heads = {"method": method, "loss": "hard", "epochs": 6}
    tuning = replace(TUNINGS[kind], head_weight=0.5)  # so few steps need more than the paper's
    monkeypatch.setitem(TUNINGS, kind, tuning)
    settings = joint_options(tmp_path / "out", counting, joint=kind, **heads)
    report = train_jointly_for(target, settings)
    store = LiveStore(target, load_texts(target, [counting], max_length=2048))
    training, held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.2, seed=0)
    untrained = new_head(settings, target, store, training)
    learner = Learner(untrained, target.weights, loss="hard")
    at_start = measure(learner, store, held_out, batch_tokens=100)
    assert report.tokens_per_step_chain > at_start.tokens_per_step(Tree.chain(3)) + 0.1
    assert sum(report.losses) < 0.8 * float(at_start.losses.sum())
    log = lines(tmp_path / "out")
    second = [line["backbone_loss"] for line in log if "backbone_loss" in line]
    assert len(log) - len(second) == int(tuning.heads_first * len(log))  # the first stage
    movement = report.movement
    if tuning.towards == "text":
        assert sum(second[-3:]) < 0.9 * sum(second[:3])
        assert movement.tuned_perplexity < 0.8 * movement.original_perplexity
    else:
        assert 0.0 < movement.kl < 0.5
        assert movement.agreement > 0.7
    # the model itself is as it was
    after = target.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_heads_and_adapter_have_their_own_learning_rates_and_stages(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[list[float]] = []
    original_step = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *arguments: Any, **named: Any) -> Any:
        seen.append([group["lr"] for group in self.param_groups])
        is_adapter_moving = any(p.grad is not None for p in self.param_groups[1]["params"])
        seen[-1].append(float(is_adapter_moving))
        return original_step(self, *arguments, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    settings = joint_options(tmp_path / "out", chats, warmup=0.0, epochs=1)
    train_jointly_for(chat_model(), settings)
    half = len(seen) // 2
    assert half > 3
    rates = [0.5 * (1 + math.cos(math.pi * step / len(seen))) for step in range(len(seen))]
    assert [group[0] for group in seen] == pytest.approx([0.02 * rate for rate in rates])
    both = len(seen) - half
    rates = [0.5 * (1 + math.cos(math.pi * step / both)) for step in range(both)]
    assert [group[1] for group in seen] == pytest.approx([0.0] * half + [0.005 * rate for rate in rates])
    assert [group[2] for group in seen] == [0.0] * half + [1.0] * both


def test_the_folder_holds_adapter_head_and_movement(chats: Path, tuned: Path):
    names = {"adapter", "head", "log.jsonl", "metrics.json", "validation.jsonl"}
    assert {path.name for path in tuned.iterdir()} - {".lock"} == names
    assert Report.of(json.loads((tuned / "metrics.json").read_text())).movement.kl > 0
    assert all("lora_" in name for name in load_file(tuned / "adapter" / "adapter_model.safetensors"))
    with pytest.raises(InvalidSettings, match="holds a trained head"):
        train(joint_options(tuned, chats), FakeProgress())


def test_the_best_step_has_its_head_and_its_adapter(tmp_path: Path):
    """The held-out loss rises at a far too high learning rate."""
    data = write_chats(tmp_path / "counting.jsonl", counting_chats(60))
    settings = joint_options(tmp_path / "out", data, learning_rate=1.0, epochs=6, loss="hard", save_steps=2)
    report, best = train_jointly_for(chat_model(), settings), settings.out / "best"
    losses = {line["step"]: fmean(line["losses"]) for line in lines(settings.out, "validation.jsonl")}
    assert report.best_step == min(losses, key=losses.__getitem__) < report.num_steps
    kept = Report.of(json.loads((best / "metrics.json").read_text()))
    assert fmean(kept.losses) == pytest.approx(losses[kept.num_steps], rel=1e-5)
    assert kept.movement != report.movement
    for name in ("head/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (best / name).read_bytes() != (settings.out / name).read_bytes()


def test_validation_measures_the_tuned_model_and_does_not_change_the_training(chats: Path, tmp_path: Path):
    often = joint_options(tmp_path / "often", chats, epochs=1, save_steps=2)
    never = replace(often, out=tmp_path / "never", save_steps=1000)
    report = train_jointly_for(chat_model(), often)
    assert without_time(report) == without_time(train_jointly_for(chat_model(), never))
    assert_same_files(often.out, never.out)
    last = lines(often.out, "validation.jsonl")[-1]
    assert last["losses"] == pytest.approx(report.losses, rel=1e-5)
    assert last["top1"] == report.top1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stop", "after"),
    some_rows(  # after 3 steps it is in the first stage, after 10 in the second
        product([stop_by_ctrl_c, stop_by_crash], [3, 10]), (stop_by_ctrl_c, 10), (stop_by_crash, 3)
    ),
)
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(chats: Path, tmp_path: Path, stop: Any, after: int):
    whole = joint_options(tmp_path / "a", chats, save_steps=2, epochs=2)
    expected = train_jointly_for(chat_model(), whole)
    settings = replace(whole, out=tmp_path / "b")
    assert 3 < expected.num_steps // 2 < 11
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises((TrainingInterrupted, KilledError)):
        train_jointly_for(chat_model(), settings, FakeProgress(after, stop, stage="training"))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (settings.out / "head").exists()
    with pytest.raises(InvalidSettings, match="add --resume"):
        train(settings, FakeProgress())
    torch.rand(7)  # whatever was drawn before must not matter
    found = train_jointly_for(chat_model(), replace(settings, resume=True))
    assert without_time(found) == without_time(expected)
    assert_same_files(settings.out, whole.out)
    assert lines(settings.out) == lines(whole.out)


def test_what_is_not_adapted_of_a_mixture_of_experts_is_said(chats: Path, tmp_path: Path):
    model = tiny_model("qwen3_moe", vocab_size=len(VOCAB)).model
    progress = FakeProgress()
    options = joint_options(tmp_path / "out", chats, epochs=1)
    train_jointly_for(TargetModel(model, chat_tokenizer(), "tiny-moe"), options, progress)
    (said,) = (stage for stage in progress.stages if stage.startswith("not adapted"))
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters() if ".mlp." in name}
    assert all(name.replace(".0.", ".*.") in said for name in numbers if ".0." in name)
    assert f"({sum(numbers.values()):,} parameters)" in said


def test_a_loss_that_is_not_finite_stops_joint_training_and_names_the_texts(chats: Path, tmp_path: Path):
    settings = joint_options(tmp_path / "out", chats, learning_rate=1e37, warmup=0.0)
    with pytest.raises(NonFiniteLoss, match=r"at step \d+, on .*chats\.jsonl:\d+, .*lower --learning-rate"):
        train_jointly_for(chat_model(), settings)


def test_the_error_without_peft_has_the_pip_command(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[lora\]'"):
        train(joint_options(tmp_path / "out", chats), FakeProgress())


def test_train_joint_and_merge_print_their_results(chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    model = on_disk(tmp_path / "base")
    command.run(joint_options(tmp_path / "out", chats, model=model, epochs=1))
    commands.merge(MergeOptions(model=model, adapter=tmp_path / "out", out=tmp_path / "merged"))
    printed = capfd.readouterr().out
    columns = ("top-10", "perplexity", "KL(original || tuned)", "same greedy token", "(plain decoding: 1)")
    page = f"wrote {tmp_path / 'out' / 'report.html'}\n"
    for words in (*columns, "draftheads merge --model", "draftheads generate --model", page):
        assert words in printed
