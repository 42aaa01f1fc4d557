"""The largest of many logits, natively on a CPU."""

import torch
from torch import Tensor

from draftheads.cpu.native_library import KINDS, load_library
from draftheads.cpu.threads import native_threads


def first_largest(logits: Tensor) -> Tensor | None:
    """The first of the largest logits of each row, (…, V) -> (…) int64; None where there is no library for it."""
    library = load_library()
    if library is None or logits.device.type != "cpu" or logits.dtype not in KINDS:
        return None
    logits = logits.contiguous()
    values, places = (torch.empty(logits.shape[:-1], dtype=dtype) for dtype in (torch.float32, torch.int64))
    given = (KINDS[logits.dtype], logits.data_ptr(), places.numel(), logits.shape[-1], 1, 1.0)
    library.draftheads_threads(native_threads())
    library.draftheads_top(*given, values.data_ptr(), places.data_ptr(), None)
    return places


def largest(logits: Tensor, count: int, divisor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row, as log-probabilities need them.

    Args:
        logits: (…, V).
        count: k, at most V are returned.
        divisor: of the logits.

    Returns:
        The k largest quotients, the largest first, (…, k) float32; their places (…, k) int64; and the logarithm of
        the sum of all quotients' exponentials (…, 1) float32.
    """
    count = min(count, logits.shape[-1])
    library = load_library()
    if library is None or logits.device.type != "cpu" or logits.dtype not in KINDS:
        scaled = logits.float() if divisor == 1.0 else logits.float() / divisor
        top = scaled.topk(count, dim=-1)
        return top.values, top.indices, scaled.logsumexp(-1, keepdim=True)
    shape, logits = logits.shape[:-1], logits.contiguous()
    values = torch.empty(*shape, count, dtype=torch.float32)
    places = torch.empty(*shape, count, dtype=torch.int64)
    totals = torch.empty(*shape, 1, dtype=torch.float32)
    given = (KINDS[logits.dtype], logits.data_ptr(), totals.numel(), logits.shape[-1], count, divisor)
    library.draftheads_threads(native_threads())
    library.draftheads_top(*given, values.data_ptr(), places.data_ptr(), totals.data_ptr())
    return values, places, totals
