"""Tiny models in GGUF files, as llama.cpp's converter writes them."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"gemma3_text": "gemma3"}
PERMUTED = ("llama", "mistral", "mixtral", "granite")  # families whose queries and keys have another order of rows
SHIFTED = ("gemma", "gemma2", "gemma3_text", "nemotron")  # norms multiply by 1 + w, in files by w
LAYER_NORMS = {"layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"}
SAME = ("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual", "vocab_size")
NAMES = {  # attributes of configurations, and keys
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length", "n_inner": "feed_forward_length",
    "ffn_hidden_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "num_kv_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "norm_topk_prob": "expert_weights_norm",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    **dict.fromkeys(LAYER_NORMS, "attention.layer_norm_epsilon"), **{name: name for name in SAME},
}  # fmt: skip
NOTHING: Mapping[str, Any] = MappingProxyType({})


def write_gguf(
    path: Path,
    model: Any,
    tokens: Sequence[str],
    *,
    merges: Sequence[str] = (),
    special: Mapping[str, int] = NOTHING,
    template: str = "",
    architecture: str | None = None,
    left_out: Sequence[str] = (),
    more: Mapping[str, Tensor] = NOTHING,
    sizes: Mapping[str, int] = NOTHING,
    packs: GGMLQuantizationType | None = None,
    keys: Mapping[str, Any] = NOTHING,
) -> None:
    """The model with a byte-level tokenizer, whose first three tokens are special.

    ``special`` has the ids of the roles bos, eos, unknown and padding. ``sizes`` are told in place of the model's own;
    ``keys`` are further ones, or have other values; None leaves a key out. {arch} is the architecture.
    """
    config = copy.deepcopy(model.config)
    config.update(dict(sizes))
    family = architecture or ARCHITECTURES.get(config.model_type, config.model_type)
    told: dict[str, Any] = {f"{family}.{key}": value for key, value in keys_of(config).items()}
    told |= {f"tokenizer.ggml.{role}_token_id": token for role, token in special.items()}
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    told |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": list(tokens)}
    told |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": list(merges) or [" ".join(tokens[:2])]}
    told |= {"tokenizer.chat_template": template or None}
    told |= {key.format(arch=family): value for key, value in keys.items()}
    writer: Any = GGUFWriter(path, family)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in told.items():
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, weight in (tensors_of(model, left_out) | dict(more)).items():
        if packs is not None and weight.dim() == 2:
            writer.add_tensor(name, quantize(weight.numpy(), packs), raw_dtype=packs)
        else:
            writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def keys_of(config: Any) -> dict[str, Any]:
    """The keys of a configuration, without the architecture."""
    keys = {key: value for name, key in NAMES.items() if (value := getattr(config, name, None)) is not None}
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys |= {"attention.key_length": head_size, "attention.value_length": head_size}
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    if rope:
        keys["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head_size)
        keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    if rope.get("rope_type") == "longrope":
        keys["rope.scaling.attn_factor"] = rope["attention_factor"]
    if "sliding_attention" in ropes:
        keys["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    return keys


def tensors_of(model: Any, left_out: Sequence[str] = ()) -> dict[str, Tensor]:
    """The tensors of a model by their names in files."""
    config, tensors = model.config, {}
    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(
        known[ARCHITECTURES.get(config.model_type, config.model_type)], config.num_hidden_layers
    )
    for name, weight in model.state_dict().items():
        if name in left_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.float().chunk(2, dim=1), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        own = "output.weight" if own is None and name == "lm_head.weight" else own
        assert own is not None, name
        own = own if own.endswith((".weight", ".bias")) else f"{own}.weight"
        tensors[own] = _turned(name, weight.float(), config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        usual = rope["rope_theta"] ** (-torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
        tensors["rope_freqs.weight"] = usual / scaled
    elif rope.get("rope_type") == "longrope":
        tensors |= {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("long", "short")}
    return tensors


def _turned(name: str, weight: Tensor, config: Any) -> Tensor:
    """A tensor as llama.cpp's converter stores it."""
    family, heads = config.model_type, config.num_attention_heads
    if family in PERMUTED and ("q_proj" in name or "k_proj" in name):
        rows = heads if "q_proj" in name else config.num_key_value_heads
        return weight.view(rows, 2, len(weight) // rows // 2, -1).transpose(1, 2).reshape(weight.shape)
    if family == "gpt2" and weight.dim() == 2 and ".h." in name:
        return weight.T
    if family == "falcon" and "query_key_value" in name:
        groups = weight.view(config.num_kv_heads, heads // config.num_kv_heads + 2, -1, *weight.shape[1:])
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        return torch.cat([part.reshape(-1, *weight.shape[1:]) for part in parts])
    if "shared_expert_gate" in name:
        return weight.squeeze(0)
    return weight + 1.0 if family in SHIFTED and name.endswith("norm.weight") else weight
