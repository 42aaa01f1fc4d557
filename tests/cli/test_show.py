"""Answers on a terminal as they come, and elsewhere."""

import io
from typing import Any

import pytest
from rich.console import Console

from draftheads.cli.show import show_stream
from draftheads.decode.engine import Engine
from families import TREES, PlantedDrafter


@pytest.fixture(scope="module")
def drafted(engine: Engine) -> Engine:
    """An engine whose drafter often guesses rightly, for the one prompt ``[5, 6, 7]``."""
    answer = engine.generate([[5, 6, 7]], max_new_tokens=30, ignore_eos=True)[0].token_ids
    return Engine(engine.model, PlantedDrafter(TREES["chain"], {(5, 6, 7): answer}))


def shown_on(console: Console, engine: Engine, **settings: Any) -> tuple[str, str]:
    """What a console gets, and the result's text."""
    assert isinstance(engine.drafter, PlantedDrafter)
    engine.drafter.generator.manual_seed(0)
    engine.drafter.texts = []
    requests = engine.requests([[5, 6, 7]], **{"max_new_tokens": 30, "ignore_eos": True, **settings})
    show_stream(engine.run(requests), requests[0], engine.model.tokenizer, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue(), requests[0].result().text


def test_draft_tokens_are_green_on_a_terminal(drafted: Engine):
    def console() -> Console:
        return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=20, _environ={})

    out, text = shown_on(console(), drafted)
    green, plain = "\x1b[1;32m", "\x1b[0m"
    parts = out.split(green)
    assert len(parts) > 8, "nothing was guessed"
    assert all(plain in part for part in parts[1:])
    bare = out.replace(green, "").replace(plain, "")
    assert bare.replace(" ", "") == (text + "\n").replace("\t", "").replace(" ", "")
    drafted.drafter.generator.manual_seed(0)  # type: ignore[attr-defined]
    drafted.drafter.texts = []  # type: ignore[attr-defined]
    events = list(drafted.stream([5, 6, 7], max_new_tokens=30, ignore_eos=True))
    expected = [
        drafted.model.tokenizer.decode(token) for event in events for token in event.token_ids[: event.num_drafted]
    ]
    shown = [part.split(plain)[0] for part in parts[1:]]
    assert [word for word in shown if word.strip()] == [word for word in expected if word.strip()]

    token = int(drafted.model.tokenizer.convert_tokens_to_ids(text.strip()[-1]))
    out, text = shown_on(console(), drafted, stop_token_ids=(token,))
    bare = out.replace(green, "").replace(plain, "")
    assert bare.replace(" ", "") == (text + "\n").replace("\t", "").replace(" ", "")

    out, text = shown_on(console(), drafted, stop=(text[-3:],))
    assert out == text + "\n", "with stop strings nobody can say which letters were guessed"


def test_elsewhere_the_text_is_written_unchanged(drafted: Engine):
    """No colour codes, no wrapping, no tabs made blanks."""
    out, text = shown_on(Console(file=io.StringIO(), width=5, _environ={}), drafted)
    assert out == text + "\n"
    assert "\t" in text
    assert len(max(text.split("\n"), key=len)) > 5
