"""How far a long search or comparison is."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
    """A bar in a terminal; elsewhere a line for each stage."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=None)
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def stage(self, what: str, total: int) -> None:
        """Something new begins."""
        self.bar.update(self.task, description=what, total=total, completed=0)
        if not self.console.is_terminal:
            self.console.print(f"{time.monotonic() - self.started:5.0f} s  {what}", soft_wrap=True)

    def advance(self) -> None:
        """A piece is done."""
        self.bar.advance(self.task)
