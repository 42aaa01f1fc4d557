"""Heads of FasterDecoding/Medusa (versions 0.1, 2 and 1.0), and what came of it: vLLM's up to 0.32 and zankner/Hydra's.

Those of vLLM and of Hydra are only read. Hydra's are Hydra, Hydra++ (``prefix-mlp``), and heads that read no draft
tokens.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import CheckpointCorrupt, InvalidSettings, InvalidTree, UnsupportedModel
from draftheads.formats.layout import (
    Format,
    Layout,
    Made,
    Reasons,
    Source,
    Written,
    added_keys,
    check_keys,
    draft_ids,
    has_names,
    numbers_in,
    partial_vocabulary,
    refuse,
    sizes_of,
    whole_lm_heads,
)
from draftheads.formats.llama import layer_names
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.hydra import HydraConfig, HydraPlusPlusConfig
from draftheads.heads.medusa import MedusaConfig
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree

_KEYS = {  # numbers of heads and layers are those of the tensors
    *("medusa_num_heads", "medusa_num_layers", "medusa_choices", "version", "num_heads", "max_paths", "topk"),
    *("truncated_vocab_size", "original_lm_head", "medusa_fc_bias", "hidden_state_offset"),
    *("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads"),
}
_IN_MODEL = ("medusa_head.", "medusa_heads.")  # of version 1.0 and ModelOpt, beside the base model's tensors
_MOST_CHOICES = 1024  # published trees have 64
_OF_VLLM = "medusa_heads."
# names with the numbers of a head and of a layer in it
_BLOCKS = r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.weight"
_VLLM_BLOCKS = rf"(?:{re.escape(_OF_VLLM)})?blocks\.(\d+)\.layers\.(\d+)\.weight"
_HYDRA_BLOCKS = r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight"
_PREFIX = "prefix_embeding_layer."  # as Hydra's project spells it
_EMBEDDING = "input_embed_fn.weight"


def medusa_layout(source: Source, base: TargetModel) -> Layout:
    """Published configurations say fewer heads than the files have: the tensors count."""
    shapes = source.shapes
    prefix = next((prefix for prefix in _IN_MODEL if any(name.startswith(prefix) for name in shapes)), "")
    heads, layers = _counts(source, _BLOCKS)
    has_own = f"{prefix}0.{layers}.weight" in shapes
    config = MedusaConfig(**sizes_of(base), num_heads=heads, num_layers=layers, lm_head="own" if has_own else "shared")
    names = {ours: prefix + theirs for ours, theirs in medusa_names(config).items()}
    check_keys(source, _KEYS, added_keys(base, source.config) if prefix else source.config)
    kind = "a full model with Medusa heads" if prefix else "Medusa heads" if has_own else "Medusa heads, version 2"
    beside = [name for name in shapes if prefix and not name.startswith(prefix)]
    name = base.model_id  # of a model on the Hub, the folder of its files has the name with "--" for "/"
    folder = source.config_file.parent
    if beside and folder.resolve() != Path(name).resolve() and name.replace("/", "--") not in str(folder):
        what = "a full model with Medusa heads, which were trained for that model"
        raise InvalidSettings(f"{source.path} is {what}, not for {base.model_id}: give --model {folder}")
    return Layout(kind, config, names, unused=beside, tree=_choices(source, heads))


def medusa_names(config: MedusaConfig) -> dict[str, str]:
    """The project's name of each tensor."""
    return _names(config, "{}.{}.linear.{}", f"{{}}.{config.num_layers}.weight")


def _names(config: MedusaConfig, block: str, lm_head: str) -> dict[str, str]:
    """Names by patterns: of a head's number, a layer's, and a part; and of a head's number."""
    places = product(range(config.num_heads), range(config.num_layers), ("weight", "bias"))
    names = {"blocks.{}.{}.linear.{}".format(*place): block.format(*place) for place in places}
    if config.lm_head == "own":
        names |= {f"lm_heads.heads.{i}.weight": lm_head.format(i) for i in range(config.num_heads)}
    return names


def vllm_layout(source: Source, base: TargetModel) -> Layout:
    """All biases may be missing: they are zero. lm_heads of the whole vocabulary are cut to the draft tokens."""
    shapes = source.shapes
    prefix = _OF_VLLM if any(name.startswith(_OF_VLLM) for name in shapes) else ""
    heads, layers = _counts(source, _VLLM_BLOCKS)
    check_keys(source, _KEYS, source.config)
    tokens = prefix + "token_map"
    count = shapes[tokens][0] if tokens in shapes else None
    config = MedusaConfig(**sizes_of(base), num_heads=heads, num_layers=layers, lm_head="own", draft_vocab_size=count)
    if (said := source.number("truncated_vocab_size")) and count not in (None, said):
        raise source.wrong(f"truncated_vocab_size is {said}, and the tensors are those of {count}")
    has_bias = bool(source.config.get("medusa_fc_bias")) or any(name.endswith(".bias") for name in shapes)
    are_one = sum(name.startswith(f"{prefix}lm_heads.") for name in shapes) == 1
    names: dict[str, str | Made] = {}
    for ours, theirs in vllm_names(config).items():
        name = prefix + theirs
        if theirs.endswith(".bias") and not has_bias:
            names[ours] = Made((name.removesuffix("bias") + "weight",), lambda weight: weight.new_zeros(len(weight)))
        elif theirs.startswith("lm_heads."):
            one = prefix + "lm_head.weight"
            name = f"{prefix}lm_heads.0.weight" if are_one else one if one in shapes else name
            is_whole = count is not None and shapes.get(name, (count,))[0] != count
            names[ours] = Made((name, tokens), lambda weight, ids: weight[ids.long()]) if is_whole else name
        elif theirs == "token_map":
            names[ours] = Made((name,), partial(draft_ids, source, name, base.vocab_size))
        else:
            names[ours] = name
    return Layout("vLLM's Medusa heads", config, names)


def vllm_names(config: MedusaConfig) -> dict[str, str]:
    """The name of each tensor in vLLM."""
    names = _names(config, "blocks.{}.layers.{}.{}", "lm_heads.{}.weight")
    return names if config.draft_vocab_size is None else {**names, "draft_vocab": "token_map"}


def write_medusa(head: DraftHead, target: TargetModel, name: str) -> Written:
    """``config.json`` and the tensors as Medusa stores them, with the head's lm_heads written out or shared."""
    config: Any = head.config
    tensors = dict(head.state_dict())
    has_bias = head.lm_heads.shared_bias is not None or head.lm_heads.bias
    reasons = {"the lm_heads have a bias, for which the layout has no place": has_bias, **partial_vocabulary(config)}
    refuse({**reasons, **_different_layers(config, tensors)})
    about: dict[str, Any] = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    about["base_model_name_or_path"] = name
    if config.lm_head == "shared":
        about["version"] = "2"
    else:
        config = replace(config, lm_head="own")
        tensors |= {f"lm_heads.heads.{i}.weight": part for i, (part, _) in enumerate(whole_lm_heads(head, target))}
    return about, {theirs: tensors[ours] for ours, theirs in medusa_names(config).items()}


def _different_layers(config: MedusaConfig, tensors: Mapping[str, Tensor]) -> Reasons:
    """Why a head cannot be written for Medusa's code, which uses one block for all layers of a head."""
    for i, part in product(range(config.num_heads), ("weight", "bias")):
        first, *others = (tensors[f"blocks.{i}.{j}.linear.{part}"] for j in range(config.num_layers))
        if not all(torch.equal(first, other) for other in others):
            what = f"the layers of head {i} differ, and the original code would read the last one into all of them"
            return {f"{what}: train a head with --num-layers 1": True}
    return {}


def _choices(source: Source, heads: int) -> Tree | None:
    """The tree of ``medusa_choices``, as far as the heads reach."""
    choices = source.config.get("medusa_choices")
    if choices is None:
        return None
    try:
        return Tree.from_paths([tuple(path) for path in choices[:_MOST_CHOICES] if 0 < len(path) <= heads])
    except (TypeError, ValueError, InvalidTree) as error:
        raise source.wrong(f"medusa_choices: {error}") from None


def _counts(source: Source, pattern: str) -> tuple[int, int]:
    """Heads and layers of each, by the numbers in names; an error where one is missing, of the configuration, too."""
    places = numbers_in(source.shapes, pattern)
    heads, layers = 1 + places[-1][0], len({layer for _, layer in places})
    if heads * layers > len(places):
        raise CheckpointCorrupt(f"{source.path}: layers are missing: {heads} × {layers}, and {len(places)} are there")
    for key in sorted(key for key in _KEYS if "num_" in key):
        if (said := source.number(key) or 0) > (count := heads if key.endswith("heads") else layers):
            raise CheckpointCorrupt(f"{source.path}: tensors are missing: {key} is {said}, and they are of {count}")
    return heads, layers


def hydra_layout(source: Source, base: TargetModel) -> Layout:
    """The kind of head follows from the tensors."""
    shapes = source.shapes
    if offset := source.config.get("hidden_state_offset"):
        read = f"the hidden states {offset} layers before the last (hidden_state_offset)"
        raise UnsupportedModel(f"{source.path}: the heads read {read}; only heads on the last layer's can be read")
    check_keys(source, _KEYS, source.config)
    has_prefix = any(name.startswith(_PREFIX) for name in shapes)
    is_grounded = any(".res_connection." in name for name in shapes)
    for key, found in {"hydra_head_arch": "prefix-mlp" if has_prefix else "mlp", "grounded_heads": is_grounded}.items():
        if (said := source.config.get(key)) not in (None, found):
            raise source.wrong(f"{key} is {said}, and the tensors are those of {found}")
    heads, layers = _counts(source, _HYDRA_BLOCKS)
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
    copies = {_EMBEDDING: "embedding"}
    unused = {name for name in shapes if name.endswith(".rotary_emb.inv_freq")} | {f"{_PREFIX}embed_tokens.weight"}
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
    if isinstance(config, HydraPlusPlusConfig):
        names |= layer_names(config, "prefix.", f"{_PREFIX}layers.0.")
        names["prefix_norm.weight"] = f"{_PREFIX}norm.weight"
    return names


FORMATS = (
    Format(
        "medusa",
        has_names(_BLOCKS),
        medusa_layout,
        methods=("medusa",),
        write=write_medusa,
        commands={  # Medusa 1.0, TensorRT-LLM 1.0 with engines of TensorRT
            "Medusa": "python -m medusa.inference.cli --model <head>",
            "TensorRT-LLM": "python examples/medusa/convert_checkpoint.py --model_dir <model> "
            "--medusa_model_dir <head> --num_medusa_heads <steps> --output_dir checkpoint "
            "&& trtllm-build --checkpoint_dir checkpoint --speculative_decoding_mode medusa --output_dir engine",
        },
        file="medusa_lm_head.safetensors",
    ),
    Format("vllm-medusa", has_names(_VLLM_BLOCKS), vllm_layout),
    Format("hydra", has_names(_HYDRA_BLOCKS), hydra_layout),
)
