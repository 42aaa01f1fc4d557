"""Tiny models in GGUF files, as llama.cpp's converter writes them."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from torch import Tensor

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "gemma3_text": MODEL_ARCH.GEMMA3}
NOTHING: Mapping[str, Any] = MappingProxyType({})


def write_gguf(
    path: Path,
    model: Any,
    tokens: Sequence[str],
    *,
    merges: Sequence[str],
    special: Mapping[str, int],
    template: str = "",
    architecture: str | None = None,
    left_out: Sequence[str] = (),
    more: Mapping[str, Tensor] = NOTHING,
    sizes: Mapping[str, int] = NOTHING,
    packs: GGMLQuantizationType | None = None,
) -> None:
    """The model with a byte-level tokenizer, whose first three tokens are special.

    ``special`` has the ids of the roles bos, eos, unk and pad; ``sizes`` are told in place of the model's own.
    """
    family, config = model.config.model_type, copy.deepcopy(model.config)
    config.update(dict(sizes))
    writer = GGUFWriter(path, architecture or family.removesuffix("_text"))
    head_size = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    ropes = config.rope_parameters
    numbers = {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head_size),
        "context_length": config.max_position_embeddings,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": float((ropes.get("full_attention") or ropes)["rope_theta"]),
        **({"sliding_window": config.sliding_window} if family == "gemma3_text" else {}),
        **{f"{role}_token_id": token for role, token in special.items()},
    }
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(list(merges))
    if template:
        writer.add_chat_template(template)
    names = get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name not in left_out and not (name == "lm_head.weight" and config.tie_word_embeddings):
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert own is not None, name
            _add(writer, str(own), _turned(name, weight.float(), model.config), packs)
    for name, weight in more.items():
        _add(writer, name, weight, packs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, name: str, weight: Tensor, packs: GGMLQuantizationType | None) -> None:
    if packs is not None and weight.dim() == 2:
        writer.add_tensor(name, quantize(weight.numpy(), packs), raw_dtype=packs)
    else:
        writer.add_tensor(name, weight.contiguous().numpy())


def _turned(name: str, weight: Tensor, config: Any) -> Tensor:
    """Queries and keys in llama.cpp's order of rows; its norms multiply by w where Gemma's multiply by 1 + w."""
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight + 1.0 if config.model_type == "gemma3_text" and "norm" in name else weight
