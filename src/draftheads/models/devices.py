"""The types and devices that names mean, and those that are taken where none is named."""

import torch

from draftheads.cpu.kernels import native_bf16
from draftheads.errors import InvalidSettings, first_line
from draftheads.settings import ROUNDED_BITS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BF16_CAPABILITY = (8, 0)  # Ampere and later; T4 (7.5) and V100 (7.0) emulate bf16


def dtype_named(dtype: object) -> torch.dtype | None:
    """The type that is meant by a type or a name such as ``fp32`` or ``float32``; None for None and ``auto``.

    >>> dtype_named("bf16"), dtype_named("torch.float16"), dtype_named("auto")
    (torch.bfloat16, torch.float16, None)
    """
    if dtype is None or dtype == "auto":
        return None
    named = DTYPES.get(dtype) or getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    also = f"; {dtype} is a precision of draftheads.load" if dtype in ROUNDED_BITS else ""
    raise InvalidSettings(f"dtype is {dtype!r}; choose auto, {', '.join(DTYPES)} or a floating-point torch.dtype{also}")


def device_named(device: object) -> torch.device:
    """A device that this machine has; :func:`default_device` for None."""
    if device is None:
        return default_device()
    try:
        if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
            raise TypeError  # noqa: TRY301
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidSettings(f"device is {device!r}; give cpu, cuda, cuda:0 or another device of PyTorch") from None
    if place.type == "meta":
        raise InvalidSettings("device is 'meta', which holds no weights; give cpu or cuda")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (place.index or 0):
            fix = f"give cuda:0 … cuda:{count - 1}" if count else "leave device out, or install PyTorch with CUDA"
            raise InvalidSettings(
                f"device is '{place}', and PyTorch {torch.__version__} finds {count or 'no'} CUDA devices: {fix}"
            )
    elif place.type != "cpu":
        try:
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, ImportError, TypeError) as error:
            raise InvalidSettings(f"device is '{place}', which this PyTorch cannot use: {first_line(error)}") from None
    return place


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: str | torch.device) -> torch.dtype:
    """bf16 where the CPU or GPU computes in it: emulated bf16 is slow. Otherwise fp16 on GPUs, and fp32 elsewhere."""
    kind = torch.device(device).type
    if kind == "cuda":
        has_bf16 = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
        return torch.bfloat16 if has_bf16 else torch.float16
    return torch.bfloat16 if kind == "cpu" and native_bf16() else torch.float32
