"""Writes a head in the layout that other engines read. They read EAGLE-3 heads.

The layout is that of the published EAGLE-3 heads: ``config.json`` of a Llama model with one layer, and tensors named
``midlayer.…``, ``fc``, ``norm``, ``lm_head``, ``d2t`` and ``t2d``. The engine takes the embedding from the target.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftheads.checkpoints.checkpoint import load_head
from draftheads.checkpoints.head_files import CONFIG_FILE, TENSORS_FILE, read_head_files
from draftheads.checkpoints.registry import find_head
from draftheads.errors import InvalidSettings
from draftheads.heads.eagle3 import Eagle3Config, Eagle3Head
from draftheads.loading import Loadable, load_target, name_of
from draftheads.models.model import TargetModel
from draftheads.models.model_config import three_layers
from draftheads.utils.counts import counted
from draftheads.utils.files import atomic_directory, user_path

_NUM_STATES = 3  # hidden states of a token that engines give to a head
_NAMES = {
    "fc.": "fc.",
    "fc_norm.norms.": "fc_norm.",
    "norm.": "norm.",
    "layer.input_norm.norms.0.": "midlayer.input_layernorm.",
    "layer.input_norm.norms.1.": "midlayer.hidden_norm.",
    "layer.middle_norm.": "midlayer.post_attention_layernorm.",
    "layer.feed_forward.": "midlayer.mlp.",
    "layer.": "midlayer.self_attn.",
}


def export_head(head: str | PathLike[str], out: str | PathLike[str], *, model: Loadable = "smollm2-135m") -> Path:
    """Writes an ``eagle3`` head for vLLM, SGLang and other engines, in bf16.

    Args:
        head: a trained head: a name, a folder or a Hub id.
        out: the folder to make.
        model: the model that the head was trained for.

    Returns:
        The folder.

    Raises:
        InvalidSettings: no ``eagle3`` head, or one that the layout cannot hold.
        ModelNotFound, CheckpointError: the head or the model cannot be read.
        StorageError: the folder exists, or cannot be written.
    """
    source, folder = find_head(head, name_of(model)), user_path(out)
    if (method := read_head_files(source).method) != Eagle3Config.method:
        raise InvalidSettings(f"{source} is of the method {method}: only eagle3 heads can be exported")
    target = load_target(model, precision="bf16", device="cpu", fast=False)
    found = load_head(source, target, dtype=torch.float32)
    assert isinstance(found, Eagle3Head)
    config, tensors = eagle3_layout(found, target)
    with atomic_directory(folder) as staged:
        save_file(tensors, staged / TENSORS_FILE, metadata={"format": "pt"})
        (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def eagle3_layout(head: Eagle3Head, target: TargetModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The published layout of an EAGLE-3 head: its ``config.json``, and its tensors by name, in bf16.

    ``d2t`` (V',) int64 is the target's id of each draft token minus the token's place; ``t2d`` (V,) bool is true for
    draft tokens. Neither is there if the head drafts from the whole vocabulary.

    Raises:
        InvalidSettings: the layout cannot hold this head.
    """
    config = head.config
    assert isinstance(config, Eagle3Config)
    usual = three_layers(int(target.config.num_hidden_layers))
    if len(usual) < _NUM_STATES:
        raise InvalidSettings(
            f"the model has {counted(int(target.config.num_hidden_layers), 'layer')}, but the layout needs the hidden "
            f"states of {_NUM_STATES}: no head for this model can be exported"
        )
    if config.layers != usual:
        raise InvalidSettings(
            f"the head reads layers {config.layers}, but engines agree only on {usual} for this model: train a head "
            "that reads these (the default)"
        )
    if target.weights.lm_head_bias is not None and config.lm_head == "shared":
        raise InvalidSettings(
            "the model's lm_head has a bias, for which the layout has no place: train a head with --lm-head own"
        )
    of_vocabulary = ("lm_heads.", "draft_vocab")  # other engines have other tensors for it
    tensors = {_name(name): tensor for name, tensor in head.state_dict().items() if not name.startswith(of_vocabulary)}
    # whatever kind the lm_head is: the logits of unit vectors are its columns
    tensors["lm_head.weight"] = head.logits(torch.eye(config.hidden_size), 0).T
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    if config.draft_vocab_size is not None:
        tensors["d2t"] = head.draft_vocab - torch.arange(config.draft_vocab_size)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, head.draft_vocab, value=True)
    return _config(config, target), tensors


def _name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise AssertionError(f"a new tensor of eagle3 heads: {name}")


def _config(config: Eagle3Config, target: TargetModel) -> dict[str, Any]:
    rope: dict[str, Any] = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_frequencies is not None else None,
        "max_position_embeddings": target.max_positions,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.num_draft_tokens,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": "bfloat16",
    }
