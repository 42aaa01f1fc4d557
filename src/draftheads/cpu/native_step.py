"""All layers of a pass in one call of the native library: the tokens of all texts side by side, without padding.

Every sum has an order of its own, so the bits of a token depend neither on the other tokens of a pass nor on the shape
of its tree. Layers are those of Llama: norm, attention, norm, feed-forward part. Modules that have the names of Llama's
and compute something else are noticed when the model is loaded (:mod:`draftheads.runners.structure`).

Alphabet: M tokens of all texts, D hidden size, d size of a head, n layers whose inputs a drafter reads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftheads.cpu.kernels import Native, NativeInt4, NativeInt8, PackedLinear, table_of
from draftheads.cpu.native_library import KINDS, Layer, Model, Pass, Weight, load_library
from draftheads.cpu.optimise import HalfEmbedding, RoundedEmbedding
from draftheads.cpu.threads import native_threads

_ACTS = {"SiLU": 0, "SiLUActivation": 0, "PytorchGELUTanh": 1, "GELUTanh": 1}
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MOST_HEAD_SIZE = 256
_MOST_LAYERS = 800
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose cosines depend on the position alone
_FIRST_POSITIONS = 1024
OTHERWISE_BUILT = (AttributeError, AssertionError, KeyError, TypeError, RuntimeError, ValueError)


@dataclass(frozen=True)
class SequenceBatch:
    """The tokens of a pass: those of a text are neighbours.

    Args:
        memory: of each of b texts keys and values, (layers, 2, groups, slots, d) in the step's ``cache_dtype``.
        lengths: (b,) tokens that each text has before the pass.
        counts: (b,) tokens of each text in the pass.
        depths: (M,) int32, levels below the first token of the same text.
        ancestors: (M, words) uint64: bit m says that a token sees the m-th one of its text; None: all before it.
        are_long: (b,) texts with the long factors of LongRoPE, for models that have it.
    """

    memory: Sequence[Tensor]
    lengths: Sequence[int]
    counts: Sequence[int]
    depths: Tensor
    ancestors: Tensor | None = None
    are_long: Sequence[bool] | None = None


class NativeStep:
    """The layers of a model for the native library, whose weights are those of the model's modules."""

    def __init__(self, model: Any, windows: Sequence[int]) -> None:
        """Points to the weights of a model of transformers.

        Args:
            model: whose linear layers are native products.
            windows: how many tokens a token of each layer sees; 0: all.
        """
        decoder = model.get_decoder()
        self.dtype = decoder.norm.weight.dtype
        embedding = model.get_input_embeddings()
        if type(embedding) not in (nn.Embedding, HalfEmbedding, RoundedEmbedding):
            raise TypeError(f"its embedding is a {type(embedding).__name__}")
        is_rounded = isinstance(embedding, RoundedEmbedding)
        self._embedding = embedding.product if is_rounded else embedding.weight.detach()
        table_kind, *table = table_of(self._embedding)
        self._turns = _Turns(decoder.rotary_emb, self.dtype)
        self._native = load_library()
        self._held: list[Tensor] = []  # to which the structures point
        self._products: list[Native] = []  # the same
        layers = list(decoder.layers)
        if not layers or len(layers) > _MOST_LAYERS:
            raise ValueError("this number of layers")
        self._layers = (Layer * len(layers))(*(self._layer(*pair) for pair in zip(layers, windows, strict=True)))
        first = layers[0].self_attn
        norms = [part for layer in layers for part in (layer.input_layernorm, layer.post_attention_layernorm)]
        head_norms = [norm for layer in layers for norm in _head_norms(layer.self_attn) if norm is not None]
        outer, inner = {_epsilon(norm) for norm in (*norms, decoder.norm)}, {_epsilon(norm) for norm in head_norms}
        sizes = {
            (*_heads(part.self_attn), part.self_attn.head_dim, part.self_attn.scaling, part.mlp.gate_proj.out_features)
            for part in layers
        }
        types = {self.dtype, *(product.dtype for product in self._products)}
        acts = {_ACTS[type(layer.mlp.act_fn).__name__] for layer in layers}
        if len(outer) != 1 or len(inner) > 1 or len(sizes) != 1 or len(acts) != 1 or len(types) != 1:
            raise ValueError("its layers differ")
        if first.head_dim % 2 or first.head_dim > _MOST_HEAD_SIZE or self._turns.size != first.head_dim:
            raise ValueError(f"heads of {first.head_dim} numbers, of which {self._turns.size} are turned")
        self.size = len(decoder.norm.weight)
        are_rounded = any(isinstance(product, NativeInt8 | NativeInt4) for product in self._products)
        # a number that is rounded to the other side changes the rest
        self.rounds = are_rounded or self.dtype != torch.float32
        # int8 and int4 round what keys and values are computed from, so they need no more than 16 bits
        self.cache_dtype = torch.float16 if are_rounded else self.dtype
        self._model = Model(
            self.size,
            *_heads(first),
            first.head_dim,
            layers[0].mlp.gate_proj.out_features,
            len(layers),
            acts.pop(),
            KINDS[self.cache_dtype],
            KINDS[self.dtype],
            table_kind,
            model.get_output_embeddings().out_features if is_rounded else len(self._embedding),
            outer.pop(),
            inner.pop() if inner else 0.0,
            first.scaling,
            self._numbers(decoder.norm.weight),
            self._layers,
            *table,
        )

    def memory(self, slots: int) -> Tensor:
        """Memory for the keys and values of so many tokens of a text, zeros (layers, 2, groups, slots, d)."""
        model = self._model
        return torch.zeros(model.layers, 2, model.groups, slots, model.head_size, dtype=self.cache_dtype)

    @property
    def bytes_per_token(self) -> int:
        model = self._model
        return int(2 * model.layers * model.groups * model.head_size * self.cache_dtype.itemsize)

    def run(
        self, token_ids: Tensor, texts: SequenceBatch, layers: Sequence[int] = (), *, last_position: int
    ) -> tuple[Tensor, Tensor]:
        """One pass, which writes keys and values.

        Args:
            token_ids: (M,) int64.
            texts: whose tokens they are, with memory for them.
            layers: whose inputs are returned.
            last_position: at which longer texts stay.

        Returns:
            h_t (M, D), and what a drafter reads: the inputs of n layers side by side (M, n·D); without any, h_t.
        """
        token_ids, depths = (
            token_ids.contiguous(),
            texts.depths.contiguous(),
        )  # they are read as memory
        count, slots = len(token_ids), self._checked_slots(texts, len(token_ids))
        last = torch.empty(count, self.size, dtype=self.dtype)
        inputs = torch.empty(count, len(layers) * self.size, dtype=self.dtype) if layers else last
        cos, sin, of_tokens = self._turns.of(texts, last_position)
        held = [np.array(values, dtype=np.int32) for values in (slots, texts.lengths, texts.counts, layers)]
        slots_at, lengths, counts, kept = (array.ctypes.data for array in held)
        memory = (ctypes.c_void_p * len(texts.memory))(*(part.data_ptr() for part in texts.memory))
        ancestors = texts.ancestors
        self._native.draftheads_threads(native_threads())
        has_failed = self._native.draftheads_pass(
            self._model,
            Pass(
                tokens=count,
                texts=len(held[0]),
                words=0 if ancestors is None else ancestors.shape[1],
                kept=len(layers),
                ids=token_ids.data_ptr(),
                memory=ctypes.addressof(memory),
                slots=slots_at,
                lengths=lengths,
                counts=counts,
                depths=depths.data_ptr(),
                ancestors=None if ancestors is None else ancestors.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                of_tokens=of_tokens,
                last_position=last_position,
                kept_layers=kept,
                kept_states=inputs.data_ptr(),
                states=last.data_ptr(),
            ),
        )
        if has_failed:
            raise IndexError(f"a token is outside the vocabulary, 0 to {self._model.vocab - 1}")
        return last, inputs

    def _checked_slots(self, texts: SequenceBatch, count: int) -> list[int]:
        """An error in place of reading or writing other memory."""
        model, slots = self._model, [part.shape[3] for part in texts.memory]
        shape = model.layers, 2, model.groups, model.head_size
        are_ours = all(
            (*part.shape[:3], part.shape[4]) == shape and part.dtype == self.cache_dtype and part.is_contiguous()
            for part in texts.memory
        )
        fit = all(0 <= n <= most - old for n, old, most in zip(texts.counts, texts.lengths, slots, strict=True))
        if not (are_ours and fit and sum(texts.counts) == count):
            shapes = [(tuple(part.shape), part.dtype) for part in texts.memory]
            raise ValueError(
                f"{count} tokens, of texts {texts.counts} after {texts.lengths}, do not fit into memory of {shapes}; "
                f"this model's is {shape[:3]}, slots, {shape[3]} of {self.cache_dtype}"
            )
        return slots

    def _layer(self, layer: Any, window: int) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if {name for name, _ in layer.named_children()} != _PARTS or list(attention.parameters(recurse=False)):
            raise TypeError("it has other parts than Llama's layers")
        qkv, gate_up = (Weight * 3), (Weight * 2)
        q, k, v, out = (self._weight(getattr(attention, name)) for name in _PROJECTIONS)
        heads = [None if norm is None else self._numbers(norm.weight) for norm in _head_norms(attention)]
        norms = [self._numbers(norm.weight) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        gate, up, down = (self._weight(part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return Layer(qkv(q, k, v), out, gate_up(gate, up), down, *norms, *heads, window)

    def _weight(self, layer: nn.Module) -> Weight:
        product = getattr(layer, "product", None)
        low_rank: tuple[Tensor, Tensor] | None = getattr(product, "low_rank", None)  # of LoRA beside its base
        if low_rank is not None:
            product = product.base  # type: ignore[union-attr]
        if not isinstance(layer, PackedLinear) or not isinstance(product, Native):
            raise TypeError("a product is not a native one")
        self._products.append(product)
        if low_rank is None:
            return product.given
        given = Weight.from_buffer_copy(product.given)
        kind = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        pair = [matrix.detach().to(kind).contiguous() for matrix in low_rank]
        self._held += pair
        given.low_a, given.low_b = (matrix.data_ptr() for matrix in pair)
        given.rank, given.low_kind = len(pair[0]), KINDS[kind]
        return given

    def __deepcopy__(self, memo: dict[int, Any]) -> "NativeStep":
        """The same one: nothing in it changes."""
        return self

    def _numbers(self, values: Tensor) -> int:
        self._held.append(values.detach().float().contiguous())
        return self._held[-1].data_ptr()


def _heads(attention: Any) -> tuple[int, int]:
    """Of queries, and of keys."""
    return attention.q_proj.out_features // attention.head_dim, attention.k_proj.out_features // attention.head_dim


def _head_norms(attention: Any) -> list[Any]:
    """Of queries and of keys, each head alone; None where there is none."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None and norm.weight.shape != (attention.head_dim,) for norm in norms):
        raise ValueError("its norms of queries and keys are not those of heads")
    return norms


def _epsilon(norm: Any) -> float:
    """Norms differ in its name."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class _Turns:
    """Cosines and sines of the positions, as the model's own module computes them."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        self._rotary, self._dtype = rotary, dtype
        # others depend on the length of the text
        self._is_fixed = getattr(rotary, "rope_type", None) in _FIXED_ROPES
        self._table = self._computed(torch.arange(1))
        self.size = self._table[0].shape[-1]

    def of(self, texts: SequenceBatch, last_position: int) -> tuple[Tensor, Tensor, bool]:
        """(P, d) each; P are the tokens if the last value is true, or positions from 0 on."""
        longest = max(length + count for length, count in zip(texts.lengths, texts.counts, strict=True))
        needed = min(longest, last_position + 1)
        if not self._is_fixed:
            counts = torch.tensor(texts.counts)
            positions = texts.depths + torch.tensor(texts.lengths).repeat_interleave(counts)
            positions = positions.clamp(max=last_position)
            if texts.are_long is not None:
                positions = self._rotary.marked(positions, torch.tensor(texts.are_long).repeat_interleave(counts))
            return *self._computed(positions), True
        if needed > len(self._table[0]):
            self._table = self._computed(torch.arange(max(_FIRST_POSITIONS, 2 * needed)))
        return *self._table, False

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = self._rotary(torch.empty(1, 1, 1, dtype=self._dtype), positions[None])
            return cos[0].float().contiguous(), sin[0].float().contiguous()


def ancestor_bits(ancestors: Tensor, texts: Tensor, nodes: Tensor) -> Tensor:
    """(M, words) int64 of trees (B or 1, N, N) bool, for node ``nodes[m]`` of row ``texts[m]``, each (M,)."""
    packed = np.packbits(ancestors.numpy(), axis=-1, bitorder="little")  # (B or 1, N, bytes)
    whole = np.zeros((*packed.shape[:2], -(-packed.shape[2] // 8) * 8), dtype=np.uint8)
    whole[..., : packed.shape[2]] = packed
    bits = torch.from_numpy(whole).view(torch.int64)
    return bits[texts if len(bits) > 1 else 0, nodes].contiguous()


def native_step(model: Any, windows: Sequence[int]) -> NativeStep | None:
    """The native form of a model whose linear layers are packed; None if there is none."""
    if load_library() is None or model.device.type != "cpu":
        return None
    try:
        return NativeStep(model, windows)
    except OTHERWISE_BUILT:
        return None
