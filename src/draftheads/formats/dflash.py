"""DFlash and DSpark: z-lab's, DeepSpec's and speculators' files are read and written, ModelOpt's are read.

The body has the same names in all of them. z-lab and DeepSpec count layers by what leaves them: layer i of ours, whose
input is read, is i - 1 there, and -1 is the embedding. speculators counts as we do.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import CheckpointCorrupt, SpeedWarning, UnsupportedModel
from draftheads.formats.layout import (
    CLOSE,
    SGLANG,
    Format,
    Layout,
    Made,
    Reasons,
    Source,
    Written,
    changed_logits,
    check_keys,
    distance,
    draft_vocab,
    lm_head_of,
    numbers_in,
    refuse,
    saved_in,
    speculators_config,
    vocabulary_maps,
)
from draftheads.formats.llama import LAYER_KEYS, layer_names, layer_options, llama_config, scaled_otherwise
from draftheads.heads.base import MOST_DEPTH, DraftHead
from draftheads.heads.dflash import BlockConfig, DFlashConfig
from draftheads.heads.dspark import DSparkConfig, DSparkHead
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names

_OF_ITSELF, _SPECULATORS = ("dflash_config", "dspark_config"), "speculators_model_type"
_SHIFTED = ("sample_from_anchor", "shift_label")
_DEEPSPEC = ("Qwen3DSparkModel", "Lfm2DSparkDraftModel")  # whose blocks are shifted
_ARCHITECTURES = {  # all with Qwen3's layers
    *("DFlashDraftModel", "DFlashSpeculator", "DSparkDraftModel", "DSparkSpeculator", *_DEEPSPEC, "DFlash2DraftModel")
}
_OTHERWISE: dict[str, tuple[object, str]] = {  # keys whose other values make other heads of these files, and which ones
    "attention_value_scale": (1, "scaled values"),
    "output_multiplier": (1, "scaled logits"),
    "attention_mode": ("gqa", "attention of another kind"),
    "attention_sink_bias": (0, "attention sinks"),
    "final_logit_softcapping": (0, "capped logits"),
}
_CAUSAL, _NEOX = ("causal", "causal_head", "is_causal"), ("rope_is_neox_style", "is_neox_style")
_KEYS = {  # beside those of its layers
    *(*_CAUSAL, *_NEOX, "use_swa", "swa_window_size", "sliding_window_non_causal"),
    *("max_anchors", "confidence_head_alpha"),  # of training
    *("runtime_block_size", "confidence_temperatures"),  # how many draft tokens a server takes: here `tune` finds it
    *(*_OF_ITSELF, *_SHIFTED, "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "target_layer_ids"),
    *("num_target_layers", "input_embedding_scale", "draft_vocab_size", "target_hidden_size", "num_anchors"),
    *("transformer_layer_config", "speculators_config", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov", "projector_type"),
}
_PROJECTORS = (None, "dflash", "dspark")  # of ModelOpt
_BODY = {"fc", "hidden_norm", "norm", "layers"}
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_MARKOV = ("markov_head", "markov_w1", "markov_w2", "gate_proj", "joint_proj")  # ModelOpt's have no prefix
_CONFIDENCE = ("confidence_head", "confidence_proj")
_VERIFIER = ("verifier_norm", "verifier_lm_head")  # the base's, in files of speculators' training
_MASK_FILE = "mask_embedding.pt"
Make = Callable[[Source, Mapping[str, Any], dict[str, Any]], tuple[BlockConfig, dict[str, str | Made]]]


def is_dflash(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Layers with normed queries, and a norm of the context."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= shapes.keys()


def block_layout(source: Source, base: TargetModel, *, keys: Collection[str] = (), make: Make | None = None) -> Layout:
    """Sizes, layers and the kind of block are those of ``config.json``; a Markov head makes it a DSpark head.

    Args:
        source: the files.
        base: the model that the head is for.
        keys: of the configuration, which another kind of head on this body has.
        make: the configuration and the names of that kind's own tensors.
    """
    source.need_config("it says which layers the head reads, and what stands for a masked token")
    given: dict[str, Any] = dict(source.config)
    for part in _OF_ITSELF:
        own = source.config.get(part) or {}
        for name in (name for name in own if None not in (own[name], given.get(name)) and own[name] != given[name]):
            raise source.wrong(f"{name} is {given[name]}, and {own[name]} in {part}: give one of them")
        given |= own
    layer: Mapping[str, Any] = given.get("transformer_layer_config") or given
    parts = {name.partition(".")[0] for name in source.shapes}
    is_markov = bool(parts & set(_MARKOV)) or bool(given.get("markov_rank"))
    # DeepSpec begins with all keys of the base's configuration: what is as there tells of the base
    its_own = {name: value for name, value in {**layer, **given}.items() if getattr(base.config, name, None) != value}
    check_keys(source, [*_KEYS, *keys, *_OTHERWISE, *LAYER_KEYS], its_own)
    _refuse_others(source, given, layer, parts, changed_logits(base) if is_markov else {})
    is_shifted, guesses = _is_shifted(source, given, is_markov=is_markov)
    of_base = int(base.config.num_hidden_layers)
    if (told := source.number("num_target_layers", given=given) or of_base) != of_base:
        raise source.wrong(f"num_target_layers is {told}, and {base.model_id} has {of_base}")
    block = source.number("block_size", most=MOST_DEPTH, given=given)
    mask = given.get("mask_token_id")
    if block is None or block < 2 - is_shifted or not isinstance(mask, int):
        raise source.wrong(f"block_size is {block} and mask_token_id {mask}; give both")
    found = len(numbers_in(source.shapes, r"layers\.(\d+)\.input_layernorm\.weight"))
    num_layers = source.number("num_hidden_layers", most=MOST_DEPTH, given=layer) or found
    layer, partly = _turned_whole(layer, base)
    own_mask = _mask_embedding(source, mask, base.hidden_size)
    options: dict[str, Any] = {
        **layer_options(source, base, layer, base.hidden_size, "layers.0.", has_windows=True),
        **_visible(source, given, layer, num_layers),
        "num_heads": block - (not is_shifted),
        "num_layers": num_layers,
        "own_mask": own_mask is not None,
        "layers": _layers(source, given, base),
        "mask_token_id": mask,
        "is_shifted": is_shifted,
        "embedding_scale": float(given.get("input_embedding_scale") or 1.0),
    }
    names, copies, unused = _vocabulary(source, base, options)
    if confidence := {name for name in source.shapes if name.startswith(_CONFIDENCE)}:
        unread = f"its confidence head ({', '.join(sorted(confidence))}) is not used"
        why = "how many draft tokens are checked follows from measured acceptance (`draftheads tune`)"
        warnings.warn(f"{source.path}: {unread}; {why}", SpeedWarning, stacklevel=2)
    unused |= confidence | {name for name in source.shapes if name.startswith(_VERIFIER)}
    config: BlockConfig = DFlashConfig(**options)
    if make is not None:
        config, own = make(source, given, options)
        names |= own
    elif is_markov:
        config = DSparkConfig(**options, **markov_options(source, given), own_embedding=True)
        names |= markov_names(config, "" if "markov_w1.weight" in source.shapes else "markov_head.")
    if own_mask is not None:
        names["mask_embedding"] = Made((), lambda: own_mask)
    kind = f"a {config.paper.partition(',')[0]} head"
    body_names: dict[str, str | Made] = {**dflash_names(config)}
    if _flag(source, given, _NEOX) is False:
        body_names |= _in_halves(config, dflash_names(config))
    return Layout(kind, config, {**body_names, **names}, copies=copies, unused=unused, guesses=guesses + partly)


def _flag(source: Source, given: Mapping[str, Any], names: Sequence[str]) -> bool | None:
    """What a key says that has several names; None where none of them is there."""
    told = {name: given[name] for name in names if given.get(name) is not None}
    if len(set(map(str, told.values()))) > 1 or not all(isinstance(value, bool) for value in told.values()):
        said = " and ".join(f"{name} is {value!r}" for name, value in told.items())
        raise source.wrong(f"{said}; give one of them, true or false")
    return next(iter(told.values()), None)


def _visible(
    source: Source, given: Mapping[str, Any], layer: Mapping[str, Any], num_layers: int
) -> dict[str, list[int]]:
    """Which tokens a row sees in each layer.

    In z-lab's code layers with windows are causal within a block. In speculators' they are if
    ``sliding_window_non_causal`` is there and false, and in ModelOpt's (``use_swa``) they are not.
    """
    types = layer.get("layer_types") or ["sliding_attention" if given.get("use_swa") else "full_attention"] * num_layers
    window = given.get("swa_window_size") if given.get("use_swa") else layer.get("sliding_window")
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        kinds = f"one of full_attention and sliding_attention for each of {counted(num_layers, 'layer')}"
        raise source.wrong(f"layer_types is {types}; it must have {kinds}")
    if not layer.get("layer_types") and not given.get("use_swa") and layer.get("use_sliding_window", window) and window:
        raise source.wrong(f"sliding_window is {window} and layer_types is missing: it says which layers have a window")
    with_windows = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    if with_windows and not given.get("use_swa") and layer.get("use_sliding_window") is False:
        raise source.wrong("use_sliding_window is false, and layer_types names windows: give one of them")
    if with_windows and (not isinstance(window, int) or window < 1):
        raise source.wrong(f"sliding_window is {window!r}, and layers have a window (layer_types): give its tokens")
    non_causal = given.get("sliding_window_non_causal", True if _SPECULATORS in given or given.get("use_swa") else None)
    causal = _flag(source, given, _CAUSAL)
    every = range(num_layers) if causal else with_windows if causal is None and not non_causal else ()
    windows = [window if i in with_windows else 0 for i in range(num_layers)] if with_windows else []
    return {"windows": windows, "causal_layers": [*every]}


def _turned_whole(layer: Mapping[str, Any], base: TargetModel) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The layer's keys without the base's ``partial_rotary_factor``, which the layers of these heads do not have."""
    name, rope = "partial_rotary_factor", "rope_parameters"
    own, of_base = (dict(part or {}) for part in (layer.get(rope), getattr(base.config, rope, None)))
    copied = {own.get(name), layer.get(name)} - {None}
    if not copied or copied != {of_base.get(name, getattr(base.config, name, None))}:
        return layer, ()
    kept = {key: value for key, value in layer.items() if key != name}
    kept[rope] = {key: value for key, value in own.items() if key != name}
    return kept, (f"that it turns all numbers of queries and keys, and {name} is that of the model",)


def _mask_embedding(source: Source, token_id: int, size: int) -> Tensor | None:
    """(D,) of masks, of the file beside the head if there is one."""
    file = source.config_file.with_name(_MASK_FILE)
    if not file.is_file():
        return None
    values = saved_in(file)
    given = values if isinstance(values, dict) else {"embedding": values}
    found = [value for name, value in given.items() if name in ("embedding", "mask_embedding")]
    if unknown := sorted(map(str, given.keys() - {"embedding", "mask_embedding", "mask_token_id"})):
        raise UnsupportedModel(f"{file}: unknown key {first_names(unknown)}; give mask_token_id and embedding")
    if given.get("mask_token_id", token_id) != token_id:
        raise CheckpointCorrupt(f"{file} is for the token {given['mask_token_id']}, and mask_token_id is {token_id}")
    if len(found) != 1 or not isinstance(found[0], Tensor) or found[0].numel() != size:
        raise CheckpointCorrupt(f"{file} must hold one embedding of {size} numbers, the model's hidden_size")
    embedding: Tensor = found[0].flatten()
    return embedding


def _in_halves(config: BlockConfig, names: Mapping[str, str]) -> dict[str, Made]:
    """Queries and keys whose numbers 2j and 2j + 1 are a pair, in the order in which j and j + d/2 are one."""
    order = torch.arange(config.head_size).view(-1, 2).T.flatten()

    def ordered(weight: Tensor) -> Tensor:
        heads: Tensor = weight.unflatten(0, (-1, config.head_size))
        return heads[:, order].flatten(0, 1)

    turned = (f"{part}_{kind}" for part in "qk" for kind in ("proj.weight", "proj.bias", "norm.weight"))
    endings = tuple(f".{name}" for name in turned)
    return {ours: Made((theirs,), ordered) for ours, theirs in names.items() if ours.endswith(endings)}


def _refuse_others(
    source: Source, given: Mapping[str, Any], layer: Mapping[str, Any], parts: set[str], reasons: Reasons
) -> None:
    """Raises :class:`UnsupportedModel` for the relatives of these heads, by name."""
    reasons = dict(reasons)
    for name, (usual, meaning) in _OTHERWISE.items():
        value = given.get(name, layer.get(name))
        reasons[f"{name} is {value}, and heads with {meaning} cannot be read"] = value and value != usual
    others = sorted(set(given.get("architectures") or ()) - _ARCHITECTURES)
    known = {*_BODY, *_MARKOV, *_CONFIDENCE, *_VERIFIER, "candidate_selector", "embed_tokens", "lm_head", "d2t", "t2d"}
    unknown = sorted(parts - known)
    kind = given.get("projector_type")
    reasons |= {
        f"architectures is {others}; of this family only heads with Qwen3's layers can be read "
        f"({', '.join(sorted(_ARCHITECTURES))})": others,
        f"it has parts that DFlash and DSpark do not have ({', '.join(unknown)}): it is a head of another kind, "
        "such as Domino, which cannot be read": unknown,
        f"projector_type is {kind!r}, and of these only dspark and dflash can be read": kind not in _PROJECTORS,
    }
    refuse(reasons, UnsupportedModel, f"{source.path}: ")


def _is_shifted(source: Source, given: Mapping[str, Any], *, is_markov: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether the first row of a block predicts, and what was assumed. It never follows from the size of the block.

    DeepSpec's files and those for LFM2 do not have the key and are always shifted, z-lab's never. Those of speculators
    had both kinds before it was written. SpecForge's code reads no first row.
    """
    if (told := _flag(source, given, _SHIFTED)) is not None:
        return told, ()
    is_deepspec = _SPECULATORS not in given and bool({*_DEEPSPEC} & {*(given.get("architectures") or ())})
    if is_markov and given.get("projector_type") == "dspark" and not is_deepspec:
        return False, ("that the first row of a block predicts nothing, as in SpecForge's files of this kind",)
    if is_markov and not is_deepspec:
        raise source.wrong(
            "sample_from_anchor is missing; give true if the first row of a block predicts (block_size draft tokens), "
            "and false if it does not (block_size - 1)"
        )
    return is_deepspec, ()


def _layers(source: Source, given: Mapping[str, Any], base: TargetModel) -> list[int]:
    key, shift = ("aux_hidden_state_layer_ids", 0) if _SPECULATORS in given else ("target_layer_ids", 1)
    named, most = given.get(key) or [], int(base.config.num_hidden_layers)
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise source.wrong(f"{key} is {named!r}; it must be a list of integers")
    layers = [layer + shift for layer in named]
    if not layers or not all(0 <= layer <= most for layer in layers):
        raise source.wrong(f"{key} makes the layers {layers}; they must lie in 0 … {most}, what leaves the last one")
    return layers


def _vocabulary(
    source: Source, base: TargetModel, options: dict[str, Any]
) -> tuple[dict[str, str | Made], dict[str, str], set[str]]:
    """The names of the draft vocabulary and its lm_head, copies of the base's, and what is not used.

    An lm_head of a part of the tokens is the head's own, unless it repeats the base's rows.
    """
    shapes = source.shapes
    maps = tuple(name for name in ("d2t", "t2d") if name in shapes)
    size = source.number("draft_vocab_size") or base.vocab_size
    if size >= base.vocab_size and not ("d2t" in maps and source.tensor("d2t").any()):
        return {}, {_EMBEDDING: "embedding", _LM_HEAD: "lm_head"}, set(maps)
    if "d2t" not in maps or shapes["d2t"] != (size,):
        d2t = f"tensor d2t is {shapes.get('d2t', 'missing')}; it must be ({size},)"
        raise CheckpointCorrupt(f"{source.path}: draft_vocab_size is {size} of {base.vocab_size} tokens, and {d2t}")
    options["draft_vocab_size"] = size
    names: dict[str, str | Made] = {"draft_vocab": Made(maps, partial(draft_vocab, source, base.vocab_size))}
    if _LM_HEAD in shapes and not any(changed_logits(base).values()):
        rows = base.weights.lm_head[draft_vocab(source, base.vocab_size, *map(source.tensor, maps))]
        apart = distance(source.tensor(_LM_HEAD), rows)
        if apart is not None and apart <= CLOSE:
            return names, {_EMBEDDING: "embedding"}, {_LM_HEAD}
    options["lm_head"] = "own"
    return {**names, "lm_heads.heads.0.weight": _LM_HEAD}, {_EMBEDDING: "embedding"}, set()


def dflash_names(config: BlockConfig) -> dict[str, str]:
    """The published name of each tensor of the body."""
    names = {name: name for name in ("fc.weight", "hidden_norm.weight", "norm.weight")}
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        names |= layer_names(config, layer, layer)
        names |= {f"{layer}{part}_norm.weight": f"{layer}self_attn.{part}_norm.weight" for part in "qk"}
    return names


def body(head: DraftHead, target: TargetModel, *, has_scale: bool = False) -> Written:
    """The configuration of the layers, and the body's tensors by their published names.

    Without ``has_scale`` the layout has no scale of embeddings. What layers add is divided by the scale instead, and
    all else is normed, with an epsilon for smaller numbers.
    """
    config: Any = head.config
    scale = 1.0 if has_scale else head.embedding_scale
    tensors = {theirs: head.state_dict()[ours] for ours, theirs in dflash_names(config).items()}
    added = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    tensors |= {name: tensors[name].float() / scale for name in added}
    about = {
        "model_type": "qwen3",
        **llama_config(config, target),
        "rms_norm_eps": config.norm_epsilon / scale**2,
        "layer_types": ["full_attention"] * config.num_layers,
    }
    return about, tensors


def obstacles(config: BlockConfig, target: TargetModel) -> Reasons:
    """Why no layout of a block drafter has a place for a head."""
    return {
        **scaled_otherwise(config, target),
        "the head reads the last hidden state, and engines give a head of this kind what enters layers: train a "
        "head that reads some (--head-options layers=[…])": not config.layers,
        "the head has windows, causal layers, an embedding of the mask or a recurrent Markov head, as other projects' "
        "files may have: take the file that it was imported from": config.windows
        or config.causal_layers
        or config.own_mask
        or getattr(config, "recurrent", False),
        "the head's blocks are shifted, and engines refuse DFlash heads whose first row predicts: train it with "
        "--head-options is_shifted=false": config.method != "dspark" and config.is_shifted,
    }


def not_shared(config: BlockConfig) -> Reasons:
    """Why an lm_head that is not the target's has no place. In speculators' layout one of a part of the tokens has."""
    other = "" if config.draft_vocab_size is None else ", or export it --to speculators"
    return {
        f"the head's lm_head is {config.lm_head}, and engines take the target's for block drafters: train it with "
        f"--lm-head shared{other}": config.lm_head != "shared"
    }


def block_keys(config: BlockConfig, target: TargetModel) -> dict[str, Any]:
    """What z-lab's and DeepSpec's configurations say of blocks and of what is read of the target."""
    return {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in config.layers],
        "block_size": config.block_size,
        "num_target_layers": int(target.config.num_hidden_layers),
    }


def write_dflash(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """``config.json`` and the tensors of z-lab's layout."""
    config: Any = head.config
    refuse({**obstacles(config, target), **not_shared(config)})
    layer, tensors = body(head, target)
    keys = block_keys(config, target)
    about = {"architectures": ["DFlashDraftModel"], **layer, "dflash_config": keys}
    return {**about, **{name: keys[name] for name in ("num_target_layers", "block_size")}}, tensors


def write_dspark(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """DeepSpec's ``config.json`` and tensors, with copies of the target's embedding and lm_head."""
    config: Any = head.config
    reasons = {
        **obstacles(config, target),
        **not_shared(config),
        **changed_logits(target),
        "the head's blocks are not shifted, and DeepSpec's layout has no key for that: export it --to "
        "speculators": not config.is_shifted,
        f"the head predicts {config.draft_vocab_size} of {config.vocab_size} tokens, and DeepSpec's layout has no "
        "draft vocabulary: export it --to speculators, or train it with --draft-vocab-size 0": config.draft_vocab_size,
    }
    refuse(reasons)
    layer, tensors = body(head, target)
    keys = {**block_keys(config, target), **markov_keys(config), "num_anchors": 512}
    copies = {_EMBEDDING: target.weights.embedding, _LM_HEAD: target.weights.lm_head}
    return {"architectures": ["Qwen3DSparkModel"], **layer, **keys}, {**copies, **tensors, **markov_tensors(head)}


def write_speculators(head: DraftHead, target: TargetModel, name: str) -> Written:
    """The layout of vllm-project/speculators; ``name`` is the base model's.

    Only an lm_head of a part of the tokens is written, with ``d2t`` and ``t2d``.
    """
    config: Any = head.config
    whole = not_shared(config) if config.draft_vocab_size is None else {}
    refuse({**obstacles(config, target), **changed_logits(target), **whole})
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
    if config.draft_vocab_size is not None:
        tensors |= {_LM_HEAD: lm_head_of(head), **vocabulary_maps(head)}
    return about, tensors


def markov_options(source: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    """The rank and the gate, which the file says and its tensors have."""
    shapes = {name.removeprefix("markov_head."): shape for name, shape in source.shapes.items()}
    kind = "gated" if "gate_proj.weight" in shapes else "rnn" if "joint_proj.weight" in shapes else "vanilla"
    rank = shapes.get("markov_w1.weight", (0,))[-1] or given.get("markov_rank")
    for name, value in {"markov_head_type": kind, "markov_rank": rank}.items():
        if given.get(name, value) != value:
            raise source.wrong(f"{name} is {given[name]!r}, and the tensors are those of {value!r}")
    is_gated = kind == "gated"
    return {"markov_rank": rank, "gated": is_gated, "gate_reads_token": is_gated, "recurrent": kind == "rnn"}


def markov_names(config: DSparkConfig, prefix: str = "markov_head.") -> dict[str, str | Made]:
    """The published name of each tensor of DSpark's Markov head.

    There the bias is W2 (σ(G [h; e] + b) * e) with e = W1[x] (arXiv 2607.05147); our gate is twice that.
    """
    size, rank, gate = config.hidden_size, config.markov_rank, f"{prefix}gate_proj."
    down, up = (f"{prefix}markov_{name}.weight" for name in ("w1", "w2"))
    if config.recurrent:
        joint = f"{prefix}joint_proj."  # of [s; e; h]
        parts = {"state_gates": slice(rank), "token_gates": slice(rank, 2 * rank), "gates": slice(2 * rank, None)}
        made = {f"{ours}.0.weight": Made((f"{joint}weight",), partial(_columns, part)) for ours, part in parts.items()}
        return {"down.0.weight": down, "up.0.weight": up, **made, "gates.0.bias": f"{joint}bias"}
    if not config.gated:
        return {"down.0.weight": down, "up.0.weight": up}
    return {
        "down.0.weight": down,
        "up.0.weight": Made((up,), lambda w: w / 2),
        "gates.0.weight": Made((f"{gate}weight",), lambda w: w[:, :size].contiguous()),
        "token_gates.0.weight": Made((f"{gate}weight",), lambda w: w[:, size:].contiguous()),
        "gates.0.bias": f"{gate}bias",
    }


def _columns(part: slice, weight: Tensor) -> Tensor:
    return weight[:, part].contiguous()


def markov_tensors(head: DraftHead) -> dict[str, Tensor]:
    """W1 (V, r), W2 (V', r), and G (r, D + r) with its bias: see :func:`markov_names`.

    Without an embedding of its own W1 is A E(x) of every token, and a gate that does not read the token has zeros.
    """
    assert isinstance(head, DSparkHead)
    config: Any = head.config
    prefix = "markov_head."
    weights, gate = head.state_dict(), 2.0 if config.gated else 1.0
    tensors = {
        f"{prefix}markov_w1.weight": head.scores(torch.arange(config.vocab_size), 0),
        f"{prefix}markov_w2.weight": weights["up.0.weight"] * gate,
    }
    if config.gated:
        of_token = weights.get("token_gates.0.weight", torch.zeros(2 * (config.markov_rank,)))
        tensors[f"{prefix}gate_proj.weight"] = torch.cat([weights["gates.0.weight"], of_token], 1)
        tensors[f"{prefix}gate_proj.bias"] = weights["gates.0.bias"]
    return tensors


def markov_keys(config: DSparkConfig) -> dict[str, Any]:
    """What a configuration says of the Markov head. A confidence head is not written."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "gated" if config.gated else "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


FORMATS = (
    Format(
        "dflash",
        is_dflash,
        block_layout,
        methods=("dflash",),
        write=write_dflash,
        commands={  # vLLM 0.33, SGLang 0.5.23
            "vLLM": "VLLM(dflash)",
            "SGLang": SGLANG.format("DFLASH"),
        },
    ),
    Format(
        "dspark",
        methods=("dspark",),
        write=write_dspark,
        commands={  # vLLM 0.33, SGLang 0.5.23
            "vLLM": "VLLM(dspark)",
            "SGLang": SGLANG.format("DSPARK"),
        },
        keeps_vocab=True,
    ),
    Format(
        "speculators",
        methods=("dflash", "dspark"),
        write=write_speculators,
        commands={"vLLM": "vllm serve <head>"},  # 0.33
        keeps_vocab=True,
    ),
)
