"""Merges a model and its adapter into one ordinary model folder, with the head that was tuned with it, if there is one.

If embedding and lm_head are one matrix and one of them was adapted, the merged model has two matrices: the adapter did
not change the other.
"""

from dataclasses import replace
from pathlib import Path

import torch

from draftheads.checkpoints.checkpoint import load_head, read_head, save_head
from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.errors import ModelNotFound
from draftheads.models.adapter import check_adapter_base, is_tied
from draftheads.models.gguf_models import without_bars
from draftheads.models.model import TargetModel
from draftheads.models.model_config import DTYPES
from draftheads.models.model_names import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    BASE_FILE,
    base_of,
    find_adapter,
    kind_of_folder,
)
from draftheads.models.pretrained import cast_weights, stored_dtype, with_adapter
from draftheads.train.options import MergeOptions
from draftheads.utils.files import atomic_directory, user_path


def merge(options: MergeOptions) -> int:
    """Merges in fp32 on the CPU, and writes the folder whole or not at all. Returns the bytes of a new second matrix.

    The adapter is that of a joint run, with its head, or any other adapter of peft that can be merged.
    """
    out, run = user_path(options.out), user_path(options.adapter)
    name = options.model or base_of(str(_adapter_in(run)))
    dtype = DTYPES[options.dtype] if options.dtype else stored_dtype(name)
    base = TargetModel.load(name, dtype=torch.float32, device="cpu")
    was_tied = is_tied(base.model)
    merged = merged_model(base, run, dtype=dtype, model_id=str(out.resolve()))
    added = merged.model.get_output_embeddings().weight.nbytes if was_tied and not is_tied(merged.model) else 0
    with atomic_directory(out) as staged, without_bars():
        merged.model.save_pretrained(staged)
        merged.tokenizer.save_pretrained(staged)
        if not (run / ADAPTER_FOLDER).is_dir() and not (run / HEAD_FOLDER).is_dir():
            return added  # no joint run, whose head comes with it
        saved = read_head(run / HEAD_FOLDER)
        head = load_head(saved.folder, merged, dtype=torch.float32)
        base = replace(merged, chat_template=saved.chat_template)
        save_head(head, staged / HEAD_FOLDER, base=base, card=saved.card, profile=saved.profile)
    return added


def merged_model(base: TargetModel, run: Path, *, dtype: torch.dtype, model_id: str) -> TargetModel:
    """The tuned model of a run as an ordinary one; it takes over the modules of the base."""
    adapter = _adapter_in(run)
    if adapter != run or (adapter / BASE_FILE).exists():
        check_adapter_base(adapter, base.model_id, base.fingerprints)
    model, tokenizer = with_adapter(base.model, base.tokenizer, adapter)
    cast_weights(model, dtype)
    return TargetModel(model.eval().requires_grad_(requires_grad=False), tokenizer, model_id)


def _adapter_in(run: Path) -> Path:
    if (found := find_adapter(run)) is not None:
        return found
    kind = kind_of_folder(run)
    what = f"{run} is a {kind}" if kind else f"no {ADAPTER_CONFIG} in {run}"
    raise ModelNotFound(f"no adapter at {run}: {what}; give the folder of a PEFT adapter, or of a joint run")
