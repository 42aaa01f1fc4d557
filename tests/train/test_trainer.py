"""Training steps: rates, large batches, logs, and losses that are not finite."""

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from draftheads.data.batches import choose_texts, plan_batches
from draftheads.data.features import FeatureStore, shard_path
from draftheads.errors import MissingDependency, NonFiniteLoss
from draftheads.models.model import TargetModel
from draftheads.train import run, trainer, training
from draftheads.train.trainer import StepLog
from draftheads.train.training_data import Stage, staged_rate
from fake_progress import FakeProgress
from training_world import (
    KilledError,
    chat_model,
    chat_options,
    lines,
    stop_by_crash,
    train_for,
    train_options,
    without_time,
)


@pytest.mark.parametrize("final", [0.0, 0.3])
def test_the_rates_are_those_of_transformers(final: float):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    settings = {"min_lr_rate": final}
    scheduler = get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=6, num_training_steps=31, scheduler_specific_kwargs=settings
    )
    for step in range(31):
        rate = staged_rate(step, [Stage(31)], warmup=0.2, final=final)
        assert rate == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_gradients_are_scaled_down_to_the_given_norm(target: TargetModel, chats: Path, tmp_path: Path):
    """Below AdamW's ε, steps become short."""
    train_for(target, chat_options(tmp_path, data=(chats,), max_grad_norm=1e-13))
    first, *_, last = (sum(line["losses"]) for line in lines(tmp_path, "validation.jsonl"))
    assert last == pytest.approx(first, rel=1e-3)
    assert min(line["grad_norm"] for line in lines(tmp_path)) > 0.1, "the log has the norm before"


def test_what_was_drawn_before_a_training_does_not_matter(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own, found = training.new_head, []
    for number in (0, 7):
        monkeypatch.setattr(training, "new_head", lambda *a, n=number, **k: (own(*a, **k), torch.rand(n))[0])
        out = tmp_path / str(number)
        found.append(without_time(train_for(target, chat_options(out, data=(chats,), noise_alpha=20.0))))
    assert found[0] == found[1]


def test_matrices_decay_and_vectors_do_not(target: TargetModel, features: Path, tmp_path: Path):
    settings = train_options(tmp_path, features, weight_decay=0.25, num_layers=2, betas=(0.8, 0.95))
    head = training.new_head(settings, target, FeatureStore(features), [0])
    groups = trainer.head_optimizer(settings, head).param_groups
    decays = {(group["weight_decay"], weight.ndim > 1) for group in groups for weight in group["params"]}
    assert decays == {(0.25, True), (0.0, False)}
    assert sum(len(group["params"]) for group in groups) == len(list(head.parameters()))
    assert {group["betas"] for group in groups} == {(0.8, 0.95)}


def test_bf16_rounds_the_products(target: TargetModel, chats: Path, tmp_path: Path):
    first = []
    for precision in ("fp32", "bf16"):
        train_for(target, chat_options(tmp_path / precision, data=(chats,), precision=precision))
        first.append(lines(tmp_path / precision)[0]["loss"])
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], rel=0.01)


def test_adamw_8bit_trains_nearly_as_well_with_8_bit_moments(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = chat_model(hidden_size=128)  # smaller tensors are kept in full
    monkeypatch.setattr(training.shutil, "rmtree", lambda *_, **__: None)  # leave the checkpoints
    settings = chat_options(tmp_path / "out", data=(chats,), save_steps=5, learning_rate=0.003)
    small = train_for(target, replace(settings, optimizer="adamw-8bit"))
    full = train_for(target, replace(settings, out=tmp_path / "full"))
    assert small.losses == pytest.approx(full.losses, rel=0.02)
    (newest,) = (tmp_path / "out" / "checkpoints").glob("checkpoint-*.pt")
    assert "dtype=torch.uint8" in str(torch.load(newest)["optimizer"]["state"])


def test_a_missing_package_is_named(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingDependency, match=r"needs bitsandbytes; install it with: pip install '\.\["):
        run.train(chat_options(tmp_path / "out", data=(chats,), optimizer="adamw-8bit"), FakeProgress())


@pytest.mark.parametrize("loss", ["teacher", "hard"])
def test_a_loss_of_nan_names_the_step_and_the_texts(target: TargetModel, features: Path, tmp_path: Path, loss: Any):
    broken = shutil.copytree(features, tmp_path / "features")
    store = FeatureStore(features)
    training, _ = choose_texts(store.token_ids, store.loss_masks, held_out=0.2, seed=0)
    index = training[len(training) // 2]
    start, end = store.texts.starts[index : index + 2]
    np.memmap(shard_path(broken, 0), np.int16, "r+").reshape(-1, target.hidden_size)[start:end] = 0x7FC0  # NaN
    settings = train_options(tmp_path / "out", broken, loss=loss)
    with pytest.raises(NonFiniteLoss, match=rf"nan at step \d+, on .*chats\.jsonl:{index + 1}\b") as caught:
        train_for(target, settings)
    plan = plan_batches(training, store.lengths, max_tokens=128, num_epochs=1, seed=0)
    step = next(n for n, batch in enumerate(plan, start=1) if index in batch)
    assert f"at step {step}," in str(caught.value)


def test_a_kill_while_the_log_is_rewritten_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "log.jsonl"
    lines = ['{"step": 1}\n', '{"step": 2}\n', '{"step": 3, "lo']
    path.write_text("".join(lines))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: stop_by_crash())  # the new content is written by then
        with pytest.raises(KilledError):
            StepLog(path, keep_until=2)
    assert path.read_text() == "".join(lines)
    StepLog(path, keep_until=2)
    assert path.read_text() == "".join(lines[:2])


def test_ctrl_c_while_its_handler_is_set_stops_the_run(monkeypatch: pytest.MonkeyPatch):
    own = signal.signal

    def signalled(number: int, handler: Any) -> Any:
        before = own(number, handler)
        if handler is not signal.default_int_handler:
            signal.raise_signal(number)
        return before

    own(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(trainer.signal, "signal", signalled)
    with trainer._interruptible() as event:
        assert event.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("usual", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", ["auto", "4bit", "fp32", "bf16"])
def test_auto_is_bf16_where_the_device_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, precision: str, usual: torch.dtype
):
    monkeypatch.setattr(trainer, "default_dtype", lambda _: usual)
    expected = precision == "bf16" if precision in ("fp32", "bf16") else usual == torch.bfloat16
    assert trainer.computes_in_bf16(train_options(Path("out"), Path("x"), precision=precision)) == expected
