"""How long work reports its progress, and bars for notebooks and scripts; those of commands are in ``cli/show.py``."""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol


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


class Bars:
    """A bar for each stage that counts its units, in a notebook or on a terminal."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: Any = None

    def stage(self, what: str) -> None:
        """The bar of the last stage stays as it is."""
        self._close()
        self._what = what

    def progress(self, done: int, total: int, note: str = "") -> None:
        if self._bar is None:
            from tqdm.auto import tqdm  # noqa: PLC0415 - most imports of this module need no bars

            self._bar = tqdm(desc=self._what, total=total, initial=done)
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def shown(progress: Progress | bool) -> Progress:  # noqa: FBT001 - its only argument
    """What receives progress: the given one; or for True bars, if there is somebody to see them."""
    if isinstance(progress, bool) or progress is None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        return Bars() if progress and (is_terminal or in_notebook()) else NoProgress()
    return progress


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


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
    done = count(1)
    return lambda: progress.progress(next(done), total)
