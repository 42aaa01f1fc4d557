"""The display of long commands, on a terminal and elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from draftheads.cli import progress_display
from draftheads.cli.progress_display import ProgressDisplay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that is moved by hand."""
    moved = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: moved.seconds)
    return moved


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def on_file(out: io.StringIO) -> ProgressDisplay:
    return ProgressDisplay(Console(file=out, width=40, _environ={}))


def on_terminal(out: io.StringIO, **options: bool) -> ProgressDisplay:
    return ProgressDisplay(Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"}), **options)


def test_a_file_gets_a_line_per_stage(clock: SimpleNamespace, out: io.StringIO):
    with on_file(out) as display:
        display.stage("loading [a] model")
        display.stage("training")
        display.progress(1, 10)
    assert out.getvalue() == "loading [a] model\ntraining\n"


def test_a_file_gets_a_line_now_and_then_with_speed_and_time_left(clock: SimpleNamespace, out: io.StringIO):
    with on_file(out) as display:
        display.stage("training")
        display.progress(1000, 4000)  # done by an earlier run: not part of the speed
        clock.seconds += 20
        display.progress(1100, 4000)
        clock.seconds += 20
        display.progress(1200, 4000, "loss 1.500")
        clock.seconds += 20
        display.progress(1300, 4000)
    assert out.getvalue() == "training\ntraining, loss 1.500: 1,200 of 4,000, 5.00/s, 9 min left\n"


def test_a_file_gets_no_speed_before_it_is_known(clock: SimpleNamespace, out: io.StringIO):
    """The first progress came late, and the next units soon after it: a batch that ended, or saved results."""
    with on_file(out) as display:
        display.stage("answering")
        clock.seconds += 29
        display.progress(0, 4000)
        clock.seconds += 1
        display.progress(2, 4000)
        clock.seconds += 30
        display.progress(62, 4000)
    assert out.getvalue() == "answering\nanswering: 2 of 4,000\nanswering: 62 of 4,000, 2.00/s, 33 min left\n"


@pytest.mark.parametrize("warm_up", [0, 35, 200])
def test_the_time_left_is_right_although_the_first_units_were_slow(
    clock: SimpleNamespace, out: io.StringIO, warm_up: float
):
    """A model's first text, and the first answers of a batch: afterwards each second brings ten units."""
    with on_file(out) as display:
        display.stage("reading")
        display.progress(0, 6000)
        clock.seconds += warm_up
        for done in range(10, 6010, 10):
            display.progress(done, 6000)
            clock.seconds += 1
    shown = [line.partition(", ") for line in out.getvalue().splitlines()[1:]]
    assert len(shown) >= 20 - 1
    for line, _, estimate in shown[1:]:  # the first one may come before the speed is known
        done = int(line.split()[1].replace(",", ""))
        left = (6000 - done) / 10
        number, unit, _ = estimate.split(", ")[1].split()
        assert float(number) * {"s": 1, "min": 60}[unit] == pytest.approx(
            left, rel=0.02, abs=31 if unit == "min" else 1
        )
        assert number != "0" or not left


def test_work_that_changed_its_speed_or_stands_still_has_no_wrong_time_left(clock: SimpleNamespace, out: io.StringIO):
    with on_file(out) as display:
        display.stage("answering")
        for done in (0, 5, 10, 10, 10):
            display.progress(done, 100)
            clock.seconds += 31
    assert out.getvalue().splitlines()[-1] == "answering: 10 of 100"


def test_a_terminal_shows_a_bar_and_keeps_a_line_of_each_finished_stage(clock: SimpleNamespace, out: io.StringIO):
    with on_terminal(out) as display:
        display.stage("loading")
        clock.seconds += 7
        display.stage("training")
        display.progress(3, 8, "loss 2.000")
    shown = out.getvalue()
    assert "loading: 7 s\n" in shown
    assert "training, loss 2.000" in shown
    assert "3/8" in shown


def test_a_transient_display_keeps_no_lines(clock: SimpleNamespace, out: io.StringIO):
    with on_terminal(out, transient=True) as display:
        display.stage("loading")
        display.stage("training")
    assert "loading: " not in out.getvalue()


def test_a_notebook_shows_a_bar(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
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
