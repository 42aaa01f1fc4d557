"""How many threads compute a step on a CPU: as many as other programs leave cores for.

An operator ends when its slowest thread ends. So two threads on two cores, one of which another program uses, take
several times as long as one thread. The result of a step does not depend on its threads, up to rounding.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from draftheads.utils.machine import IDLE_CORES, OtherPrograms

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # who sets them has chosen
_SECONDS = 0.3  # of the shortest time over which the use of cores is averaged
_PASSES = 8  # between two looks: one takes a tenth of a millisecond


class ThreadChoice:
    """The number of threads of this process, which no other object changes; ``is_fixed``: it never changes."""

    def __init__(self, others: OtherPrograms, *, is_fixed: bool) -> None:
        self.others = others
        self.most = self.chosen = torch.get_num_threads()
        self.is_fixed = is_fixed
        self._passes = 0
        self._of_thread = threading.local()  # native, is_known: see natively() and _number_of_caller()
        self._was_lowered = False

    @property
    def native(self) -> int | None:
        """Threads of the native library while torch has one in the calling thread: see :meth:`natively`."""
        number: int | None = getattr(self._of_thread, "native", None)
        return number

    def look(self) -> None:
        """Chooses by what other programs used since the last look, if that was long enough ago."""
        if self.is_fixed or self.most == 1:
            return
        busy = self.others.busy_cores(least_seconds=_SECONDS)
        if busy is not None:
            self.chosen = num_threads(self.most, self.others.num_cores - busy)

    def before_pass(self) -> None:
        """Sets the number for the next pass of the calling thread, and looks now and then."""
        if self.is_fixed:
            return
        if self.native is not None:
            self._passes += 1
            if self._passes % _PASSES == 0:
                self.look()
            self._of_thread.native = self.chosen
            return
        now = self._number_of_caller()
        self._passes += 1
        if self._passes % _PASSES == 0:
            self.look()
        if now != self.chosen:
            torch.set_num_threads(self.chosen)

    def restore(self) -> None:
        """Sets the number that was there at first: other work of this process has its own needs."""
        if not self.is_fixed and torch.get_num_threads() == self.chosen != self.most:
            torch.set_num_threads(self.most)

    @contextmanager
    def natively(self) -> Iterator[None]:
        """While native passes are made, torch computes in one thread.

        Its own threads spin for a while after each operator, and so take the cores from the library's threads: a step
        of one token took 14 ms, and 10.6 ms without them.
        """
        if self.native is not None:
            yield
            return
        before = self._number_of_caller()
        self._of_thread.native = before if self.is_fixed else self.chosen
        self._was_lowered = True
        torch.set_num_threads(1)
        try:
            yield
        finally:
            self._of_thread.native = None
            torch.set_num_threads(before)

    def _number_of_caller(self) -> int:
        """Torch's threads in the calling thread. A new number is a choice of the caller, and holds from now on.

        But a thread that begins while another one is in :meth:`natively` begins with one.
        """
        now = torch.get_num_threads()
        if now == 1 and self._was_lowered and not getattr(self._of_thread, "is_known", False):
            now = self.chosen
            torch.set_num_threads(now)
        self._of_thread.is_known = True
        if now not in (self.most, self.chosen):
            self.most = self.chosen = now
        return now

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Looks, and uses the chosen number within the context, where nothing changes it: something is measured."""
        before = self.is_fixed
        if not before:
            self.look()
            torch.set_num_threads(self.chosen)
        self.is_fixed = True
        try:
            yield
        finally:
            self.is_fixed = before
            self.restore()


def num_threads(most: int, free_cores: float) -> int:
    """As many threads as cores are free, from 1 to ``most``.

    >>> [num_threads(2, free) for free in (2.0, 1.8, 1.4, 1.0, 0.0)], num_threads(2, 30.0)
    ([2, 2, 1, 1, 1], 2)
    """
    return max(1, min(most, int(free_cores + IDLE_CORES)))


@cache
def thread_choice() -> ThreadChoice:
    """The one of this process. The number does not change where the environment sets it."""
    return ThreadChoice(OtherPrograms(), is_fixed=any(os.environ.get(name) for name in _VARIABLES))


def native_threads() -> int:
    """How many threads the native library has now."""
    return thread_choice().native or torch.get_num_threads()
