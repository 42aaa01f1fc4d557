"""Who is told how far a training is."""

from typing import Protocol


class Reporter(Protocol):
    """Somebody who is told how far things are."""

    def stage(self, what: str) -> None:
        """Something new begins."""

    def progress(self, done: int, total: int, loss: float | None = None) -> None:
        """So many tokens or steps of the stage are done."""
