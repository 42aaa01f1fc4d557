"""Heads of zankner/Hydra: Hydra, Hydra++ (``prefix-mlp``), and heads that read no draft tokens."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from draftheads.errors import CheckpointCorrupt, UnsupportedModel
from draftheads.formats.layout import Format, Layout, numbers_in, sizes_of
from draftheads.formats.source import Source
from draftheads.heads.base import HeadConfig
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


FORMATS = (Format("hydra", is_hydra, hydra_layout),)
