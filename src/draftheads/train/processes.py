"""Several processes of ``accelerate launch`` or ``torchrun``, each with its own device: who does what, who waits.

A process that was started alone is the first of one, and waits for nobody.
"""

import os
from datetime import timedelta
from functools import cache

import torch
from accelerate import PartialState

_PATIENCE = timedelta(hours=24)  # one process may read texts for hours; if it dies, the launcher ends the others


@cache
def _state() -> PartialState:
    """The process group, joined; and this process's device made the current one."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return PartialState(cpu=not torch.cuda.is_available(), **({} if alone else {"timeout": _PATIENCE}))


def number() -> int:
    """Of this process, from 0."""
    return int(_state().process_index)


def count() -> int:
    """How many processes there are."""
    return int(_state().num_processes)


def device() -> torch.device:
    """Of this process."""
    return torch.device(_state().device)


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return number() == 0


def wait() -> None:
    """Until all are here."""
    _state().wait_for_everyone()


def any_of(here: bool) -> bool:  # noqa: FBT001 - a question about one flag
    """Whether it is so in at least one process; all must ask."""
    return bool(most_of(int(here)))


def most_of(here: int) -> int:
    """The largest number in any process; all must ask."""
    if count() == 1:
        return here
    number = torch.tensor(here, device=_state().device)
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
    return int(number)


def mean_of(values: torch.Tensor) -> torch.Tensor:
    """The mean over all processes; all must ask."""
    if count() == 1:
        return values
    total = values.detach().to(_state().device, torch.float64, copy=True)
    torch.distributed.all_reduce(total)
    return (total / count()).to(values.dtype)
