"""DSpark's Markov head as DeepSpec, ModelOpt and speculators store it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import CheckpointCorrupt
from draftheads.formats.layout import Made
from draftheads.formats.source import CONFIG, Source
from draftheads.heads.base import DraftHead
from draftheads.heads.dspark import DSparkConfig, DSparkHead


def markov_options(source: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    """The rank and the gate, which the file says and its tensors have."""
    shapes = {name.removeprefix("markov_head."): shape for name, shape in source.shapes.items()}
    kind = "gated" if "gate_proj.weight" in shapes else "vanilla"
    rank = shapes.get("markov_w1.weight", (0,))[-1] or given.get("markov_rank")
    for name, value in {"markov_head_type": kind, "markov_rank": rank}.items():
        if given.get(name, value) != value:
            raise CheckpointCorrupt(
                f"{source.folder / CONFIG}: {name} is {given[name]!r}, and the tensors are those of {value!r}"
            )
    return {"markov_rank": rank, "gated": kind == "gated", "gate_reads_token": kind == "gated"}


def markov_names(config: DSparkConfig, prefix: str = "markov_head.") -> dict[str, str | Made]:
    """The published name of each tensor of DSpark's Markov head.

    There the bias is W2 (σ(G [h; e] + b) * e) with e = W1[x] (arXiv 2607.05147); our gate is twice that.
    """
    size, gate = config.hidden_size, f"{prefix}gate_proj."
    names: dict[str, str | Made] = {"down.0.weight": f"{prefix}markov_w1.weight"}
    if not config.gated:
        return {**names, "up.0.weight": f"{prefix}markov_w2.weight"}
    return {
        **names,
        "up.0.weight": Made((f"{prefix}markov_w2.weight",), lambda w: w / 2),
        "gates.0.weight": Made((f"{gate}weight",), lambda w: w[:, :size].contiguous()),
        "token_gates.0.weight": Made((f"{gate}weight",), lambda w: w[:, size:].contiguous()),
        "gates.0.bias": f"{gate}bias",
    }


def markov_tensors(head: DraftHead) -> dict[str, Tensor]:
    """W1 (V, r), W2 (V', r), and G (r, D + r) with its bias: see :func:`markov_names`.

    Without an embedding of its own W1 is A E(x) of every token, and a gate that does not read the token has zeros.
    """
    assert isinstance(head, DSparkHead)
    config, prefix = head.config, "markov_head."
    assert isinstance(config, DSparkConfig)
    weights, gate = head.state_dict(), 2.0 if config.gated else 1.0
    tensors = {
        f"{prefix}markov_w1.weight": head.scores(torch.arange(config.vocab_size), 0),
        f"{prefix}markov_w2.weight": weights["up.0.weight"] * gate,
    }
    if config.gated:
        unread = torch.zeros(2 * (config.markov_rank,))
        gates = weights["gates.0.weight"], weights.get("token_gates.0.weight", unread)
        tensors |= {
            f"{prefix}gate_proj.weight": torch.cat(gates, 1),
            f"{prefix}gate_proj.bias": weights["gates.0.bias"],
        }
    return tensors


def markov_keys(config: DSparkConfig) -> dict[str, Any]:
    """What a configuration says of the Markov head. A confidence head is not written."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "gated" if config.gated else "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
