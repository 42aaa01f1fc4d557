"""Splits a frozen model over several processes (FSDP): each holds a part of every layer and fetches the rest.

Knows torch's FSDP; knows nothing of training. All processes must make the same number of forward passes.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from draftheads.models.model import TargetModel


def shard_layers(target: TargetModel, device: torch.device) -> None:
    """Splits each decoder layer over all processes; each process has the whole embedding, last norm and lm_head.

    Args:
        target: the model, whole, on the CPU.
        device: the device of this process.

    Raises:
        UnsupportedModel: the list of layers is not found.
    """
    layers = target.layers
    inside = set(layers.modules())
    for module in target.model.modules():
        if module not in inside:  # layers are split before they move to the device
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # noqa: SLF001 - what .to() calls
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
