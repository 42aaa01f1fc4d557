"""Several processes of ``accelerate launch`` or ``torchrun``, each with its own device, on one host or several.

A process that was started without a launcher is the first and only one, and never waits.
"""

import secrets
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, reduce

from draftheads.utils.machine import Environment

_TIMEOUT = timedelta(hours=24)  # one process may read texts for hours; if it dies, the launcher ends the others
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The processes that see one folder: all, or those of a host."""

    index: int  # of the group
    count: int  # of groups
    number: int  # of this process in it
    size: int


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


def every(here: T) -> list[T]:
    """The value in every process; all must call this."""
    found: list[T] = [here] if count() == 1 else gather_object([here])
    return found


@cache
def group(folder: Path) -> Group:
    """The processes that see a folder; all must call this. Where the disk is not shared, they are those of a host."""
    own, environment = number(), Environment()
    hosts = every(environment.host)
    if len(set(hosts)) > 1:
        file = folder / f".seen-{every(secrets.token_hex(8))[0]}"
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            file.touch()
        wait()
        is_shared = not any_of(not file.exists())  # no process leaves this before all have looked
        if is_first():
            file.unlink()
        if not is_shared:
            index = sorted(set(hosts)).index(environment.host)
            return Group(index, len(set(hosts)), hosts[:own].count(environment.host), hosts.count(environment.host))
    return Group(0, 1, own, count())


def writes(folder: Path) -> bool:
    """Whether this process writes into a folder: the first of those that see it."""
    return group(folder).number == 0


def of_all(folder: Path, here: int) -> int:
    """The sum of a number that all processes that see one folder have in common; all must call this."""
    return sum(every(here if writes(folder) else 0))
