"""DFlash heads: z-lab's files, which vLLM, SGLang, OpenVINO and llama.cpp's converter read.

The head has no embedding and no lm_head of its own. Layers are counted by what leaves them, so that layer i of ours,
whose input is read, is i - 1 there.
"""

from collections.abc import Mapping
from typing import Any

from draftheads.errors import CheckpointCorrupt, UnsupportedModel
from draftheads.formats.layout import (
    Format,
    Layout,
    Written,
    layer_names,
    layer_options,
    llama_config,
    need_config,
    numbers_in,
    refuse,
    scaled_otherwise,
)
from draftheads.formats.source import CONFIG, Source
from draftheads.heads.base import MOST_DEPTH, DraftHead
from draftheads.heads.dflash import DFlashConfig
from draftheads.models.model import TargetModel

_OF_ITSELF = "dflash_config"
_ONE = {"attention_value_scale": "scaled values", "output_multiplier": "scaled logits"}  # other values than 1
_OTHERWISE = {  # keys that make other heads of these files, and what they mean
    "sample_from_anchor": "blocks whose first row predicts",
    "shift_label": "blocks whose first row predicts",
    "causal": "rows that see the rows before them only",
    "causal_head": "rows that see the rows before them only",
    "is_causal": "rows that see the rows before them only",
    "use_swa": "attention within a window",
    "attention_sink_bias": "attention sinks",
    "final_logit_softcapping": "capped logits",
}


def is_dflash(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Layers with normed queries, and a norm of the context."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= shapes.keys()


def dflash_layout(source: Source, base: TargetModel) -> Layout:
    """Sizes and layers are those of ``config.json``."""
    need_config(source, "it says which layers the head reads, and what stands for a masked token")
    given = source.config
    own: dict[str, Any] = given.get(_OF_ITSELF) or {}
    for name, meaning in {**_OTHERWISE, **_ONE}.items():
        value = own.get(name, given.get(name))
        if value and not (name in _ONE and value == 1):
            raise UnsupportedModel(f"{source.path}: {name} is {value}, and heads with {meaning} cannot be read")
    if others := sorted({name.partition(".")[0] for name in source.shapes} - {"fc", "hidden_norm", "norm", "layers"}):
        raise UnsupportedModel(
            f"{source.path} has parts that DFlash does not have ({', '.join(others)}): it is a head of a later kind, "
            "such as DSpark or DFlash2, which cannot be read"
        )
    if "sliding_attention" in (given.get("layer_types") or ()):
        raise UnsupportedModel(f"{source.path}: layer_types has sliding_attention, and windows cannot be read")
    layers = [int(layer) + 1 for layer in own.get("target_layer_ids", given.get("target_layer_ids")) or ()]
    known = range(int(base.config.num_hidden_layers))
    if not layers or any(layer not in known for layer in layers):
        raise CheckpointCorrupt(
            f"{source.folder / CONFIG}: target_layer_ids makes the layers {layers}; {base.model_id} has {len(known)}, "
            "and states that leave the last one cannot be read"
        )
    block = source.number("block_size", most=MOST_DEPTH, given={**given, **own})
    mask = own.get("mask_token_id", given.get("mask_token_id"))
    if block is None or block < 2 or not isinstance(mask, int):
        raise CheckpointCorrupt(f"{source.folder / CONFIG}: block_size is {block} and mask_token_id {mask}; give both")
    config = DFlashConfig(
        **layer_options(source, base, given, base.hidden_size),
        num_heads=block - 1,
        num_layers=len(numbers_in(source.shapes, r"layers\.(\d+)\.input_layernorm\.weight")),
        layers=layers,
        mask_token_id=mask,
        qkv_bias="layers.0.self_attn.q_proj.bias" in source.shapes,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
    )
    return Layout("a DFlash head", config, dflash_names(config))


def dflash_names(config: DFlashConfig) -> dict[str, str]:
    """The published name of each tensor."""
    names = {name: name for name in ("fc.weight", "hidden_norm.weight", "norm.weight")}
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        names |= layer_names(config, layer, layer) | {f"{layer}input_norm.weight": f"{layer}input_layernorm.weight"}
        names |= {f"{layer}{part}_norm.weight": f"{layer}self_attn.{part}_norm.weight" for part in "qk"}
    return names


def write_dflash(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """``config.json`` and the tensors of z-lab's layout.

    It has no scale of embeddings. What layers add is divided by the scale instead, and all else is normed, with an
    epsilon for smaller numbers.
    """
    config = head.config
    assert isinstance(config, DFlashConfig)
    reasons = scaled_otherwise(config, target)
    if config.lm_head != "shared":
        reasons.append(
            f"the head's lm_head is {config.lm_head}, and engines take the target's for DFlash heads: train it with "
            "--lm-head shared"
        )
    if not config.layers:
        reasons.append(
            "the head reads the last hidden state, and engines give a DFlash head what enters layers: train a head "
            "that reads some (--head-options layers=[…])"
        )
    refuse(reasons)
    tensors = {theirs: head.state_dict()[ours] for ours, theirs in dflash_names(config).items()}
    added = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    tensors |= {name: tensors[name].float() / head.embedding_scale for name in added}
    num_layers = int(target.config.num_hidden_layers)
    about = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **llama_config(config, target),
        "rms_norm_eps": config.norm_epsilon / head.embedding_scale**2,
        "num_target_layers": num_layers,
        "block_size": config.block_size,
        "layer_types": ["full_attention"] * config.num_layers,
        _OF_ITSELF: {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.layers],
            "block_size": config.block_size,
            "num_target_layers": num_layers,
        },
    }
    return about, tensors


FORMATS = (
    Format(
        "dflash",
        ("dflash",),
        write_dflash,
        {
            "vLLM": "VLLM(dflash)",
            "SGLang": "python -m sglang.launch_server --model <model> --speculative-algorithm DFLASH "
            "--speculative-draft-model-path <head>",
            "llama.cpp": "python convert_hf_to_gguf.py <head> --target-model-dir <model> --outfile draft.gguf && "
            "llama-server -m MODEL.gguf -md draft.gguf --spec-type draft-dflash",
        },
        is_dflash,
        dflash_layout,
    ),
)
