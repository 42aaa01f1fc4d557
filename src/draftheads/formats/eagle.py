"""EAGLE, EAGLE-3 and P-EAGLE heads: SafeAILab's, SpecForge's, AngelSlim's, Amazon's and speculators' files."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import BaseModelWarning, CheckpointCorrupt, UnsupportedModel
from draftheads.formats.layout import (
    CLOSE,
    SGLANG,
    Format,
    Layout,
    Made,
    Source,
    Written,
    check_keys,
    distance,
    draft_vocab,
    lm_head_of,
    numbers_in,
    refuse,
    speculators_config,
    vocabulary_maps,
)
from draftheads.formats.llama import LAYER_KEYS, layer_names, layer_options, llama_config, scaled_otherwise
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead
from draftheads.heads.eagle import EagleConfig
from draftheads.heads.eagle3 import Eagle3Config, FusedConfig
from draftheads.heads.p_eagle import PEagleConfig
from draftheads.models.model import TargetModel
from draftheads.models.model_config import three_layers

_SPECULATORS, _PUBLISHED = _PREFIXES = "layers.0.", "midlayer."
_EAGLE = (("fc.", _SPECULATORS), ("fusion_fc.", "transformer."))  # of version 1; the second is speculators'
_OF_SPECULATORS = ("transformer_layer_config", "speculators_config", "fusion_bias", "transformer_layer_architecture")
_EMBEDDING = "embed_tokens.weight"
_MOST_DEPTH = 32
_DEPTH = 5  # of drafts, where the files do not say it: what both papers draft
_PARALLEL_DEPTH = 8  # of P-EAGLE's, which its heads are trained for
_SGLANG = f"{SGLANG} --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 12"
_IDS = "eagle_aux_hidden_state_layer_ids"
_KEYS = {  # beside those of its layer
    *("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "draft_vocab_size", "target_hidden_size"),
    *(_IDS, "eagle_config", "transformer_layer_config", "speculators_config", "target_model_type"),
    *("truncated_vocab_size", "num_aux_hidden_states", "target_layer_count"),
    *("num_local_experts", "experts_per_token"),  # of gpt-oss; a layer with experts has other tensors
}
_ALWAYS: dict[str, Any] = {  # what ModelOpt's files may say of a head, and what it is in those that can be read
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"), True),
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # speculators' name of P-EAGLE's mask, vLLM's and Amazon's
_OF_P_EAGLE = {*_MASKS, "num_depths", "parallel_drafting", "down_sample_ratio", "down_sample_ratio_min"}
_NORMS = {"fc_norm": "fc_norm.0", "norm_before_fc": "input_norm"}  # before fc: a key, and a tensor
_AUX = "use_aux_hidden_state"  # off: the head reads the last hidden state, without fc
_FLAGS = ("norm_output", "norm_before_residual")  # of the configuration alone
_DEEPER_NORM = r"layers\.(\d+)\.hidden_norm\.weight"
_NUM_STATES = 3  # hidden states of a token that engines give to an EAGLE-3 head


def is_eagle(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Layers that read as many numbers as a hidden state has, and ``fc`` two vectors."""
    pairs = ((shapes.get(f"{prefix}self_attn.q_proj.weight"), shapes.get(f"{fc}weight")) for fc, prefix in _EAGLE)
    return any(query and fused and fused[0] == query[1] and fused[1] == 2 * query[1] for query, fused in pairs)


def is_eagle3(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """One layer that reads two vectors side by side."""
    pairs = ((shapes.get(f"{prefix}self_attn.q_proj.weight"), _size(shapes, prefix)) for prefix in _PREFIXES)
    return any(query is not None and query[1] == 2 * size for query, size in pairs)


def _size(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    """Numbers in a state of an EAGLE-3 layer; 0 if it is none."""
    return (shapes.get("fc.weight") or shapes.get(f"{prefix}hidden_norm.weight") or (0,))[0]


def is_p_eagle(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """As EAGLE-3, with what stands for hidden states in rows of the mask."""
    return "mask_hidden" in shapes and is_eagle3(shapes)


def eagle_layout(source: Source, base: TargetModel) -> Layout:
    """Biases are there or not, whatever the configuration says. Of speculators' files only those without norms."""
    fc, prefix = next(names for names in _EAGLE if f"{names[0]}weight" in source.shapes)
    layer = source.config.get("transformer_layer_config") or source.config
    check_keys(source, [*LAYER_KEYS, *(() if layer is source.config else _OF_SPECULATORS)], source.config)
    check_keys(source, LAYER_KEYS, {} if layer is source.config else layer, "transformer_layer_config.")
    sizes = layer_options(source, base, layer, base.hidden_size, prefix)
    _compare(layer, {"num_hidden_layers": (count := _num_layers(source))}, source, base)
    depth, has_bias = _depth(source) or _DEPTH, f"{fc}bias" in source.shapes
    config = EagleConfig(**sizes, fusion_bias=has_bias, num_heads=depth, num_layers=count)
    copies = {_EMBEDDING: "embedding", "lm_head.weight": "lm_head"}
    return Layout("an EAGLE head", config, eagle_names(config, fc, prefix), copies=copies, unused=_unused(source))


def eagle_names(config: EagleConfig, fc: str = "fc.", prefix: str = _SPECULATORS) -> dict[str, str]:
    """The published name of each tensor."""
    names = {"fusion.weight": f"{fc}weight", **({"fusion.bias": f"{fc}bias"} if config.fusion_bias else {})}
    for ours, theirs in _layer_prefixes(config, "layer.", prefix).items():
        names |= layer_names(config, ours, theirs, input_norm=ours != "layer.")
    return names


def _layer_prefixes(config: LayerConfig, first: str, theirs: str) -> dict[str, str]:
    """Their prefix of each layer by ours; those behind the first have the same."""
    return {first: theirs, **{f"layers.{i}.": f"layers.{i}." for i in range(1, config.num_layers)}}


def _num_layers(source: Source) -> int:
    """As many as the tensors have."""
    found = numbers_in(source.shapes, r"layers\.(\d+)\.self_attn\.q_proj\.weight")
    return 1 + max([0, *(number for (number,) in found)])


def eagle3_layout(source: Source, base: TargetModel) -> Layout:
    """Of an EAGLE-3 head, which has one layer."""
    if source.config.get("speculators_model_type") == "peagle":
        raise source.wrong("speculators_model_type is 'peagle', and the tensor mask_hidden is missing")
    own = {"num_heads": _depth(source) or _DEPTH}
    return _fused_layout(source, base, Eagle3Config, own)


def p_eagle_layout(source: Source, base: TargetModel) -> Layout:
    """Of a P-EAGLE head, whose embedding was trained, too. ``norm_output`` changes nothing where there is one pass."""
    given = source.config
    if given.get("parallel_drafting") is False:
        raise source.wrong("parallel_drafting is false, and the tensor mask_hidden is for drafts in one pass")
    depth = _depth(source) or source.number("num_depths", most=_MOST_DEPTH)
    unsaid = f"that it predicts {_PARALLEL_DEPTH} tokens, as the files do not say it (num_depths)"
    layer = given.get("transformer_layer_config") or given
    own = {
        "num_heads": depth or _PARALLEL_DEPTH,
        "num_layers": source.number("num_hidden_layers", given=layer) or _num_layers(source),
        "mask_token_id": _mask(source),
    }
    return _fused_layout(source, base, PEagleConfig, own, () if depth else (unsaid,))


def _fused_layout(
    source: Source,
    base: TargetModel,
    made: type[FusedConfig],
    own: Mapping[str, Any],
    guesses: tuple[str, ...] = (),
) -> Layout:
    """``d2t`` has the target's id of each draft token less the token's place; ``t2d`` says which are draft tokens.

    ``own`` has the options of this kind alone.
    """
    shapes, given = source.shapes, source.config
    is_parallel = made is PEagleConfig
    prefix = _PUBLISHED if f"{_PUBLISHED}self_attn.q_proj.weight" in shapes else _SPECULATORS
    layer: dict[str, Any] = given.get("transformer_layer_config") or given
    of_eagle = given.get("eagle_config") or {}
    keys = [*_KEYS, *_ALWAYS, _AUX, *(_OF_P_EAGLE if is_parallel else ()), *(LAYER_KEYS if layer is given else ())]
    check_keys(source, keys, given)
    check_keys(source, LAYER_KEYS, {} if layer is given else layer, "transformer_layer_config.")
    check_keys(source, [*_KEYS, *_ALWAYS, _AUX], of_eagle, "eagle_config.")
    told = {**of_eagle, **{name: value for name, value in given.items() if value is not None}}
    others = [name for name, usual in _ALWAYS.items() if told.get(name, usual) != usual]
    reasons: dict[str, object] = {f"{name} is {told[name]}, and such heads cannot be read": True for name in others}
    deeper = numbers_in(shapes, r"layers\.([1-9]\d*)\.input_layernorm\.weight")
    reasons["it has several layers, and an EAGLE-3 head has one, which is used again for each depth"] = (
        deeper and not is_parallel
    )
    refuse(reasons, UnsupportedModel, f"{source.config_file}: ")
    size, has_fc = _size(shapes, prefix), "fc.weight" in shapes
    sizes = layer_options(source, base, layer, size, prefix, has_windows=not is_parallel)
    own_embedding = size != base.hidden_size or _has_own_embedding(source, base, is_trained=is_parallel)
    for name in (name for name in of_eagle if name != _IDS and of_eagle[name] not in (None, told[name])):
        raise source.wrong(f"{name} is {told[name]}, and {of_eagle[name]} in eagle_config: give one of them")
    target_size = told.get("target_hidden_size") or (base.hidden_size if has_fc else size)
    if target_size != base.hidden_size:
        theirs = f"those of {base.model_id} have {base.hidden_size}"
        raise UnsupportedModel(f"{source.path}: the head reads hidden states of {target_size} numbers, and {theirs}")
    count = shapes["fc.weight"][1] // base.hidden_size if has_fc else 1
    layers, of_layers = _layers(source, base, count) if has_fc else _no_layers(told)
    flags: dict[str, Any] = {name: f"{theirs}.weight" in shapes for name, theirs in _NORMS.items()}
    num_tokens = source.number("draft_vocab_size") or source.number("truncated_vocab_size")
    num_tokens = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else num_tokens
    facts: dict[str, Any] = {**flags, _AUX: has_fc, "num_aux_hidden_states": count}
    facts |= {"draft_vocab_size": num_tokens, "truncated_vocab_size": num_tokens}
    facts |= {} if is_parallel else {"num_hidden_layers": 1}
    _compare({**layer, **told}, facts, source, base)
    of_one_layer: dict[str, Any] = {"norm_output": source.flag("norm_output", told), "window": _window(source, layer)}
    maps = tuple(name for name in ("d2t", "t2d") if name in shapes)
    is_trimmed = "d2t" in shapes and (num_tokens != base.vocab_size or bool(source.tensor("d2t").any()))
    config = made(
        **sizes,
        layers=layers,
        **flags,
        norm_before_residual=source.flag("norm_before_residual", told),
        norm_heads=f"{prefix}self_attn.q_norm.weight" in shapes,
        lm_head="own" if "lm_head.weight" in shapes or size != base.hidden_size else "shared",
        draft_vocab_size=num_tokens if is_trimmed else None,
        inner_size=None if size == base.hidden_size else size,
        own_embedding=own_embedding,
        **own,
        **({} if is_parallel else of_one_layer),
    )
    names: dict[str, str | Made] = dict(eagle3_names(config, prefix))
    if not has_fc:
        names["fc.weight"] = Made((f"{prefix}hidden_norm.weight",), lambda w: torch.eye(len(w), dtype=w.dtype))
    if is_trimmed:
        names["draft_vocab"] = Made(maps, partial(draft_vocab, source, base.vocab_size))
    if is_parallel:
        names["mask_hidden"] = Made(("mask_hidden",), torch.flatten)
    unused = {*_unused(source), *(() if is_trimmed else maps)}
    copies = {} if own_embedding else {_EMBEDDING: "embedding"}
    kind = f"a{'n EAGLE-3' if not is_parallel else ' P-EAGLE'} head"
    return Layout(
        kind, config, names, copies=copies, unused=unused, guesses=(*guesses, *of_layers, *_other_base(told, base))
    )


def _compare(told: Mapping[str, Any], facts: Mapping[str, Any], source: Source, base: TargetModel) -> None:
    """Raises :class:`CheckpointCorrupt` if a configuration says otherwise than the tensors or the base."""
    for name, fact in facts.items():
        said = told.get(name, True if name == _AUX else None)
        if said is not None and said != fact:
            raise source.wrong(f"{name} is {said}, and the tensors are those of {fact}")
    if told.get("target_layer_count", num_layers := int(base.config.num_hidden_layers)) != num_layers:
        raise source.wrong(f"target_layer_count is {told['target_layer_count']}, and {base.model_id} has {num_layers}")


def _no_layers(told: Mapping[str, Any]) -> tuple[list[int], tuple[str, ...]]:
    """Of a head without fc, and what was assumed of the layers that its configuration names."""
    named = told.get(_IDS)
    return [], (f"that it reads the last hidden state and not the layers {named}, as it has no fc",) if named else ()


def _other_base(told: Mapping[str, Any], base: TargetModel) -> tuple[str, ...]:
    """What is assumed of a base of another kind. Names of models with images begin as those of their text models."""
    kind, own = told.get("target_model_type") or "", base.config.model_type
    is_alike = kind.startswith(own) or own.startswith(kind)
    return () if is_alike else (f"that {base.model_id} is its base model, whose model_type is {own}, and not {kind}",)


def eagle3_names(config: FusedConfig, prefix: str = _PUBLISHED) -> dict[str, str]:
    """The published name of each tensor but the draft vocabulary and what stands for hidden states in masks."""
    first = "layers.0." if isinstance(config, PEagleConfig) else "layer."
    names = {"fc.weight": "fc.weight", "norm.weight": "norm.weight"}
    if config.fc_norm:
        names |= {f"fc_norm.norms.{i}.weight": f"fc_norm.{i}.weight" for i in range(max(1, len(config.layers)))}
    names |= {"fc_norm.weight": "input_norm.weight"} if config.norm_before_fc else {}
    for ours, theirs in _layer_prefixes(config, first, prefix).items():
        names |= layer_names(config, ours, theirs, input_norm=ours != first)
        if config.norm_heads:
            names |= {f"{ours}{part}_norm.weight": f"{theirs}self_attn.{part}_norm.weight" for part in "qk"}
    names |= {"embedding.weight": _EMBEDDING} if config.own_embedding else {}
    names |= {
        f"{first}input_norm.norms.0.weight": f"{prefix}input_layernorm.weight",
        f"{first}input_norm.norms.1.weight": f"{prefix}hidden_norm.weight",
    }
    return names | ({"lm_heads.heads.0.weight": "lm_head.weight"} if config.lm_head == "own" else {})


def write_eagle3(head: DraftHead, target: TargetModel, _: str = "", *, prefix: str = _PUBLISHED) -> Written:
    """The published layout of an EAGLE-3 head: its ``config.json``, and its tensors by name.

    ``d2t`` (V',) int64 is the target's id of each draft token minus the token's place; ``t2d`` (V,) bool is true for
    draft tokens. Engines count layers in two ways: vLLM and llama.cpp name the layer whose input is read, at the top;
    SGLang the one before it, in ``eagle_config``.
    """
    config: Any = head.config
    are_others = len(config.layers) != _NUM_STATES
    biased = target.weights.lm_head_bias is not None and config.lm_head == "shared"
    reasons = {
        **scaled_otherwise(config, target),
        f"the head reads the layers {config.layers}, and engines give an EAGLE-3 head the hidden states of "
        f"{_NUM_STATES}: train a head that reads {_NUM_STATES} (--head-options layers=[…])": are_others,
        "the model's lm_head has a bias, for which the layout has no place: train a head with --lm-head own": biased,
        "the head norms queries and keys or has a window, as other projects' files may have: take the file that it was "
        "imported from": config.norm_heads or getattr(config, "window", 0),
    }
    refuse(reasons)
    weights, names = head.state_dict(), eagle3_names(config, prefix)
    tensors = {theirs: weights[ours] for ours, theirs in names.items()}
    tensors |= {"lm_head.weight": lm_head_of(head), **_output_bias(config, prefix), **vocabulary_maps(head)}
    about = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **llama_config(config, target),
        "hidden_size": config.state_size,
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.num_draft_tokens,
        **_own_keys(config),
        "eagle_config": {"use_aux_hidden_state": True, _IDS: [layer - 1 for layer in config.layers]},
    }
    return about, tensors


def _own_keys(config: Any) -> dict[str, Any]:
    """What a configuration says of the head beside its layer."""
    return {**{name: getattr(config, name, False) for name in (*_NORMS, *_FLAGS)}, _IDS: list(config.layers)}


def write_speculators(head: DraftHead, target: TargetModel, name: str) -> Written:
    """The layout of vllm-project/speculators, for which ``vllm serve FOLDER`` is enough.

    ``name`` is the base model's, whose embedding is written if the head has none: the project starts from it.
    """
    _, tensors = write_eagle3(head, target, prefix=_SPECULATORS)
    config: Any = head.config
    layer = {"model_type": "llama", **llama_config(config, target), "hidden_size": config.state_size}
    of_project = {"architectures": ["Eagle3DraftModel"], **speculators_config(config, layer, target, name)}
    if isinstance(config, PEagleConfig):
        other = f"the head's size is {config.state_size}, and engines take the model's ({config.hidden_size}) for masks"
        refuse({other: config.state_size != config.hidden_size})
        of_project |= {"architectures": ["PEagleSpeculator"], "mask_token_id": config.mask_token_id}
        tensors["mask_hidden"] = head.state_dict()["mask_hidden"][None, None]
    about = {**of_project, **_own_keys(config)}
    return about, {_EMBEDDING: target.weights.embedding.detach(), **tensors}


def write_eagle(head: DraftHead, target: TargetModel, _: str = "", *, with_bias: bool = False) -> Written:
    """The layout of EAGLE heads: vLLM's, which has no bias of ``fc``, or SGLang's.

    Embeddings that the head scales are scaled by ``fc``. The lm_head is the target's.
    """
    config: Any = head.config
    tensors = {theirs: head.state_dict()[ours] for ours, theirs in eagle_names(config).items()}
    tensors |= _output_bias(config, _SPECULATORS)
    bias = None if with_bias else tensors.pop("fc.bias", None)
    reasons = {
        **scaled_otherwise(config, target),
        f"the head's lm_head is {config.lm_head}, and engines take the target's for EAGLE heads: train it with "
        "--lm-head shared": config.lm_head != "shared",
        "the head's fc has a bias, for which vLLM's layout has no place: export it --to eagle-sglang, or "
        "train it with --head-options fusion_bias=false": bias is not None and bias.any(),
    }
    refuse(reasons)
    scale = torch.ones(2 * config.hidden_size)
    scale[: config.hidden_size] = head.embedding_scale
    tensors["fc.weight"] = tensors["fc.weight"].float() * scale
    about = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", **llama_config(config, target)}
    if with_bias:  # SGLang always has one, and takes `bias` for that of attention
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size))
    return {**about, "bias": False}, tensors


def _has_own_embedding(source: Source, base: TargetModel, *, is_trained: bool) -> bool:
    """Whether the file's embedding, if it has one, is another one than the base model's.

    Warns:
        BaseModelWarning: it is, and heads of this kind do not train it; so the head may be for another base model.
    """
    apart = distance(source.tensor(_EMBEDDING), base.weights.embedding) if _EMBEDDING in source.shapes else None
    if apart is None or apart <= CLOSE:
        return False
    if is_trained:
        return True
    differs = f"its {_EMBEDDING} differs by {apart:.0%} from the embedding of {base.model_id}"
    own = "so it is read as the head's own; if the head was trained for another model, give that one"
    warnings.warn(f"{source.path}: {differs}, {own}", BaseModelWarning, stacklevel=2)
    return True


def _depth(source: Source) -> int | None:
    """How deep drafts are, if it is a file of speculators."""
    methods = (source.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens")
    return min(depth, _MOST_DEPTH) if isinstance(depth, int) and depth > 0 else None


def _mask(source: Source) -> int:
    """The token of the mask, which several keys may name."""
    said = {name: source.config[name] for name in _MASKS if source.config.get(name) is not None}
    ids = list(dict.fromkeys(said.values()))
    if len(ids) != 1 or type(ids[0]) is not int:
        raise source.wrong(f"the mask's token is {said or 'missing'}: give one number as {' or '.join(_MASKS)}")
    return ids[0]


def _layers(source: Source, base: TargetModel, count: int) -> tuple[list[int], tuple[str, ...]]:
    """The layers, and what was assumed of them.

    ``eagle_config`` names the layer before; some files say both alike. Alone it counts as we do where it names what
    leaves the last layer, or the layers that engines read by default.
    """
    named, before = source.config.get(_IDS), (source.config.get("eagle_config") or {}).get(_IDS)
    num_layers = int(base.config.num_hidden_layers)
    as_ours = before is not None and (num_layers in before or before == three_layers(num_layers))
    shifted = before if before is None or as_ours else [layer + 1 for layer in before]
    guesses: tuple[str, ...] = ()
    if named is not None and before not in (None, named) and shifted != named:
        raise source.wrong(f"{_IDS} is {named}, and {before} in eagle_config, where the layer before each is named")
    layers = shifted if named is None else named
    if layers is None:
        layers = three_layers(num_layers) if count > 1 else []
        guesses = (f"that it reads the layers {layers}, as the files do not say it ({_IDS})",) if layers else ()
    elif named is None:
        by = "enters" if as_ours else "leaves"
        guesses = (f"that eagle_config counts layers by what {by} them, so that it reads the layers {layers}",)
    known, numbers = range(num_layers + 1), source.shapes["fc.weight"][1]
    if max(1, len(layers)) * base.hidden_size != numbers or any(layer not in known for layer in layers):
        found = f"fc reads {numbers} numbers of a token, hidden states of {base.model_id} have {base.hidden_size}"
        limits = f"must lie in 0 … {known[-1]}, the number of layers, which stands for what leaves the last one"
        fix = "If they are right, give the base model that the head was trained for"
        raise CheckpointCorrupt(f"{source.path}: {found}, and the layers are {layers}; they {limits}. {fix}")
    return list(layers), guesses


def _window(source: Source, layer: Mapping[str, Any]) -> int:
    """The tokens that the layer sees; 0 is all. As in vLLM and SGLang ``layer_types`` tells whether it has a window."""
    types, window = layer.get("layer_types") or (), layer.get("sliding_window")
    if unknown := sorted({*types} - {"full_attention", "sliding_attention"}):
        raise source.wrong(f"layer_types has {', '.join(unknown)}; only full_attention and sliding_attention are read")
    if not types and layer.get("use_sliding_window", window) and window:
        raise source.wrong(f'sliding_window is {window} and layer_types is missing: give ["sliding_attention"] or none')
    if "sliding_attention" not in types:
        return 0
    if layer.get("use_sliding_window") is False:
        raise source.wrong("use_sliding_window is false, and layer_types names a window: give one of them")
    if len(types) != 1 or not isinstance(window, int) or window < 1:
        raise source.wrong(f"layer_types is {types} and sliding_window {window!r}: give one type and its tokens")
    return window


def _unused(source: Source) -> set[str]:
    """Also a bias behind the attention, if it is zero, and a norm that engines have in deeper layers and never use."""
    biases = [name for name in source.shapes if name.endswith("self_attn.o_proj.bias")]
    unused = {name for name in biases if not source.tensor(name).any()}
    unused |= {name for name in source.shapes if name.endswith("rotary_emb.inv_freq")}
    return unused | {f"layers.{i}.hidden_norm.weight" for (i,) in numbers_in(source.shapes, _DEEPER_NORM) if i}


def _output_bias(config: LayerConfig, prefix: str) -> dict[str, Tensor]:
    """Engines whose q, k and v have biases give the layer behind the attention one, too, and do not set it to zero."""
    prefixes = _layer_prefixes(config, "layer.", prefix).values() if config.qkv_bias else ()
    return {f"{layer}self_attn.o_proj.bias": torch.zeros(config.state_size) for layer in prefixes}


FORMATS = (
    Format("p-eagle", is_p_eagle, p_eagle_layout),
    Format(
        "eagle3",
        is_eagle3,
        eagle3_layout,
        methods=("eagle3",),
        write=write_eagle3,
        commands={  # vLLM 0.33, SGLang 0.5.23, llama.cpp of November 2026, optimum-intel 2.2
            "vLLM": "VLLM(eagle3)",
            "SGLang": _SGLANG.format("EAGLE3"),
            "llama.cpp": "python convert_hf_to_gguf.py <head> --target-model-dir <model> --outfile draft.gguf && "
            "llama-server -m MODEL.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max <steps>",
            "OpenVINO": "pip install optimum-intel==2.2.0 diffusers==0.38.0 einops 'huggingface-hub<1.22' && "
            "optimum-cli export openvino --model <head> --task text-generation-with-past --trust-remote-code "
            "openvino-draft  # then openvino_genai.draft_model('openvino-draft', 'CPU')",
        },
        keeps_vocab=True,
    ),
    Format(
        "speculators",
        methods=("eagle3", "p-eagle"),
        write=write_speculators,
        commands={"vLLM": "vllm serve <head>"},  # 0.33
        keeps_vocab=True,
    ),
    Format(
        "eagle",
        is_eagle,
        eagle_layout,
        methods=("eagle",),
        write=write_eagle,
        commands={"vLLM": "VLLM(eagle)"},  # 0.33
    ),
    Format(
        "eagle-sglang",
        methods=("eagle",),
        write=partial(write_eagle, with_bias=True),
        commands={"SGLang": _SGLANG.format("EAGLE")},  # 0.5.23
        keeps_vocab=True,
    ),
)
