"""What the layers of a model compute, by the names of their parts: one description for all families.

A layer has attention, a recurrence whose states follow a tree (``native/walk.h``), or both side by side. Recurrences
are the gated delta rule, Mamba-2, and a short convolution.

A description may be wrong for modules that have known names and compute something else. That is noticed when the model
is loaded (:mod:`draftheads.runners.structure`): there layers with random weights must have the stock modules' logits.

Experts of a mixture (MoE) are native products, too: the weights of each are packed alone, so only chosen ones are read.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.cpu.kernels import PackedLinear, Plain

# norms before and after attention, before and after the feed-forward part, by the names of all norms of a layer
_NORMS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset(name for name in names if name): names
    for names in (
        ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
        # Gemma 2
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
        ("input_layernorm", None, None, None),  # Cohere 2
        (None, None, "norm", None),  # a feed-forward part alone
        ("ln_1", None, "ln_2", None),  # GPT-2
        ("operator_norm", None, "ffn_norm", None),  # LFM2
        ("input_layernorm", None, "pre_ff_layernorm", None),  # Bamba
    )
}
SILU = 0
_ACTS = [  # by their numbers
    {"SiLU", "SiLUActivation"},
    {"PytorchGELUTanh", "GELUTanh", "NewGELUActivation"},
    {"GELUActivation", "GELU"},
    {"Clamped"},
    {"ReLUSquaredActivation"},
]
_FEED_FORWARD = (  # gate, up and down, or up and down
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("c_fc", "c_proj"),
    ("up_proj", "down_proj"),
)
_OF_MIXTURE = {"experts", "gate", "router", "shared_expert", "shared_experts", "shared_expert_gate"}
_ACT_NAMES = ("act_fn", "activation_fn", "act", "activation")
_OF_DELTA = {"A_log", "dt_bias"}  # parameters of a gated delta rule, beside its modules


class PackedExperts(nn.Module):
    """Takes the place of a transformers module with the weights of all experts in two tensors.

    Args:
        stock: the module, whose own function joins gate and up. It loses its weights.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.num_experts = len(stock.down_proj)
        self.parts = nn.ModuleList(PackedLinear(Plain(*pair)) for pair in _weights(stock))
        self._parts_each = len(self.parts) // self.num_experts
        self._is_concatenated = stock.is_concatenated
        for name in [name for name, _ in stock.named_parameters(recurse=False)]:
            delattr(stock, name)
        self._stock = (stock,)  # not a module of this one

    @property
    def gate(self) -> tuple[str, float, float]:
        """How gate and up are joined: the activation's class, and α and limit of a clamped one (gpt-oss), or zeros."""
        stock = self._stock[0]
        limits = float(getattr(stock, "alpha", 0.0)), float(getattr(stock, "limit", 0.0))
        if any(limits):
            return ("Clamped", *limits)
        return ("SiLU" if stock.act_fn is nn.functional.silu else type(stock.act_fn).__name__, 0.0, 0.0)

    def expert(self, number: int) -> Any:
        """Its layers for gate, up and down, or up and down."""
        return self.parts[self._parts_each * number : self._parts_each * (number + 1)]

    def forward(self, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum of the chosen experts' outputs: (n, D), numbers (n, k) and shares (n, k) of experts -> (n, D)."""
        out = torch.zeros_like(hidden_states)
        for number in chosen.unique().tolist():
            rows, places = (chosen == number).nonzero(as_tuple=True)
            states = hidden_states[rows]
            *inner, down = self.expert(number)
            pair = [part(states) for part in inner]
            joined = torch.cat(pair, -1) if self._is_concatenated else torch.stack(pair, -1).flatten(-2)
            stock = self._stock[0]
            active = stock._apply_gate(joined) if len(pair) == 2 else stock.act_fn(joined)  # noqa: SLF001
            out.index_add_(0, rows, (down(active) * shares[rows, places, None]).to(out.dtype))
        return out


def are_experts(module: nn.Module) -> bool:
    """Whether it has the form that :class:`PackedExperts` takes the place of."""
    names = {name for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    return (
        callable(getattr(module, "_apply_gate", None))
        and names == {"gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj"}
        and not getattr(module, "has_post_expert_norm", False)
    )


def replace_experts(model: nn.Module) -> None:
    """Replaces the modules of that form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if are_experts(child):
                setattr(parent, name, PackedExperts(child))


def _weights(stock: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights (out, in) and biases of gate, up and down of each expert, or of up and down."""

    def of(name: str, number: int) -> tuple[Tensor, Tensor | None]:
        weight, bias = getattr(stock, name)[number].detach(), getattr(stock, f"{name}_bias", None)
        return weight.T if stock.is_transposed else weight, None if bias is None else bias[number].detach()

    for number in range(len(stock.down_proj)):
        weight, bias = of("gate_up_proj" if stock.has_gate else "up_proj", number)
        if not stock.has_gate:
            yield weight, bias
        half = len(weight) // 2
        for place in range(2 * stock.has_gate):
            rows = slice(place * half, (place + 1) * half) if stock.is_concatenated else slice(place, None, 2)
            yield weight[rows], None if bias is None else bias[rows].clone()
        yield of("down_proj", number)


@dataclass(frozen=True)
class Outputs:
    """Some outputs of a linear layer, from ``first`` on; all of them if there is no count."""

    layer: Any
    first: int = 0
    count: int | None = None
    factor: Any = 1.0  # of outputs: a number, or (out,)
    input_factor: float = 1.0


@dataclass(frozen=True)
class Mixing:
    """Sizes of recurrences. The heads of a group have the same query and key."""

    kind: int = 0
    groups: int = 0
    heads: int = 0  # of a group
    rows: int = 0  # numbers of a key
    values: int = 0  # numbers of a head's value
    taps: int = 1  # of the convolution
    normed: int = 0  # numbers of outputs that are normed together
    gates_first: bool = False  # outputs are gated before they are normed
    share_factor: float = 1.0  # of the delta rule
    least_step: float = 0.0
    most_step: float = math.inf


_DELTA_RULE, _STATE_SPACE, _SHORT_CONVOLUTION = 1, 2, 3  # kinds of them


@dataclass(frozen=True)
class Recurrence:
    """A recurrence of H heads in G groups over the outputs of a convolution of C channels."""

    mixing: Mixing
    # among the outputs of the first products, of the first group and from group to group: queries, keys, values,
    # gates of outputs, shares (of values that are added) and steps; a short convolution has gates of values there
    places: tuple[tuple[int, int], ...]
    products: tuple[Outputs, ...]
    out: Outputs
    taps: Tensor  # (taps, C), channels group by group: queries, keys, values
    tap_bias: Tensor | None  # (C,)
    decay: Tensor | None = None  # (H,)
    step_bias: Tensor | None = None  # (H,)
    skip: Tensor | None = None  # (H,)
    norm: tuple[Tensor, float] | None = None  # (H * values,) of outputs, epsilon


@dataclass(frozen=True)
class Heads:
    """What must be equal in all layers with attention."""

    heads: int = 1
    groups: int = 1
    head_size: int = 1
    is_interleaved: bool = False  # a head's query, key and value are neighbours among the outputs
    has_gates: bool = False  # behind a head's query is the gate of its output
    norms_whole: bool = False  # those of queries and keys are of all heads together
    scaling: float = 1.0
    cap: float = 0.0  # of scores; 0: none


@dataclass(frozen=True)
class Sizes:
    """What must be equal in all layers."""

    gate: tuple[Any, ...] | None  # the activation's number, α and limit; None: there is no feed-forward part
    is_parallel: bool = False  # attention and feed-forward part read the same states
    residual_scale: float = 1.0
    chosen: int = 0  # experts of a token


@dataclass(frozen=True)
class LayerParts:
    """A layer's weights, and how it puts them together. A part that is None is not there."""

    norms: tuple[Any, ...]  # before and after attention, before and after the feed-forward part
    qkv: tuple[Outputs, ...]  # of attention
    out: Outputs | None
    heads: Heads | None
    head_norms: tuple[Any, ...]  # of queries and keys
    feed_forward: tuple[Outputs, ...]  # gate, up and down, or up and down; empty if there are experts
    sizes: Sizes
    turns: bool  # whether queries and keys have rotary positions
    recurrence: Recurrence | None = None
    sinks: Tensor | None = None  # (heads,)
    experts: PackedExperts | None = None
    shared: tuple[Outputs, ...] = ()  # gate, up and down of the expert that all tokens choose
    shared_gate: Any = None  # whose sigmoid is the share of it; None: 1
    router: Any = None
    choice_bias: Tensor | None = None  # (experts,) of the choice alone, not of shares


def parts_of(layer: Any, config: Any) -> LayerParts:
    """The description of a layer.

    Raises:
        AttributeError, TypeError: it has other parts than the families that are known here.
    """
    children = {name: getattr(layer, name) for name in _names_of(layer)}
    is_single = {*children} == {"norm", "mixer"}  # one part, in place of two
    if is_single:
        part = children["mixer"]
        name = "mamba" if hasattr(part, "A_log") else "self_attn" if hasattr(part, "q_proj") else "mlp"
        children = {name: part, "norm" if name == "mlp" else "input_layernorm": children["norm"]}
    attention: Any = next((children.pop(name) for name in ("self_attn", "attention", "attn") if name in children), None)
    kind = next((name for name in _MIXERS if name in children), "")
    mixer: Any = children.pop(kind, None)
    mlp: Any = next((children.pop(name) for name in ("mlp", "feed_forward", "shared_mlp") if name in children), None)
    mixture: Any = children.pop("block_sparse_moe", mlp)
    mixes = attention is not None or mixer is not None
    if is_single == (mixes and mlp is not None) or frozenset(children) not in _NORMS:
        raise TypeError(f"its layers have other parts: {', '.join(name for name, _ in layer.named_children())}")
    norms = tuple(children[name] if name else None for name in _NORMS[frozenset(children)])
    experts: Any = getattr(mixture, "experts", None)
    router: Any = getattr(mixture, "gate", getattr(mixture, "router", None))
    is_mixture = isinstance(experts, PackedExperts)
    if _names_of(mixture) - _OF_MIXTURE if is_mixture else mixture is not mlp:
        raise TypeError("it has more than experts, a router and a shared expert")
    shared: Any = mlp if mixture is not mlp else _first(mixture, "shared_experts", "shared_expert", otherwise=None)
    acts = {_act_of(plain) for plain in (shared if is_mixture else mlp,) if plain is not None}
    gates = {experts.gate} if is_mixture else {(act, 0.0, 0.0) for act in acts}
    if acts - {act for act, *_ in gates}:
        raise TypeError("the shared expert has another activation")
    if unknown := [act for act, *_ in gates if not any(act in names for names in _ACTS)]:
        raise TypeError(f"its activation is {unknown[0]}")
    is_cohere = norms[1:] == (None, None, None) and not is_single
    numbers = [(next(number for number, names in enumerate(_ACTS) if act in names), *rest) for act, *rest in gates]
    sizes = Sizes(
        is_parallel=bool(getattr(layer, "use_parallel_residual", is_cohere)),
        residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
        gate=numbers[0] if numbers else None,
        chosen=int(router.top_k) if is_mixture else 0,
    )
    is_cohere_2 = type(attention).__name__ == "Cohere2Attention"
    if attention is not None and mixer is not None and (norms[1] is not None or sizes.is_parallel):
        raise TypeError("the sum of its attention and its recurrence has a norm")
    qkv = () if attention is None else _qkv(attention, float(getattr(layer, "attention_in_multiplier", 1.0)))
    recurrence = None if mixer is None else _MIXERS[kind](mixer, _out(mixer, getattr(layer, "ssm_out_multiplier", 1.0)))
    return LayerParts(
        norms=norms,
        qkv=qkv,
        out=None if attention is None else _out(attention, getattr(layer, "attn_out_multiplier", 1.0)),
        heads=None if attention is None else _heads_of(attention, qkv, config),
        head_norms=tuple(_head_norm(attention, name) for name in "qk"),
        feed_forward=() if is_mixture or mlp is None else _feed_forward(mlp),
        sizes=sizes,
        turns=attention.sliding_window is not None if is_cohere_2 else bool(getattr(attention, "use_rope", True)),
        recurrence=recurrence,
        sinks=getattr(attention, "sinks", None),
        experts=experts if is_mixture else None,
        shared=() if shared is None else _feed_forward(shared),
        shared_gate=getattr(mixture, "shared_expert_gate", None) if is_mixture else None,
        router=router if is_mixture else None,
        choice_bias=getattr(mixture, "expert_bias", getattr(router, "e_score_correction_bias", None)),
    )


def _names_of(module: Any) -> set[str]:
    return {name for name, part in module.named_children() if not isinstance(part, nn.Dropout | nn.Identity)}


def _out(mixer: Any, factor: float) -> Outputs:
    return Outputs(_first(mixer, "o_proj", "dense", "c_proj", "out_proj"), factor=float(factor))


def _qkv(attention: Any, input_factor: float) -> tuple[Outputs, ...]:
    if hasattr(attention, "q_proj"):
        factors = {"q_proj": 1.0, "k_proj": float(getattr(attention, "key_multiplier", 1.0)), "v_proj": 1.0}
        return tuple(
            Outputs(getattr(attention, name), factor=factor, input_factor=input_factor)
            for name, factor in factors.items()
        )
    return (Outputs(_first(attention, "qkv_proj", "query_key_value", "c_attn")),)


def _head_norm(attention: Any, name: str) -> Any:
    return getattr(attention, f"{name}_norm", getattr(attention, f"{name}_layernorm", None))


def _heads_of(attention: Any, qkv: Sequence[Outputs], config: Any) -> Heads:
    own = {name for name, _ in attention.named_parameters(recurse=False)}
    if own - {"sinks"}:
        raise TypeError(f"its attention has {', '.join(sorted(own))}")
    size = int(getattr(attention, "head_dim", None) or attention.head_size)
    heads = int(config.num_attention_heads)
    outputs = [part.layer.out_features // size for part in qkv]
    norm = _head_norm(attention, "q")
    return Heads(
        heads=heads,
        groups=outputs[1] if len(qkv) == 3 else (outputs[0] - heads) // 2,
        head_size=size,
        is_interleaved=hasattr(attention, "query_key_value"),
        has_gates=len(qkv) == 3 and outputs[0] == 2 * heads,
        norms_whole=norm is not None and norm.weight.shape != (size,),
        scaling=float(attention.scaling),
        cap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
    )


def _gated_delta(mixer: Any, out: Outputs) -> Recurrence:
    """A gated delta rule: of Qwen3.5, OLMo-Hybrid, or Qwen3-Next, where all of a group are neighbours among outputs."""
    groups, rows, values = (int(getattr(mixer, name)) for name in ("num_k_heads", "head_k_dim", "head_v_dim"))
    heads = mixer.num_v_heads // groups
    whole, keys = heads * values, groups * rows
    if hasattr(mixer, "in_proj_qkvz"):
        names: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
        step, behind = 2 * (rows + whole), groups * 2 * (rows + whole)
        starts = 0, rows, 2 * rows, 2 * rows + whole, behind, behind + heads
        steps = (*4 * [step], *2 * [2 * heads])
    else:
        names = tuple(f"in_proj_{name}" for name in ("qkv", "z", "b", "a"))
        if hasattr(mixer, "q_proj"):
            names = tuple(f"{name}_proj" for name in "qkvgba")
        behind = 2 * (keys + groups * whole)
        starts = 0, keys, 2 * keys, 2 * keys + groups * whole, behind, behind + groups * heads
        steps = rows, rows, whole, whole, heads, heads
    norm = _first(mixer, "norm", "o_norm")
    if {mixer.activation, norm.activation} != {"silu"} or {*dict(mixer.named_parameters(recurse=False))} != _OF_DELTA:
        raise TypeError("its recurrence is another one")
    taps, bias = _taps(mixer.conv1d, groups, (keys, keys, groups * whole))
    share_factor = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
    return Recurrence(
        Mixing(_DELTA_RULE, groups, heads, rows, values, len(taps), values, share_factor=share_factor),
        tuple(zip(starts, steps, strict=True)),
        tuple(Outputs(getattr(mixer, name)) for name in names),
        out,
        taps,
        bias,
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach(),
        None,
        (norm.weight.detach().repeat(groups * heads), float(norm.variance_epsilon)),
    )


def _state_space(mixer: Any, out: Outputs) -> Recurrence:
    """Mamba-2, with multipliers (Falcon-H1) and without."""
    groups, rows, values = (int(getattr(mixer, name)) for name in ("n_groups", "ssm_state_size", "head_dim"))
    heads, inner, norm = mixer.num_heads // groups, mixer.num_heads * values, mixer.norm
    own = {*dict(mixer.named_parameters(recurse=False))}
    if mixer.activation != "silu" or own != {*_OF_DELTA, "D"}:
        raise TypeError("its recurrence is another one")
    behind = 2 * inner + 2 * groups * rows
    starts = 2 * inner + groups * rows, 2 * inner, inner, 0, behind, behind
    taps, bias = _taps(mixer.conv1d, groups, (inner, groups * rows, groups * rows), (2, 1, 0))
    normed = 0 if isinstance(norm, nn.Identity) else inner // int(getattr(norm, "n_groups", 1))
    factor, input_factor = getattr(mixer, "mup_vector", 1.0), float(getattr(mixer, "ssm_in_multiplier", 1.0))
    return Recurrence(
        Mixing(
            *(_STATE_SPACE, groups, heads, rows, values, len(taps), int(getattr(norm, "group_size", normed))),
            gates_first=not getattr(norm, "norm_before_gate", False),
            least_step=float(mixer.time_step_limit[0]),
            most_step=float(mixer.time_step_limit[1]),
        ),
        tuple(zip(starts, (rows, rows, heads * values, heads * values, heads, heads), strict=True)),
        (Outputs(mixer.in_proj, factor=factor, input_factor=input_factor),),
        out,
        taps,
        bias,
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach(),
        mixer.D.detach(),
        (norm.weight.detach(), float(norm.variance_epsilon)) if normed else None,
    )


def _short_convolution(mixer: Any, out: Outputs) -> Recurrence:
    """Of LFM2: B * x is convolved, and the output multiplied by C."""
    size = int(mixer.conv.out_channels)
    if [name for name, _ in mixer.named_children()] != ["conv", "in_proj", "out_proj"]:
        raise TypeError("its convolution is another one")
    taps, bias = _taps(mixer.conv, 1, (size,))
    places = tuple((start * size, 0) for start in (0, 0, 0, 1, 0, 2))
    mixing = Mixing(_SHORT_CONVOLUTION, 1, 1, 0, size, len(taps))
    return Recurrence(mixing, places, (Outputs(mixer.in_proj),), out, taps, bias)


def _taps(
    convolution: Any, groups: int, sizes: Sequence[int], order: Sequence[int] = (0, 1, 2)
) -> tuple[Tensor, Tensor | None]:
    """The convolution's weights (taps, C) and biases (C,), whose parts of so many channels are ordered by groups."""
    parts = [part.view(groups, -1) for part in torch.arange(convolution.out_channels).split(list(sizes))]
    channels = torch.cat([parts[place] for place in order[: len(parts)]], 1).flatten()
    weight, bias = convolution.weight.detach()[channels, 0].T, convolution.bias
    return weight, None if bias is None else bias.detach()[channels]


_MIXERS = {"linear_attn": _gated_delta, "mamba": _state_space, "conv": _short_convolution}  # by their names in layers


def _act_of(mlp: Any) -> str:
    return "SiLU" if hasattr(mlp, "w1") else type(_first(mlp, *_ACT_NAMES)).__name__  # LFM2's is a function


def _feed_forward(mlp: Any) -> tuple[Outputs, ...]:
    for both, down in (("gate_up_proj", "down_proj"), ("input_linear", "output_linear")):
        if hasattr(mlp, both):
            half = getattr(mlp, both).out_features // 2
            halves = (Outputs(getattr(mlp, both), place * half, half) for place in range(2))
            return (*halves, Outputs(getattr(mlp, down)))
    for names in _FEED_FORWARD:
        if all(hasattr(mlp, name) for name in names):
            factors = {name: float(getattr(mlp, f"{name.removesuffix('_proj')}_multiplier", 1.0)) for name in names}
            return tuple(Outputs(getattr(mlp, name), factor=factors[name]) for name in names)
    raise TypeError("its feed-forward part has unknown layers")


def _first(module: Any, *names: str, **otherwise: Any) -> Any:
    found = next((name for name in names if hasattr(module, name)), names[0])
    return getattr(module, found, *otherwise.values())


def common(values: Sequence[Any], otherwise: Any) -> Any:
    """What all of them are; raises ValueError if they differ."""
    if len({*values}) > 1:
        raise ValueError("its layers differ")
    return values[0] if values else otherwise


def norm_numbers(norm: Any) -> tuple[Tensor, Tensor | None, float, bool]:
    """A norm's scale (D,), shift (D,) or None, epsilon, and whether it subtracts the mean, by what it makes of ones."""
    weight = norm.weight.detach()
    bias = getattr(norm, "bias", None)
    with torch.inference_mode():
        of_ones = norm(torch.ones(1, weight.numel(), dtype=weight.dtype)).float()[0]
    scale, shift = weight.float(), torch.zeros(()) if bias is None else bias.detach().float()
    epsilon = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
    is_centred = bool(((of_ones - shift).abs() < 1e-3).all())
    is_less_1 = (of_ones - 1 - scale).abs().sum() < (of_ones - scale).abs().sum()  # Gemma stores what is behind 1
    scale = 1 + scale if is_less_1 and not is_centred else scale
    return scale, None if bias is None else shift, epsilon, is_centred
