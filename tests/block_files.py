"""Random heads in the layouts of block drafters."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftheads.models.model import TargetModel

HEADS, GROUPS, SIZE, INNER, LAYERS, BLOCK, MASK, BASE = 4, 2, 8, 24, 2, 4, 9, 5000.0
RANK = 6
DRAFTED = [2, 3, 5, 7, 8, 11, 20, 21]  # draft tokens of a reduced vocabulary


def write_file(folder: Path, model: TargetModel, **changes: Any) -> dict[str, Tensor]:
    """A head as z-lab saves it, which reads what leaves the embedding and the first layer."""
    size, chance = model.hidden_size, torch.Generator().manual_seed(0)
    tensors = {"fc.weight": (size, 2 * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for i in range(LAYERS):
        shapes = {
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "self_attn.q_proj": (HEADS * SIZE, size),
            "self_attn.k_proj": (GROUPS * SIZE, size),
            "self_attn.v_proj": (GROUPS * SIZE, size),
            "self_attn.o_proj": (size, HEADS * SIZE),
            "self_attn.q_norm": (SIZE,),
            "self_attn.k_norm": (SIZE,),
            "mlp.gate_proj": (INNER, size),
            "mlp.up_proj": (INNER, size),
            "mlp.down_proj": (size, INNER),
        }
        tensors |= {f"layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    made = {  # norms lie around 1
        name: (len(shape) == 1) + 0.3 * torch.randn(shape, generator=chance) for name, shape in tensors.items()
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": BASE,
        "num_target_layers": 2,
        "block_size": BLOCK,
        "layer_types": ["full_attention"] * LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [-1, 0], **changes.pop("dflash_config", {})},
        **changes,
    }
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def write_markov_file(
    folder: Path,
    model: TargetModel,
    *,
    form: str = "deepspec",
    kind: str = "gated",
    reduced: bool = False,
    **changes: Any,
) -> dict[str, Tensor]:
    """A DSpark head as DeepSpec, ModelOpt or speculators saves it; kind "none" is a DFlash head of speculators."""
    body = write_file(folder, model)
    layer = json.loads((folder / "config.json").read_text())
    chance = torch.Generator().manual_seed(1)
    size, tokens = model.hidden_size, len(DRAFTED) if reduced else model.vocab_size
    prefix = "" if form == "modelopt" else "markov_head."
    shapes: dict[str, tuple[int, ...]] = {}
    if kind != "none":
        shapes = {"markov_w1.weight": (model.vocab_size, RANK), "markov_w2.weight": (tokens, RANK)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, size + RANK), "gate_proj.bias": (RANK,)}
    tensors = body | {prefix + name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    markov = {"markov_rank": RANK, "markov_head_type": kind} if kind != "none" else {}
    given = {"block_size": BLOCK, "mask_token_id": MASK, **markov}
    if form == "deepspec":
        layer.pop("dflash_config")
        tensors["embed_tokens.weight"] = model.weights.embedding.clone()
        tensors["lm_head.weight"] = model.weights.lm_head.clone()
        config = {**layer, **given, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 0]}
    elif form == "modelopt":
        about = {**given, "projector_type": "dspark", "shift_label": True, "target_layer_ids": [0, -1]}
        config = {**layer, "dflash_config": about}
    else:
        name = "dflash" if kind == "none" else "dspark"
        config = {
            **given,
            "architectures": ["DFlashDraftModel" if kind == "none" else "DSparkDraftModel"],
            "speculators_model_type": name,
            "transformer_layer_config": {
                key: layer[key] for key in layer if key not in ("dflash_config", "block_size")
            },
            "aux_hidden_state_layer_ids": [0, 1],
            "sample_from_anchor": kind != "none",
            "draft_vocab_size": tokens,
        }
    if reduced:
        ids = torch.tensor(DRAFTED)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
        tensors["lm_head.weight"] = torch.randn(tokens, size, generator=chance)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return tensors
