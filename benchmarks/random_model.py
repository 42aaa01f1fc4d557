"""Models of real sizes with random weights, on disk: as transformers saves them, and as GGUF. Never whole in memory.

    python benchmarks/random_model.py qwen3.5-0.8b FOLDER
    python benchmarks/step.py --model FOLDER --precisions fp32

The same numbers are in both. They are normal with the configuration's initialiser range, and norms lie around the value
at which they do nothing, so activations are as large as in a trained model. No token ends a text.
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
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig
from tyro.conf import Positional

_SHARD_BYTES = 400 << 20
_NORM_RANGE = 0.1  # of norms: far from 0, so that one that is left out changes the text
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


def _sized(*sizes: int) -> dict[str, Any]:
    """Hidden size, layers, heads, heads of keys and values, inner size, vocabulary."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    return {**_COMMON, **dict(zip(("hidden_size", "num_hidden_layers", *names), sizes, strict=True))}


CONFIGS: dict[str, Any] = {  # by name
    "1.1b": LlamaConfig(**_sized(2048, 22, 32, 4, 5632, 32000)),  # TinyLlama's
    "3b": LlamaConfig(**_sized(3072, 28, 24, 8, 8192, 32000)),  # Llama-3.2-3B's, with TinyLlama's vocabulary
    # as large numbers in its attention as the others have, or a wrong order of queries and keys would change no token
    "tiny": LlamaConfig(**_sized(64, 2, 4, 2, 128, 512), initializer_range=0.2),
    "gemma-270m": Gemma3TextConfig(**_sized(640, 18, 4, 1, 2048, 262144), **_GEMMA),
    "qwen3.5-tiny": Qwen3_5TextConfig(**_sized(64, 4, 4, 2, 128, 512), **_QWEN35),
    "qwen3.5-0.8b": Qwen3_5TextConfig(**_sized(1024, 24, 8, 2, 3584, 248320), **_QWEN35),  # 3 of 4 layers recurrent
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
    if parameter.dim() > 1:
        return numbers.normal_(0.0, config.initializer_range)
    adds_one = config.model_type in ("gemma3_text", "qwen3_5_text")  # norms multiply by 1 + w
    return numbers.normal_(0.0 if adds_one and "linear_attn" not in name else 1.0, _NORM_RANGE)


def _tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_gguf(config: Any, folder: Path, path: Path) -> None:
    """The model of a folder as llama.cpp's own converter would write it in bf16, but without a vocabulary."""
    is_gemma = config.model_type == "gemma3_text"
    kind = gguf.MODEL_ARCH.GEMMA3 if is_gemma else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _describe(writer, config)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in _stored(folder):
        own = names.get_name(name, try_suffixes=(".weight",))
        assert own is not None, name
        if tensor.dim() == 1:
            writer.add_tensor_info(own, tensor.shape, np.dtype("float32"), 4 * tensor.numel())
        else:
            writer.add_tensor_info(own, tensor.shape, np.dtype("uint16"), tensor.nbytes, gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _stored(folder):
        if tensor.dim() == 1:
            writer.write_tensor_data((tensor.float() + is_gemma).numpy())
        else:
            turned = tensor if is_gemma else _turned(name, tensor, config)
            writer.write_tensor_data(turned.contiguous().view(torch.uint16).numpy())
    writer.close()


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
    rope = config.rope_parameters
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "sliding_attention" in rope:  # every sixth layer sees all, and the others turn by 10,000: llama.cpp knows
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def main(size: Positional[str], folder: Positional[Path], *, gguf: bool = False) -> None:
    """Writes a model of a size, 2 bytes a weight, to a folder; with --gguf also model.gguf, not for qwen3.5.

    Sizes: 1.1b (TinyLlama's), 3b (Llama-3.2-3B's with TinyLlama's vocabulary), gemma-270m, qwen3.5-0.8b, tiny ones.
    """
    if size not in CONFIGS:
        sys.exit(f"error: no size {size!r}; choose among {', '.join(CONFIGS)}")
    folder.mkdir(parents=True, exist_ok=True)
    write_model(CONFIGS[size], folder)
    if gguf:
        write_gguf(CONFIGS[size], folder, folder / "model.gguf")


if __name__ == "__main__":
    tyro.cli(main)
