"""A training run: it learns, repeats, stops and resumes bit for bit, and its errors are clear."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftheads
from draftheads.checkpoints.checkpoint import load_head, read_head
from draftheads.cli import train as command
from draftheads.cli.main import main
from draftheads.data.features import FeatureStore
from draftheads.data.records import NO_ANSWER
from draftheads.errors import DataError, InvalidSettings, StorageError
from draftheads.heads import HEADS
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from draftheads.train import run, training
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import RECIPES
from draftheads.train.report import Report, verdict_of
from draftheads.train.trainer import TrainingInterrupted
from draftheads.train.training_data import plan_training
from draftheads.utils.progress import Bars, NoProgress
from fake_progress import FakeProgress
from families import fitting
from thorough import some_rows
from training_world import (
    TEMPLATE,
    chat,
    counting_chats,
    lines,
    measured,
    stop_by_ctrl_c,
    tensors,
    train_for,
    train_options,
    write_chats,
)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "loss"),
    some_rows(
        [*((method, "teacher") for method in HEADS), ("medusa", "hard"), ("hydra", "hard")],
        *[(method, "teacher") for method in HEADS if method not in ("hydra", "amphista")],
    ),
)
def test_training_improves_the_heads_predictions(
    target: TargetModel, features: Path, tmp_path: Path, method: str, loss: Any
):
    heads = fitting(method, num_heads=3)
    if method in ("eagle3", "dflash", "dflash2", "dspark", "p-eagle"):  # these features are of the last hidden state
        heads["head_options"] = ("layers=[]",)
    settings = train_options(tmp_path / "out", features, method=method, loss=loss, epochs=12, **heads)
    train_for(target, settings)
    head = load_head(tmp_path / "out", target, dtype=torch.float32)
    trained, untrained = (measured(target, features, settings, head=made, on="training") for made in (head, None))
    chain = Tree.chain(3)
    assert trained.tokens_per_step(chain) > untrained.tokens_per_step(chain) + 0.1
    most = 0.9 if method == "dflash" else 0.7  # it starts fitted to the text, at two thirds of a random head's loss
    assert float(trained.losses.sum()) < most * float(untrained.losses.sum())
    losses = [line["loss"] for line in lines(tmp_path / "out")]
    assert sum(losses[-3:]) < most * sum(losses[:3])


def test_the_folder_holds_the_head_and_how_it_was_made(
    target: TargetModel, features: Path, trained: Callable[[str], Path]
):
    out = trained("medusa")
    names = {"README.md", "acceptance.json", "config.json", "model.safetensors"}  # the head
    assert {path.name for path in out.iterdir()} == names | {"log.jsonl", "metrics.json", "validation.jsonl"}
    metrics = json.loads((out / "metrics.json").read_text())
    report, settings = Report.of(metrics), train_options(out, features, save_steps=4)
    assert metrics["options"]["learning_rate"] == 0.02
    changed = {"model", "out", "method", "num_heads", "draft_vocab_size", "batch_tokens", "learning_rate", "features"}
    assert set(metrics["changed_options"]) == changed | {"held_out", "save_steps"}, "epochs are as by default"
    assert metrics["provenance"]["torch"] == torch.__version__
    store = FeatureStore(features)
    used = plan_training(store, settings).training
    every, answers = report.num_training_tokens, report.num_answer_tokens
    assert every == sum(store.lengths[i] for i in used) < sum(store.lengths)
    assert answers == sum(int(store.loss_masks[i].sum()) for i in used) < every
    saved = read_head(out)
    for words in (f"({every:,} tokens, {answers:,} of them in answers)", f"{report.tokens_per_step_tree:.2f}"):
        assert words in saved.card
    assert str(out.parent) not in saved.card
    head = load_head(out, target, dtype=torch.float32)
    assert Tree.from_paths(report.tree).num_nodes == 16
    assert head.default_shape == saved.profile.tree(10)
    assert saved.profile.num_texts >= 2
    for tokens in (saved.profile.static_tokens[9], saved.profile.dynamic_tokens[9]):
        assert 1.0 < tokens <= 4.0
    # the saved head (bf16) predicts as well as the one that was measured
    assert measured(target, features, settings, head=head).accuracy(1) == pytest.approx(report.top1, abs=0.03)
    line = lines(out)[0]
    assert line.keys() == {"step", "loss", "learning_rate", "grad_norm", "head_losses", "predictions"}
    assert line["loss"] == pytest.approx(sum(0.8**i * loss for i, loss in enumerate(line["head_losses"])), rel=1e-5)
    for rank, shares in ((0, report.top1), (9, report.top10)):
        assert [by_rank[rank] for by_rank in report.accuracy_by_rank] == shares


def test_the_head_is_measured_while_it_is_trained(
    target: TargetModel, features: Path, tmp_path: Path, trained: Callable[[str], Path]
):
    """With each checkpoint and after each epoch; that changes nothing in the training."""
    settings = train_options(tmp_path / "out", features, save_steps=1000)
    progress = FakeProgress()
    report = train_for(target, settings, progress)
    found = lines(settings.out, "validation.jsonl")
    assert [line["step"] for line in found] == [round(report.num_steps * i / 2) for i in range(3)]
    # progress shows the newest of them, and of which step it is; and means of the last ten losses in training
    losses = {line["step"]: f"{fmean(line['losses']):.3f} at step {line['step']}" for line in found}
    assert [note.split("held-out loss ")[1] for note in progress.notes if "held-out" in note] == [
        losses[max(old for old in losses if old <= step)] for step in progress.steps
    ]
    last = lines(settings.out)[-10:]
    in_training = fmean((fmean(line["head_losses"]) for line in last), [line["predictions"] for line in last])
    assert any(note.startswith(f"loss {in_training:.3f}, held-out loss") for note in progress.notes)
    assert found[0]["losses"] == pytest.approx(measured(target, features, settings).losses.tolist(), rel=1e-6)
    names = ("losses", "top1", "top3", "top10", "tokens_per_step_chain", "tokens_per_step_tree")
    # there are fewer held-out texts than are measured
    assert found[-1] == {"step": report.num_steps, **{name: getattr(report, name) for name in names}}
    often = [line["step"] for line in lines(trained("medusa"), "validation.jsonl")]
    assert often == sorted({*range(0, report.num_steps, 4), round(report.num_steps / 2), report.num_steps})
    rare = tensors(settings.out)
    assert all(torch.equal(tensor, rare[name]) for name, tensor in tensors(trained("medusa")).items())


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stage", ["training", "acceptance"])
def test_a_full_disk_keeps_earlier_checkpoints(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Any, *, stage: str
):
    """While a checkpoint is saved, or the head after the last one."""
    settings = replace(train_options(tmp_path / "out", features, save_steps=4), resume=True)
    with monkeypatch.context() as patch:
        module, name = (torch, "save") if stage == "training" else (os, "fsync")
        reporter = FakeProgress(6 if stage == "training" else None, partial(patch.setattr, module, name, full))
        if stage == "acceptance":
            profile = training.Run.acceptance_profile
            patch.setattr(training.Run, "acceptance_profile", lambda *given: (reporter.action(), profile(*given))[1])
        with pytest.raises(StorageError, match="a checkpoint cannot be saved" if stage == "training" else "no space"):
            train_for(target, settings, reporter)
    assert not list(settings.out.glob("*.safetensors"))
    progress = FakeProgress()
    train_for(target, settings, progress)
    assert progress.steps[:1] == ([5] if stage == "training" else [])
    assert (settings.out / "model.safetensors").read_bytes() == (trained("medusa") / "model.safetensors").read_bytes()


def test_a_run_depends_on_the_text_of_the_chat_template_not_on_its_path(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its place does not count: the same text in another file is the same run."""
    monkeypatch.setattr(
        TargetModel, "load", lambda *_, chat_template, **__: replace(target, chat_template=chat_template)
    )
    one, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    text = TEMPLATE.replace("m['role']", "'w1' if m['role'] == 'user' else m['role']")
    for path in (one, other):
        path.write_text(text, encoding="utf-8")
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings = train_options(tmp_path / "out", None, data=(data,), chat_template=str(one), epochs=1)
    with pytest.raises(TrainingInterrupted):
        run.train(settings, FakeProgress(2, stop_by_ctrl_c, stage="training"))
    with pytest.raises(InvalidSettings, match=r"settings have changed: chat_template was .* and is None"):
        run.train(replace(settings, resume=True, chat_template=None), FakeProgress())
    run.train(replace(settings, resume=True, chat_template=str(other)), FakeProgress())
    # a run that starts from this head reads chats as it does
    next_run = train_options(tmp_path / "next", None, data=(data,), epochs=1, start_from=str(settings.out))
    run.train(next_run, FakeProgress())
    assert read_head(settings.out).chat_template == read_head(next_run.out).chat_template == text
    one.write_text("changed", encoding="utf-8")
    with pytest.raises(InvalidSettings, match=r"holds a trained head .*chat_template was"):
        run.train(replace(settings, resume=True), FakeProgress())


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("data", b"", "chats.jsonl: the file is empty"),
        ("data", b'{"prompt": "w1"}', r"not \{'prompt': 'w1'\}; `draftheads distill` answers prompts"),
        ("data", b'{"messages": [{"role": "user", "content": "w1"}]}', "1 chat was left out: no message of role 'ass"),
        ("text", b"", "chats.jsonl: the file is empty"),
        ("text", b'{"messages": []}', "chats go to --data"),
        ("features", b"", "--features .*chats.jsonl has no hidden states: give --data"),
    ],
)
def test_files_of_the_wrong_kind_fail_before_the_model_is_loaded_or_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, content: bytes, message: str
):
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content)
    given = {"features": None, **({"features": path} if option == "features" else {option: (path,)})}
    with pytest.raises(DataError, match=message):
        run.train(train_options(tmp_path / "out", **given), FakeProgress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n \n", r"no chat in .*chats\.jsonl"),
        (f"{json.dumps(chat('w1', 'w2', finished=False))}\n" * 9, "no two assistant tokens in a row"),
    ],
)
def test_files_without_an_answer_to_learn_are_an_error(target: TargetModel, tmp_path: Path, content: str, message: str):
    (tmp_path / "chats.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        train_for(target, train_options(tmp_path / "out", None, data=(tmp_path / "chats.jsonl",)))


@pytest.mark.usefixtures("loaded")
def test_the_command_tells_what_was_left_out_and_how_long_all_took(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    data = write_chats(tmp_path / "chats.jsonl", [chat("w3"), *counting_chats(30), chat("w1")])
    clock = count(0, 10)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    command.run(train_options(tmp_path / "out", None, data=(data,), num_heads=2, epochs=1))
    printed = capfd.readouterr().out
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    total = f"{found['reading_seconds'] + found['training_seconds']:,.0f}"
    for words in (
        f"2 chats were left out: {NO_ANSWER} (the first is {data}:1)",
        *("top-1", "top-3", "top-10", "tokens per step, chain", "tree of ", "tokens per second"),
        f"{found['losses'][1]:.3f}",
        f"{verdict_of(found).replace('`', '')}\n",
        f"wrote {tmp_path / 'out' / 'report.html'}\n",
        f"took {found['reading_seconds']:,.0f} seconds for hidden states",
    ):
        assert words in printed
    assert found["reading_seconds"] >= 10
    assert f", {total} seconds with the hidden states" in (tmp_path / "out" / "README.md").read_text()
    assert (found["num_training_texts"] + found["num_held_out_texts"], len(found["left_out"])) == (30, 1)


@pytest.mark.usefixtures("loaded")
def test_hidden_states_that_are_stored_are_said_to_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(12))
    for out, words in (("first", "hidden states of 12 texts\n"), ("second", "12 texts, all stored already\n")):
        command.run(train_options(tmp_path / out, tmp_path / "states", data=(data,), num_heads=2, epochs=1))
        assert words in capfd.readouterr().out


@pytest.mark.thorough
def test_a_training_process_prints_no_warnings(features: Path, tmp_path: Path):
    """Warnings of transformers and accelerate belong in no user's terminal."""
    program = f"""
import sys; sys.path[:0] = {[*map(str, Path(__file__).parents[1:3]), str(Path(run.__file__).parents[2])]!r}
from pathlib import Path
from training_world import train_options
from training_world import chat_model
from draftheads.cli import train
from draftheads.models.model import TargetModel
TargetModel.load = lambda *_, **__: chat_model()
train.run(train_options(Path({str(tmp_path / "out")!r}), Path({str(features)!r}), epochs=1))
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True)
    # what bitsandbytes says when peft imports it is not ours to silence
    foreign = re.compile(r"Failed to load CPU gemm|DeprecationWarning: `torch\.jit|^  warnings\.warn\($")
    assert [line for line in done.stderr.splitlines() if not foreign.search(line)] == []
    assert "saved in" in done.stdout
    assert "grad_norm" not in done.stdout  # the Trainer's own lines


# --- the public function ---


@pytest.mark.usefixtures("loaded")
def test_the_public_function_trains_the_head_of_the_command(tmp_path: Path):
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings: dict[str, Any] = {"method": "hydra", "num_heads": 2, "draft_vocab_size": 48, "epochs": 1, "seed": 3}
    report = draftheads.train_head(out=tmp_path / "function", data=str(data), **settings)
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "--out", str(tmp_path / "command"), "--data", str(data), *words]) == 0
    assert report == Report.of(json.loads((tmp_path / "function" / "metrics.json").read_text()))
    function, other = tensors(tmp_path / "function"), tensors(tmp_path / "command")
    assert function.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in function.items())


def test_the_public_function_takes_defaults_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[TrainOptions] = []
    monkeypatch.setattr("draftheads.train.run.train", lambda options, _: seen.append(options))
    draftheads.train_head(recipe="hydra", data=["one.jsonl", "two.jsonl"], out=tmp_path, epochs=5)
    expected = {**RECIPES["hydra"].settings, "recipe": "hydra", "epochs": 5}
    expected |= {"data": (Path("one.jsonl"), Path("two.jsonl")), "out": tmp_path}
    assert seen == [TrainOptions.of(**expected)]


def test_only_the_first_process_shows_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []
    monkeypatch.setattr("draftheads.train.run.train", lambda _, progress: seen.append(progress))
    monkeypatch.setattr("draftheads.utils.progress.in_notebook", lambda: True)
    own = FakeProgress()
    for first, progress in ((True, True), (False, True), (True, False), (False, own)):
        monkeypatch.setattr("draftheads.train.processes.is_first", lambda first=first: first)
        draftheads.train_head(recipe="hydra", data="one.jsonl", out=tmp_path, progress=progress)
    assert [type(progress) for progress in seen] == [Bars, NoProgress, NoProgress, FakeProgress]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "chats.jsonl"}, "give method=…, or a recipe that has one"),
        ({"method": "hydra", "data": "chats.jsonl", "epoch": 2}, "no setting 'epoch'; did you mean epochs"),
        ({"method": "hydra", "features": 3}, "features is 3; give a path"),
    ],
)
def test_the_public_function_names_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str):
    with pytest.raises(InvalidSettings, match=message):
        draftheads.train_head(out=tmp_path, **settings)
