"""What commands show: answers with draft tokens in colour, tables, JSON, and the progress of long work."""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Table
from rich.text import Text

from draftheads.decode.text import TextStream
from draftheads.errors import MissingDependency
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, user_path, write_atomic

if TYPE_CHECKING:  # commands of other packages write JSON, too, and need not wait for models
    from draftheads.decode.request import GenerationResult, Request, StreamEvent
    from draftheads.reports.page import Page, Pieces
    from draftheads.reports.record_pages import Kind

DRAFTED = "bold green"
SECONDS_BETWEEN_LINES = 30.0  # of progress, where the output is not a terminal
_STYLES = {  # of parts of training texts
    "": "dim",
    "special": "bold magenta",
    "learned": "black on green",
    "learned special": "bold bright_white on green",
}
_SECONDS_OF_SPEED = 600.0  # over which a bar averages the speed: some work ends in bursts
_BREAKS = re.compile(r"(?<=\S) (?=\S)|(?<=[/_])(?=\w)")  # where a heading goes on in the next line


def show_stream(events: "Iterable[StreamEvent]", request: "Request", tokenizer: Any, console: Console) -> None:
    """Prints the text of one request as it grows; on a terminal accepted draft tokens are green."""
    pieces = TextStream(tokenizer)
    # a stop string cuts the text, not the tokens: then letters cannot be assigned to draft tokens
    has_colours = console.color_system is not None and not request.settings.stop
    for event in events:
        if not has_colours:
            console.file.write(event.text)
            console.file.flush()
            continue
        ended = event.finish_reason == "stop"  # by its last token, which is not text
        for place, token in enumerate(event.token_ids[:-1] if ended else event.token_ids):
            style = DRAFTED if place < event.num_drafted else ""
            console.print(Text(pieces.push([token]), style), end="", soft_wrap=True)
    console.print(Text(pieces.flush()), soft_wrap=True)


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


def simple_table(headings: Sequence[str], lines: Sequence[Sequence[str]], title: str = "") -> Table:
    """A table without borders. Long cells of text are folded."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title or None, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold", vertical="bottom")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def print_table(console: Console, headings: Sequence[str], lines: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table, whose headings break at blanks.

    One that is too wide, and has more columns than lines, is printed with its columns as lines.
    """
    broken = [_BREAKS.sub("\n", heading) for heading in headings]
    table, wide = simple_table(broken, lines, title), console.options.update(max_width=10_000)
    if table.__rich_measure__(console, wide).minimum > console.width and len(lines) < len(headings) - 1:
        first, *others = zip(headings, *lines, strict=True)
        table = simple_table(first, others, title)
    console.print(table)


def show_page(console: Console, page: "Page") -> None:
    """The sentences, numbers, texts and tables of a page."""
    numbers = "; ".join(f"{value} {name}" for value, name in page.numbers)
    for sentence in filter(None, (page.verdict, page.note, numbers)):
        console.print(sentence.replace("`", ""), soft_wrap=True, markup=False)
    has_colours = console.color_system is not None and not console.no_color
    for title, pieces in page.texts:
        console.print(Text(f"\n{title}", style="bold"))
        if has_colours:
            console.print(Text.assemble(*((words, _STYLES[classes]) for words, classes in pieces)))
        else:  # a line of the text stays one line of output, however long
            console.print(Text(bracketed(pieces)), soft_wrap=True)
    for table in page.tables:
        console.print()
        print_table(console, table.columns, [list(map(str, row)) for row in table.rows], table.title)
    console.print()


def bracketed(pieces: "Pieces") -> str:
    """The pieces without styles: learned tokens are in brackets, and special ones in others."""
    words = ""
    for is_learned, together in groupby(pieces, lambda piece: piece[1].startswith("learned")):
        text = "".join(f"‹{piece}›" if classes.endswith("special") else piece for piece, classes in together)
        words += f"⟦{text}⟧" if is_learned else text
    return words


def write_page(console: Console, folder: Path, kind: "Kind", *, show: bool = False) -> None:
    """Writes the page of work that has just finished; without matplotlib or jinja2, one line says so instead.

    With ``show``, what the page says is printed first.
    """
    from draftheads.reports import record_pages  # noqa: PLC0415 - most commands write none

    if show:
        show_page(console, record_pages.page_of(folder, kind))
    try:
        console.print(f"wrote {record_pages.write_page(folder, kind)}", soft_wrap=True, markup=False)
    except MissingDependency as error:
        console.print(f"no page: {error}", soft_wrap=True, markup=False)


def error_console() -> Console:
    """A console on standard error that is silent where that is not a terminal."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console


class ProgressDisplay(Progress):
    """Shows a :class:`draftheads.utils.progress.Progress` on a console, a bar for each stage; a context manager.

    Where the console is neither a terminal nor a notebook, it prints a line for each stage, and one now and then.

    Args:
        console: to print to.
        transient: leave nothing on a terminal at the end.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeftColumn()),
            console=console,
            transient=transient,
            get_time=time.monotonic,
            speed_estimate_period=_SECONDS_OF_SPEED,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self._bar: TaskID | None = None
        self._what, self._last_line = "", 0.0

    def stage(self, what: str) -> None:
        """Starts a bar, or prints a line."""
        if self._bar is not None:
            self.stop_task(self._bar)
        self._what, self._bar = what, self.add_task(what, total=None)
        self._print(what)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Moves the bar, or prints a line if the last one is old."""
        what = f"{self._what}, {note}" if note else self._what
        if self._bar is not None:
            self.update(self._bar, completed=done, total=total, description=what)
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            left = next((task.time_remaining for task in self.tasks if task.id == self._bar), None)
            self._print(f"{what}: {done:,} of {total:,}" + (f", {timedelta(seconds=left)} left" if left else ""))

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        if self.disable:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
