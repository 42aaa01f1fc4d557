"""DFlash2 of z-lab, also as vllm-project/speculators saves it: DFlash's body with convolutions and a selector."""

from collections.abc import Collection, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

from draftheads.formats.dflash import block_keys, block_layout, body, is_dflash, not_shared, obstacles
from draftheads.formats.layout import SGLANG, Format, Made, Source, Written, refuse
from draftheads.heads.base import DraftHead
from draftheads.heads.dflash import BlockConfig
from draftheads.heads.dflash2 import DFlash2Config, DFlash2Head
from draftheads.models.model import TargetModel

_START = "candidate_selector."
_SIZES = {"selector_rank": "markov_rank", "selector_top_k": "num_candidates"}  # by our names
_SIZES |= {"conv_kernel_size": "kernel_taps", "conv_group_size": "kernel_group"}


def is_dflash2(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """A DFlash body with a selector."""
    return is_dflash(shapes) and any(name.startswith(_START) for name in shapes)


def _made(
    source: Source, given: Mapping[str, Any], options: dict[str, Any]
) -> tuple[BlockConfig, dict[str, str | Made]]:
    """The configuration, and the published name of each tensor that DFlash does not have."""
    sizes: dict[str, Any] = {ours: source.number(theirs, given=given) for theirs, ours in _SIZES.items()}
    if missing := sorted(name for name in _SIZES if given.get(name) is None):
        raise source.wrong(f"{', '.join(missing)} is missing, and the tensors are those of DFlash2")
    config = DFlash2Config(**options, **sizes, own_embedding=True)
    return config, {**selector_names(config, source.shapes)}


def selector_names(config: DFlash2Config, stored: Collection[str] = ()) -> dict[str, str]:
    """The published name of each tensor of the selector and the convolutions. Some codebooks end in ``.weight``."""
    names = {"gates.0.weight": f"{_START}hidden_projection.weight"}
    for ours, theirs in {"down.0.weight": "predecessor_codebook", "up.0.weight": "successor_codebook"}.items():
        names[ours] = _START + theirs + (".weight" if f"{_START}{theirs}.weight" in stored else "")
    parts = product(("attention_conv", "mlp_conv"), ("base_kernel", "kernel_projection.weight"))
    every = [f"layers.{i}.{'.'.join(part)}" for part in parts for i in range(config.num_layers)]
    return names | dict(zip(every, every, strict=True))


def write_dflash2(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """``config.json`` and the tensors of z-lab's layout. Without an embedding of its own P is A E(x) of every token."""
    assert isinstance(head, DFlash2Head)
    config: Any = head.config
    part = f"the head predicts {config.draft_vocab_size} of {config.vocab_size} tokens, and the layout has no draft "
    reasons = {f"{part}vocabulary: train it with --draft-vocab-size 0": config.draft_vocab_size}
    refuse({**obstacles(config, target), **not_shared(config), **reasons})
    layer, tensors = body(head, target, has_scale=True)
    weights = {**head.state_dict(), "down.0.weight": head.scores(torch.arange(config.vocab_size), 0)}
    tensors |= {theirs: weights[ours] for ours, theirs in selector_names(config).items()}
    keys = {**block_keys(config, target), **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}}
    keys["input_embedding_scale"] = head.embedding_scale
    return {"architectures": ["DFlash2DraftModel"], **layer, "dflash_config": keys}, tensors


FORMATS = (
    Format(
        "dflash2",
        is_dflash2,
        partial(block_layout, keys=_SIZES, make=_made),
        methods=("dflash2",),
        write=write_dflash2,
        commands={"vLLM": "VLLM(dflash)", "SGLang": SGLANG.format("DFLASH")},  # 0.33, 0.5.23
    ),
)
