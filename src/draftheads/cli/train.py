"""``draftheads train``: runs a training and shows how it goes."""

import math
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from draftheads.train.options import TrainOptions
from draftheads.train.report import Report
from draftheads.train.run import train

_SECONDS_BETWEEN_LINES = 60.0  # where the output is no terminal


def run(options: TrainOptions) -> None:
    """Trains, then prints a table of what the heads can do."""
    console = Console()
    with _Display(console) as display:
        report = train(options, display)
    console.print(_table(report))
    console.print(
        f"expected tokens per step on held-out text: chain [bold]{report.tokens_per_step_chain:.2f}[/], "
        f"tree of {len(report.tree) + 1} nodes [bold]{report.tokens_per_step_tree:.2f}[/]"
    )
    console.print(f"saved in {options.out}")


class _Display:
    """A progress bar in a terminal; elsewhere a line a minute."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            _Speed(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.what = ""
        self.task = None
        self.started = self.last_line = 0.0
        self.first = 0

    def __enter__(self) -> "_Display":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def stage(self, what: str) -> None:
        """Starts a new bar."""
        self.what = what
        self.started = self.last_line = time.monotonic()
        self.first = -1
        self.task = None
        if self.console.is_terminal:
            self.task = self.bar.add_task(what, total=None)
        else:
            self.console.print(what)

    def progress(self, done: int, total: int, loss: float | None = None) -> None:
        """Moves the bar."""
        now = time.monotonic()
        if self.first < 0:
            self.first, self.started = done, now
        words = self.what if loss is None else f"{self.what}, loss {loss:.3f}"
        if self.task is not None:
            self.bar.update(self.task, completed=done, total=total, description=words)
        elif now - self.last_line >= _SECONDS_BETWEEN_LINES:
            self.last_line = now
            speed = (done - self.first) / max(now - self.started, 1e-9)
            left = (total - done) / speed if speed else math.inf
            self.console.print(f"{words}: {done:,} of {total:,}, {speed:,.1f}/s, {left / 60:.0f} min left")


class _Speed(ProgressColumn):
    """How much of a task is done in a second."""

    def render(self, task) -> Text:
        return Text(f"{task.speed:,.1f}/s" if task.speed else "")


def _table(report: Report) -> Table:
    table = Table(
        "head",
        "loss",
        "top-1",
        "top-3",
        "top-10",
        title=f"{report.method} for {report.model_id}, held-out text",
    )
    for i, numbers in enumerate(zip(report.losses, report.top1, report.top3, report.top10, strict=True)):
        loss, *accuracies = numbers
        table.add_row(str(i + 1), f"{loss:.3f}", *(f"{accuracy:.1%}" for accuracy in accuracies))
    return table
