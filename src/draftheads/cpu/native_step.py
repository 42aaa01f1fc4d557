"""All layers of a pass in one call of the native library: the tokens of all texts side by side, without padding.

It computes what :class:`draftheads.cpu.fused_modules.FusedLayer` computes, from the same weights. Every sum has an
order of its own, so the bits of a token depend neither on the other tokens of a pass nor on the shape of its tree.

Alphabet: M tokens of all texts, D hidden size, d size of a head, n layers whose inputs a drafter reads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftheads.cpu.fused_modules import FusedAttention, FusedLayer, FusedMlp, FusedNorm
from draftheads.cpu.kernels import Native, NativeInt8, PackedLinear
from draftheads.cpu.native_library import KINDS, Layer, Model, Pass, Weight, load_library
from draftheads.cpu.threads import native_threads

_ACTS = {"SiLU": 0, "SiLUActivation": 0, "PytorchGELUTanh": 1, "GELUTanh": 1}
_MOST_HEAD_SIZE = 256
_MOST_LAYERS = 800
_ROUNDED = 0.25  # how much rounding to 16 bits may change hidden states, as a share of the largest
_OTHERWISE_BUILT = (AttributeError, AssertionError, KeyError, TypeError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Texts:
    """The tokens of a pass: those of a text are neighbours.

    Args:
        rows: (b,) of the cache.
        lengths: (b,) tokens that each text has before the pass.
        counts: (b,) tokens of each text in the pass.
        depths: (M,) int32, levels below the first token of the same text.
        ancestors: (M, words) uint64: bit m says that a token sees the m-th one of its text; None: all before it.
    """

    rows: Sequence[int]
    lengths: Sequence[int]
    counts: Sequence[int]
    depths: Tensor
    ancestors: Tensor | None = None


class NativeStep:
    """The layers of a model for the native library, whose weights are those of the model's modules."""

    def __init__(self, model: Any, windows: Sequence[int]) -> None:
        """Points to the weights of a model of transformers.

        Args:
            model: with fused modules.
            windows: how many tokens a token of each layer sees; 0: all.

        Raises:
            TypeError, ValueError: it is built in another way.
        """
        decoder = model.get_decoder()
        self.embed, self.rotary, self.dtype = (
            model.get_input_embeddings(),
            decoder.rotary_emb,
            decoder.norm.weight.dtype,
        )
        self._native = load_library()
        self._held: list[Tensor] = []  # to which the structures point
        self._products: list[Native] = []  # the same
        layers = list(decoder.layers)
        if not layers or len(layers) > _MOST_LAYERS or any(type(layer) is not FusedLayer for layer in layers):
            raise TypeError("its layers are not all fused")
        self._layers = (Layer * len(layers))(*(self._layer(*pair) for pair in zip(layers, windows, strict=True)))
        first: FusedAttention = layers[0].self_attn
        norms = [module for layer in layers for module in layer.modules() if isinstance(module, FusedNorm)]
        outer = {norm.epsilon for norm in (*(n for n in norms if len(n.weight) != first.head_dim), decoder.norm)}
        inner = {norm.epsilon for norm in norms if len(norm.weight) == first.head_dim}
        sizes = {
            (part.num_heads, part.num_groups, part.head_dim, part.scaling, layer.mlp.size)
            for layer, part in ((layer, layer.self_attn) for layer in layers)
        }
        types = {self.dtype, self.embed(torch.zeros(1, dtype=torch.long)).dtype}
        types.update(product.dtype for product in self._products)
        acts = {_ACTS[type(layer.mlp.act_fn).__name__] for layer in layers}
        if len(outer) != 1 or len(inner) > 1 or len(sizes) != 1 or len(acts) != 1 or len(types) != 1:
            raise ValueError("its layers differ")
        if first.head_dim % 2 or first.head_dim > _MOST_HEAD_SIZE:
            raise ValueError(f"heads of {first.head_dim} numbers")
        self.size = len(decoder.norm.weight)
        # a number that is rounded to the other side changes the rest
        self.rounds = self.dtype != torch.float32 or any(isinstance(p, NativeInt8) for p in self._products)
        self._model = Model(
            self.size,
            first.num_heads,
            first.num_groups,
            first.head_dim,
            layers[0].mlp.size,
            len(layers),
            acts.pop(),
            KINDS[self.dtype],
            outer.pop(),
            inner.pop() if inner else 0.0,
            first.scaling,
            self._numbers(decoder.norm.scale),
            self._layers,
        )

    def cache_shape(self) -> tuple[int, int]:
        """Groups and d of the keys and values."""
        return self._model.groups, self._model.head_size

    @torch.inference_mode()
    def run(
        self, token_ids: Tensor, positions: Tensor, texts: Texts, cache: Sequence[Any], layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """One pass, which writes keys and values.

        Args:
            token_ids: (M,).
            positions: (M,).
            texts: whose tokens they are.
            cache: of each layer keys and values (rows, groups, slots, d) in the model's type, with room for them.
            layers: whose inputs are returned.

        Returns:
            h_t (M, D), and what a drafter reads: the inputs of n layers side by side (M, n·D); without any, h_t.
        """
        count, given = len(token_ids), self._model
        starts = np.cumsum([0, *texts.counts])
        _check(texts, starts, count, cache, self.dtype)
        states = self.embed(token_ids).float().contiguous()
        cos, sin = (part[0].float().contiguous() for part in self.rotary(states[None].to(self.dtype), positions[None]))
        repeats = np.array(texts.counts)
        rows, first, lengths = (
            np.repeat(np.array(values, dtype=np.int32), repeats) for values in (texts.rows, starts[:-1], texts.lengths)
        )
        keys, values = (
            (ctypes.c_void_p * len(cache))(*(getattr(c, n).data_ptr() for c in cache)) for n in ("keys", "values")
        )
        kept = np.array(layers, dtype=np.int32)
        inputs = states.new_empty(len(layers), count, self.size)
        _, groups, slots, size = cache[0].keys.shape
        self._native.draftheads_threads(native_threads())
        self._native.draftheads_pass(
            given,
            Pass(
                count,
                states.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                rows.ctypes.data,
                first.ctypes.data,
                lengths.ctypes.data,
                texts.depths.data_ptr(),
                None if texts.ancestors is None else texts.ancestors.data_ptr(),
                0 if texts.ancestors is None else texts.ancestors.shape[1],
                ctypes.addressof(keys),
                ctypes.addressof(values),
                groups * slots * size,
                slots * size,
                len(kept),
                kept.ctypes.data,
                inputs.data_ptr(),
            ),
        )
        last = states.to(self.dtype)
        return last, last if not layers else inputs.transpose(0, 1).flatten(1).to(self.dtype)

    def _layer(self, layer: Any, window: int) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        if not all(isinstance(norm, FusedNorm) for norm in norms) or not isinstance(mlp, FusedMlp):
            raise TypeError("a norm or a feed-forward part is not fused")
        heads = [None if norm is None else self._numbers(norm.scale) for norm in (attention.q_norm, attention.k_norm)]
        products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        return Layer(*map(self._weight, products), *(self._numbers(norm.scale) for norm in norms), *heads, window)

    def _weight(self, layer: nn.Module) -> Weight:
        if not isinstance(layer, PackedLinear) or not isinstance(layer.product, Native):
            raise TypeError("a product is not a native one")
        self._products.append(layer.product)
        return layer.product.given

    def __deepcopy__(self, memo: dict[int, Any]) -> "NativeStep":
        """The same one: nothing in it changes."""
        return self

    def _numbers(self, values: Tensor) -> int:
        self._held.append(values.detach().float().contiguous())
        return self._held[-1].data_ptr()


def _check(texts: Texts, starts: Any, count: int, cache: Sequence[Any], dtype: torch.dtype) -> None:
    """Raises an error in place of reading or writing other memory."""
    keys = cache[0].keys
    for part in (part for layer in cache for part in (layer.keys, layer.values)):
        if part.shape != keys.shape or part.dtype != dtype or not part.is_contiguous():
            raise ValueError(
                f"keys or values {tuple(part.shape)} of {part.dtype} are not as the first ones, of {dtype}"
            )
    rows, _, slots, _ = keys.shape
    fit = all(length + n <= slots for length, n in zip(texts.lengths, texts.counts, strict=True))
    if starts[-1] != count or not fit or not all(0 <= row < rows for row in texts.rows):
        raise ValueError(f"{count} tokens of {texts} do not fit into a cache of {rows} rows and {slots} slots")


def ancestor_bits(ancestors: Tensor, texts: Tensor, nodes: Tensor) -> Tensor:
    """(M, words) int64 of trees (B or 1, N, N) bool, for node ``nodes[m]`` of row ``texts[m]``, each (M,)."""
    packed = np.packbits(ancestors.numpy(), axis=-1, bitorder="little")  # (B or 1, N, bytes)
    packed = np.pad(packed, ((0, 0), (0, 0), (0, -packed.shape[-1] % 8)))
    bits = torch.from_numpy(np.ascontiguousarray(packed)).view(torch.int64)
    return bits[texts if len(bits) > 1 else 0, nodes].contiguous()


def native_step(model: Any, windows: Sequence[int]) -> NativeStep | None:
    """The native form of a model with fused modules, if it agrees with them on a short text; None if there is none."""
    if load_library() is None or model.device.type != "cpu":
        return None
    try:
        step = NativeStep(model, windows)
        return step if _agrees(step, model) else None
    except _OTHERWISE_BUILT:
        return None


@torch.inference_mode()
def _agrees(step: NativeStep, model: Any) -> bool:
    count = 5
    token_ids = torch.arange(count) * 7 % model.get_input_embeddings().weight.shape[0]
    expected = model.get_decoder()(input_ids=token_ids[None], use_cache=False).last_hidden_state[0].float()
    groups, size = step.cache_shape()
    depths = torch.arange(count, dtype=torch.int32)
    cache = [_OneText(torch.zeros(1, groups, count, size, dtype=step.dtype)) for _ in model.get_decoder().layers]
    out, _ = step.run(token_ids, torch.arange(count), Texts([0], [0], [count], depths), cache)
    if out.shape != expected.shape:
        return False
    rounding = _ROUNDED if step.rounds else 1e-4
    return float((out.float() - expected).abs().max()) <= rounding * float(expected.abs().max())


class _OneText:
    def __init__(self, keys: Tensor) -> None:
        self.keys, self.values = keys, keys.clone()
