"""Files of block drafters, as z-lab, DeepSpec, ModelOpt, SpecForge and speculators write them, with random tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

import published_heads as published
from draftheads.models.model import TargetModel

HEADS, GROUPS, SIZE, LAYERS, BLOCK, MASK, BASE = 4, 2, 8, 2, 4, 9, 10000.0
RANK = 6
DRAFTED = [2, 3, 5, 7, 8, 11, 20, 21]  # draft tokens of a reduced vocabulary


def write_file(folder: Path, model: TargetModel, **changes: Any) -> dict[str, Tensor]:
    """A head as z-lab saves it, which reads what leaves the embedding and the first layer."""
    size, chance = model.hidden_size, torch.Generator().manual_seed(0)
    layer = {**published.SIZES, "head_dim": SIZE, "num_hidden_layers": LAYERS}
    shapes = {"fc.weight": (size, 2 * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for i in range(LAYERS):
        parts = Qwen3DecoderLayer(Qwen3Config(**layer), i).state_dict()
        shapes |= {f"layers.{i}.{name}": tuple(tensor.shape) for name, tensor in parts.items()}
    made = {name: (len(shape) == 1) + 0.3 * torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    config = {
        **layer,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
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


def write_lattice_file(folder: Path, model: TargetModel, *, end: str) -> dict[str, Tensor]:
    """A DFlash2 head as z-lab or speculators saves it; the names of the codebooks have that ending."""
    of_speculators, end = end == " of speculators", end.removesuffix(" of speculators")
    start, size, chance = "candidate_selector.", model.hidden_size, torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {f"{start}hidden_projection.weight": (RANK, size)}
    shapes |= {f"{start}{each}_codebook{end}": (model.vocab_size, RANK) for each in ("predecessor", "successor")}
    for place in (f"layers.{i}.{part}_conv." for i in range(LAYERS) for part in ("attention", "mlp")):
        shapes |= {f"{place}base_kernel": (2, 2, size), f"{place}kernel_projection.weight": (4 * size // 8, size)}
    about = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 5}
    body = write_file(folder, model, architectures=["DFlash2DraftModel"], dflash_config=about)
    tensors = body | {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    if of_speculators:
        layer = json.loads((folder / "config.json").read_text())
        kept = {name: layer[name] for name in layer if name not in ("dflash_config", "block_size", "architectures")}
        config = {
            **about,
            "architectures": ["DFlash2DraftModel"],
            "speculators_model_type": "dflash2",
            "transformer_layer_config": kept,
            "aux_hidden_state_layer_ids": [0, 1],
            "sample_from_anchor": False,
            "draft_vocab_size": model.vocab_size,
            "block_size": BLOCK,
            "mask_token_id": MASK,
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


def markov_shapes(kind: str, vocab_size: int, size: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a Markov head."""
    if kind == "none":
        return {}
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (vocab_size, RANK), "markov_w2.weight": (tokens, RANK)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, size + RANK), "gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * RANK, size + 2 * RANK), "joint_proj.bias": (3 * RANK,)}
    return shapes


def write_markov_file(
    folder: Path,
    model: TargetModel,
    *,
    form: str = "deepspec",
    kind: str = "gated",
    reduced: bool = False,
    given: Mapping[str, Tensor | None] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, Tensor]:
    """A head as z-lab, DeepSpec, ModelOpt or speculators saves it; kind "none" is a DFlash head."""
    if form == "zlab":
        return write_file(folder, model, **changes)
    if form.startswith("dflash2"):
        return write_lattice_file(folder, model, end=form.removeprefix("dflash2"))
    body = write_file(folder, model)
    layer = json.loads((folder / "config.json").read_text())
    chance = torch.Generator().manual_seed(1)
    size, tokens = model.hidden_size, len(DRAFTED) if reduced else model.vocab_size
    prefix = "" if form == "modelopt" else "markov_head."
    shapes = markov_shapes(kind, model.vocab_size, size, tokens)
    tensors = body | {prefix + name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    markov = {"markov_rank": RANK, "markov_head_type": kind} if kind != "none" else {}
    block = {"block_size": BLOCK, "mask_token_id": MASK, **markov}
    if form == "deepspec":
        layer.pop("dflash_config")
        tensors["embed_tokens.weight"] = model.weights.embedding.clone()
        tensors["lm_head.weight"] = model.weights.lm_head.clone()
        config = {**layer, **block, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 0]}
    elif form == "modelopt":
        about = {**block, "projector_type": "dspark", "shift_label": True, "target_layer_ids": [0, -1]}
        config = {**layer, "dflash_config": about}
    elif form == "specforge":
        about = {
            "mask_token_id": MASK,
            "target_layer_ids": [-1, 0],
            "projector_type": "dspark",
            "attention_mode": "gqa",
        }
        config = {**layer, "architectures": ["DSparkDraftModel"], "dflash_config": about, "dspark_config": markov}
    elif form == "lfm2":
        about = {"mask_token_id": MASK, "target_layer_ids": [-1, 0], "num_target_layers": 2}
        kinds = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, "runtime_block_size": 10}
        config = {**layer, **markov, **kinds, "dflash_config": about}
    else:
        name = "dflash" if kind == "none" else "dspark"
        config = {
            **block,
            "architectures": ["DFlashDraftModel" if kind == "none" else "DSparkDraftModel"],
            "speculators_model_type": name,
            "transformer_layer_config": {
                **{key: layer[key] for key in layer if key not in ("dflash_config", "block_size")},
                **changes.pop("layer", {}),
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
    tensors = {name: tensor for name, tensor in {**tensors, **given}.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return tensors


SCALED = {"attention_value_scale": 1.0, "input_embedding_scale": 3.0}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 3}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
FILES: dict[str, dict[str, Any]] = {
    "z-lab": {"form": "zlab"},
    "z-lab, scaled": {"form": "zlab", "output_multiplier": 1.0, "dflash_config": SCALED},
    "deepspec": {},
    "deepspec, vanilla": {"kind": "vanilla"},
    "modelopt": {"form": "modelopt"},
    "speculators": {"form": "speculators"},
    "speculators, reduced": {"form": "speculators", "kind": "vanilla", "reduced": True},
    "speculators, not shifted": {"form": "speculators", "reduced": True, "sample_from_anchor": False},
    "speculators dflash": {"form": "speculators", "kind": "none"},
    "speculators dflash, reduced": {"form": "speculators", "kind": "none", "reduced": True},
    "speculators dflash, shifted": {"form": "speculators", "kind": "none", "sample_from_anchor": True},
    "z-lab, windows": {"form": "zlab", **MIXED},
    "z-lab, windows, not causal": {"form": "zlab", **MIXED, "dflash_config": {"causal": False}},
    "z-lab, windows that no layer has": {"form": "zlab", "use_sliding_window": True, "sliding_window": 3},
    "z-lab, causal": {"form": "zlab", "is_causal": True},
    "use_swa": {"form": "zlab", "layer_types": None, "use_swa": True, "swa_window_size": 4},
    "speculators, windows": {
        "form": "speculators",
        "kind": "rnn",
        "layer": SLIDING,
        "sliding_window_non_causal": False,
    },
    "speculators, windows, not causal": {"form": "speculators", "kind": "vanilla", "layer": SLIDING},
    "deepspec, rnn": {"kind": "rnn"},
    "modelopt, rnn": {"form": "modelopt", "kind": "rnn"},
    "specforge": {"form": "specforge", "kind": "vanilla"},
    "lfm2": {"form": "lfm2", "kind": "vanilla"},
    "jetspec": {"form": "zlab", "dflash_config": {"causal_head": True}},
    "dflash2 of speculators": {"form": "dflash2 of speculators", "kind": "none"},
    "z-lab, a mask of its own": {"form": "zlab", "own_mask": True},
    "dflash2": {"form": "dflash2", "kind": "none"},
    "dflash2, other names": {"form": "dflash2.weight", "kind": "none"},
}
