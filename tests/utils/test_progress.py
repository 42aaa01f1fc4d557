"""The progress protocol: stages, units, and counting."""

import inspect
import io
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tqdm.auto

import draftheads
from draftheads.utils.progress import Bars, NoProgress, counted_stage, shown
from fake_progress import FakeProgress

# --- bars: in a notebook, on a terminal, and nowhere else ---


def test_a_bar_is_shown_for_each_stage_that_counts(monkeypatch: pytest.MonkeyPatch):
    made: list[Mock] = []

    def bar(*, desc: str, total: int, initial: int) -> Mock:
        made.append(Mock(desc=desc, total=total, n=initial))
        made[-1].update.side_effect = lambda steps: setattr(made[-1], "n", made[-1].n + steps)
        return made[-1]

    monkeypatch.setattr(tqdm.auto, "tqdm", bar)
    progress = Bars()
    progress.stage("loading")
    progress.stage("training")
    for done, note in ((3, ""), (5, "loss 2.0"), (9, "loss 1.5")):  # three were done by an earlier run
        progress.progress(done, 9, note)
    advance = counted_stage(progress, "measuring", 2)
    advance()
    progress.stage("writing")
    assert [(bar.desc, bar.n, bar.total) for bar in made] == [("training", 9, 9), ("measuring", 1, 2)]
    assert [call.args for call in made[0].update.call_args_list] == [(0,), (2,), (4,)]
    assert made[0].set_postfix_str.call_args == (("loss 1.5",), {"refresh": False})
    assert all(bar.close.called for bar in made)


@pytest.mark.parametrize(
    ("shell", "stderr", "expected"),
    [
        ("none", io.StringIO(), NoProgress),
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
