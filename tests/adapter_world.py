"""Adapters of tiny models on the disk, and their bases with the adapter merged into the weights: the oracle."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from draftheads.models.adapter import load_merged
from draftheads.models.model import TargetModel
from draftheads.train.tuned_model import Adapter, linear_layers


def saved_adapter(
    base: TargetModel,
    folder: Path,
    *,
    seed: int = 1,
    rank: int = 2,
    scale: float = 0.2,
    targets: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """A random LoRA adapter of the base; of all linear layers with the lm_head where no targets are given."""
    torch.manual_seed(seed)
    targets = targets or (*linear_layers(base.model), "lm_head")  # also where it is the embedding, too
    adapter = Adapter(copy.deepcopy(base.model), rank=rank, alpha=4, dropout=0.1, targets=targets)
    for parameter in adapter.parameters:
        parameter.data += scale * torch.randn_like(parameter)
    adapter.save(folder)
    change_config(folder, **{"base_model_name_or_path": base.model_id, **config})
    return folder


def change_config(folder: Path, **config: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def merged(base: TargetModel, adapter: Path) -> TargetModel:
    """The base with the adapter merged into its weights."""
    model = load_merged(copy.deepcopy(base.model), adapter)
    return TargetModel(model.eval().requires_grad_(requires_grad=False), base.tokenizer, "merged", base.chat_template)
