"""Copies from the host to a device, without waiting for the device; and whether it still works."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(
    values: Sequence[Any] | npt.NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor on the device from numbers, an array or a tensor on the host.

    A plain copy to a GPU waits for all work of the GPU. A copy from pinned memory does not.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def device_works(device: torch.device) -> bool:
    """Whether a device still computes. After a failed assert on a GPU no further call of the process succeeds."""
    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
