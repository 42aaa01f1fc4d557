"""The display of long commands, on a terminal and elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from cli_world import without_colours
from draftheads.cli import progress_display
from draftheads.cli.progress_display import ProgressDisplay


def show(console: Console, clock: SimpleNamespace, *, transient: bool = False) -> None:
    with ProgressDisplay(console, transient=transient) as display:
        display.stage("loading [a] model")
        display.stage("training")
        display.progress(1, 10)
        clock.seconds += 40
        display.progress(2, 10, "loss 1.5")
        display.progress(3, 10)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that is moved by hand."""
    moved = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: moved.seconds)
    return moved


def test_a_file_gets_a_line_per_stage_and_one_now_and_then(clock: SimpleNamespace):
    out = io.StringIO()
    show(Console(file=out, width=40, _environ={}), clock)
    assert out.getvalue() == "loading [a] model\ntraining\ntraining, loss 1.5: 2 of 10\n"


def test_a_terminal_gets_a_bar_for_each_stage(clock: SimpleNamespace):
    out = io.StringIO()
    show(Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"}), clock)
    last = without_colours(out.getvalue())
    assert "loading [a] model" in last
    assert "3/10" in last.rpartition("training")[2]
    out = io.StringIO()
    show(Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"}), clock, transient=True)
    assert out.getvalue().endswith("\x1b[2K"), "the bars are erased"
