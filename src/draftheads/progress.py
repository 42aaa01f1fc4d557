"""How long work reports its progress. Shows nothing: ``cli/progress_display.py`` has the one display."""

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of long work: stages one after the other, and in each how much is done."""

    def stage(self, what: str) -> None:
        """A new stage begins; ``what`` describes it in a few words."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total`` units of the stage are done; ``note`` is shown beside them, such as a loss."""


class NoProgress:
    """Ignores all progress."""

    def stage(self, what: str) -> None:
        """Nothing is shown."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Nothing is shown."""


def counted_stage(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """Begins a stage of ``total`` units and returns a function to call after each of them.

    >>> class Printed(NoProgress):
    ...     def progress(self, done: int, total: int, note: str = "") -> None:
    ...         print(done, "of", total)
    >>> advance = counted_stage(Printed(), "reading", 2)
    >>> advance(), advance()
    1 of 2
    2 of 2
    (None, None)
    """
    progress.stage(what)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress.progress(done, total)

    return advance
