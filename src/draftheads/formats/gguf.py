"""DFlash and DSpark heads as a GGUF file that llama.cpp loads beside its own file of the model; it is only written.

The architecture is ``dflash`` for both. Layers are counted as ours are, by what enters them. The names of keys and
tensors are those that llama.cpp's ``src/models/dflash.cpp`` reads, which also has the scale of embeddings.
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import MissingDependency
from draftheads.formats.dflash import markov_tensors, obstacles
from draftheads.formats.layout import Format, Written, changed_logits, lm_head_of, refuse
from draftheads.heads.base import DraftHead
from draftheads.heads.dflash import BlockConfig
from draftheads.models.model import TargetModel

GGUF_FILE = "draft.gguf"
_NORMAL, _CONTROL = 1, 3  # llama_token_type
_WHOLE = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
_OF_LAYER = {"input_norm": "attn_norm", "o_proj": "attn_output", "middle_norm": "ffn_norm"}
_OF_LAYER |= {f"{part}_proj": f"attn_{part}" for part in "qkv"} | {f"{part}_norm": f"attn_{part}_norm" for part in "qk"}
_OF_LAYER |= {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_OURS = {  # keys, and our options
    "embedding_length": "hidden_size", "block_count": "num_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "norm_epsilon", "rope.freq_base": "rope_theta", "block_size": "block_size",
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), "head_size"),
}  # fmt: skip


def write_dflash_gguf(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """The file's keys and its tensors. Only an lm_head that is not the target's is written."""
    config: Any = head.config
    is_dspark = config.method == "dspark"
    reasons = {
        **obstacles(config, target),
        **changed_logits(target),
        "the head's bias has a gate (gated=true), and llama.cpp reads a bias without one (gated=false): train it "
        "with --head-options gated=false": is_dspark and config.gated,
        "queries, keys and values of the head have a bias (qkv_bias=true), and llama.cpp reads none "
        "(qkv_bias=false): train it with --head-options qkv_bias=false": config.qkv_bias,
    }
    refuse(reasons)
    weights = head.state_dict()
    tensors = {f"{theirs}.weight": weights[f"{ours}.weight"] for ours, theirs in _WHOLE.items()}
    for i, (ours, theirs) in product(range(config.num_layers), _OF_LAYER.items()):
        tensors[f"blk.{i}.{theirs}.weight"] = weights[f"layers.{i}.{ours}.weight"]
    if config.rope_frequencies is not None:  # there a base's frequencies are divided by factors
        usual = config.rope_theta ** (-torch.arange(0, config.head_size, 2) / config.head_size)
        tensors["rope_freqs.weight"] = usual / torch.tensor(config.rope_frequencies)
    if config.draft_vocab_size is not None or config.lm_head != "shared":
        tensors["output.weight"] = lm_head_of(head)
    if config.draft_vocab_size is not None:
        tensors["d2t"] = head.draft_vocab  # ids, not their distances as in other layouts
    if is_dspark:
        tensors |= {name.removeprefix("markov_head."): tensor for name, tensor in markov_tensors(head).items()}
    return _keys(head, target, config, is_dspark=is_dspark), tensors


def _keys(head: DraftHead, target: TargetModel, config: BlockConfig, *, is_dspark: bool) -> dict[str, Any]:
    """Sizes, what is read of the target, and its vocabulary, of which llama.cpp needs the size and the mask."""
    about = {
        **{key: getattr(config, ours) for key, ours in _OURS.items()},
        "context_length": target.max_positions,
        "attention.scale": config.rope_scale**2 * config.head_size**-0.5,  # of turned queries and turned keys
        "embedding_scale": float(head.embedding_scale),
        "target_layers": list(config.layers),
        **({"sample_from_anchor": config.is_shifted, "has_confidence_head": False} if is_dspark else {}),
    }
    texts = {token_id: text for text, token_id in target.tokenizer.get_vocab().items()}
    special = {i for i, token in target.tokenizer.added_tokens_decoder.items() if token.special}
    tokenizer = getattr(target.tokenizer, "backend_tokenizer", None)
    model = json.loads(tokenizer.to_str())["model"] if tokenizer is not None else {}
    merges = [" ".join(pair) for pair in model.get("merges") or () if not model.get("byte_fallback")]
    vocabulary = {
        "model": "gpt2" if merges else "llama",
        "pre": "default",  # how texts are cut: a draft model cuts none
        "tokens": [texts.get(i, f"[PAD{i}]") for i in range(config.vocab_size)],
        "token_type": [_CONTROL if i in special else _NORMAL for i in range(config.vocab_size)],
        "merges": merges or None,
        "eos_token_id": target.tokenizer.eos_token_id,
        "mask_token_id": config.mask_token_id,
    }
    keys = {f"dflash.{name}": value for name, value in about.items()}
    return keys | {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items() if value is not None}


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file: matrices in bf16, vectors in fp32, and integers as they are.

    Raises:
        MissingDependency: gguf is not installed.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, quantize  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency("a GGUF file needs gguf", extra="demo") from None
    writer: Any = GGUFWriter(path, "dflash")
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in keys.items():
        add.get(type(value), writer.add_array)(name, value)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            kind = GGMLQuantizationType.F32 if tensor.dim() == 1 else GGMLQuantizationType.BF16
            writer.add_tensor(name, quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FORMATS = (
    Format(
        "gguf",
        methods=("dflash", "dspark"),
        write=write_dflash_gguf,
        commands={  # of November 2026
            "llama.cpp": f"llama-server -m MODEL.gguf -md <head>/{GGUF_FILE} --spec-type draft-<method> "
            "--spec-draft-n-max <steps>"
        },
        file=GGUF_FILE,
        keeps_vocab=True,
    ),
)
