"""MTP layers in a model's own files: Qwen3-Next, Qwen3.5, MiMo, GLM-4.5 and DeepSeek-V3; also speculators' files.

They are read from a folder of the whole model, of which the other tensors are left alone.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from draftheads.checkpoints.checkpoint import weightless_head
from draftheads.errors import UnsupportedModel
from draftheads.formats.layout import Format, Layout, Made, numbers_in, sizes_of
from draftheads.formats.source import Source
from draftheads.heads.mtp import MtpConfig
from draftheads.models.model import TargetModel

_LAYER = "layer.block."
_DEPTH = 3  # of drafts: what FastMTP trains a layer for


class _Names(NamedTuple):
    """What the parts of an MTP layer are called. All stand behind a prefix."""

    fusion: str  # pattern of the name of fc, with the prefix as its group
    norms: tuple[str, str, str]  # of the embedding and of the hidden state, and the one behind the layer
    layer: str = ""
    hidden_first: bool = False


_NAMES = (
    _Names(r"(mtp\.)fc\.weight", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "layers.0."),
    _Names(r"(model\.layers\.\d+\.)eh_proj\.weight", ("enorm", "hnorm", "shared_head.norm")),
    _Names(
        r"(model\.mtp_layers\.\d+\.)input_proj\.weight",
        ("token_layernorm", "hidden_layernorm", "final_layernorm"),
        hidden_first=True,  # MiMo
    ),
    _Names(r"(mtp_layers\.\d+\.)input_proj\.weight", ("token_layernorm", "hidden_layernorm", "final_layernorm")),
)


def is_mtp(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """A layer that fuses an embedding and a hidden state, under one of the known names."""
    return bool(_found(shapes))


def mtp_layout(source: Source, base: TargetModel) -> Layout:
    """The layer's class and settings are those of the base model."""
    (names, fusion), *further = _found(source.shapes)
    prefix = fusion[1]
    if further or numbers_in(source.shapes, r"mtp\.layers\.([1-9]\d*)\.input_layernorm\.weight"):
        raise UnsupportedModel(f"{source.path} has several MTP layers; a head has one, which is used for each depth")
    config = MtpConfig(
        **sizes_of(base), num_heads=_DEPTH, hidden_first=names.hidden_first, layer=base.head_sizes["layer"]
    )
    ours = ("embedding_norm.weight", "hidden_norm.weight", "norm.weight")
    places: dict[str, str | Made] = {"fusion.weight": fusion[0]}
    places |= {name: f"{prefix}{theirs}.weight" for name, theirs in zip(ours, names.norms, strict=True)}
    for name, tensor in weightless_head(config).state_dict().items():
        if name.startswith(_LAYER):
            theirs = prefix + names.layer + name.removeprefix(_LAYER)
            is_stacked = ".experts." in name and theirs not in source.shapes
            places[name] = _of_experts(theirs, len(tensor)) if is_stacked else theirs
    copies = {f"{prefix}embed_tokens.weight": "embedding", f"{prefix}shared_head.head.weight": "lm_head"}
    return Layout(
        "an MTP layer",
        config,
        places,
        copies={name: part for name, part in copies.items() if name in source.shapes},
        unused={name for name in source.shapes if not name.startswith(prefix)},
    )


def _found(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[_Names, re.Match[str]]]:
    """The name of fc of each MTP layer."""
    return [(names, match) for names in _NAMES for name in shapes if (match := re.fullmatch(names.fusion, name))]


def _of_experts(name: str, count: int) -> Made:
    """Matrices (E, …) of all experts, which have files with a matrix for each: gate and up side by side, or down."""
    stem, _, parts = name.rpartition(".")
    kinds = parts.removesuffix("_proj").split("_")

    def stacked(*matrices: Tensor) -> Tensor:
        return torch.stack([torch.cat(matrices[i : i + len(kinds)]) for i in range(0, len(matrices), len(kinds))])

    return Made(tuple(f"{stem}.{expert}.{kind}_proj.weight" for expert in range(count) for kind in kinds), stacked)


FORMATS = (Format("mtp", (), None, {}, is_mtp, mtp_layout),)
