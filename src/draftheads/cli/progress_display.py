"""The display of all long commands: a progress bar on a terminal or in a notebook, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 30.0  # where the output is not a terminal
SECONDS_TO_KNOW_SPEED = 10.0  # of progress; the first steps say little about the others
_SECONDS_OF_SPEED = 600.0  # over which the bar averages the speed: some work ends in bursts


def error_console() -> Console:
    """A console on standard error that is silent where that is not a terminal."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console


class ProgressDisplay:
    """Shows a :class:`draftheads.utils.progress.Progress` on a console; a context manager.

    Each finished stage leaves a line with its seconds.

    Args:
        console: to print to.
        transient: leave nothing on a terminal at the end.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self.console = console
        self._has_bars = console.is_terminal or console.is_jupyter
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Speed(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=transient,
            speed_estimate_period=_SECONDS_OF_SPEED,
            disable=not self._has_bars,
        )
        self._transient = transient
        self._bar: TaskID | None = None
        self._what = ""
        self._started = 0.0
        self._marks: list[tuple[float, int]] = []  # time and units done at the stage's progress, once a second
        self._last_line = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, what: str) -> None:
        """Starts the bar again, or prints a line."""
        now = time.monotonic()
        if not self._has_bars:
            self._print(what)
        elif self._bar is None:
            self._bar = self._bars.add_task(what, total=None)
        else:
            if not self._transient:
                self._print(f"{self._what}: {now - self._started:,.0f} s")
            self._bars.reset(self._bar, description=what, total=None)
        self._what, self._started, self._last_line, self._marks = what, now, now, []

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Moves the bar, or prints a line if the last one is old."""
        what = f"{self._what}, {note}" if note else self._what
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total, description=what)
            return
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] >= 1:
            self._marks.append((now, done))
        if now - self._last_line < SECONDS_BETWEEN_LINES or done == self._marks[0][1]:
            return
        self._last_line = now
        line = f"{what}: {done:,} of {total:,}"
        # the first units take longer than others, so that the speed is that of the second half of the time after them
        after_first = [mark for mark in self._marks if mark[1] > self._marks[0][1]] or [(now, done)]
        half = (after_first[0][0] + now) / 2
        started, first = [mark for mark in after_first if mark[0] <= half][-1]
        if now - started >= SECONDS_TO_KNOW_SPEED and done > first:
            per_second = (done - first) / (now - started)
            seconds = (total - done) / per_second
            left = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
            line += f", {per_second:,.2f}/s, {left} left"
        self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class _Speed(ProgressColumn):
    """Units of the stage per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.1f}/s" if speed else "")
