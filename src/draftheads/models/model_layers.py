"""Layers of models: which families are supported, what their layers call, LongRoPE, their inputs, and LoRA beside them.

A mixer of a recurrent layer calls a causal convolution and, except in short convolutions, a recurrence over its output.

With LoRA beside its base model the layers share their weights with the base, and each adds its own low-rank product.
The layers keep their kernels, also packed and quantised ones. So a pass of the base does not change, and an adapter
needs memory for its own matrices only.
"""

import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from os import PathLike
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftheads.cpu.kernels import Native, PackedLinear, Plain, Product
from draftheads.cpu.native_step import native_step
from draftheads.errors import UnsupportedModel, first_line
from draftheads.models.adapter import LowRank, check_base, read_lora
from draftheads.models.model_config import long_rope_start
from draftheads.models.model_names import find_adapter
from draftheads.models.pretrained import ATTENTION, adapter_tokenizer
from draftheads.utils.files import user_path

if TYPE_CHECKING:
    from draftheads.models.model import TargetModel

CONVOLUTION = "causal_conv1d_fn"
KIMI_RULE = "chunk_kimi_delta_attention"
DELTA_RULE, MAMBA2, MAMBA1 = "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba_selective_scan"
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), (CONVOLUTION, DELTA_RULE)),
    **dict.fromkeys(
        ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"), (CONVOLUTION, MAMBA2)
    ),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), (CONVOLUTION, MAMBA1)),
    "kimi_linear": (CONVOLUTION, KIMI_RULE),
    **dict.fromkeys(("lfm2", "lfm2_moe"), (CONVOLUTION,)),
}
KINDS = frozenset({"linear_attention", "hybrid", "conv", "moe", "mlp"})  # of layers, beside attention
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
_SLOT_BOUND_TYPES = {"bloom", "gpt_neo", "mpt"}  # they use ALiBi, or their own causal mask
_LONG = 1 << 24  # a position from here on is that of a long text


def problems_of(target: "TargetModel") -> Iterator[str]:
    """Why drafts of this model could not be verified, to be read after its name."""
    unknown = set(target.layer_kinds) - ATTENTION_KINDS - (KINDS if target.is_recurrent else set())
    if unknown or (getattr(target.model, "_is_stateful", False) and not target.is_recurrent):
        yield (
            f"has {', '.join(sorted(unknown)) or 'a recurrent state'}: drafts are rewound by removing cache entries, "
            f"or by states that follow a tree in families that are tested: {', '.join(sorted(FAMILIES))}"
        )
    called = FAMILIES[target.config.model_type] if target.is_recurrent and target.has_layers else ()
    modules = recurrent_modules(target.decoder) if called else []
    if missing := [name for name in called if not any(hasattr(module, name) for module in modules)]:
        yield (
            f"cannot read trees: its layers do not call {' and '.join(missing)} in transformers "
            f"{transformers.__version__}, which trees need: install another version of transformers, such as 5.24"
        )
    if target.config.model_type in _SLOT_BOUND_TYPES or getattr(target.config, "alibi", False):
        yield "derives positions from cache slots: trees need attention that depends on positions and masks only"
    attention = str(target.config._attn_implementation)  # noqa: SLF001 - no public name
    if any(kind in attention for kind in ("flash", "flex", "paged")):
        yield (
            f"was loaded with attn_implementation={attention!r}; trees need a mask of four dimensions, which "
            f"{' and '.join(ATTENTION)} take: model.set_attn_implementation('sdpa')"
        )
    places = {str(target.device), *(str(weight.device) for weight in target.model.parameters())}
    if not target.only_reads and (len(places) > 1 or "meta" in places):
        yield (
            f"has weights on {', '.join(sorted(places))}; drafts are verified on one device: load it with device=…, "
            "and with four_bit=True if it is too large"
        )
    if getattr(target.config, "use_bidirectional_attention", False) is True:
        yield "reads prompts in both directions (use_bidirectional_attention): drafts need causal attention"
    elif target.facts is None or not target.has_layers:  # of others, the model that they were made from was checked
        error = _logits_error(target)
        if not error <= 1e-2:
            yield (
                f"computes its logits in an unsupported way: they differ by {error:.3g} from lm_head(last hidden state)"
            )


def require_layers(target: "TargetModel") -> None:
    """Raises :class:`UnsupportedModel` if only embedding, last norm and lm_head are loaded."""
    if not target.has_layers:
        alone = f"only embedding, last norm and lm_head of {target.model_id} are loaded, and a text is to be read"
        raise UnsupportedModel(f"{alone}: load the whole model, as `draftheads generate` and `train --data` do")


@torch.inference_mode()
def _own_logits(target: "TargetModel") -> tuple[Tensor, Tensor]:
    """The last hidden states of four tokens (1, 4, D), and the model's own logits of them (1, 4, V)."""
    states: list[Tensor] = []
    handle = target.decoder.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state))
    try:
        probe = torch.arange(4, device=target.device)[None] % target.vocab_size
        logits = target.model(input_ids=probe, use_cache=False).logits.float()
    except AttributeError as error:
        raise UnsupportedModel(f"{target.model_id} cannot read text alone: {first_line(error)}") from error
    finally:
        handle.remove()
    return target.in_own_type(states[0]) if states else target.hidden_states(probe), logits


@torch.inference_mode()
def _logits_error(target: "TargetModel") -> float:
    """How far :meth:`logits` of the last hidden state are from the model's own, as a share of the largest."""
    hidden, expected = _own_logits(target)
    if not hidden.isfinite().all():  # sums may be too large for fp16: nothing can be said
        return 0.0
    return float((expected - target.logits(hidden).float()).abs().max()) / max(1.0, float(expected.abs().max()))


def logit_scale(target: "TargetModel") -> float:
    """The factor of a model's logits."""
    if getattr(target.config, "logits_scaling", None):  # Granite divides
        return 1.0 / float(target.config.logits_scaling)
    scales = (getattr(target.config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    scale = float(next(filter(None, scales), 1.0))  # Cohere and Falcon-H1 multiply
    return 1.0 if scale != 1.0 and target.config is not target.model.config and _is_unscaled(target) else scale


@torch.inference_mode()
def _is_unscaled(target: "TargetModel") -> bool:
    """Whether a model around the text model leaves the factor of the text model's logits out, as Aya Vision does."""
    hidden, logits = _own_logits(target)
    return bool(((target.lm_head(hidden).float() - logits).norm() <= 1e-2 * logits.norm()).item())


def recurrent_modules(decoder: Any) -> list[ModuleType]:
    """The modules of ``transformers`` with the mixers of a decoder, whose names they call."""
    names = {type(module).__module__ for module in decoder.modules()}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], CONVOLUTION)]


@contextmanager
def layer_inputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor | None]]:
    """Notes the input of each layer in the passes within the context; None where a layer was not called.

    Passes of other threads, which may use the same model, are not noted.
    """
    thread = threading.get_ident()
    inputs: list[Tensor | None] = [None] * len(layers)

    def noting(place: int) -> Any:
        # another thread may call a hook that is just being removed, and then without ``named``
        def note(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})) -> None:
            if threading.get_ident() == thread:
                inputs[place] = arguments[0] if arguments else named["hidden_states"]

        return note

    handles = [layer.register_forward_pre_hook(noting(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def use_long_rope(decoder: Any, config: Any) -> "LongRope | None":
    """A decoder's module for rotary positions if it has LongRoPE: the first call replaces transformers' own."""
    start, rotary = long_rope_start(config), getattr(decoder, "rotary_emb", None)
    if start and getattr(rotary, "rope_type", None) == "longrope" and not isinstance(rotary, LongRope):
        decoder.rotary_emb = rotary = LongRope(rotary, start)
    return rotary if isinstance(rotary, LongRope) else None


class LongRope(nn.Module):
    """Takes the place of a model's own module for rotary positions, with LongRoPE (Ding et al. 2024).

    In texts that are longer than the original length, rotary positions have other factors. Transformers chooses by the
    greatest position of a pass, so a text would depend on the other rows and on the drafts. Here each text has the
    factors of its own greatest length from its first token on.

    Args:
        rotary: the module, of kind ``longrope``.
        original: the length up to which a text is short.
    """

    rope_type = "longrope"

    def __init__(self, rotary: Any, original: int) -> None:
        super().__init__()
        self.original = original
        self.short, self.long = deepcopy(rotary), deepcopy(rotary)
        for rope, length in ((self.short, None), (self.long, original + 1)):
            rope.rope_type = "fixed"  # transformers does not change it any more
            rope.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, rotary.inv_freq.device, seq_len=length)

    def marked(self, positions: Tensor, are_long: Tensor) -> Tensor:
        """The positions in texts of which some are long. Short ones stay at their last position."""
        return torch.where(are_long, positions + _LONG, positions.clamp(max=self.original - 1))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions (b, T). A row of positions without marks is a whole text."""
        are_long = position_ids >= _LONG
        positions = torch.where(are_long, position_ids - _LONG, position_ids)
        are_long = are_long | (position_ids.masked_fill(are_long, 0) >= self.original).any(-1, keepdim=True)
        (cos, sin), (long_cos, long_sin) = self.short(x, positions), self.long(x, positions)
        return torch.where(are_long[..., None], long_cos, cos), torch.where(are_long[..., None], long_sin, sin)


def sharing_weights(model: Any) -> Any:
    """A copy of a model's modules with the same weights, packed ones included."""
    products = [module.product for module in model.modules() if isinstance(module, PackedLinear)]
    shared: list[Any] = [*model.parameters(), *model.buffers(), *products]
    return deepcopy(model, memo={id(item): item for item in shared})


class WithLora(Product):
    """X Wᵀ + b + (X Aᵀ) Bᵀ; the product by W is the base model's own, and the others are native ones if it is."""

    name = "lora"

    def __init__(self, base: Product, a: Tensor, b: Tensor) -> None:
        self.out_features, self.in_features, self.dtype = base.out_features, base.in_features, base.dtype
        self.bias = base.bias
        self.base = base
        self.low_rank = a, b  # (r, in) and (out, r) in fp32, which native passes read
        kind = Native if isinstance(base, Native) else Plain
        self._a, self._b = (kind(matrix.to(self.dtype), None) for matrix in (a, b))  # (r, in) and (out, r)

    @property
    def weight(self) -> Tensor:
        """(out, in): W + B A."""
        return torch.addmm(self.base.weight, self._b.weight, self._a.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        return self.base(rows).add_(self._b(self._a(rows)))


def with_lora(target: "TargetModel", folder: str | PathLike[str]) -> "TargetModel":
    """A model with a LoRA adapter (peft) on top. It shares all weights with the given one, which does not change.

    Args:
        target: the base model.
        folder: of the adapter. Its own tokenizer is used, if it has one.

    Raises:
        ModelNotFound: no adapter there.
        CheckpointMismatch: it was tuned for another model.
        CheckpointCorrupt: it does not fit the layers, or is damaged.
        UnsupportedModel: it changes more than linear layers, or adds tokens: merge it.
        MissingDependency: no peft.
    """
    place = user_path(folder)
    place = find_adapter(place) or place
    matrices = read_lora(target.model, place)
    check_base(place, target.model_id, target.fingerprints)
    tokenizer = adapter_tokenizer(place) or target.tokenizer
    num_embeddings = len(target.model.get_input_embeddings().weight)
    if hasattr(tokenizer, "__len__") and len(tokenizer) > num_embeddings:
        counts = f"its tokenizer has {len(tokenizer)} and {target.model_id} has embeddings for {num_embeddings}"
        raise UnsupportedModel(f"{place} adds tokens: {counts}. Merge it: `draftheads merge --adapter {place} --out …`")
    model = sharing_weights(target.model)
    add_lora(model, matrices)
    digest = hashlib.sha256(target.weights_fingerprint.encode())
    for name, pair in sorted(matrices.items()):
        digest.update(name.encode() + pair.a.numpy().tobytes() + pair.b.numpy().tobytes())
    own = digest.hexdigest()[:16]
    facts = replace(target.weight_facts(), weights_fingerprint=own, layers_fingerprint=None)
    native = None if target.native is None else native_step(model, target.windows)
    return target.changed(model, facts, native=native, tokenizer=tokenizer, model_id=str(place.resolve()))


def add_lora(model: Any, matrices: Mapping[str, LowRank]) -> None:
    """Adds low-rank products to the layers of a model, stock or with faster modules, in place; no weight changes.

    The matrices have the names of the stock model's layers.
    """
    modules = dict(model.named_modules())
    for name, pair in matrices.items():
        layer = modules[name]
        if isinstance(layer, PackedLinear):
            layer.product = WithLora(layer.product, pair.a, pair.b)
            layer.tied = None  # the adapter changes the lm_head, but not the embedding
        else:
            _hook(layer, pair)


def _hook(layer: nn.Module, pair: LowRank) -> None:
    weight = next(layer.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    a, b = (matrix.to(weight.device, dtype) for matrix in (pair.a, pair.b))

    def added(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + F.linear(F.linear(inputs[0].to(dtype), a), b).to(out.dtype)

    layer.register_forward_hook(added)
