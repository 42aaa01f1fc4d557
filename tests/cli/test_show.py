"""Answers and progress on a terminal as they come, and elsewhere."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cli_world import without_colours
from draftheads.cli import show
from draftheads.cli.show import ProgressDisplay, show_stream
from draftheads.decode.engine import Engine
from families import TREES, PlantedDrafter


@pytest.fixture(scope="module")
def drafted(engine: Engine) -> Engine:
    """An engine whose drafter often guesses rightly, for the one prompt ``[5, 6, 7]``."""
    answer = engine.generate([[5, 6, 7]], max_new_tokens=30, ignore_eos=True)[0].token_ids
    return Engine(engine.model, PlantedDrafter(TREES["chain"], {(5, 6, 7): answer}))


def restart(engine: Engine) -> None:
    """Its drafter guesses as at the beginning."""
    assert isinstance(engine.drafter, PlantedDrafter)
    engine.drafter.generator.manual_seed(0)
    engine.drafter.texts = []


def shown_on(engine: Engine, *, settings: dict[str, Any] | None = None, **console: Any) -> tuple[str, str]:
    """What such a console gets, and the result's text."""
    restart(engine)
    out = io.StringIO()
    requests = engine.requests([[5, 6, 7]], **{"max_new_tokens": 30, "ignore_eos": True, **(settings or {})})
    show_stream(engine.run(requests), requests[0], engine.model.tokenizer, Console(file=out, _environ={}, **console))
    return out.getvalue(), requests[0].result().text


def bare(text: str) -> str:
    """Without green, tabs, blanks and ends of lines."""
    return re.sub(r"\x1b\[(1;32|0)m|\s", "", text)


def test_draft_tokens_are_green_on_a_terminal(drafted: Engine):
    terminal: dict[str, Any] = {"force_terminal": True, "color_system": "standard", "width": 20}
    out, text = shown_on(drafted, **terminal)
    green, plain = "\x1b[1;32m", "\x1b[0m"
    parts = out.split(green)
    assert len(parts) > 8, "nothing was guessed"
    assert all(plain in part for part in parts[1:])
    assert bare(out) == bare(f"{text}\n")
    restart(drafted)
    events = list(drafted.stream([5, 6, 7], max_new_tokens=30, ignore_eos=True))
    expected = [
        drafted.model.tokenizer.decode(token) for event in events for token in event.token_ids[: event.num_drafted]
    ]
    shown = [part.split(plain)[0] for part in parts[1:]]
    assert [word for word in shown if word.strip()] == [word for word in expected if word.strip()]

    token = int(drafted.model.tokenizer.convert_tokens_to_ids(text.strip()[-1]))
    out, text = shown_on(drafted, settings={"stop_token_ids": (token,)}, **terminal)
    assert bare(out) == bare(f"{text}\n")

    out, text = shown_on(drafted, settings={"stop": (text[-3:],)}, **terminal)
    assert out == text + "\n", "with stop strings nobody can say which letters were guessed"


def test_elsewhere_the_text_is_written_unchanged(drafted: Engine):
    """No colour codes, no wrapping, no tabs made blanks."""
    out, text = shown_on(drafted, width=5)
    assert out == text + "\n"
    assert "\t" in text
    assert len(max(text.split("\n"), key=len)) > 5


# --- progress ---


def work(console: Console, clock: SimpleNamespace, *, transient: bool = False) -> None:
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
    monkeypatch.setattr(show.time, "monotonic", lambda: moved.seconds)
    return moved


def test_a_file_gets_a_line_per_stage_and_one_now_and_then(clock: SimpleNamespace):
    out = io.StringIO()
    work(Console(file=out, width=40, _environ={}), clock)
    assert out.getvalue() == "loading [a] model\ntraining\ntraining, loss 1.5: 2 of 10, 0:05:20 left\n"


def test_a_terminal_gets_a_bar_for_each_stage(clock: SimpleNamespace):
    out = io.StringIO()
    work(Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"}), clock)
    last = without_colours(out.getvalue())
    assert "loading [a] model" in last
    assert "3/10" in last.rpartition("training")[2]
    out = io.StringIO()
    work(Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"}), clock, transient=True)
    assert out.getvalue().endswith("\x1b[2K"), "the bars are erased"
