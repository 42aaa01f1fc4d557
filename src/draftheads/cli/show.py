"""Answers on a terminal while they are generated, with draft tokens in colour."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.decode.text import TextStream
from draftheads.errors import MissingDependency
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, user_path, write_atomic

if TYPE_CHECKING:  # `doctor` writes JSON, too, and must not wait for models
    from draftheads.decode.request import GenerationResult, Request, StreamEvent

DRAFTED = "bold green"
_BREAKS = re.compile(r"(?<=\S) (?=\S)|(?<=[/_])(?=\w)")  # where a heading goes on in the next line
_FIRST_IDEOGRAPH = "\u2e80"  # from here on, scripts are written without spaces
_PARTS = re.compile(f"\\s+|[^\\s{_FIRST_IDEOGRAPH}-\U0010ffff]+|[{_FIRST_IDEOGRAPH}-\U0010ffff]")


def show_stream(events: "Iterable[StreamEvent]", request: "Request", tokenizer: Any, console: Console) -> None:
    """Prints the text of one request as it grows; on a terminal words are not cut, and accepted draft tokens are green.

    Elsewhere the text is written unchanged.
    """
    lines = _Lines(console)
    # a stop string cuts the text, not the tokens: then letters cannot be assigned to draft tokens
    if console.color_system is not None and not request.settings.stop:
        pieces = TextStream(tokenizer)
        for event in events:
            _write_coloured(lines, event, pieces)
    else:
        for event in events:
            lines.write(event.text)
    lines.flush()
    console.print()


def drafted_text(result: "GenerationResult") -> Text:
    """A finished answer; accepted draft tokens are green."""
    pairs = zip(result.pieces, result.drafted, strict=True)
    return Text.assemble(*((piece, DRAFTED if drafted else "") for piece, drafted in pairs))


def speed_words(answer: "GenerationResult | Request", seconds: float) -> str:
    """Tokens, speed and end of one answer; a request without an end was stopped."""
    tokens = len(answer.token_ids)
    per_step = (tokens - 1) / answer.num_steps if answer.num_steps else 1.0  # the first token is from the prompt's pass
    copied = f", {answer.num_copied} copied" if answer.num_copied else ""
    ends = {"stop": "complete", "length": "cut off at its greatest length (--max-new-tokens)"}
    end = ends.get(answer.finish_reason or "", "stopped")
    return (
        f"{counted(tokens, 'token')} in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, "
        f"{per_step:.2f} tokens/step{copied}, {end}"
    )


def _write_coloured(lines: "_Lines", event: "StreamEvent", pieces: TextStream) -> None:
    ended = event.finish_reason == "stop"  # by its last token, which is not text
    for place, token in enumerate(event.token_ids[:-1] if ended else event.token_ids):
        lines.write(pieces.push([token]), DRAFTED if place < event.num_drafted else "")
    if event.finish_reason is not None:
        lines.write(pieces.flush())


class _Lines:
    """Writes text piece by piece. On a terminal a word is written when it ends, and where there is place for it."""

    def __init__(self, console: Console) -> None:
        self._console, self._column = console, 0
        self._word: list[tuple[str, str]] = []  # its pieces so far, with their styles

    def write(self, text: str, style: str = "") -> None:
        if not self._console.is_terminal:
            self._console.file.write(text)
            self._console.file.flush()
            return
        for part in _PARTS.findall(text):
            if not (is_word := part[0] > " " and part[0] < _FIRST_IDEOGRAPH):
                self.flush()
            self._word.append((part, style))
            if not is_word:
                self.flush()

    def flush(self) -> None:
        """Writes the word that has begun."""
        word, self._word = Text.assemble(*self._word), []
        width = self._console.width
        if self._column and word.plain.strip() and word.cell_len <= width < self._column + word.cell_len:
            self._console.print()
            self._column = 0
        if word:
            self._console.print(word, end="", soft_wrap=True)
            _, newline, last = word.plain.rpartition("\n")
            column = (0 if newline else self._column) + cell_len(last)
            self._column = (column - 1) % width + 1 if column else 0


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


def print_table(console: Console, headings: Sequence[str], lines: Sequence[Sequence[str]], title: str = "") -> None:
    """A table. Headings break at blanks, and long cells of text are folded.

    One that is too wide, and has more columns than lines, is printed with its columns as lines.
    """

    def made(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title or None, title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", overflow="fold", vertical="bottom")
        for line in lines:
            table.add_row(*map(Text, line))
        return table

    broken = [_BREAKS.sub("\n", heading) for heading in headings]
    table, wide = made(broken, lines), console.options.update(max_width=10_000)
    if table.__rich_measure__(console, wide).minimum > console.width and len(lines) < len(headings) - 1:
        first, *others = zip(headings, *lines, strict=True)
        table = made(first, others)
    console.print(table)


def write_page(console: Console, folder: Path, kind: Literal["training", "tune", "bench"]) -> None:
    """Writes the page of work that has just finished; without matplotlib or jinja2, one line says so instead."""
    from draftheads.reports import write  # noqa: PLC0415 - most commands write none

    try:
        console.print(f"wrote {write.write_page(folder, kind)}", soft_wrap=True, markup=False)
    except MissingDependency as error:
        console.print(f"no page: {error}", soft_wrap=True, markup=False)
