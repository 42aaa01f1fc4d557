"""Layers of Llama's kind, which most projects' heads have, and a small Llama as an ordinary folder of transformers."""

import warnings
from collections.abc import Mapping
from typing import Any

from draftheads.errors import UnsupportedModel
from draftheads.formats.layout import SGLANG, Format, Reasons, Source, Written, refuse, sizes_of
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.models.model_config import layer_sizes

_OF_LAYER = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
)
_SAME_NAME = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rope_theta")
_OURS = {  # what our configurations say, by Llama's names
    **{name: name for name in (*_SAME_NAME, "vocab_size")},
    "num_hidden_layers": "num_layers",
    "head_dim": "head_size",
    "rms_norm_eps": "norm_epsilon",
    "attention_bias": "qkv_bias",
}
LAYER_KEYS = {*_OF_LAYER, "hidden_act", "partial_rotary_factor", "sliding_window", "use_sliding_window", "layer_types"}


def layer_options(
    source: Source, base: TargetModel, given: Mapping[str, Any], size: int, prefix: str, *, has_windows: bool = False
) -> dict[str, Any]:
    """Options of a layer of that size, whose tensors have the prefix, that a Llama configuration gives.

    Windows are refused unless the head ``has_windows``: then the caller reads them.
    """
    from transformers import LlamaConfig  # noqa: PLC0415 - slow to import
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - slow to import

    source.need_config("it says how many heads the layer's attention has, and its rotary positions")
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    windows = given.get("use_sliding_window", given.get("sliding_window")) and given.get("sliding_window")
    reasons: dict[str, object] = {
        f"partial_rotary_factor is {part}, and a head turns all numbers of queries and keys": part not in (None, 1)
        for part in (given.get("partial_rotary_factor"), rope.get("partial_rotary_factor"))
    }
    windows = windows or "sliding_attention" in (given.get("layer_types") or ())
    reasons["attention within a window (sliding_window) cannot be read"] = windows and not has_windows
    act = given.get("hidden_act", "silu")
    reasons[f"the layer's activation is {act!r}; only silu can be read"] = act != "silu"
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = {"default", "mrope", *ROPE_INIT_FUNCTIONS}  # the positions of a text are the same in all parts of mrope
    reasons[f"rope_type is {kind!r}; only {', '.join(sorted(known))} can be read"] = kind not in known
    refuse(reasons, UnsupportedModel, f"{source.path}: ")
    if (told := given.get("hidden_size")) not in (None, size):
        of = "the tensors are those of" if size != base.hidden_size else f"that of {base.model_id} is"
        raise source.wrong(f"hidden_size is {told}, and {of} {size}: give the base model that the head was trained for")
    if len(thetas := {given.get("rope_theta"), rope.get("rope_theta")} - {None}) > 1:
        raise source.wrong(f"rope_theta is {' and '.join(map(str, thetas))}: give one of them")
    kept = {name: given[name] for name in _OF_LAYER if given.get(name) is not None}
    for name in _OF_LAYER[:4]:
        source.number(name, given=given)
    if "num_attention_heads" not in kept:
        raise source.wrong("num_attention_heads is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LlamaConfig(**kept, hidden_size=size)
        sizes = {**sizes_of(base), **layer_sizes(config, size)}
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise source.wrong(str(error)) from None
    return {**sizes, "qkv_bias": f"{prefix}self_attn.q_proj.bias" in source.shapes}


def layer_names(config: LayerConfig, ours: str, theirs: str, *, input_norm: bool = True) -> dict[str, str]:
    """Llama's name of each tensor of a transformer layer by ours; both with a prefix."""
    names = {f"{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in "qkvo"}
    names |= {f"{part}_proj.bias": f"self_attn.{part}_proj.bias" for part in "qkv"} if config.qkv_bias else {}
    names |= {f"feed_forward.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in ("down", "gate", "up")}
    names |= {"middle_norm.weight": "post_attention_layernorm.weight"}
    names |= {"input_norm.weight": "input_layernorm.weight"} if input_norm else {}
    return {ours + name: theirs + other for name, other in names.items()}


def scaled_otherwise(config: LayerConfig, target: TargetModel) -> Reasons:
    """Why :func:`llama_config` is not the head's."""
    scaled, own = config.rope_frequencies, layer_sizes(target.config, config.hidden_size).get("rope_frequencies")
    reason = "the head's rotary positions are scaled otherwise than the model's, which the layout would be written with"
    return {reason: scaled not in (None, own)}


def llama_config(config: LayerConfig, target: TargetModel) -> dict[str, Any]:
    """What a Llama configuration says of one layer, with rotary positions in the old and the new schema."""
    rope: dict[str, Any] = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    is_scaled = config.rope_frequencies is not None
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"} if is_scaled else None
    return {
        **{theirs: getattr(config, ours) for theirs, ours in _OURS.items()},
        **{name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id")},
        "hidden_act": "silu",
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "max_position_embeddings": target.max_positions,
    }


def write_small_llama(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """``config.json`` and the tensors, with the target's embedding and an lm_head of the whole vocabulary.

    Tokens outside the head's draft vocabulary get the target's rows, too: a model has no draft vocabulary.
    """
    config: Any = head.config
    reasons = {
        **scaled_otherwise(config, target),
        f"a Llama of its own has an lm_head of the whole vocabulary; this head's is {config.lm_head}: train it with "
        "--lm-head shared": config.lm_head != "shared",
        "the model's lm_head has a bias, for which a Llama has no place": target.weights.lm_head_bias is not None,
    }
    refuse(reasons)
    names = {"norm.weight": "norm.weight"}
    for layer in (f"layers.{i}." for i in range(config.num_layers)):
        names |= layer_names(config, layer, layer)
    tensors = {f"model.{theirs}": head.state_dict()[ours] for ours, theirs in names.items()}
    tensors["model.embed_tokens.weight"] = target.weights.embedding.detach()
    tensors["lm_head.weight"] = target.weights.lm_head.detach() * target.weights.logit_scale
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **llama_config(config, target)}, tensors


FORMATS = (
    Format(
        "small-llama",
        methods=("small-llama",),
        write=write_small_llama,
        commands={  # vLLM 0.33, SGLang 0.5.23, transformers 5, llama.cpp of November 2026
            "vLLM": "VLLM(draft_model)",
            "SGLang": SGLANG.format("STANDALONE") + " --speculative-num-steps <steps>",
            "transformers": "model.generate(…, assistant_model=AutoModelForCausalLM.from_pretrained('<head>'))",
            "llama.cpp": "python convert_hf_to_gguf.py <head> --outfile draft.gguf && llama-server -m MODEL.gguf "
            "-md draft.gguf",
        },
        has_tokenizer=True,
    ),
)
