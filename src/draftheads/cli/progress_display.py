"""The display of all long commands: a progress bar on a terminal or in a notebook, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

SECONDS_BETWEEN_LINES = 30.0  # where the output is not a terminal
_SECONDS_OF_SPEED = 600.0  # over which the bar averages the speed: some work ends in bursts


def error_console() -> Console:
    """A console on standard error that is silent where that is not a terminal."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console


class ProgressDisplay:
    """Shows a :class:`draftheads.utils.progress.Progress` on a console, a bar for each stage; a context manager.

    Args:
        console: to print to.
        transient: leave nothing on a terminal at the end.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self.console = console
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeftColumn())
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            *columns,
            console=console,
            transient=transient,
            speed_estimate_period=_SECONDS_OF_SPEED,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self._bar: TaskID | None = None
        self._what, self._last_line = "", 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, what: str) -> None:
        """Starts a bar, or prints a line."""
        if self._bar is not None:
            self._bars.stop_task(self._bar)
        self._what, self._last_line = what, time.monotonic()
        self._bar = self._bars.add_task(what, total=None)
        self._print(what)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Moves the bar, or prints a line if the last one is old."""
        what = f"{self._what}, {note}" if note else self._what
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total, description=what)
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print(f"{what}: {done:,} of {total:,}")

    def _print(self, line: str) -> None:
        if self._bars.disable:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
