"""Heads of zankner/Hydra: Hydra, Hydra++ (``prefix-mlp``), and heads that read no draft tokens."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from draftheads.errors import CheckpointCorrupt, UnsupportedModel
from draftheads.formats.layout import (
    Format,
    Layout,
    Written,
    numbers_in,
    partial_vocabulary,
    refuse,
    sizes_of,
    whole_lm_heads,
)
from draftheads.formats.medusa import different_layers
from draftheads.formats.source import Source
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.hydra import HydraConfig
from draftheads.heads.hydra_plus_plus import HydraPlusPlusConfig
from draftheads.heads.medusa import MedusaConfig
from draftheads.models.model import TargetModel

_PREFIX = "prefix_embeding_layer."  # as the project spells it
_EMBEDDING = "input_embed_fn.weight"
_LAYER = {  # Llama's names of our layer's parts
    "input_norm.weight": "input_layernorm.weight",
    "middle_norm.weight": "post_attention_layernorm.weight",
    **{f"{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"feed_forward.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def is_hydra(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the heads' tensors have the project's names."""
    return any(name.startswith("hydra_mlp.") for name in shapes)


def hydra_layout(source: Source, base: TargetModel) -> Layout:
    """The kind of head follows from the tensors."""
    shapes = source.shapes
    if offset := source.config.get("hidden_state_offset"):
        raise UnsupportedModel(
            f"{source.path}: the heads read the hidden states {offset} layers before the last (hidden_state_offset); "
            "only heads on the last layer's can be read"
        )
    has_prefix = any(name.startswith(_PREFIX) for name in shapes)
    is_grounded = any(".res_connection." in name for name in shapes)
    places = numbers_in(shapes, r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
    heads, layers = 1 + max(head for head, _ in places), len({layer for _, layer in places})
    if heads * layers > len(shapes):
        raise CheckpointCorrupt(
            f"{source.path}: heads and layers are missing: {heads} × {layers}, of {len(places)} blocks"
        )
    given: dict[str, Any] = {**sizes_of(base), "num_heads": heads, "num_layers": layers, "lm_head": "own"}
    config: HeadConfig
    if has_prefix and not is_grounded:
        raise UnsupportedModel(f"{source.path}: a prefix layer for heads that read no draft tokens cannot be read")
    if has_prefix:
        config, kind = HydraPlusPlusConfig(**given, **base.layer_sizes), "Hydra++ heads"
    elif is_grounded:
        config, kind = HydraConfig(**given), "Hydra heads"
    else:
        config, kind = MedusaConfig(**given, lm_head_bias=True), "Hydra heads that read no draft tokens"
    embeddings = {_EMBEDDING, f"{_PREFIX}embed_tokens.weight"} & set(shapes)
    copies = {_EMBEDDING: "embedding"} if _EMBEDDING in shapes else {}
    unused = {name for name in shapes if name.endswith(".rotary_emb.inv_freq")} | (embeddings - set(copies))
    return Layout(kind, config, hydra_names(config), copies=copies, unused=unused)


def hydra_names(config: HeadConfig) -> dict[str, str]:
    """The project's name of each tensor. With a prefix layer, a dropout module stands before each other module."""
    has_prefix = isinstance(config, HydraPlusPlusConfig)
    names = {}
    for i, j, part in product(range(config.num_heads), range(config.num_layers), ("weight", "bias")):
        block = f"hydra_mlp.{i}.{2 * j + 1 if has_prefix else j}"
        names[f"blocks.{i}.{j}.linear.{part}"] = f"{block}.linear.{part}"
        if j == 0 and not isinstance(config, MedusaConfig):
            names[f"blocks.{i}.0.residual.{part}"] = f"{block}.res_connection.{part}"
        names[f"lm_heads.heads.{i}.{part}"] = f"hydra_lm_head.{i}.{'1.' if has_prefix else ''}{part}"
    if has_prefix:
        names |= {f"prefix.{ours}": f"{_PREFIX}layers.0.{theirs}" for ours, theirs in _LAYER.items()}
        names["prefix_norm.weight"] = f"{_PREFIX}norm.weight"
    return names


def write_hydra(head: DraftHead, target: TargetModel, name: str) -> Written:
    """``config.json`` and the tensors as the project stores them: every head has an lm_head of the whole vocabulary.

    Embeddings that the head scales are scaled by the first block.
    """
    config, tensors = head.config, dict(head.state_dict())
    has_prefix, is_grounded = isinstance(config, HydraPlusPlusConfig), not isinstance(config, MedusaConfig)
    layers = range(1 if is_grounded else 0, config.num_layers)
    refuse([*partial_vocabulary(config), *different_layers(tensors, config.num_heads, layers)])
    about = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "prefix-mlp" if has_prefix else "mlp",
        "grounded_heads": is_grounded,
        "hidden_state_offset": 0,
        "base_model_name_or_path": name,
    }
    for i, (weight, bias) in enumerate(whole_lm_heads(head, target)):
        tensors |= {f"lm_heads.heads.{i}.weight": weight, f"lm_heads.heads.{i}.bias": bias}
    for i, part in product(range(config.num_heads if is_grounded else 0), ("linear", "residual")):
        name = f"blocks.{i}.0.{part}.weight"  # (D, (i+2)·D): of h_t, and behind it of the embeddings
        tensors[name] = tensors[name].clone()
        tensors[name][:, config.hidden_size :] *= head.embedding_scale
    return about, {theirs: tensors[ours] for ours, theirs in hydra_names(config).items()}


FORMATS = (
    Format(
        "hydra",
        ("hydra", "hydra++", "medusa"),
        write_hydra,
        {"Hydra": "python -m hydra.inference.cli --model <head>"},
        is_hydra,
        hydra_layout,
        file="hydra_lm_head.pt",
    ),
)
