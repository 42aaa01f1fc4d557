"""Answers on a terminal while they are generated, with draft tokens in colour."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from draftheads.decode.engine import Engine
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.text import TextStream

DRAFTED = "bold green"


def show_stream(engine: Engine, requests: Sequence[Request], console: Console, *, colour: bool = True) -> None:
    """Decodes one request and prints its text as it grows; accepted draft tokens are green.

    Without colours the text is written unchanged.
    """
    # a stop string cuts the text, not the tokens: then letters cannot be assigned to draft tokens
    if colour and console.color_system is not None and not requests[0].settings.stop:
        pieces = TextStream(engine.model.tokenizer)
        for event in engine.run(requests):
            _print_coloured(console, event, pieces)
    else:
        for event in engine.run(requests):
            console.file.write(event.text)
            console.file.flush()
    console.print()


def _print_coloured(console: Console, event: StreamEvent, pieces: TextStream) -> None:
    ended = event.finish_reason == "stop"  # by its last token, which is not text
    for place, token in enumerate(event.token_ids[:-1] if ended else event.token_ids):
        _print(console, pieces.push([token]), DRAFTED if place < event.num_drafted else "")
    if event.finish_reason is not None:
        _print(console, pieces.flush(), "")


def _print(console: Console, text: str, style: str) -> None:
    if text:
        console.print(Text(text, style=style), end="", soft_wrap=True)


def quiet_transformers() -> None:
    """Turns off the progress bars and warnings of ``transformers``."""
    from transformers.utils import logging  # noqa: PLC0415 - `--help` need not wait for it

    logging.set_verbosity_error()
    logging.disable_progress_bar()
