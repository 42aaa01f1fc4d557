"""DSpark heads in DeepSpec's layout, and DFlash and DSpark heads in that of vllm-project/speculators; both are written.

:mod:`draftheads.formats.dflash` reads them.
"""

import torch

from draftheads.formats.dflash import block_keys, body, not_shared, obstacles
from draftheads.formats.layout import Format, Written, changed_logits, refuse, speculators_config, vocabulary_maps
from draftheads.formats.markov import markov_keys, markov_tensors
from draftheads.heads.base import DraftHead
from draftheads.heads.dflash import BlockConfig
from draftheads.heads.dspark import DSparkConfig
from draftheads.models.model import TargetModel

_NUM_ANCHORS = 512  # places of a text in DeepSpec's training, a key of its files


def write_dspark(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """DeepSpec's ``config.json`` and tensors, with copies of the target's embedding and lm_head."""
    config = head.config
    assert isinstance(config, DSparkConfig)
    reasons = [*obstacles(config, target), *not_shared(config), *changed_logits(target)]
    if not config.is_shifted:
        reasons.append(
            "the head's blocks are not shifted, and DeepSpec's layout has no key for that: export it --to speculators"
        )
    if config.draft_vocab_size is not None:
        reasons.append(
            f"the head predicts {config.draft_vocab_size} of {config.vocab_size} tokens, and DeepSpec's layout has no "
            "draft vocabulary: export it --to speculators, or train it with --draft-vocab-size 0"
        )
    refuse(reasons)
    layer, tensors = body(head, target)
    keys = {**block_keys(config, target), **markov_keys(config), "num_anchors": _NUM_ANCHORS}
    copies = {"embed_tokens.weight": target.weights.embedding, "lm_head.weight": target.weights.lm_head}
    return {"architectures": ["Qwen3DSparkModel"], **layer, **keys}, {**copies, **tensors, **markov_tensors(head)}


def write_speculators(head: DraftHead, target: TargetModel, name: str) -> Written:
    """The layout of vllm-project/speculators; ``name`` is the base model's.

    Only an lm_head of a part of the tokens is written, with ``d2t`` and ``t2d``.
    """
    config = head.config
    assert isinstance(config, BlockConfig)
    reasons = [*obstacles(config, target), *changed_logits(target)]
    if config.draft_vocab_size is None:
        reasons += not_shared(config)
    refuse(reasons)
    layer, tensors = body(head, target)
    about = {
        "architectures": ["DSparkDraftModel" if isinstance(config, DSparkConfig) else "DFlashDraftModel"],
        **speculators_config(config, layer, target, name),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.layers),
        "sample_from_anchor": config.is_shifted,
        **(markov_keys(config) if isinstance(config, DSparkConfig) else {}),
    }
    if isinstance(config, DSparkConfig):
        tensors |= markov_tensors(head)
    if config.draft_vocab_size is not None:  # whatever kind the lm_head is: the logits of unit vectors are its columns
        tensors |= {"lm_head.weight": head.lm_heads(torch.eye(config.hidden_size), 0).T, **vocabulary_maps(head)}
    return about, tensors


FORMATS = (
    Format(
        "dspark",
        ("dspark",),
        write_dspark,
        {
            "vLLM": "VLLM(dspark)",
            "SGLang": "python -m sglang.launch_server --model <model> --speculative-algorithm DSPARK "
            "--speculative-draft-model-path <head>",
        },
        keeps_vocab=True,
    ),
    Format("speculators", ("dflash", "dspark"), write_speculators, {"vLLM": "vllm serve <head>"}, keeps_vocab=True),
)
