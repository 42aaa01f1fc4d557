"""Families with recurrent layers: which are proved, and which functions of ``transformers`` their mixers call.

A mixer calls a causal convolution and, except in short convolutions, a recurrence over its outputs.
"""

import sys
from types import ModuleType
from typing import Any

CONVOLUTION = "causal_conv1d_fn"
KIMI_RULE = "chunk_kimi_delta_attention"
DELTA_RULE, MAMBA2, MAMBA1 = "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba_selective_scan"
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), (CONVOLUTION, DELTA_RULE)),
    **dict.fromkeys(
        ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"), (CONVOLUTION, MAMBA2)
    ),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), (CONVOLUTION, MAMBA1)),
    "kimi_linear": (CONVOLUTION, KIMI_RULE),
    **dict.fromkeys(("lfm2", "lfm2_moe"), (CONVOLUTION,)),
}
KINDS = frozenset({"linear_attention", "hybrid", "conv", "moe", "mlp"})  # of layers, beside attention


def recurrent_modules(decoder: Any) -> list[ModuleType]:
    """The modules of ``transformers`` with the mixers of a decoder, whose names they call."""
    names = {type(module).__module__ for module in decoder.modules()}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], CONVOLUTION)]


def missing_functions(family: str, decoder: Any) -> list[str]:
    """Functions that this version of ``transformers`` does not have."""
    namespaces = recurrent_modules(decoder)
    return [name for name in FAMILIES[family] if not any(hasattr(module, name) for module in namespaces)]
