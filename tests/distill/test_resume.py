"""Distillations that are killed, stopped, started twice or meet a full disk: nothing is lost or repeated."""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill_world import RECORDS, manifest, options, records, write_prompts
from draftheads.distill import run as distillation
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import Journal, Outcome, distill, part_path
from draftheads.errors import DataError, DistillationInterrupted, InvalidSettings, StorageError
from fake_progress import FakeProgress
from families import saved_model
from nursery import Nursery
from thorough import some
from training_world import chat_model

NUM_SELF_TALK = 30
TOTAL = len(RECORDS) + NUM_SELF_TALK


class Echo:
    """Answers at once; has few self-talk questions, so that many are repeated."""

    def __init__(self, model: str = "echo", *, is_finished: bool = True) -> None:
        self.identity = {"model": model}
        self.is_finished = is_finished  # whether its answers end by themselves
        self.asked: list[int] = []  # indices of the conversations

    def converse(self, dialogues: list[Dialogue], on_progress: OnProgress) -> None:
        for dialogue in dialogues:
            self.asked.append(dialogue.index)
            while not dialogue.is_over:
                if not dialogue.ask_next():
                    dialogue.ask(f"w{dialogue.next_seed % 20}")
                dialogue.answer(f"{dialogue.temperature} {dialogue.next_seed}", is_finished=self.is_finished)
                dialogue.count(3)
                on_progress(3)
            on_progress(0, dialogue)


class Killed(BaseException):
    """Stands for the end of the process."""


def echo_options(folder: Path, **changes: Any) -> DistillOptions:
    return options(folder, **{"num_self_talk": NUM_SELF_TALK, **changes})


def run(chosen: DistillOptions, source: Echo | None = None, progress: FakeProgress | None = None) -> Outcome:
    return distill(chosen, lambda: source or Echo(), progress or FakeProgress())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run without a stop."""
    chosen = echo_options(tmp_path_factory.mktemp("whole"))
    counts = run(chosen).counts
    assert counts["repeated"] > 3
    return chosen.out.read_bytes()


def test_repeated_self_talk_questions_are_dropped(tmp_path: Path):
    chosen = echo_options(tmp_path)
    counts = run(chosen).counts
    asked = [tuple(m["content"] for m in record["messages"] if m["role"] != "assistant") for record in records(chosen)]
    assert len(set(asked)) == len(asked) == counts["records"]
    assert counts["records"] + counts["repeated"] == TOTAL
    assert [record["index"] for record in records(chosen)][: len(RECORDS)] == list(range(len(RECORDS)))


def test_prompts_that_differ_only_in_later_turns_are_all_kept(tmp_path: Path):
    chosen = options(tmp_path)
    write_prompts(chosen.prompts[0], [{"prompt": "w1"}, {"turns": ["w1", "w2"]}])
    run(chosen, Echo(is_finished=False))
    assert [len(record["messages"]) for record in records(chosen)] == [2, 2]


@pytest.mark.parametrize("where", ["before", "in", "after"])
@pytest.mark.parametrize("kill_at", [0, 1, 2, 30, TOTAL, TOTAL + 1, TOTAL + 2])
def test_a_run_continues_after_a_kill_at_any_write(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kill_at: int
):
    """The first write is of the settings, the last two are of the output and its manifest."""
    calls = iter(range(1000))

    def killing(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(path: Path, content: Any, **place: int) -> None:
            is_last = next(calls) == kill_at
            if is_last and where == "in" and place:  # half the bytes of a line; other files are written atomically
                write(path, content[: len(content) // 2], **place)
            elif not is_last or where == "after":
                write(path, content, **place)
            if is_last:
                raise Killed

        return wrapped

    chosen, first, second = echo_options(tmp_path), Echo(), Echo()
    with monkeypatch.context() as patched:
        patched.setattr(distillation, "append_synced", killing(distillation.append_synced))
        patched.setattr(distillation, "write_atomic", killing(distillation.write_atomic))
        with pytest.raises(Killed):
            run(chosen, first)
    outcome = run(chosen, second)
    assert chosen.out.read_bytes() == whole
    assert not part_path(chosen.out).exists()
    assert len(set(first.asked) & set(second.asked)) <= 1, "no more than the one that was being saved"
    assert {*first.asked, *second.asked} == set(range(TOTAL))
    assert outcome.counts["done"] == TOTAL
    assert outcome.counts["answers"] == sum(len(record["messages"]) // 2 for record in records(chosen))
    assert outcome.counts["tokens"] == manifest(chosen)["counts"]["tokens"] == 3 * (TOTAL + 3)
    assert run(chosen, third := Echo()).was_complete
    assert third.asked == []


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_loses_no_finished_answer(whole: bytes, tmp_path: Path):
    chosen, second = echo_options(tmp_path), Echo()
    with pytest.raises(DistillationInterrupted, match=f"stopped after 34 of {TOTAL} .*the same command continues"):
        run(chosen, progress=FakeProgress(34, interrupt))
    progress = FakeProgress()
    run(chosen, second, progress)
    assert f"answering {TOTAL - 34} of {TOTAL} conversations" in progress.stages
    assert len(second.asked) == TOTAL - 34
    assert chosen.out.read_bytes() == whole


def test_a_run_continues_after_a_full_disk(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = echo_options(tmp_path)
    fsync, left = os.fsync, iter(range(20, -1000, -1))

    def failing(descriptor: int) -> None:
        if next(left) <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(StorageError, match="no space left on the disk"):
            run(chosen)
    run(chosen)
    assert chosen.out.read_bytes() == whole


# --- another run, other files ---


def stopped(folder: Path, **changes: Any) -> DistillOptions:
    """A run that was stopped."""
    chosen = echo_options(folder, **changes)
    with pytest.raises(DistillationInterrupted):
        run(chosen, progress=FakeProgress(34, interrupt))
    return chosen


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"temperature": (0.0, 0.7)}, r"temperature was \[0.0, 1.0\] and is \[0.0, 0.7\]"),
        ({"max_new_tokens": 13}, "max_new_tokens was 12 and is 13"),
        ({"num_self_talk": 61}, "num_self_talk was 30 and is 61"),
    ],
)
def test_a_run_with_other_settings_is_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    chosen = stopped(tmp_path)
    words += ". To continue that run use its settings; else name another --out"
    for _ in ("stopped", "complete"):
        before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
        with pytest.raises(InvalidSettings, match=words):
            run(echo_options(tmp_path, **changes))
        assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before
        run(chosen)


def test_a_run_with_other_prompts_or_another_model_is_refused(tmp_path: Path):
    chosen = stopped(tmp_path)
    with pytest.raises(InvalidSettings, match="model was 'echo' and is 'other'"):
        run(chosen, Echo("other"))
    write_prompts(chosen.prompts[0], [*RECORDS[:-1], {"prompt": "w50"}])
    with pytest.raises(InvalidSettings, match=r"fingerprint was '[0-9a-f]{16}' and is '[0-9a-f]{16}'"):
        run(chosen)


def test_settings_that_change_no_answer_may_change(whole: bytes, tmp_path: Path):
    stopped(tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "prompts.jsonl").rename(moved / "prompts.jsonl")
    prompts = (moved / "prompts.jsonl",)
    chosen = echo_options(tmp_path, prompts=prompts, batch_size=3, head="hydra", model="./echo")
    run(chosen)
    assert chosen.out.read_bytes() == whole
    assert manifest(chosen)["options"]["batch_size"] == 3


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("out.jsonl", "precious", "out.jsonl exists, but is of no run"),
        ("out.jsonl.part", "precious\n", "out.jsonl.part: is not of a distillation"),
        ("out.jsonl.part", "[]\n", "out.jsonl.part: is not of a distillation"),
        ("out.jsonl.manifest.json", "{", "out.jsonl.manifest.json: is not of a distillation"),
        ("out.jsonl.manifest.json", '{"format": 1}', "out.jsonl.manifest.json: is not of a distillation"),
    ],
)
def test_unknown_files_are_not_overwritten(tmp_path: Path, name: str, content: str, words: str):
    (tmp_path / name).write_text(content)
    with pytest.raises((InvalidSettings, DataError), match=words):
        run(echo_options(tmp_path))
    assert (tmp_path / name).read_text() == content


def test_an_output_of_others_beside_a_stopped_run_is_not_overwritten(tmp_path: Path):
    chosen = stopped(tmp_path)
    chosen.out.write_text("precious")
    with pytest.raises(InvalidSettings, match="exists, but is of no run"):
        run(chosen)
    assert chosen.out.read_text() == "precious"


def test_a_complete_output_that_is_gone_is_an_error(tmp_path: Path):
    chosen = echo_options(tmp_path)
    run(chosen)
    chosen.out.unlink()
    with pytest.raises(DataError, match="its output file is gone"):
        run(chosen)


def test_two_runs_cannot_write_one_file(tmp_path: Path):
    chosen = echo_options(tmp_path)
    with Journal.locked(chosen.out, {}), pytest.raises(StorageError, match="another process is writing"):
        run(chosen)


# --- real processes ---


def num_lines(out: Path) -> int:
    part = part_path(out)
    return part.read_bytes().count(b"\n") if part.exists() else 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("num_kills", some([3, 10], 3))
def test_after_kills_at_random_moments_the_file_is_the_same(num_kills: int, tmp_path: Path):
    saved_model(chat_model(seed=3), tmp_path / "model")
    turns = [{"turns": [f"w{i % 57} w{i // 57}", "w1"]} for i in range(60)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", turns)
    command = f"--model {tmp_path}/model --prompts {prompts} --precision fp32".split()
    command += ["--max-new-tokens", "20", "--batch-size", "4"]
    out = tmp_path / "killed.jsonl"
    chance = random.Random(0)  # noqa: S311 - nothing secret
    done: list[int] = []
    with Nursery("distill") as nursery:
        for _ in range(num_kills):
            process = nursery.start([*command, "--out", str(out)], folder=tmp_path)
            before, deadline = num_lines(out), time.monotonic() + 60
            while num_lines(out) < before + 5 and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.05))
            os.kill(process, signal.SIGKILL)
            assert nursery.wait() == -signal.SIGKILL
            done.append(num_lines(out))
        for path in (out, tmp_path / "whole.jsonl"):
            nursery.start([*command, "--out", str(path)], folder=tmp_path)
            assert nursery.wait() == 0
    assert done == sorted(done)
    assert 0 < done[-1] <= 61  # there was something to lose, and something left to do
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".*.tmp"))
