"""Which type multiplies whole texts faster on this machine: measured once, then read from a file."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F

from draftheads.errors import CacheWarning, InvalidSettings, StorageError
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import write_atomic
from draftheads.utils.machine import OtherPrograms
from draftheads.utils.provenance import processor

_SIZES = (512, 1024, 2048)  # rows, inputs and outputs of a typical product in training
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dtype_for_texts(*, clock: Callable[[], float] = time.perf_counter) -> torch.dtype:
    """The type in which this CPU multiplies many rows faster, as in training and in reading whole texts: fp32 or bf16.

    Some CPUs with bf16 instructions need 1.5 times as long for large products in bf16 as in fp32. For the few rows of a
    decoding step they are still faster in bf16, because they read half as many bytes.

    It is kept by processor, threads and PyTorch in the user's cache, unless other programs disturbed the measurement.

    Args:
        clock: returns the time in seconds.

    Warns:
        CacheWarning: the cache cannot be read or written. It is measured again.
    """
    facts = [processor(), torch.get_num_threads(), torch.__version__, _SIZES]
    others = OtherPrograms()
    try:
        path = cache_folder() / "types" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.json"
        if path.exists():
            return _TYPES[json.loads(path.read_text(encoding="utf-8"))["texts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path}: no type of numbers ({error!r}); it is measured again", CacheWarning, stacklevel=2)
    except InvalidSettings:
        return _TYPES[_faster(clock)]
    name = _faster(clock)
    if not others.disturb(torch.get_num_threads()):
        try:
            write_atomic(path, json.dumps({"texts": name}).encode())
        except StorageError as error:
            warnings.warn(f"the faster type of numbers is not kept: {error}", CacheWarning, stacklevel=2)
    return _TYPES[name]


@torch.inference_mode()
def _faster(clock: Callable[[], float]) -> str:
    """Takes a tenth of a second. The minimum of several turns counts: other processes can only add time."""
    rows, inputs, outputs = _SIZES
    generator = torch.Generator().manual_seed(0)  # not the program's own random numbers
    x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
    factors = {name: (x.to(dtype), weight.to(dtype)) for name, dtype in _TYPES.items()}
    best = dict.fromkeys(factors, float("inf"))
    for turn in range(5):  # the first turn is the warm-up
        for name, (left, right) in factors.items():
            start = clock()
            F.linear(left, right)
            if turn:
                best[name] = min(best[name], clock() - start)
    return min(best, key=best.__getitem__)
