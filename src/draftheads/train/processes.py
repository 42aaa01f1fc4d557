"""Several processes of ``accelerate launch`` or ``torchrun``, each with its own device.

A process that was started without a launcher is the first and only one, and never waits.
"""

from datetime import timedelta
from functools import cache

import torch
from accelerate import PartialState
from accelerate.utils import reduce

from draftheads.utils.machine import Environment

_TIMEOUT = timedelta(hours=24)  # one process may read texts for hours; if it dies, the launcher ends the others


@cache
def _state() -> PartialState:
    """Joins the process group and makes the device of this process the current one."""
    alone = Environment().num_processes == 1
    return PartialState(cpu=not torch.cuda.is_available(), **({} if alone else {"timeout": _TIMEOUT}))


def number() -> int:
    """Number of this process, from 0."""
    return int(_state().process_index)


def count() -> int:
    return int(_state().num_processes)


def device() -> torch.device:
    return torch.device(_state().device)


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return number() == 0


def wait() -> None:
    """Waits until all processes have called this."""
    _state().wait_for_everyone()


def any_of(here: bool) -> bool:  # noqa: FBT001 - a question about one flag
    """Whether the flag is set in at least one process; all processes must call this."""
    return here if count() == 1 else bool(total(torch.tensor(int(here), device=device())))


def total(here: torch.Tensor) -> torch.Tensor:
    """The sum over all processes; all must call this."""
    return here if count() == 1 else reduce(here, "sum")
