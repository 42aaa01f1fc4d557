"""A device that is not there: its tensors are computed on the CPU, and what passes between it and the host is noted.

It is as a GPU in what matters here: an operator on tensors of both devices raises, and the host waits for each value
that it reads. The values are real, so what is computed on this device can be compared with what the CPU computes.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import draftheads

# PyTorch knows this type of device but has no tensors on it. So nothing need be registered, which would be for ever.
DEVICE = torch.device("lazy")
_SOURCES = str(Path(draftheads.__file__).parent) + "/"
_COPIES = {"aten::_to_copy", "aten::to", "aten::copy_"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DeviceTensor(Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls: type[Self], value: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, value.stride(), value.storage_offset(), dtype=value.dtype, device=DEVICE
        )

    def __init__(self, value: Tensor) -> None:
        self.value = value  # on the CPU

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """PyTorch's own refuses tensors of other classes."""
        return self.cpu().tolist()


class FakeDevice(TorchDispatchMode):
    """While it is entered, tensors can be made on :data:`DEVICE` and copied to it and back.

    Attributes:
        reads: how often the host read values, by file and line. It waits for the device each time.
        waits: how often it sent values such that it waits for the device, too.
        copies: how often it sent values without waiting, by :func:`draftheads.utils.transfer.to_device`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Forgets what was noted."""
        self.reads, self.waits, self.copies = Counter[str](), Counter[str](), Counter[str]()

    def __enter__(self) -> Self:
        # torch.tensor(…, device=DEVICE) then makes a tensor on the CPU, and this mode copies it
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:  # the parts of a composite operator
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        self._note(func, args, kwargs)
        return _computed(func, args, kwargs)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = func.name().split(".")[0]
        if name in _COPIES:
            source = args[1] if name == "aten::copy_" else args[0]
            target = args[0].device if name == "aten::copy_" else kwargs.get("device") or source.device
            if torch.device(target).type != source.device.type:
                self._note_transfer(to_host=torch.device(target).type == "cpu")
        elif name in _INDEXING and isinstance(args[0], DeviceTensor):
            indices = [index for index in args[1] if index is not None]
            for _ in (index for index in indices if not isinstance(index, DeviceTensor)):
                self._note_transfer(to_host=False)
            masks = any(index.dtype == torch.bool for index in indices)
            if masks and (name == "aten::index" or args[2].numel() != 1):  # the host needs the number of values
                self._note_transfer(to_host=True)
        elif _NEEDS_VALUES & {*func.tags} and any(isinstance(one, DeviceTensor) for one in _tensors([args, kwargs])):
            self._note_transfer(to_host=True)

    def _note_transfer(self, *, to_host: bool) -> None:
        places = _places()
        place = next(places)
        if to_host:
            self.reads[place] += 1
        elif place.startswith("utils/transfer.py"):
            self.copies[next(places)] += 1
        else:
            self.waits[place] += 1


@cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


def _computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator's result; on the device where an input is, or where it is asked for."""
    name = func.name().split(".")[0]
    tensors = list(_tensors([args, kwargs]))
    inputs = {id(tensor.value): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
    if inputs and name not in _COPIES:
        _check_devices(func, [args[0], *args[2:3]] if name in _INDEXING else tensors)
    device = kwargs.get("device")
    is_here = bool(inputs) if device is None else torch.device(device).type == DEVICE.type
    if is_here and device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    values = _changed(_value, args)
    if name == "aten::histc" and not values[0].is_floating_point():  # the CPU has no kernel for it, but GPUs have
        values = (values[0].double(), *values[1:])
    found = func(*values, **{key: _changed(_value, value) for key, value in kwargs.items()})
    if name == "aten::histc":
        found = found.to(tensors[0].dtype)
    if name == "aten::copy_":
        return args[0]
    return _changed(lambda one: _on_device(one, inputs), found) if is_here else found


def _on_device(value: Any, inputs: Mapping[int, DeviceTensor]) -> Any:
    """A result; an operator in place returns its input."""
    if not isinstance(value, Tensor):
        return value
    if id(value) in inputs:
        return inputs[id(value)]
    with torch.inference_mode(value.is_inference()):  # views of ordinary tensors are ordinary tensors
        return DeviceTensor(value)


def _check_devices(func: Any, tensors: Iterable[Any]) -> None:
    """As on a GPU, where only numbers may come from the host, and only to operators on single values."""
    for tensor in tensors:
        is_here = isinstance(tensor, DeviceTensor) or not isinstance(tensor, Tensor)
        if not is_here and (tensor.dim() > 0 or torch.Tag.pointwise not in func.tags):
            raise RuntimeError(f"{func}: a tensor {tuple(tensor.shape)} on the CPU meets tensors on {DEVICE}")


def _value(one: Any) -> Any:
    return one.value if isinstance(one, DeviceTensor) else one


def _changed(change: Any, found: Any) -> Any:
    """Arguments or results, lists of them too, with a change of each; faster than PyTorch's trees."""
    return type(found)(_changed(change, one) for one in found) if isinstance(found, list | tuple) else change(found)


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple | dict):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _tensors(one)


def _places() -> Iterator[str]:
    """File and line of the package that are at work, and then those that called them."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_SOURCES):
            yield f"{frame.f_code.co_filename.removeprefix(_SOURCES)}:{frame.f_lineno}"
        frame = frame.f_back
    yield "elsewhere"
