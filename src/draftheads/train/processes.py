"""Several processes of ``accelerate launch`` or ``torchrun``, each with its own device.

A process that was started without a launcher is the first and only one, and never waits.
"""

from datetime import timedelta
from functools import cache

import torch
from accelerate import PartialState
from accelerate.utils import reduce

from draftheads.models.model import TargetModel
from draftheads.utils.environment import Environment

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


def shard(target: TargetModel) -> None:
    """Splits each layer of a model over all processes (FSDP), which must then make the same number of passes.

    Each process has the whole embedding, last norm and lm_head on its device. Before, the model is on the CPU.

    Raises:
        UnsupportedModel: the list of layers is not found.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - not in all builds of PyTorch
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    inside, place = set(target.layers.modules()), device()
    for module in target.model.modules():
        if module not in inside:  # layers are split before they move to the device
            module._apply(lambda tensor: tensor.to(place), recurse=False)  # noqa: SLF001 - what .to() calls
    mesh = init_device_mesh(place.type, (count(),))
    for layer in target.layers:
        fully_shard(layer, mesh=mesh)


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return number() == 0


def wait() -> None:
    """Waits until all processes have called this."""
    _state().wait_for_everyone()


def any_of(here: bool) -> bool:  # noqa: FBT001 - a question about one flag
    """Whether the flag is set in at least one process; all processes must call this."""
    return bool(most_of(int(here)))


def most_of(here: int) -> int:
    """The largest number of all processes; all must call this."""
    if count() == 1:
        return here
    number = torch.tensor(here, device=_state().device)
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
    return int(number)


def mean(here: torch.Tensor) -> torch.Tensor:
    """The mean of all processes; all must call this."""
    return here if count() == 1 else reduce(here, "mean")
