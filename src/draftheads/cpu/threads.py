"""Torch computes in one thread while native passes are made: the library's threads need the cores.

Torch's own threads spin for a while after each operator: a step of one token took 14 ms beside them, and 10.6 without.
The library's free threads take the next task, so other programs slow it down by no more than what they use.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Threads(threading.local):
    native: int | None = None  # of the library, while torch has one
    is_known: bool = False  # whether torch's number in this thread is one that somebody chose


_here = _Threads()
_usual: int | None = None  # torch's number where nothing has lowered it


def native_threads() -> int:
    """How many threads the native library has now."""
    return _here.native or torch.get_num_threads()


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """The native library has the threads that torch had; contexts may be nested."""
    if _here.native is not None:
        yield
        return
    before = _here.native = _usual_number()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.native = None
        torch.set_num_threads(before)


def _usual_number() -> int:
    """Of torch in this thread. A thread that begins while another one is in the context inherits one."""
    global _usual  # the number of torch's threads is one of the process, too
    number = torch.get_num_threads()
    if number == 1 and _usual is not None and not _here.is_known:
        number = _usual
    _here.is_known, _usual = True, number
    return number
