"""MTP layers of models' own files: what they compute, with a history and in trees; losslessness; training; errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import draftheads
from draftheads.checkpoints.checkpoint import load_head, read_head
from draftheads.decode.engine import Engine
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, InvalidSettings, ModelNotFound, UnsupportedModel
from draftheads.formats.reading import convert, is_published
from draftheads.heads.base import DraftHead
from draftheads.heads.stateful import StatefulSession
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from families import GROWING, HAS_RECURRENT, PROMPTS, TREES, VOCAB, tiny_model
from mtp_files import KINDS, SlowMtp, Tensors, model_for, random_layer

RECURRENT = [kind for kind in KINDS if KINDS[kind].family.startswith("qwen3_")]
USED = [kind for kind in KINDS if HAS_RECURRENT or kind not in RECURRENT]


def write(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def files(kind: str, model: TargetModel, folder: Path) -> tuple[Path, Tensors]:
    """Of a whole model, of which the layer is a part."""
    tensors = random_layer(kind)
    copies = {}
    if kind == "deepseek-v3":
        prefix = KINDS[kind].layer
        copies[f"{prefix}embed_tokens.weight"] = model.weights.embedding.clone()
        copies[f"{prefix}shared_head.head.weight"] = model.weights.lm_head.clone()
    rest = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    return write(folder, {**rest, **tensors, **copies}), tensors


def imported(kind: str, model: TargetModel, folder: Path) -> tuple[DraftHead, Tensors]:
    source, tensors = files(kind, model, folder / "theirs")
    assert is_published(source)
    assert convert(source, folder / "ours", base=model).config.method == "mtp"
    return load_head(folder / "ours", model), tensors


def log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def text(length: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, length, 32, generator=chance)
    return hidden, torch.randint(0, VOCAB, (rows, length), generator=chance)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", USED)
@torch.no_grad()
def test_training_sees_what_the_equations_say(kind: str, tmp_path: Path) -> None:
    """At all places, at all depths."""
    model = model_for(kind)
    head, tensors = imported(kind, model, tmp_path)
    slow, (hidden, ids) = SlowMtp(kind, tensors, model), text(9)
    features, following = head(hidden, ids), ids[0].tolist()
    assert head.config.num_heads == 3
    for depth in range(3):
        for t in range(9 - 1 - depth):
            expected = slow.logits(hidden[0, : t + 1], following[1 : t + 2], following[t + 2 : t + 2 + depth])
            close(log_probs(head.logits(features[depth, 0, t], depth)), log_probs(expected))


@pytest.mark.parametrize("steps", [[(7, 1)], [(3, 1), (5, 4), (7, 9)]], ids=["at once", "in steps"])
@pytest.mark.parametrize("kind", USED)
@torch.inference_mode()
def test_every_node_of_a_tree_is_what_the_equations_say(
    kind: str, steps: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Two rows of different lengths, read at once or in steps; drafts in between leave nothing behind."""
    model = model_for(kind)
    head, tensors = imported(kind, model, tmp_path)
    slow, (hidden, ids) = SlowMtp(kind, tensors, model), text(12, rows=2)
    session, before = head.start(), (0, 0)
    assert isinstance(session, StatefulSession)
    for number, ends in enumerate(steps):
        counts = torch.tensor(ends) - torch.tensor(before)
        places = (torch.tensor(before)[:, None] + torch.arange(int(counts.max()))).clamp_max(11)
        rows = torch.arange(2)[:, None]
        context = Context(hidden[rows, places], ids[rows, places], counts, ids[torch.arange(2), torch.tensor(ends)])
        before = ends
        if number == 1:
            session.observe(context)  # it is read with the next one
            continue
        state, paths = head.begin(session.root(context), 5), [[[]], [[]]]
        for depth in range(5):
            ours = log_probs(head.predict(state, depth))
            for row, end in enumerate(ends):
                for node, path in enumerate(paths[row]):
                    close(
                        ours[row, node], log_probs(slow.logits(hidden[row, :end], ids[row, 1 : end + 1].tolist(), path))
                    )
            best = ours.topk(2).indices
            parents = torch.tensor([[len(paths[0]) - 1, 0, 0]] * 2)  # not in order, and one node has two children
            tokens = best[rows, parents, torch.tensor([[0, 1, 0]] * 2)]
            paths = [[paths[r][p] + [t] for p, t in zip(parents[r].tolist(), tokens[r].tolist())] for r in range(2)]
            state = head.descend(state, depth, parents, tokens)
