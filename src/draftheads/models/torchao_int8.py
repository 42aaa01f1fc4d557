"""Eight-bit linear layers on CUDA by torchao, an optional package. Only this file imports it.

This has not been run on a GPU yet. Without compilation, torchao 0.18's int8 product reads its input on the host: steps
are slow and cannot be captured. Its fp8 product does not do this.
"""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from draftheads.errors import MissingDependency

_FP8_CAPABILITY = (8, 9)  # Ada and later


def quantise(model: Any) -> str:
    """Quantises a model's linear layers to eight bits, in place. Returns the format, ``fp8`` or ``int8``.

    Weights have a scale per output channel. Activations have a scale per row, found in each pass, so a row does not
    depend on other rows. The lm_head is not quantised: heads read its weight, and it may be tied to the embedding.

    Raises:
        MissingDependency: torchao is not installed.
    """
    try:
        torchao = import_module("torchao.quantization")
    except ImportError as error:
        raise MissingDependency("8 bits on CUDA need torchao", pip_install="torchao") from error
    lm_head = model.get_output_embeddings()
    device = lm_head.weight.device
    is_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    if is_fp8:
        config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    else:
        config = torchao.Int8DynamicActivationInt8WeightConfig()
    torchao.quantize_(model, config, filter_fn=lambda layer, _: type(layer) is nn.Linear and layer is not lm_head)
    return "fp8" if is_fp8 else "int8"
