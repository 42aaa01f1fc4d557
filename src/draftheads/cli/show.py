"""Answers on a terminal while they are generated, with draft tokens in colour."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.decode.text import TextStream
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, user_path, write_atomic

if TYPE_CHECKING:  # `doctor` writes JSON, too, and must not wait for models
    from draftheads.decode.request import GenerationResult, Request, StreamEvent

DRAFTED = "bold green"


def show_stream(
    events: "Iterable[StreamEvent]", request: "Request", tokenizer: Any, console: Console, *, colour: bool = True
) -> None:
    """Prints the text of one request as it grows; accepted draft tokens are green.

    Without colours the text is written unchanged.
    """
    # a stop string cuts the text, not the tokens: then letters cannot be assigned to draft tokens
    if colour and console.color_system is not None and not request.settings.stop:
        pieces = TextStream(tokenizer)
        for event in events:
            _print_coloured(console, event, pieces)
    else:
        for event in events:
            console.file.write(event.text)
            console.file.flush()
    console.print()


def drafted_text(result: "GenerationResult", *, colour: bool = True) -> Text:
    """A finished answer; accepted draft tokens are green."""
    if not colour:
        return Text(result.text)
    pairs = zip(result.pieces, result.drafted, strict=True)
    return Text.assemble(*((piece, DRAFTED if drafted else "") for piece, drafted in pairs))


def speed_words(answer: "GenerationResult | Request", seconds: float) -> str:
    """Tokens, speed and end of one answer; a request without an end was stopped."""
    tokens = len(answer.token_ids)
    per_step = (tokens - 1) / answer.num_steps if answer.num_steps else 1.0  # the first token is from the prompt's pass
    copied = f", {answer.num_copied} copied" if answer.num_copied else ""
    end = f"ended by {answer.finish_reason}" if answer.finish_reason else "stopped"
    return (
        f"{counted(tokens, 'token')} in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, "
        f"{per_step:.2f} tokens/step{copied}, {end}"
    )


def print_logprobs(result: "GenerationResult", tokenizer: Any, console: Console) -> None:
    """A line for each token with its log-probability and the most likely tokens there, if they were asked for."""
    if result.logprobs is None:
        return
    most = result.top_logprobs or ((),) * len(result.logprobs)
    table = Table("token", "log-probability", *(["most likely there"] if result.top_logprobs else []), box=SIMPLE_HEAD)
    for token, value, likely in zip(result.token_ids, result.logprobs, most, strict=True):
        others = ", ".join(f"{tokenizer.decode([other])!r} {number:.2f}" for other, number in likely)
        table.add_row(*map(Text, (repr(tokenizer.decode([token])), f"{value:.3f}", others)[: len(table.columns)]))
    console.print(table)


def _print_coloured(console: Console, event: "StreamEvent", pieces: TextStream) -> None:
    ended = event.finish_reason == "stop"  # by its last token, which is not text
    for place, token in enumerate(event.token_ids[:-1] if ended else event.token_ids):
        _print(console, pieces.push([token]), DRAFTED if place < event.num_drafted else "")
    if event.finish_reason is not None:
        _print(console, pieces.flush(), "")


def _print(console: Console, text: str, style: str) -> None:
    if text:
        console.print(Text(text, style=style), end="", soft_wrap=True)


def check_json_path(path: str | None) -> None:
    """Raises StorageError if ``--json`` names a file that cannot be written."""
    if path not in (None, "-"):
        check_writable(path)


def write_json(path: str | None, record: Mapping[str, Any]) -> None:
    """Writes one JSON object to the file of ``--json``, or to standard output for ``-``."""
    if path == "-":
        print(json.dumps(record))
    elif path is not None:
        write_atomic(user_path(path), f"{json.dumps(record)}\n".encode())


def quiet_transformers() -> None:
    """Turns off the progress bars and warnings of ``transformers``."""
    from transformers.utils import logging  # noqa: PLC0415 - `--help` need not wait for it

    logging.set_verbosity_error()
    logging.disable_progress_bar()
