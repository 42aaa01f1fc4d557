"""Eight-bit linear layers on CUDA, by torchao, which is an optional package; the only file that knows it.

It has not been run on a GPU yet. fp8 needs no more than ``torch._scaled_mm``. torchao's int8 product looks at its input's
values when it is not compiled: steps with it are not captured, and should be measured before they are offered.
"""

from typing import Any

import torch
from torch import nn

from draftheads.errors import MissingDependency

_FP8_CAPABILITY = (8, 9)  # Ada and later


def quantise(model: Any) -> str:
    """Holds a model's linear layers in eight bits, in place; gives the format's name, ``fp8`` or ``int8``.

    Weights have a scale per output channel, activations one per row, found at each pass: a row's numbers do not depend
    on the others. The lm_head stays as it is: heads read its weight, and it may be the embedding, too.

    Args:
        model: a transformers causal LM.

    Raises:
        MissingDependency: torchao is not installed.
    """
    try:
        from torchao.quantization import quantize_  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingDependency("8 bits on CUDA need torchao", pip_install="torchao") from error
    lm_head = model.get_output_embeddings()
    is_fp8 = _has_fp8(lm_head.weight.device)
    quantize_(model, _config(is_fp8=is_fp8), filter_fn=lambda layer, _: _is_linear(layer) and layer is not lm_head)
    return "fp8" if is_fp8 else "int8"


def _config(*, is_fp8: bool) -> Any:
    from torchao import quantization  # noqa: PLC0415 - an extra

    if is_fp8:
        return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    return quantization.Int8DynamicActivationInt8WeightConfig()


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear
