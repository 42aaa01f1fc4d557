"""Models of real sizes with random weights, on disk: as transformers saves them, and as GGUF. Never whole in memory.

    python benchmarks/random_model.py qwen3.5-0.8b FOLDER
    python benchmarks/step.py --model FOLDER --precisions fp32

The same numbers are in both. They are normal with the configuration's initialiser range, and norms lie around the value
at which they do nothing, so activations are as large as in a trained model. No token ends a text. Names, layouts and
settings of the GGUF file are those of llama.cpp's own converter.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import tyro
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)
from tyro.conf import Positional

_SHARD_BYTES = 400 << 20
_NORM_RANGE = 0.1  # of norms: far from 0, so that one that is left out changes the text
_STEP_MEAN = -3.0  # of biases of a recurrence's step sizes: a state keeps some of what was dozens of tokens before
_ARCHITECTURES = {  # of GGUF, by the configuration's model_type
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
}
_ADD_ONE = ("gemma3_text", "qwen3_5_text")  # norms multiply by 1 + w
_COMMON: dict[str, Any] = {"max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None}
_GEMMA: dict[str, Any] = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "pad_token_id": None}
_QWEN35: dict[str, Any] = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
_LFM2: dict[str, Any] = {"block_auto_adjust_ff_dim": False, "pad_token_id": None, "tie_word_embeddings": True}
_GRANITE: dict[str, Any] = {  # no experts
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), 0),
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "position_embedding_type": "nope",
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}


def _sized(*sizes: int) -> dict[str, Any]:
    """Hidden size, layers, heads, heads of keys and values, inner size, vocabulary."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    return {**_COMMON, **dict(zip(("hidden_size", "num_hidden_layers", *names), sizes, strict=True))}


def _attention_at(num_layers: int, *places: int) -> list[str]:
    return ["attention" if place in places else "mamba" for place in range(num_layers)]


CONFIGS: dict[str, Any] = {  # by name
    "1.1b": LlamaConfig(**_sized(2048, 22, 32, 4, 5632, 32000)),  # TinyLlama's
    "3b": LlamaConfig(**_sized(3072, 28, 24, 8, 8192, 32000)),  # Llama-3.2-3B's, with TinyLlama's vocabulary
    # as large numbers in its attention as the others have, or a wrong order of queries and keys would change no token
    "tiny": LlamaConfig(**_sized(64, 2, 4, 2, 128, 512), initializer_range=0.2),
    "gemma-270m": Gemma3TextConfig(**_sized(640, 18, 4, 1, 2048, 262144), **_GEMMA),
    "qwen3.5-tiny": Qwen3_5TextConfig(**_sized(64, 4, 4, 2, 128, 512), **_QWEN35, initializer_range=0.2),
    "qwen3.5-0.8b": Qwen3_5TextConfig(**_sized(1024, 24, 8, 2, 3584, 248320), **_QWEN35),  # 3 of 4 layers recurrent
    "lfm2-tiny": Lfm2Config(**_sized(64, 4, 4, 2, 128, 512), **_LFM2, full_attn_idxs=[2], initializer_range=0.2),
    "lfm2-1.2b": Lfm2Config(**_sized(2048, 16, 32, 8, 8192, 65536), **_LFM2, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    "granite-4-h-tiny": GraniteMoeHybridConfig(
        **_sized(64, 3, 4, 2, 128, 512),
        **_GRANITE,
        shared_intermediate_size=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        layer_types=_attention_at(3, 1),
        initializer_range=0.2,
    ),
    "granite-4-h-1b": GraniteMoeHybridConfig(
        **_sized(1536, 40, 12, 4, 4096, 100352),
        **_GRANITE,
        shared_intermediate_size=4096,
        mamba_n_heads=48,
        mamba_d_head=64,
        layer_types=_attention_at(40, 5, 15, 25, 35),
    ),
}


def write_model(config: Any, folder: Path, *, seed: int = 0) -> None:
    """A model with a tokenizer of bytes, in bf16, a file at a time."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())  # a tied lm_head is not among them
    torch.manual_seed(seed)
    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for name, parameter in parameters.items():
        shard[name] = _drawn(name, parameter, config)
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES or name == next(reversed(parameters)):
            file = f"model-{len(set(files.values())):05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _drawn(name: str, parameter: Tensor, config: Any) -> Tensor:
    numbers = torch.empty(parameter.shape, dtype=torch.bfloat16)
    if parameter.dim() == 3:  # a convolution over the last few tokens; it must not make its layer vanish
        return numbers.normal_(0.0, parameter.shape[-1] ** -0.5)
    if parameter.dim() > 1:
        return numbers.normal_(0.0, config.initializer_range)
    if name.endswith("dt_bias"):
        return numbers.normal_(_STEP_MEAN, _NORM_RANGE)
    is_around_zero = name.endswith(".bias") or (config.model_type in _ADD_ONE and "linear_attn" not in name)
    return numbers.normal_(0.0 if is_around_zero else 1.0, _NORM_RANGE)


def _tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_gguf(config: Any, folder: Path, path: Path) -> None:
    """The model of a folder as llama.cpp's own converter would write it in bf16, but without a vocabulary."""
    kind = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _describe(writer, config)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in _converted(folder, config):
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        if tensor.dtype == torch.float32:
            writer.add_tensor_info(own, tensor.shape, np.dtype("float32"), tensor.nbytes)
        else:
            writer.add_tensor_info(own, tensor.shape, np.dtype("uint16"), tensor.nbytes, gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in _converted(folder, config):
        numbers = tensor.contiguous()
        writer.write_tensor_data((numbers if tensor.dtype == torch.float32 else numbers.view(torch.uint16)).numpy())
    writer.close()


def _converted(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors as llama.cpp has them, under names that its table knows; what it keeps in fp32 is fp32."""
    for name, tensor in _stored(folder):
        if "shared_mlp.input_linear" in name:
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"), half
        elif "shared_mlp.output_linear" in name:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        elif tensor.dim() == 2:
            is_turned = config.model_type in ("llama", "granitemoehybrid")
            yield name, _turned(name, tensor, config) if is_turned else tensor
        elif tensor.dim() == 3:
            yield name, tensor.squeeze(1).float()
        else:
            yield name.replace(".dt_bias", ".dt_proj.bias"), _vector(name, tensor.float(), config)


def _vector(name: str, vector: Tensor, config: Any) -> Tensor:
    if name.endswith(".A_log"):
        vector = -vector.exp()
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        vector = vector + (config.model_type in _ADD_ONE)
    if name.endswith(("mamba.A_log", "mamba.D")):
        return vector[:, None]
    return vector.view(config.mamba_n_groups, -1) if name.endswith("mamba.norm.weight") else vector


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    for file in dict.fromkeys(index.values()):
        with safe_open(folder / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                yield name, tensors.get_tensor(name)


def _turned(name: str, weight: Tensor, config: Any) -> Tensor:
    """Llama's queries and keys in llama.cpp's order: the two numbers that a position turns are neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    return weight if heads is None else weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    """Sizes and settings, under the names of GGUF."""
    rope, kind = config.rope_parameters, config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if kind in ("lfm2", "granitemoehybrid"):  # layers without keys are recurrent
        heads = [config.num_key_value_heads * (one == "full_attention") for one in config.layer_types]
        writer.add_head_count_kv(heads)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config.norm_eps if kind == "lfm2" else config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "sliding_attention" in rope:  # every sixth layer sees all, and the others turn by 10,000: llama.cpp knows
        writer.add_sliding_window(config.sliding_window)
    if kind == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif kind == "qwen3_5_text":
        if config.linear_num_key_heads != config.linear_num_value_heads:
            raise ValueError(
                "linear_num_value_heads must equal linear_num_key_heads: llama.cpp has others in another order"
            )
        writer.add_rope_dimension_sections([11, 11, 10, 0])  # of a text's positions all are the same
        writer.add_full_attention_interval(1 + config.layer_types.index("full_attention"))
        sizes = (config.linear_conv_kernel_dim, config.linear_key_head_dim, config.linear_num_key_heads)
        _describe_recurrence(writer, *sizes, (config.linear_num_value_heads, config.linear_value_head_dim))
    elif kind == "granitemoehybrid":
        sizes = (config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups)
        _describe_recurrence(writer, *sizes, (config.mamba_n_heads, config.mamba_d_head))
        writer.add_rope_scaling_finetuned(False)  # noqa: FBT003 - no positions at all
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _describe_recurrence(writer: gguf.GGUFWriter, kernel: int, state: int, groups: int, heads: tuple[int, int]) -> None:
    """``heads``: how many, and their size."""
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads[0])
    writer.add_ssm_inner_size(heads[0] * heads[1])


def main(size: Positional[str], folder: Positional[Path], *, gguf: bool = False) -> None:
    """Writes a model of a size, 2 bytes a weight, to a folder; with --gguf also model.gguf.

    Sizes: 1.1b (TinyLlama's), 3b (Llama-3.2-3B's with TinyLlama's vocabulary), gemma-270m, and of hybrid models
    qwen3.5-0.8b, lfm2-1.2b and granite-4-h-1b; tiny ones.
    """
    if size not in CONFIGS:
        sys.exit(f"error: no size {size!r}; choose among {', '.join(CONFIGS)}")
    folder.mkdir(parents=True, exist_ok=True)
    write_model(CONFIGS[size], folder)
    if gguf:
        write_gguf(CONFIGS[size], folder, folder / "model.gguf")


if __name__ == "__main__":
    tyro.cli(main)
