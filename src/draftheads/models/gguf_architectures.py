"""The model in a GGUF file: each key of its architecture, and each tensor, is used, has no effect, or is refused.

The keys are those of llama.cpp. Where a file leaves one out, llama.cpp's default holds and not that of
``transformers``. The first part of a key is the architecture, which the tables here leave out. The names of tensors are
those of the package ``gguf``.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.errors import UnsupportedModel, first_line
from draftheads.models.gguf_files import GgufFile
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names, printable, short


class Architecture(NamedTuple):
    """What files of an architecture do not say of their model."""

    model_type: str  # of transformers
    defaults: Mapping[str, Any] = {}  # attributes of the configuration, as far as no key sets them
    pattern: int = 0  # of models with a sliding window: each layer of that number is without it


_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
_SAME_NAME = ("gemma", "gpt2", "granite", "llama", "nemotron", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2")
ARCHITECTURES = {name: Architecture(name) for name in _SAME_NAME} | {  # those that draftheads can decode
    "deci": Architecture("llama"),
    "falcon": Architecture("falcon", {"alibi": False, "parallel_attn": True}),
    "gemma2": Architecture("gemma2", _CAPS, pattern=2),
    "gemma3": Architecture("gemma3_text", pattern=6),
    "qwen2moe": Architecture("qwen2_moe", {**_EXPERTS, "norm_topk_prob": False}),
    "qwen3moe": Architecture("qwen3_moe", _EXPERTS),
}
_LLAMAS = {"expert_count": "mixtral", "attention.sliding_window": "mistral"}  # what files of llama may also have
_NEEDED = {  # keys, and the attributes that they set: the first one that a model's configuration has
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size n_inner ffn_hidden_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "expert_count": "num_experts num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads num_kv_heads", "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier query_pre_attn_scalar", "expert_weights_norm": "norm_topk_prob",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_NO_EFFECT = {  # values of keys for which a model has no attribute
    (0, 1): "logit_scale residual_scale embedding_scale expert_weights_scale",
    (0,): "attention.clamp_kqv attention.max_alibi_bias attention.sliding_window attn_logit_softcapping "
    "final_logit_softcapping nextn_predict_layers expert_count expert_used_count expert_shared_count "
    "leading_dense_block_count rope.scaling.yarn_log_multiplier rope.scaling.alpha attention.shared_kv_layers",
    (1,): "rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor expert_gating_func interleave_moe_layer_step "
    "attention.causal",
}
_SIZES_OF_HEADS = "attention.key_length attention.value_length attention.key_length_swa attention.value_length_swa "
_SIZES_OF_HEADS += "rope.dimension_count rope.dimension_count_swa"
_NOTES = ("tensor_data_layout", "rope.scaling.finetuned")  # keys that change nothing
_QKV, _MLP = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")
_BIASES = {  # attributes that are True if one of these layers has a bias
    "attention_bias": (*_QKV, "attn_output"), "mlp_bias": _MLP, "qkv_bias": _QKV, "use_qkv_bias": _QKV,
    **dict.fromkeys(("use_bias", "bias"), (*_QKV, "attn_qkv", "attn_output", *_MLP)),
}  # fmt: skip
_BIG = {("gemma2", 46), ("gemma3", 62)}  # the 27B models have another scale of attention, which files do not say
_FIXED_HEADS = {"falcon", "gpt2", "phi3", "stablelm"}  # the size of a head follows from the hidden size
_PARTIAL = {"nemotron", "phi3", "stablelm"}  # rotary positions may turn a part of a head
_MOST = 1 << 24  # of any size in a file


def config_of(file: GgufFile) -> Any:
    """The configuration of ``transformers`` for the model in a file.

    Raises:
        UnsupportedModel: a key is not known, is missing, or has a value that the model cannot have.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - slow to import

    if (found := ARCHITECTURES.get(file.architecture)) is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{file.name} has a {file.architecture} model; of GGUF files draftheads reads {known}")
    if file.architecture == "llama":
        found = Architecture(next((kind for key, kind in _LLAMAS.items() if file.keys.get(f"llama.{key}")), "llama"))
    model_class = CONFIG_MAPPING[found.model_type]
    try:
        keys = _Keys(file, found, model_class())
        config = model_class(**(values := keys.values()))
        for name, value in values.items():
            if name != "rope_parameters" and (own := getattr(config, name)) != value and (own or value):
                raise UnsupportedModel(f"a {found.model_type} model has {name} {own}, and the file {value}")  # noqa: TRY301
    except Exception as error:  # its classes depend on what is wrong
        raise UnsupportedModel(
            f"{file.name} has a {file.architecture} model: {first_line(error.__cause__ or error)}"
        ) from error
    return config


class _Keys:
    """The keys of a file's architecture, which are taken one by one."""

    def __init__(self, file: GgufFile, architecture: Architecture, usual: Any) -> None:
        self._file, self._architecture, self._usual = file, architecture, usual
        self._kind, prefix = architecture.model_type, f"{file.architecture}."
        self._left = {key.removeprefix(prefix): value for key, value in file.keys.items() if key.startswith(prefix)}

    def values(self) -> dict[str, Any]:
        """The attributes of the configuration."""
        known = {
            key: next((name for name in attributes.split() if hasattr(self._usual, name)), None)
            for key, attributes in (_NEEDED | _OPTIONAL).items()
        }
        taken = {name: value for key, name in known.items() if name and (value := self._take(key)) is not None}
        values = {**self._architecture.defaults, **taken}
        if missing := [key for key in _NEEDED if known[key] and known[key] not in values]:
            raise UnsupportedModel(f"there is no field {self._file.architecture}.{missing[0]}")
        heads = values["num_attention_heads"]
        head_size = usual_size = values["hidden_size"] // heads
        if self._kind not in _FIXED_HEADS:
            values["head_dim"] = head_size = self._take("attention.key_length", usual_size)
        is_big = (self._file.architecture, values["num_hidden_layers"]) in _BIG
        scale = values.pop("query_pre_attn_scalar", None)
        for name, default in {  # llama.cpp's
            "num_key_value_heads": heads, "num_kv_heads": heads, "attention_multiplier": head_size**-0.5,
            "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
            "query_pre_attn_scalar": round(scale**-2, 4) if scale else usual_size if is_big else head_size,
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None,
        }.items():  # fmt: skip
            if hasattr(self._usual, name):
                values[name] = values.get(name) or default
        values |= self._of_tensors(values)
        if self._architecture.pattern:
            values["layer_types"] = self._layers(values)
        if self._kind != "gpt2":
            values["rope_parameters"] = self._ropes(head_size, values["max_position_embeddings"])
        self._check_rest(values, head_size)
        return values

    def _check_rest(self, values: Mapping[str, Any], head_size: int) -> None:
        """Refuses what was not taken, unless it says what the model is anyway."""
        allowed = {key: numbers for numbers, keys in _NO_EFFECT.items() for key in keys.split()}
        allowed |= dict.fromkeys(_SIZES_OF_HEADS.split(), (head_size,))
        allowed |= {"vocab_size": (values["vocab_size"],), "attention.scale": (0, head_size**-0.5)}
        allowed["use_parallel_residual"] = (values.get("use_parallel_residual", False),)
        for key, value in self._left.items():
            numbers = allowed.get(key, ())
            is_number = isinstance(value, int | float)
            if key not in _NOTES and not (is_number and any(math.isclose(value, n, rel_tol=1e-5) for n in numbers)):
                words = f"; a {self._kind} model has {numbers[-1]}" if numbers else ", which is not known"
                raise self._refused(key, value, words)

    def _take(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, default)
        if isinstance(value, list):  # one for each layer
            if len(set(value)) != 1:
                raise self._refused(key, value, f"; a {self._kind} model has one for all layers")
            value = value[0]
        if isinstance(value, str) and key != "rope.scaling.type":
            raise self._refused(key, value, "; it must be a number")
        most = len(self._file.tensors) if key == "block_count" else _MOST
        if key.endswith(("_length", "_count", "_count_kv")) and value is not None and not 1 <= value <= most:
            raise self._refused(key, value, f"; it must lie in 1 … {most}")
        return value

    def _refused(self, key: str, value: Any, words: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._file.architecture}.{printable(key)} is {short(repr(value))}{words}")

    def _layers(self, values: Mapping[str, Any]) -> list[str]:
        """Which layers have a sliding window."""
        key, count = "attention.sliding_window_pattern", values["num_hidden_layers"]
        if values["sliding_window"] is None:
            raise UnsupportedModel(f"there is no field {self._file.architecture}.attention.sliding_window")
        pattern = self._left.pop(key, self._architecture.pattern)
        slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern > 0 for i in range(count)]
        if len(slides) != count:
            raise self._refused(key, pattern, f"; the model has {count} layers")
        return ["sliding_attention" if each else "full_attention" for each in slides]

    def _of_tensors(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the file says by the tensors that it has."""
        file = self._file
        ends = {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")}
        own = {name: parts for name, parts in _BIASES.items() if hasattr(self._usual, name)}
        found: dict[str, Any] = {name: any(f"{part}.bias" in ends for part in parts) for name, parts in own.items()}
        found["vocab_size"] = file.shape("token_embd.weight")[0]
        found["tie_word_embeddings"] = "output.weight" not in file.tensors
        if self._kind == "stablelm":
            found["use_parallel_residual"] = "ffn_norm.weight" not in ends
        elif self._kind == "falcon":
            is_new = values["num_kv_heads"] > 1
            norms = 1 + ("attn_norm_2.weight" in ends) if is_new else None
            found |= {"new_decoder_architecture": is_new, "multi_query": not is_new, "num_ln_in_parallel_attn": norms}
        return found

    def _ropes(self, head_size: int, longest: int) -> dict[str, Any]:
        """Rotary positions, by kind of layer where these differ."""
        theta = float(self._take("rope.freq_base", 10000.0))
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        turned = self._take("rope.dimension_count", head_size) if self._kind in _PARTIAL else head_size
        if self._kind in _PARTIAL:
            rope["partial_rotary_factor"] = turned / head_size
        rope |= self._scaling(theta, turned, longest)
        if self._kind == "gemma3_text":
            local = float(self._take("rope.freq_base_swa", 10000.0))
            return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        if rope["rope_type"] not in ("default", "longrope") and self._kind == "phi3":
            raise UnsupportedModel(f"rope.scaling.type is {rope['rope_type']}; a phi3 model has only longrope")
        return rope

    def _scaling(self, theta: float, size: int, longest: int) -> dict[str, Any]:
        """How rotary positions are scaled; empty if they are not."""
        file, old = self._file, self._take("rope.scale_linear")  # a key of 2023
        factor = float(self._take("rope.scaling.factor", old or 1.0))
        kind = self._take("rope.scaling.type", "none" if factor == 1.0 else "linear")
        attention = float(self._take("rope.scaling.attn_factor", 1.0))
        original = {"original_max_position_embeddings": self._take("rope.scaling.original_context_length", longest)}
        fast, slow = (float(self._take(f"rope.scaling.yarn_beta_{key}", n)) for key, n in (("fast", 32), ("slow", 1)))
        sets = [f"rope_factors_{name}.weight" for name in ("short", "long")]
        has_sets = any(name in file.tensors for name in sets)
        if has_sets and factor == 1.0 and kind in ("none", "longrope"):
            short_factor, long_factor = (file.tensor(name).tolist() for name in sets)
            factors = {"short_factor": short_factor, "long_factor": long_factor, "attention_factor": attention}
            return {"rope_type": "longrope", "factor": longest / next(iter(original.values())), **original, **factors}
        if has_sets or (attention != 1.0 and kind != "yarn"):
            raise self._refused("rope.scaling.type", kind, "; with it, no factors of positions or attention are known")
        if "rope_freqs.weight" in file.tensors and kind == "none":
            return llama3(file.tensor("rope_freqs.weight"), theta, size)
        if "rope_freqs.weight" in file.tensors or kind not in ("none", "linear", "yarn"):
            raise self._refused("rope.scaling.type", kind, "; known are linear, yarn, and none with rope_freqs.weight")
        if kind == "yarn":
            attention *= 0.1 * math.log(max(factor, 1.0)) + 1.0
            betas = {"beta_fast": fast, "beta_slow": slow}
            return {"rope_type": "yarn", "factor": factor, "attention_factor": attention, **original, **betas}
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {}


def llama3(factors: Tensor, theta: float, size: int) -> dict[str, Any]:
    """The settings of Llama-3's rotary positions by the factors that they give, which files have in their place.

    Args:
        factors: (size / 2,), by which each frequency is divided: 1 for short waves, the greatest for long ones.
        theta: the base of the frequencies.
        size: of a head.

    Raises:
        UnsupportedModel: they are other factors.
    """
    waves = 2 * math.pi * theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    greatest, factors = float(factors.max()), factors.double()
    for original in (2**power for power in range(4, 21)):  # low and high factor are 1 and 4 in all known models
        share = ((original / waves - 1) / 3).clamp(0, 1)
        if len(waves) == len(factors) and torch.allclose(1 / (share + (1 - share) / greatest), factors, rtol=1e-5):
            found = {"factor": greatest, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": original}
    raise UnsupportedModel("rope_freqs.weight has other factors than the rotary positions of Llama-3")


# --- the weights: what llama.cpp's converter changes in a family's tensors is undone ---

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# factors of rotary positions, which the configuration has; and frequencies in old files, which follow from it
_NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_TURNED = {"llama", "mistral", "mixtral", "granite"}  # queries and keys have llama.cpp's order of rows
_FROM_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron"}  # norms multiply by 1 + w, in files by w


def model_of(file: GgufFile, config: Any, advance: Callable[[], None]) -> Any:
    """The model of a configuration with the weights of a file; ``advance`` is called after each tensor.

    Matrices that are all in fp32, fp16 or bf16 keep that type; of several types they become fp32, quantised ones bf16.

    Raises:
        UnsupportedModel: tensors are missing, left over, or of another shape.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    dtypes = {_DTYPES.get(tensor.tensor_type.name) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = torch.bfloat16 if None in dtypes else dtypes.pop() if len(dtypes) == 1 else torch.float32
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    places = _places(file, model)
    _check(file, config, {part for parts in places.values() for part in parts})
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if parts := places[name]:  # none of a weight that is tied
            try:
                tensor = torch.cat([_undone(file, part, config) for part in parts], dim=1 if len(parts) > 1 else 0)
            except (RuntimeError, ValueError) as error:
                raise UnsupportedModel(f"{file.name}: {parts[0]} has another shape: {first_line(error)}") from error
            if tensor.shape != weight.shape:
                shape, wanted = tuple(tensor.shape), tuple(weight.shape)
                raise UnsupportedModel(f"{file.name}: {', '.join(parts)} has the shape {shape}, not {wanted}")
            tensors[name] = tensor.to(dtype)
            for _ in parts:
                advance()
    for name in model.state_dict().keys() - tensors.keys():
        tensors[name] = tensors[next(each for each, parts in places.items() if "token_embd.weight" in parts)]
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model


def _places(file: GgufFile, model: Any) -> dict[str, list[str]]:
    """The tensors of the file that make each weight of the model; none of a weight that is tied."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415

    known = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(known[file.architecture], model.config.num_hidden_layers)
    places = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            places[name] = [] if model.config.tie_word_embeddings else ["output.weight"]
        elif name.endswith("experts.gate_up_proj"):
            block = re.findall(r"\d+", name)[0]
            places[name] = [f"blk.{block}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        else:
            own = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
            places[name] = [own if own.endswith((".weight", ".bias")) else f"{own}.weight"]
    return places


def _check(file: GgufFile, config: Any, wanted: set[str]) -> None:
    """Refuses tensors that are left over or missing. A layer that has a bias in no block may lack it: it is zero."""
    have = set(file.tensors)
    if left := {name for name in have - wanted if not _NOT_WEIGHTS.fullmatch(name)}:
        what = f"a {file.architecture} model with {counted(len(left), 'tensor')} that no part of it takes"
        raise file.refused(f"has {what}: {first_names(left)}")
    optional = {f"{part}.bias" for name, parts in _BIASES.items() if hasattr(config, name) for part in parts}
    optional -= {name.split(".", 2)[-1] for name in have}
    if missing := {name for name in wanted - have if name.split(".", 2)[-1] not in optional}:
        raise file.refused(f"has no tensor for {first_names(missing)}")


def _undone(file: GgufFile, name: str, config: Any) -> Tensor:
    """A tensor as ``transformers`` has it."""
    kind, heads, part = config.model_type, config.num_attention_heads, name.split(".")[-2]
    if name not in file.tensors:
        return torch.zeros(file.shape(f"{name.removesuffix('bias')}weight")[0])
    tensor = file.tensor(name)
    if part == "ffn_gate_inp_shexp":
        return tensor.view(1, -1)
    if kind in _TURNED and part in ("attn_q", "attn_k"):
        rows = heads if part == "attn_q" else config.num_key_value_heads
        tensor = tensor.view(rows, len(tensor) // rows // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
    elif kind in _FROM_ONE and name.endswith("norm.weight"):
        tensor = tensor - 1.0
    elif kind == "gpt2" and tensor.ndim == 2 and part.startswith(("attn", "ffn")):
        tensor = tensor.T
    elif kind == "falcon" and part == "attn_qkv":  # here each group has its queries, its key and its value
        groups = config.num_kv_heads
        size = len(tensor) // (heads + 2 * groups)
        blocks = tensor.split((heads * size, groups * size, groups * size))
        tensor = torch.cat([each.view(groups, -1, *tensor.shape[1:]) for each in blocks], dim=1).reshape(tensor.shape)
    return tensor
