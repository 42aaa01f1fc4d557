"""Training runs that are killed or started again: with --resume the same command gives the same head."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from draftheads.checkpoints.checkpoint import read_head
from draftheads.errors import InvalidSettings, StorageError
from draftheads.models.model import TargetModel
from draftheads.train import processes, run, run_folder
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report, verdict_of
from draftheads.train.run_folder import RunFolder, find_checkpoint
from draftheads.utils.files import locked
from fake_progress import FakeProgress
from thorough import some
from training_world import (
    TEMPLATE,
    KilledError,
    chat_model,
    counting_chats,
    lines,
    stop_by_crash,
    tensors,
    train_for,
    train_options,
    write_chats,
)

pytestmark = pytest.mark.usefixtures("loaded")
SAVE_STEPS = 4
# of a small run; noise makes it depend on the random numbers of every step
SETTINGS: dict[str, Any] = {"method": "medusa", "num_heads": 2, "draft_vocab_size": 48, "noise_alpha": 75.0}
SETTINGS |= {"batch_tokens": 224, "save_steps": SAVE_STEPS}


def found_in(out: Path) -> dict[str, Any]:
    """All files of a run, without times, speeds and the command."""
    paths = (path for path in out.rglob("*") if path.is_file() and path.name not in (".lock", "README.md"))
    found: dict[str, Any] = {str(path.relative_to(out)): path.read_bytes() for path in paths}
    for name in [name for name in found if name.endswith(("config.json", "metrics.json"))]:
        content = json.loads(found[name])
        for key in ("provenance", "reading_seconds", "training_seconds", "tokens_per_second"):
            content.pop(key, None)
        if "options" in content:
            del content["options"]["out"], content["options"]["resume"]
        found[name] = json.dumps(content)
    return {**found, "report.html": None}  # made from the others


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", counting_chats(90))


def options(out: Path, data: Path, **changes: Any) -> TrainOptions:
    return TrainOptions.of(out=out, data=(data,), resume=True, **{**SETTINGS, **changes})


def train_until_killed(settings: TrainOptions, *, after: int) -> None:
    with pytest.raises(KilledError):
        run.train(settings, FakeProgress(after, stop_by_crash, stage="training"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train_for(chat_model(), options(out, data), FakeProgress())
    return out


# --- the same command always works ---


@pytest.mark.parametrize(
    "kill_after", some([2, SAVE_STEPS - 1, SAVE_STEPS, SAVE_STEPS + 1, 3 * SAVE_STEPS - 1], 2, SAVE_STEPS + 1)
)
def test_a_killed_run_resumes_with_the_same_log_and_the_same_head(
    data: Path, whole: Path, tmp_path: Path, kill_after: int
):
    settings = options(tmp_path / "out", data)
    # settings may change before the first checkpoint
    train_until_killed(replace(settings, learning_rate=0.5) if kill_after == 2 else settings, after=kill_after)
    reporter = FakeProgress()
    run.train(settings, reporter)
    last = (kill_after - 1) // SAVE_STEPS * SAVE_STEPS  # a step is reported before it is saved
    where = f"resuming from {settings.out}/checkpoints/checkpoint-{last}.pt" if last else "no checkpoint in"
    assert reporter.stages[0].startswith(where)
    assert reporter.steps[0] == last + 1
    assert found_in(settings.out) == found_in(whole)


def test_the_best_head_is_kept_beside_the_last_one_by_a_killed_run_too(data: Path, tmp_path: Path):
    """The held-out loss rises: at a far too high learning rate, these heads overfit the training text."""
    changes: dict[str, Any] = {"learning_rate": 0.3, "epochs": 6, "loss": "hard", "noise_alpha": 0.0}
    whole, settings = (options(tmp_path / name, data, **changes) for name in ("whole", "out"))
    report = train_for(chat_model(), whole)
    losses = {line["step"]: fmean(line["losses"]) for line in lines(whole.out, "validation.jsonl")}
    best = min(losses, key=losses.__getitem__)
    assert report.best_step == best < report.num_steps
    assert report.best_loss == pytest.approx(losses[best], rel=1e-5)  # all held-out texts are measured during training
    sentence = (
        f"step {best}, the best one: the held-out loss rose from {losses[best]:.3f} to {losses[report.num_steps]:.3f}"
    )
    assert sentence in verdict_of(vars(report))
    kept = Report.of(json.loads((whole.out / "best" / "metrics.json").read_text()))
    assert (kept.num_steps, fmean(kept.losses), kept.best_step) == (best, report.best_loss, None)
    assert f"in {best} step" in read_head(whole.out / "best").card
    weights = tensors(whole.out)
    assert any(not torch.equal(weights[name], tensor) for name, tensor in tensors(whole.out / "best").items())
    for kill_after in (max(1, best), report.num_steps - 1):
        train_until_killed(settings, after=kill_after)
        kinds = [path.name.split("-")[0] for path in (settings.out / "checkpoints").iterdir()]
        assert len(kinds) == len(set(kinds)), "one of each kind"
    run.train(settings, FakeProgress())
    assert found_in(settings.out) == found_in(whole.out)
    assert not (settings.out / "checkpoints").exists()


def test_a_complete_run_is_not_repeated(data: Path, whole: Path, tmp_path: Path):
    kept = [path for path in whole.iterdir() if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in kept}
    reporter = FakeProgress()
    report = run.train(options(whole, data), reporter)
    assert reporter.stages == [f"{whole} is complete already: nothing is left to do"]
    assert report.top1 == json.loads((whole / "metrics.json").read_text())["top1"]
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert {path.name for path in whole.iterdir()} - {".lock"} == {path.name for path in kept}
    with pytest.raises(InvalidSettings, match="holds a trained head"):
        run.train(options(whole, data, epochs=3), FakeProgress())
    with pytest.raises(InvalidSettings, match="holds a trained head"):
        run.train(replace(options(whole, data), resume=False), FakeProgress())
    moved = shutil.copytree(whole, tmp_path / "moved")
    (moved / "metrics.json").unlink()  # a head of others
    with pytest.raises(InvalidSettings, match="holds a trained head"):
        run.train(options(moved, data), FakeProgress())


def test_a_run_killed_after_saving_the_head_only_removes_its_checkpoints(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = options(tmp_path / "out", data)
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "tidy_up", lambda _: stop_by_crash())
        with pytest.raises(KilledError):
            run.train(settings, FakeProgress())
    assert (settings.out / "checkpoints").is_dir()
    (settings.out / ".metrics.json.0a1b2c3d.tmp").touch()
    reporter = FakeProgress()
    run.train(settings, reporter)
    assert not reporter.steps
    assert found_in(settings.out) == found_in(whole)


@pytest.mark.parametrize(("stage", "after"), [("hidden states", 0), ("training", SAVE_STEPS + 1)])
def test_a_run_that_resumes_on_another_day_has_the_date_of_its_beginning(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, after: int
):
    target = chat_model()
    target.tokenizer.chat_template = "w{{ strftime_now('%d') | int }} \n " + TEMPLATE
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: target)
    read = []
    settings, whole = options(tmp_path / "out", data), options(tmp_path / "whole", data)
    for day, out in ((29, whole), (29, settings), (30, settings)):
        monkeypatch.setattr(
            run_folder.time, "time", lambda day=day: datetime(2026, 11, day, 12, tzinfo=UTC).timestamp()
        )
        progress = FakeProgress(after, stop_by_crash, stage=stage) if out is settings and day == 29 else FakeProgress()
        with pytest.raises(KilledError) if out is settings and day == 29 else nullcontext():
            run.train(out, progress)
        read.append([text for text in progress.stages if "the date" in text])
    assert read == 3 * [["the chat template writes the date: that of the run, 2026-11-29"]]
    assert found_in(settings.out) == found_in(whole.out)


# --- what a kill leaves half-written ---


def test_half_a_checkpoint_is_ignored_and_removed(data: Path, whole: Path, tmp_path: Path):
    settings = options(tmp_path / "out", data)
    train_until_killed(settings, after=SAVE_STEPS + 1)
    newest = settings.out / "checkpoints" / f"checkpoint-{SAVE_STEPS}.pt"
    half = newest.with_name(f".checkpoint-{SAVE_STEPS + 1}.pt.a1b2c3d4.tmp")
    half.write_bytes(newest.read_bytes()[:1000])
    assert find_checkpoint(settings.out) == newest
    train_until_killed(settings, after=SAVE_STEPS + 1)
    assert not half.exists()
    run.train(settings, FakeProgress())
    assert found_in(settings.out) == found_in(whole)


def test_a_damaged_checkpoint_is_an_error_that_names_it(data: Path, tmp_path: Path):
    settings = options(tmp_path / "out", data)
    train_until_killed(settings, after=SAVE_STEPS + 1)
    newest = settings.out / "checkpoints" / f"checkpoint-{SAVE_STEPS}.pt"
    for content in (newest.read_bytes()[:1000], b""):
        newest.write_bytes(content)
        with pytest.raises(StorageError, match=rf"checkpoint-{SAVE_STEPS}\.pt cannot be read: .*delete it"):
            run.train(settings, FakeProgress())


def test_a_run_with_other_settings_is_refused_before_the_model_reads(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of processes, since a checkpoint has the random state of each one; and settings of other versions by name."""
    settings = options(tmp_path / "out", data)
    train_until_killed(settings, after=SAVE_STEPS + 1)
    monkeypatch.setattr(TargetModel, "hidden_states", lambda *_: pytest.fail("the model was asked"))
    with pytest.raises(InvalidSettings, match=r"learning_rate was 0\.001 and is 0\.5, .*seed was 0 and is 7"):
        run.train(replace(settings, learning_rate=0.5, seed=7), FakeProgress())
    path = settings.out / "run.json"
    before = json.loads(path.read_text())
    for changes, words in (
        ({"processes": 2}, "processes was 2 and is 1"),
        ({"dropout": 0.2, "accumulate": 2}, "run.json has settings that this version does not have: accumulate, drop"),
    ):
        path.write_text(json.dumps({**before, **changes}), encoding="utf-8")
        with pytest.raises(InvalidSettings, match=re.escape(words)):
            run.train(settings, FakeProgress())
    complete = shutil.copytree(whole, tmp_path / "complete")
    for content, what in (("{", "cannot be read as JSON"), ("[]", r"is \[\]; it must be an object"), ("{}", "has no ")):
        for file, out in ((path, settings.out), (complete / "metrics.json", complete)):
            kept, _ = file.read_bytes(), file.write_text(content)
            with pytest.raises(StorageError, match=rf"{file.name} {what}.*: delete {out}, or name another --out"):
                run.train(options(out, data), FakeProgress())
            file.write_bytes(kept)
    metrics = json.loads((complete / "metrics.json").read_text())
    metrics["options"]["dropout"] = 0.2
    (complete / "metrics.json").write_text(json.dumps(metrics))
    with pytest.raises(InvalidSettings, match=r"metrics\.json has settings .*: dropout\. Finish the run with"):
        run.train(options(complete, data), FakeProgress())


def test_two_runs_cannot_write_one_folder(features: Path, whole: Path, data: Path, tmp_path: Path):
    """Nor can one tidy up what the other may be writing."""
    for settings in (train_options(tmp_path / "out", features), options(whole, data)):
        silent = FakeProgress()
        with locked(settings.out, ""), pytest.raises(StorageError, match=r"another process is writing .*: wait"):
            run.train(settings, silent)
        assert silent.stages == []


def test_of_several_processes_one_locks_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "writes", lambda _: False)
    with locked(tmp_path, ""), RunFolder(train_options(tmp_path, tmp_path)).lock():
        pass
