"""A training run: it learns, repeats, stops and resumes bit for bit, and its errors are clear."""

import errno
import json
import os
import re
import signal
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
    KilledError,
    chat,
    counting_chats,
    lines,
    measured,
    stop_by_crash,
    stop_by_ctrl_c,
    tensors,
    train_for,
    train_options,
    without_time,
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
) -> None:
    heads = fitting(method, num_heads=3)
    if method in ("eagle3", "dflash", "dspark"):  # these features are of the last hidden state
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
) -> None:
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
    assert report.num_training_tokens == sum(store.lengths[i] for i in used) < sum(store.lengths)
    every, answers = report.num_training_tokens, report.num_answer_tokens
    assert answers == sum(int(store.loss_masks[i].sum()) for i in used) < every
    assert f"({every:,} tokens, {answers:,} of them in answers)" in read_head(out).card
    assert f"{report.tokens_per_step_tree:.2f}" in read_head(out).card
    head, profile = load_head(out, target, dtype=torch.float32), read_head(out).profile
    assert Tree.from_paths(report.tree).num_nodes == 16
    assert str(out.parent) not in read_head(out).card
    assert head.default_shape == profile.tree(10)
    assert profile.num_texts >= 2
    assert profile.num_tokens > 0
    assert 1.0 < profile.static_tokens[9] <= 4.0
    assert 1.0 < profile.dynamic_tokens[9] <= 4.0
    # the saved head (bf16) predicts as well as the one that was measured
    assert measured(target, features, settings, head=head).accuracy(1) == pytest.approx(report.top1, abs=0.03)
    line = lines(out)[0]
    assert line.keys() == {"step", "loss", "learning_rate", "grad_norm", "head_losses"}
    assert line["loss"] == pytest.approx(sum(0.8**i * loss for i, loss in enumerate(line["head_losses"])), rel=1e-5)
    assert [shares[0] for shares in report.accuracy_by_rank] == report.top1
    assert [shares[-1] for shares in report.accuracy_by_rank] == report.top10
    assert report.tokens_per_second > 0


def test_the_head_is_measured_while_it_is_trained(
    target: TargetModel, features: Path, tmp_path: Path, trained: Callable[[str], Path]
) -> None:
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
    in_training = fmean(fmean(line["head_losses"]) for line in lines(settings.out)[-10:])
    assert any(note.startswith(f"loss {in_training:.3f}, held-out loss") for note in progress.notes)
    untrained = measured(target, features, settings)
    assert found[0]["losses"] == pytest.approx(untrained.losses.tolist(), rel=1e-6)
    assert found[0]["tokens_per_step_chain"] == untrained.tokens_per_step(Tree.chain(3))
    last = {key: value for key, value in found[-1].items() if key != "step"}
    assert last == {key: getattr(report, key) for key in last}, "there are fewer held-out texts than are measured"
    assert {"losses", "top1", "top3", "top10", "tokens_per_step_chain", "tokens_per_step_tree"} == last.keys()
    often = [line["step"] for line in lines(trained("medusa"), "validation.jsonl")]
    assert often == sorted({*range(0, report.num_steps, 4), round(report.num_steps / 2), report.num_steps})
    rare = tensors(settings.out)
    assert all(torch.equal(tensor, rare[name]) for name, tensor in tensors(trained("medusa")).items())


@pytest.mark.parametrize("lm_head", ["own", "low_rank"])
def test_every_kind_of_lm_head_learns(target: TargetModel, features: Path, tmp_path: Path, lm_head: Any) -> None:
    settings = train_options(
        tmp_path / "out", features, lm_head=lm_head, head_options=("lm_head_rank=8",), draft_vocab_size=0
    )
    report = train_for(target, settings)
    untrained = measured(target, features, settings)
    assert sum(report.losses) < 0.9 * float(untrained.losses.sum())
    names = {name.split(".")[0] for name in tensors(tmp_path / "out")}
    assert names == {"blocks", "lm_heads"}


@pytest.mark.parametrize(("stop", "optimizer"), [(stop_by_ctrl_c, "adamw"), (stop_by_crash, "muon")])
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(
    target: TargetModel, features: Path, tmp_path: Path, stop: Any, optimizer: Any
) -> None:
    changes: dict[str, Any] = {"method": "hydra", "save_steps": 4, "epochs": 1, "optimizer": optimizer}
    whole, parts = train_options(tmp_path / "a", features, **changes), tmp_path / "b"
    expected = train_for(target, whole)
    settings = replace(whole, out=parts)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises((TrainingInterrupted, KilledError)):
        train_for(target, settings, FakeProgress(6, stop, stage="training"))
    assert signal.getsignal(signal.SIGINT) is before
    last = {stop_by_ctrl_c: 6, stop_by_crash: 4}[stop]
    assert (parts / "checkpoints" / f"checkpoint-{last}.pt").is_file()
    assert not (parts / "model.safetensors").exists()
    with pytest.raises(InvalidSettings, match="add --resume"):
        run.train(settings, FakeProgress())
    reporter = FakeProgress()
    found = train_for(target, replace(settings, resume=True), reporter)
    assert reporter.steps[0] == last + 1
    assert without_time(found) == without_time(expected)
    assert (parts / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    for name in ("log.jsonl", "validation.jsonl"):
        assert lines(parts, name) == lines(tmp_path / "a", name)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_earlier_checkpoints(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = train_options(tmp_path / "out", features, save_steps=4, epochs=1)
    expected = train_for(target, replace(settings, out=tmp_path / "whole"))
    with monkeypatch.context() as patch:
        reporter = FakeProgress(6, lambda: patch.setattr(torch, "save", full), stage="training")
        with pytest.raises(StorageError, match="a checkpoint cannot be saved"):
            train_for(target, settings, reporter)
    assert [path.name for path in (settings.out / "checkpoints").iterdir()] == ["checkpoint-4.pt"]
    found = train_for(target, replace(settings, resume=True))
    assert without_time(found) == without_time(expected)


def test_a_run_that_failed_while_saving_resumes(
    target: TargetModel, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = train_options(tmp_path / "out", features)
    expected = train_for(target, replace(settings, out=tmp_path / "whole"))
    with monkeypatch.context() as patch:
        profile = training.Run.acceptance_profile
        full_disk = partial(patch.setattr, os, "fsync", full)
        patch.setattr(training.Run, "acceptance_profile", lambda *given: (full_disk(), profile(*given))[1])
        with pytest.raises(StorageError, match="no space left"):
            train_for(target, settings)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    progress = FakeProgress()
    found = train_for(target, replace(settings, resume=True), progress)
    assert progress.steps == [], "the last step was saved before the head was measured"
    assert without_time(found) == without_time(expected)


def test_a_run_depends_on_the_text_of_the_chat_template_not_on_its_path(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place does not: the same text in another file is the same run."""

    def load(*_: object, chat_template: str | None = None, **__: object) -> TargetModel:
        return replace(target, chat_template=chat_template)

    monkeypatch.setattr(TargetModel, "load", load)
    one, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    one.write_text(TEMPLATE.replace("m['role']", "'w1' if m['role'] == 'user' else m['role']"), encoding="utf-8")
    other.write_text(one.read_text(encoding="utf-8"), encoding="utf-8")
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings = train_options(tmp_path / "out", None, data=(data,), chat_template=str(one), epochs=1)
    with pytest.raises(TrainingInterrupted):
        run.train(settings, FakeProgress(2, stop_by_ctrl_c, stage="training"))
    with pytest.raises(DataError, match=r"texts or the model have changed since .* start again with another --out"):
        run.train(replace(settings, resume=True, chat_template=None), FakeProgress())
    run.train(replace(settings, resume=True, chat_template=str(other)), FakeProgress())
    assert read_head(settings.out).chat_template == one.read_text(encoding="utf-8")
    # a run that starts from this head reads chats as it does
    next_run = train_options(tmp_path / "next", None, data=(data,), epochs=1, start_from=str(settings.out))
    run.train(next_run, FakeProgress())
    assert read_head(next_run.out).chat_template == one.read_text(encoding="utf-8")
    one.write_text("changed", encoding="utf-8")
    with pytest.raises(InvalidSettings, match=r"holds a trained head .*chat_template was"):
        run.train(replace(settings, resume=True), FakeProgress())


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("data", None, r"chats\.jsonl.*cannot be read: No such file"),
        ("data", b"", "chats.jsonl: the file is empty"),
        ("data", b"hello", "line 1: not JSON: Expecting value at character 1; each line must be one JSON object"),
        ("data", b"\xff\xfe", "line 1: not UTF-8 text: byte 0xff"),
        ("data", b'{"prompt": "w1"}', r"not \{'prompt': 'w1'\}; `draftheads distill` answers prompts"),
        ("data", b'{"messages": [{"role": "user", "content": "w1"}]}', r"chats\.jsonl: no message of role 'assistant'"),
        ("data", b'{"text": "w1"}', r"a chat is an object .*, not \{'text': 'w1'\}$"),
        ("text", b"", "chats.jsonl: the file is empty"),
        ("text", b'{"messages": []}', "chats go to --data"),
        ("features", b"", "--features .*chats.jsonl has no hidden states: give --data"),
    ],
)
def test_files_of_the_wrong_kind_fail_before_the_model_is_loaded_or_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    path = tmp_path / "chats.jsonl"
    if content is not None:
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
def test_files_without_an_answer_to_learn_are_an_error(
    target: TargetModel, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "chats.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        train_for(target, train_options(tmp_path / "out", None, data=(tmp_path / "chats.jsonl",)))


@pytest.mark.usefixtures("loaded")
def test_the_command_tells_what_was_left_out_and_how_long_all_took(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_chats(tmp_path / "chats.jsonl", [chat("w3"), *counting_chats(30), chat("w1")])
    clock = count(0, 10)
    for module in (run, training):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    command.run(train_options(tmp_path / "out", None, data=(data,), num_heads=2, epochs=1))
    printed = capfd.readouterr().out
    assert f"2 chats were left out: {NO_ANSWER} (the first is {data}:1)" in printed
    assert "this run took " in printed
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    for words in ("top-1", "top-3", "top-10", "expected tokens per step", "tree of ", "text per second"):
        assert words in printed
    assert f"│ mean │ {sum(found['losses']) / 2:.3f} " in printed
    assert f"\n{verdict_of(found)}\n" in printed
    assert f"wrote {tmp_path / 'out' / 'report.html'}\n" in printed
    assert found["reading_seconds"] >= 10
    total = f"{found['reading_seconds'] + found['training_seconds']:,.0f}"
    assert f"took {total} s: {found['reading_seconds']:,.0f} s for hidden states" in printed
    assert f", {total} seconds with the hidden states" in (tmp_path / "out" / "README.md").read_text()
    assert (found["num_training_texts"] + found["num_held_out_texts"], len(found["left_out"])) == (30, 1)


@pytest.mark.thorough
def test_a_training_process_prints_no_warnings(features: Path, tmp_path: Path) -> None:
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
def test_the_public_function_trains_the_head_of_the_command(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(40))
    settings: dict[str, Any] = {"method": "hydra", "num_heads": 2, "draft_vocab_size": 48, "epochs": 1, "seed": 3}
    report = draftheads.train_head(out=tmp_path / "function", data=str(data), **settings)
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "--out", str(tmp_path / "command"), "--data", str(data), *words]) == 0
    assert report == Report.of(json.loads((tmp_path / "function" / "metrics.json").read_text()))
    function, other = tensors(tmp_path / "function"), tensors(tmp_path / "command")
    assert function.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in function.items())


def test_the_public_function_takes_defaults_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainOptions] = []
    monkeypatch.setattr("draftheads.train.run.train", lambda options, _: seen.append(options))
    draftheads.train_head(recipe="hydra", data=["one.jsonl", "two.jsonl"], out=tmp_path, epochs=5)
    expected = {**RECIPES["hydra"].settings, "recipe": "hydra", "epochs": 5}
    expected |= {"data": (Path("one.jsonl"), Path("two.jsonl")), "out": tmp_path}
    assert seen == [TrainOptions.of(**expected)]


def test_only_the_first_process_shows_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"method": "hydra"}, "give --data FILE"),
        ({"method": "hydra", "data": "chats.jsonl", "epoch": 2}, "no setting 'epoch'; did you mean epochs"),
        ({"recipe": "hydra-3"}, "no recipe 'hydra-3'"),
        ({"method": "hydra", "features": 3}, "features is 3; give a path"),
    ],
)
def test_the_public_function_names_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        draftheads.train_head(out=tmp_path, **settings)
