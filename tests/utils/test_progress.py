"""The progress protocol: stages, units, and counting."""

import inspect
import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import tqdm.auto

import draftheads
from draftheads.utils.progress import Bars, NoProgress, counted_stage, shown
from fake_progress import FakeProgress

# --- bars: in a notebook, on a terminal, and nowhere else ---


class BarRecorder:
    """In place of tqdm."""

    made: ClassVar[list["BarRecorder"]] = []

    def __init__(self, *, desc: str, total: int, initial: int) -> None:
        self.shown = [(desc, initial, total, "")]
        self.n, self.note, self.closed = initial, "", False
        self.made.append(self)

    def set_postfix_str(self, note: str, *, refresh: bool) -> None:
        assert not refresh
        self.note = note

    def update(self, steps: int) -> None:
        self.n += steps
        desc, _, total, _ = self.shown[0]
        self.shown.append((desc, self.n, total, self.note))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[BarRecorder]:
    monkeypatch.setattr(tqdm.auto, "tqdm", BarRecorder)
    monkeypatch.setattr(BarRecorder, "made", [])
    return BarRecorder.made


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's shell, as IPython gives it."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel="a kernel")))


@pytest.mark.usefixtures("notebook")
def test_a_notebook_shows_a_bar_for_each_stage_that_counts(bars: list[BarRecorder]):
    progress = shown(True)
    progress.stage("loading")
    progress.stage("training")
    progress.progress(3, 9)  # done by an earlier run
    progress.progress(5, 9, "loss 2.0")
    progress.progress(9, 9, "loss 1.5")
    assert bars[0].closed
    advance = counted_stage(progress, "measuring", 2)
    advance()
    progress.stage("writing")
    training = [("training", 3, 9, ""), ("training", 5, 9, "loss 2.0"), ("training", 9, 9, "loss 1.5")]
    assert bars[0].shown == [training[0], *training]
    assert bars[1].shown == [("measuring", 1, 2, "")] * 2
    assert len(bars) == 2
    assert bars[1].closed


def test_bars_need_a_notebook_or_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(shown(True), NoProgress)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported by a script
    assert isinstance(shown(True), NoProgress)
    terminal = SimpleNamespace(isatty=lambda: True)  # that of IPython has no kernel
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: terminal))
    assert isinstance(shown(True), NoProgress)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(shown(True), Bars)
    monkeypatch.setattr(sys, "stderr", None)  # without a console on Windows
    assert isinstance(shown(True), NoProgress)


@pytest.mark.usefixtures("notebook")
def test_false_shows_nothing_and_another_receiver_is_taken():
    assert isinstance(shown(False), NoProgress)
    own = FakeProgress()
    assert shown(own) is own


def test_the_bar_of_tqdm(monkeypatch: pytest.MonkeyPatch):
    """The real one, on a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    progress = shown(True)
    progress.stage("training")
    for done in range(4):
        progress.progress(done, 3, "loss 1.5")
    last = out.getvalue().split("\r")[-1]
    assert last.startswith("training: 100%|")
    assert "3/3" in last
    assert "loss 1.5" in last
    assert last.endswith("\n"), "the bar is closed"


@pytest.mark.parametrize("function", [draftheads.train_head, draftheads.tune_head, draftheads.compare_heads])
def test_long_work_shows_bars_by_default(function: Callable[..., object]):
    assert inspect.signature(function).parameters["progress"].default is True
