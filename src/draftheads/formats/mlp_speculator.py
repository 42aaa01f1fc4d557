"""IBM's accelerators (fms-extras), which TGI and vLLM up to 0.9.2 read, too."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.checkpoints.checkpoint import weightless_head
from draftheads.errors import CheckpointCorrupt
from draftheads.formats.layout import (
    Format,
    Layout,
    Made,
    Source,
    Written,
    check_keys,
    has_names,
    numbers_in,
    partial_vocabulary,
    refuse,
    sizes_of,
    whole_lm_heads,
)
from draftheads.heads.base import MOST_DEPTH, DraftHead
from draftheads.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import MAX_NODES
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted

_PREFIX = "speculator."
_KEYS = {"emb_dim", "inner_dim", "n_predict", "n_candidates", "top_k_tokens_per_head", "tie_weights", "scale_input"}
_MOST_PATHS = 10_000  # of which the likeliest are looked for
_MORE = 8  # numbers that a state gets where the lm_heads need a bias: one would do, kernels like multiples of 8
_CONSTANT = 8.0  # what they are: GELU(8) = 8
_PARTS = {  # the project's names of our parts
    "embeddings": ("emb", ("weight",)),
    "projections": ("proj", ("weight",)),
    "norms": ("ln", ("weight", "bias")),
    "lm_heads.heads": ("head", ("weight",)),
}


def mlp_layout(source: Source, base: TargetModel) -> Layout:
    """Some files are marked as tied and hold different lm_heads: only what is equal counts as tied."""
    shapes = source.shapes
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in shapes) else ""
    check_keys(source, _KEYS, source.config)
    if (size := source.number("emb_dim")) not in (None, base.hidden_size):
        raise source.wrong(f"emb_dim is {size}, and the hidden states of {base.model_id} have {base.hidden_size}")
    known = {theirs: _stages(source, prefix, theirs) for theirs, _ in _PARTS.values()}
    stages = source.number("n_predict", most=MOST_DEPTH) or max(known.values())
    may_be_tied = source.config.get("tie_weights", known["emb"] < stages)
    for theirs, found in known.items():
        fewest = _distinct(theirs, stages, tied=may_be_tied)
        if found not in (fewest, stages):
            raise CheckpointCorrupt(
                f"{source.path}: missing tensor {prefix}{theirs}.{found}.weight: an MLP speculator of "
                f"{counted(stages, 'stage')}{', which are tied,' if may_be_tied else ''} needs {fewest} or {stages}"
            )
    tied = stages > 1 and all(
        _are_equal(source, [f"{prefix}{theirs}.{i}.{part}" for i in range(1 if theirs == "proj" else 0, known[theirs])])
        for theirs, parts in _PARTS.values()
        for part in parts
    )
    config = MlpSpeculatorConfig(
        **sizes_of(base),
        num_heads=stages,
        lm_head="own",
        inner_size=source.number("inner_dim") or shapes[f"{prefix}emb.0.weight"][1],
        tie_weights=tied,
        scale_input=source.flag("scale_input"),
        embeddings="own",
    )
    names: dict[str, str | Made] = {}
    for ours, theirs in mlp_names(config, prefix).items():
        stem, place, part = theirs.rsplit(".", 2)
        last = f"{stem}.{min(int(place), known[stem.removeprefix(prefix)] - 1)}.{part}"  # of a tied part its only one
        names[ours] = theirs if theirs == last else Made((last,), torch.clone)
    unused = [name for name in shapes if tied and re.match(rf"{re.escape(prefix)}(emb|proj|ln|head)\.", name)]
    return Layout("an MLP speculator", config, names, unused=unused, tree=_candidates(source, stages))


def mlp_names(config: MlpSpeculatorConfig, prefix: str = _PREFIX) -> dict[str, str]:
    """The project's name of each tensor."""
    return {
        f"{ours}.{i}.{part}": f"{prefix}{theirs}.{i}.{part}"
        for ours, (theirs, parts) in _PARTS.items()
        for i in range(_distinct(theirs, config.num_heads, tied=config.tie_weights))
        for part in parts
    }


def _distinct(theirs: str, stages: int, *, tied: bool) -> int:
    """How many different ones there are of a part."""
    return (min(2, stages) if theirs == "proj" else 1) if tied else stages


def write_mlp(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """``config.json`` and the tensors as the project stores them.

    Parts of the target that the head reads become its own: the embeddings with their scale and projection, the lm_head
    with the layer before it. A bias has no place there: if there is one, states get numbers that are always the same.
    """
    config: Any = head.config
    refuse(partial_vocabulary(config))
    own, given = _as_own(head, target)
    about = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        **{name: getattr(config, name) for name in ("vocab_size", "tie_weights", "scale_input")},
        "emb_dim": config.hidden_size,
        "inner_dim": own.state_size,
        "n_predict": config.num_heads,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3, *[1] * config.num_heads][: config.num_heads],
    }
    return about, {theirs: given[ours] for ours, theirs in mlp_names(own).items()}


def _as_own(head: DraftHead, target: TargetModel) -> tuple[MlpSpeculatorConfig, dict[str, Tensor]]:
    """The same head with embeddings and lm_heads of its own, for all tokens: its configuration and tensors."""
    assert isinstance(head, MlpSpeculatorHead)
    given = dict(head.state_dict())
    embedding = target.weights.embedding.detach().float() * head.embedding_scale
    for i in range(len(head.embedding_projections)):
        given[f"embeddings.{i}.weight"] = embedding @ given[f"embedding_projections.{i}.weight"].T
    lm_heads = whole_lm_heads(head, target)
    for i in range(len(head.outputs)):  # before the target's
        weight, bias = lm_heads[i]
        lm_heads[i] = (weight @ given[f"outputs.{i}.weight"], weight @ given[f"outputs.{i}.bias"] + bias)
    more = _MORE if any(bool(bias.any()) for _, bias in lm_heads) else 0
    size = head.options.state_size
    kept: dict[str, Any] = {"lm_head": "own", "embeddings": "own", "draft_vocab_size": None, "embedding_scale": 1.0}
    own = replace(head.options, **kept, inner_size=size + more if more else head.options.inner_size)
    for i, (weight, bias) in enumerate(lm_heads):
        given[f"lm_heads.heads.{i}.weight"] = F.pad(weight, (0, more))
        if more:
            given[f"lm_heads.heads.{i}.weight"][:, size] = bias / _CONSTANT
    # the norm's mean is over more numbers; embeddings of one's own are weighted by that size
    ratio = head.embedding_weight / weightless_head(own).embedding_weight
    for i in range(len(head.norms)):
        given[f"norms.{i}.weight"] = F.pad(given[f"norms.{i}.weight"] * math.sqrt(size / (size + more)), (0, more))
        given[f"norms.{i}.bias"] = F.pad(given[f"norms.{i}.bias"], (0, more), value=_CONSTANT)
        given[f"embeddings.{i}.weight"] = F.pad(given[f"embeddings.{i}.weight"] * ratio, (0, more))
    for i in range(len(head.projections)):
        given[f"projections.{i}.weight"] = F.pad(given[f"projections.{i}.weight"], (0, more if i else 0, 0, more))
    return own, given


def _candidates(source: Source, stages: int) -> Tree | None:
    """The likeliest ``n_candidates`` whole paths, if each stage proposes ``top_k_tokens_per_head`` tokens."""
    widths, count = source.config.get("top_k_tokens_per_head"), source.number("n_candidates")
    if widths is None or count is None:
        return None
    if not isinstance(widths, list) or len(widths) < stages or not all(isinstance(k, int) and k > 0 for k in widths):
        needs = f"it must have a number of at least 1 for each of {counted(stages, 'stage')}"
        raise source.wrong(f"top_k_tokens_per_head is {widths}; {needs}")
    if count > MAX_NODES or math.prod(widths[:stages]) > _MOST_PATHS:
        return None
    whole = sorted(product(*(range(min(k, count)) for k in widths[:stages])), key=lambda path: (sum(path), path))
    return Tree.from_paths(sorted({path[: depth + 1] for path in whole[:count] for depth in range(stages)}))


def _stages(source: Source, prefix: str, part: str) -> int:
    """How many there are of a part."""
    places = [place for (place,) in numbers_in(source.shapes, rf"{re.escape(prefix + part)}\.(\d+)\.weight")]
    if places != list(range(len(places))) or not places:
        raise CheckpointCorrupt(
            f"{source.path}: {prefix}{part} has the stages {places}; they must be 0, 1, … without gaps"
        )
    return len(places)


def _are_equal(source: Source, names: Sequence[str]) -> bool:
    return all(
        source.shapes.get(name) == source.shapes.get(names[0])
        and torch.equal(source.tensor(name), source.tensor(names[0]))
        for name in names[1:]
    )


FORMATS = (
    Format(
        "mlp-speculator",
        has_names(rf"({re.escape(_PREFIX)})?proj\.0\.weight"),
        mlp_layout,
        methods=("mlp-speculator",),
        write=write_mlp,
        # TGI 3.3
        commands={"TGI": "text-generation-launcher --model-id <head>", "vLLM up to 0.9.2": "VLLM(mlp_speculator)"},
    ),
)
