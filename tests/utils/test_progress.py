"""The progress protocol: stages, units, and counting."""

import inspect
import io
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

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


def test_a_bar_is_shown_for_each_stage_that_counts(bars: list[BarRecorder]):
    progress = Bars()
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


@pytest.mark.parametrize(
    ("shell", "stderr", "expected"),
    [
        ("none", io.StringIO(), NoProgress),
        (None, io.StringIO(), NoProgress),  # imported by a script
        (SimpleNamespace(), io.StringIO(), NoProgress),  # that of a terminal has no kernel
        (SimpleNamespace(), SimpleNamespace(isatty=lambda: True), Bars),
        (SimpleNamespace(kernel=1), io.StringIO(), Bars),
        (SimpleNamespace(), None, NoProgress),  # without a console on Windows
    ],
)
def test_bars_need_a_notebook_or_a_terminal(monkeypatch: pytest.MonkeyPatch, shell: Any, stderr: Any, expected: type):
    monkeypatch.setattr(sys, "stderr", stderr)
    ipython = None if shell == "none" else SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert isinstance(shown(True), expected)
    assert isinstance(shown(False), NoProgress)
    own = FakeProgress()
    assert shown(own) is own


def test_long_work_shows_bars_by_default():
    for function in (draftheads.train_head, draftheads.tune_head, draftheads.compare_heads):
        assert inspect.signature(function).parameters["progress"].default is True
