"""A run that is stopped at any moment keeps what its message says, and goes on to the head of an unbroken run."""

import json
import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from itertools import product
from multiprocessing import forkserver
from pathlib import Path

import pytest

from draftheads.data.features import stored
from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.run_folder import find_checkpoint
from thorough import some_rows
from training_child import child, settings
from training_world import counting_chats, without_time, write_chats

SIGNALS = (signal.SIGINT, signal.SIGKILL)
Events = list[tuple[str, str, int]]  # kind, stage and units of each report


@pytest.fixture(scope="module")
def run() -> Callable[..., Events]:
    """Runs a training; may send a signal after a number of reports, whatever the process is doing then."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["training_child"])  # imports take longer than all trainings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()

    def runs(options: TrainOptions, moment: int | None = None, number: signal.Signals | None = None) -> Events:
        here, there = processes.Pipe(duplex=False)
        process = processes.Process(target=child, args=(there, options))
        process.start()
        there.close()
        events: Events = []
        try:
            while not events or events[-1][0] != "end":
                if len(events) == moment and number is not None and process.pid is not None:
                    os.kill(process.pid, number)
                events.append(here.recv())
        except EOFError:
            pass
        process.join()
        return events

    return runs


@pytest.fixture(scope="module")
def unbroken(run: Callable[..., Events], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Events]:
    """The data, the folder of a run, and what it reported."""
    folder = tmp_path_factory.mktemp("unbroken")
    data = write_chats(folder / "chats.jsonl", counting_chats(40))
    events = run(settings(folder / "out", data))
    assert events[-1] == ("end", "complete", 0)
    return data, folder / "out", events


def first_progress(events: Events, stage: str) -> int | None:
    return next((done for kind, what, done in events if kind == "progress" and what.startswith(stage)), None)


def check_message(message: str, out: Path, after: Events) -> None:
    """What a message says is there, and the next run began with it."""
    texts = re.search(r"hidden states of (\d+) texts? \((\d+) tokens\) are kept", message)
    step = re.search(r"stopped after step (\d+) of", message) or re.search(r"checkpoint-(\d+)\.pt is kept", message)
    if texts:
        assert first_progress(after, "hidden states") == int(texts[2]) > 0
    elif step:
        assert first_progress(after, "training") in {int(step[1]) + 1, None}  # None after the last step
    elif "the trained head is in" in message:
        assert any("is complete already" in what for _, what, _ in after)
    else:
        assert message == "stopped; nothing was kept: the same command begins again"
        assert first_progress(after, "hidden states") == 0


def stop_and_continue(
    run: Callable[..., Events], unbroken: tuple[Path, Path, Events], out: Path, moment: int, number: signal.Signals
) -> str:
    """Stops at a moment, checks what is kept, continues by the command that the message names, compares the heads."""
    data, whole, _ = unbroken
    events = run(settings(out, data), moment, number)
    message = events[-1][1] if events and events[-1][0] == "end" else ""
    kept = stored(out / "features")
    if "are kept" in message:
        assert f"hidden states of {kept[0]} text" in message
        assert f"({kept[1]} tokens)" in message
    if "nothing was kept" in message:
        assert kept == (0, 0)
    if "nothing was kept" in message or "are kept" in message:
        assert find_checkpoint(out) is None
    if message != "complete":
        # without a message only --resume fits every state
        resume = "--resume" in message or not message or "the trained head" in message
        after = run(settings(out, data, resume=resume))
        assert after[-1] == ("end", "complete", 0), (moment, number, message)
        if message:
            check_message(message, out, after)
    for name in ("model.safetensors", "log.jsonl", "validation.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    first, second = (without_time(Report.of(json.loads((path / "metrics.json").read_text()))) for path in (out, whole))
    assert first == second
    assert not (out / "checkpoints").exists()
    return message


@pytest.mark.parametrize(
    ("stage", "number"),
    some_rows(
        product(["reading data", "hidden states", "training", "measuring", "acceptance"], SIGNALS),
        *[("hidden states", signal.SIGINT), ("training", signal.SIGINT), ("measuring", signal.SIGINT)],
        *[("hidden states", signal.SIGKILL), ("training", signal.SIGKILL)],
    ),
)
def test_a_run_that_is_stopped_in_each_stage_continues(
    run: Callable[..., Events], unbroken: tuple[Path, Path, Events], tmp_path: Path, stage: str, number: signal.Signals
):
    moments = [place for place, event in enumerate(unbroken[2], 1) if event[1].startswith(stage)]
    message = stop_and_continue(run, unbroken, tmp_path / "out", moments[len(moments) * 2 // 3], number)
    if number == signal.SIGINT:
        assert "nothing was kept" in message or "continues from there" in message or message == "complete"


@pytest.mark.thorough
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_stopped_at_a_random_moment_continues(
    run: Callable[..., Events], unbroken: tuple[Path, Path, Events], tmp_path: Path, seed: int, number: signal.Signals
):
    moment = random.Random(seed).randrange(len(unbroken[2]))  # noqa: S311 - nothing secret
    stop_and_continue(run, unbroken, tmp_path / "out", moment, number)
