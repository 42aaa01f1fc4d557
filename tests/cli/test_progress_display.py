"""The display of long commands, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from draftheads.cli import progress_display
from draftheads.cli.progress_display import ProgressDisplay


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress_display.time, "monotonic", found)
    return found


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def file_console() -> Console:
    return Console(file=io.StringIO(), width=40, _environ={})


def terminal() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=True, _environ={"TERM": "xterm"})


def test_a_file_gets_a_line_per_stage(clock: Clock):
    console = file_console()
    with ProgressDisplay(console) as display:
        display.stage("loading [a] model")
        display.stage("training")
        display.progress(1, 10)
    assert written(console) == "loading [a] model\ntraining\n"


def test_a_file_gets_a_line_now_and_then_with_speed_and_time_left(clock: Clock):
    console = file_console()
    with ProgressDisplay(console) as display:
        display.stage("training")
        display.progress(1000, 4000)  # done by an earlier run: not part of the speed
        clock.seconds += 20
        display.progress(1100, 4000)
        clock.seconds += 20
        display.progress(1200, 4000, "loss 1.500")
        clock.seconds += 20
        display.progress(1300, 4000)
    assert written(console) == "training\ntraining, loss 1.500: 1,200 of 4,000, 5.00/s, 9 min left\n"


def test_a_file_gets_no_speed_before_it_is_known(clock: Clock):
    """The first progress came late, and the next units soon after it: a batch that ended, or saved results."""
    console = file_console()
    with ProgressDisplay(console) as display:
        display.stage("answering")
        clock.seconds += 29
        display.progress(0, 4000)
        clock.seconds += 1
        display.progress(2, 4000)
        clock.seconds += 30
        display.progress(62, 4000)
    assert written(console) == "answering\nanswering: 2 of 4,000\nanswering: 62 of 4,000, 2.00/s, 33 min left\n"


def test_a_terminal_shows_a_bar_and_keeps_a_line_of_each_finished_stage(clock: Clock):
    console = terminal()
    with ProgressDisplay(console) as display:
        display.stage("loading")
        clock.seconds += 7
        display.stage("training")
        display.progress(3, 8, "loss 2.000")
    shown = written(console)
    assert "loading: 7 s\n" in shown
    assert "training, loss 2.000" in shown
    assert "3/8" in shown


def test_a_transient_display_keeps_no_lines(clock: Clock):
    console = terminal()
    with ProgressDisplay(console, transient=True) as display:
        display.stage("loading")
        display.stage("training")
    assert "loading: " not in written(console)


def test_a_notebook_shows_a_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    console = Console(file=io.StringIO(), width=80, force_jupyter=True, _environ={})
    displayed: list[str] = []
    monkeypatch.setattr(console, "_check_buffer", lambda: displayed.append(console._render_buffer(console._buffer)))
    display = ProgressDisplay(console)
    assert not display._bars.disable
    monkeypatch.setattr(display._bars, "start", lambda: None)  # it needs ipywidgets
    with display:
        display.stage("loading")
        clock.seconds += 7
        display.stage("training")
        display.progress(3, 8, "loss 2.000")
    assert "loading: 7 s" in displayed[-1]
    assert [(task.description, task.completed, task.total) for task in display._bars.tasks] == [
        ("training, loss 2.000", 3, 8)
    ]
