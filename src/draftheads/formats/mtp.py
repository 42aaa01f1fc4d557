"""MTP layers in a model's own files, of which the rest is left alone: Qwen, MiMo, GLM, DeepSeek; also speculators'."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.checkpoints.checkpoint import weightless_head
from draftheads.errors import CheckpointMismatch, UnsupportedModel
from draftheads.formats.layout import (
    EMBEDDINGS,
    Format,
    Layout,
    Made,
    Source,
    added_keys,
    check_keys,
    numbers_in,
    sizes_of,
)
from draftheads.heads.mtp import MtpConfig
from draftheads.models.model import TargetModel
from draftheads.models.model_config import layer_settings

_LAYER = "layer.block."
_KEYS = ("transformer_layer_config", "speculators_config", "num_nextn_predict_layers", "mtp_num_hidden_layers")
_DEPTH = 3  # of drafts: what FastMTP trains a layer for


class _Names(NamedTuple):
    """What the parts of an MTP layer are called. All stand behind a prefix."""

    fusion: str  # pattern of the name of fc, with the prefix as its group
    norms: tuple[str, ...]  # of the embedding and of the hidden state, and the one behind the layer
    layer: str = ""
    hidden_first: bool = False


_NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
_NAMES = (
    _Names(r"(mtp\.)fc\.weight", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "layers.0."),
    _Names(r"(model\.layers\.\d+\.)eh_proj\.weight", ("enorm", "hnorm", "shared_head.norm")),
    _Names(r"(model\.mtp_layers\.\d+\.)input_proj\.weight", _NORMS, hidden_first=True),  # MiMo
    _Names(r"(mtp_layers\.\d+\.)input_proj\.weight", _NORMS),  # speculators
)


def find_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[_Names, re.Match[str]]]:
    """The names of each MTP layer, and its fc."""
    return [(names, match) for names in _NAMES for name in shapes if (match := re.fullmatch(names.fusion, name))]


def mtp_layout(source: Source, base: TargetModel) -> Layout:
    """The layer's class and settings are those of the base model."""
    (names, fusion), *further = find_layers(source.shapes)
    if further or numbers_in(source.shapes, r"mtp\.layers\.([1-9]\d*)\.input_layernorm\.weight"):
        raise UnsupportedModel(f"{source.path} has several MTP layers; a head has one, which is used for each depth")
    layer, prefix = base.head_sizes["layer"], fusion[1]
    config = MtpConfig(**sizes_of(base), num_heads=_DEPTH, hidden_first=names.hidden_first, layer=layer)
    places: dict[str, str | Made] = {"fusion.weight": fusion[0]}
    for ours, theirs in zip(("embedding_norm", "hidden_norm", "norm"), names.norms, strict=True):
        places[f"{ours}.weight"] = f"{prefix}{theirs}.weight"
    for name, tensor in weightless_head(config).state_dict().items():
        if name.startswith(_LAYER):
            theirs = prefix + names.layer + name.removeprefix(_LAYER)
            is_made = ".experts." in name and theirs not in source.shapes
            places[name] = _of_experts(theirs, len(tensor)) if is_made else theirs
    _check_layer(source, base, layer)
    copies = {f"{prefix}embed_tokens.weight": "embedding", f"{prefix}shared_head.head.weight": "lm_head"}
    unused = {name for name in source.shapes if not name.startswith(prefix)}
    if not EMBEDDINGS & unused:  # no whole model; speculators have copies beside the layer
        copies |= {"embed_tokens.weight": "embedding", "lm_head.weight": "lm_head"}
        unused = set()
    return Layout("an MTP layer", config, places, copies=copies, unused=unused)


def _check_layer(source: Source, base: TargetModel, layer: Mapping[str, Any]) -> None:
    """Refuses a configuration that nothing reads, or that makes another layer than the base's."""
    whole = source.config
    given = whole.get("text_config") or {**whole, **(whole.get("transformer_layer_config") or {})}
    check_keys(source, _KEYS, added_keys(base, given))
    is_turned = any(name.startswith("rope_") for name in given)
    usual = {k: v for k, v in base.config.to_dict().items() if not (is_turned and k.startswith("rope_"))}
    theirs = layer_settings(type(base.config).from_dict({**usual, **given}))
    if apart := [name for name, value in layer.items() if theirs.get(name) != value]:
        what = "; ".join(f"{name} is {theirs.get(name)!r}, and {layer[name]!r} in {base.model_id}" for name in apart)
        raise CheckpointMismatch(f"{source.config_file}: {what}: give the model that the layer was trained for")


def _of_experts(name: str, count: int) -> Made:
    """Matrices of all experts, (E, …): of files that have gate, up and down of each, where the layer has gate_up."""
    stem, _, parts = name.rpartition(".")
    kinds = parts.removesuffix("_proj").split("_")

    def stacked(*matrices: Tensor) -> Tensor:
        return torch.stack([torch.cat(matrices[i : i + len(kinds)]) for i in range(0, len(matrices), len(kinds))])

    return Made(tuple(f"{stem}.{expert}.{kind}_proj.weight" for expert in range(count) for kind in kinds), stacked)


FORMATS = (Format("mtp", lambda shapes: bool(find_layers(shapes)), mtp_layout),)
