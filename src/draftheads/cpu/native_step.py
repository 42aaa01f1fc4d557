"""All layers of a pass in one call of the native library: the tokens of all texts side by side, without padding.

Every sum has an order of its own, so the bits of a token depend neither on the other tokens of a pass nor on the shape
of its tree. What a layer computes is read from the names of its parts (:mod:`draftheads.cpu.layer_parts`).

Alphabet: M tokens of all texts, D hidden size, d size of a head, n layers whose inputs a drafter reads.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftheads.cpu import native_library as structures
from draftheads.cpu.kernels import (
    HalfEmbedding,
    Native,
    NativeInt4,
    NativeInt8,
    PackedLinear,
    RoundedEmbedding,
    table_of,
)
from draftheads.cpu.layer_parts import (
    Heads,
    LayerParts,
    Mixing,
    Outputs,
    PackedExperts,
    Recurrence,
    Sizes,
    common,
    norm_numbers,
    parts_of,
)
from draftheads.cpu.native_library import (
    KINDS,
    MOST_PRODUCTS,
    Experts,
    Gate,
    Layer,
    Model,
    Norm,
    Pass,
    SequenceBatch,
    StatesOfPass,
    TextStates,
    Weight,
    addresses_of,
    load_library,
    native_threads,
)

_MOST_HEAD_SIZE = 256
_MOST_LAYERS = 800
_MOST_OUTPUTS = 32 * ((1 << 13) - 8)  # of products that read the same rows
FINAL_NORMS = ("norm", "final_layer_norm", "ln_f", "final_layernorm", "embedding_norm", "norm_f")
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose cosines depend on the position alone
_FIRST_POSITIONS = 1024
_MOST_TAPS = 16
_ANY_POSITION = (1 << 31) - 1
OTHERWISE_BUILT = (AttributeError, AssertionError, KeyError, TypeError, RuntimeError, ValueError)


@dataclass(frozen=True)
class DescribedLayers:
    """Layers in place of a model of transformers. What they read are vectors, not tokens."""

    layers: Sequence[LayerParts]
    norm: nn.Module  # the final one
    rotary_emb: Any  # as in transformers; None: nothing is turned
    config: None = None

    def get_decoder(self) -> "DescribedLayers":
        return self

    def get_input_embeddings(self) -> None:
        return None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.norm.parameters()


class NativeStep:
    """The layers of a model for the native library, whose weights are those of the model's modules."""

    def __init__(self, model: Any, windows: Sequence[int]) -> None:
        """Points to the weights of a model of transformers.

        Args:
            model: whose linear layers are native products; or :class:`DescribedLayers`.
            windows: how many tokens a token of each layer sees; 0: all.
        """
        decoder = model.get_decoder()
        final = getattr(decoder, next((name for name in FINAL_NORMS if hasattr(decoder, name)), "norm"))
        self.dtype, self.size = final.weight.dtype, len(final.weight)
        embedding = model.get_input_embeddings()
        if embedding is None:
            self._embedding: Any = torch.zeros(0, self.size)
        elif isinstance(embedding, nn.Embedding | HalfEmbedding | RoundedEmbedding):
            is_rounded = isinstance(embedding, RoundedEmbedding)
            self._embedding = embedding.product if is_rounded else embedding.weight.detach()
        else:
            raise TypeError(f"its embedding is a {type(embedding).__name__}")
        self._native = load_library()
        self._held: list[Any] = []  # to which the structures point
        self._products: list[Native] = []  # the same
        layers = list(decoder.h if hasattr(decoder, "h") else decoder.layers)
        if not layers or len(layers) > _MOST_LAYERS:
            raise ValueError("this number of layers")
        parts = [layer if isinstance(layer, LayerParts) else parts_of(layer, decoder.config) for layer in layers]
        self._heads = common([part.heads for part in parts if part.heads is not None], Heads())
        self._mixing = common([part.recurrence.mixing for part in parts if part.recurrence is not None], Mixing())
        self._turns = _Turns(decoder, [part.turns for part in parts], self.dtype)
        self._caches = self._recurrences = 0  # layers with keys and values, and with states
        self._layers = (Layer * len(layers))(
            *(self._layer(*each) for each in zip(parts, windows, self._turns.of_layers, strict=True))
        )
        gate = common([part.sizes.gate for part in parts if part.sizes.gate is not None], (0, 0.0, 0.0))
        chosen = common([part.sizes.chosen for part in parts if part.experts is not None], 0)
        sizes = common([replace(part.sizes, gate=gate, chosen=chosen) for part in parts], None)
        types = {self.dtype, *(product.dtype for product in self._products)}
        if len(types) != 1:
            raise ValueError("its layers differ")
        turned, size = self._turns.size, self._heads.head_size
        if self._caches and (size > _MOST_HEAD_SIZE or turned > size):
            raise ValueError(f"heads of {size} numbers, of which {turned} are turned")
        are_rounded = any(isinstance(product, NativeInt8 | NativeInt4) for product in self._products)
        # a number that is rounded to the other side changes the rest
        self.rounds = are_rounded or self.dtype != torch.float32
        # int8 and int4 round what keys and values are computed from, so they need no more than 16 bits
        self.cache_dtype = torch.float16 if are_rounded else self.dtype
        self._model = self._described(sizes, final, embedding, getattr(decoder, "wpe", None))
        self._sizes = self._native.draftheads_states_size(self._model), self._native.draftheads_record_size(self._model)
        self._model.embedding_scale *= float(getattr(decoder, "embedding_multiplier", 1.0))

    def memory(self, slots: int, old: Tensor | None = None) -> Tensor:
        """Memory for the keys and values of so many tokens of a text, (layers, 2, groups, slots, d).

        Zeros, or first what ``old`` has; that itself, where it has as many slots.
        """
        model = self._model
        if old is not None and old.shape[3] >= slots:
            return old
        new = torch.zeros(model.caches, 2, model.groups, slots, model.head_size, dtype=self.cache_dtype)
        if old is not None:
            new[..., : old.shape[3], :] = old
        return new

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_token(self) -> int:
        model = self._model
        return int(2 * model.caches * model.groups * model.head_size * self.cache_dtype.itemsize)

    @property
    def has_states(self) -> bool:
        """Whether it has recurrent layers."""
        return self._recurrences > 0

    def states(self) -> TextStates:
        """Of an empty text."""
        states, record = (torch.zeros(self._recurrences, size) for size in self._sizes)
        return TextStates(states, record[:, None][:, :0], [])

    def bytes_of_states(self, num_nodes: int) -> int:
        """Memory of the states of a text, and of the records of so many nodes."""
        states, record = self._sizes
        return int(4 * self._recurrences * (states + num_nodes * record))

    def settle(self, texts: Sequence[TextStates]) -> None:
        """Moves states behind the accepted nodes."""
        none = [0] * len(texts)
        batch = SequenceBatch(
            [self.memory(0)] * len(texts), none, none, torch.zeros(0, dtype=torch.int32), states=texts
        )
        self.run(torch.zeros(0, dtype=torch.long), batch, last_position=0)

    def run(
        self, tokens: Tensor, texts: SequenceBatch, layers: Sequence[int] = (), *, last_position: int = _ANY_POSITION
    ) -> tuple[Tensor, Tensor]:
        """One pass, which writes keys and values.

        Args:
            tokens: ids (M,) int64; or of :class:`DescribedLayers` what the first one reads, (M, D).
            texts: whose tokens they are, with memory for them.
            layers: whose inputs are returned; the number of layers stands for what enters the final norm.
            last_position: at which longer texts stay.

        Returns:
            h_t (M, D), and what a drafter reads: the inputs of n layers side by side (M, n·D); without any, h_t.
        """
        tokens, depths = tokens.contiguous(), texts.depths.contiguous()  # they are read as memory
        count, slots, model, token_ids = len(tokens), self._checked_slots(texts, len(tokens)), self._model, tokens
        if tokens.dim() > 1:  # a table of which each token is a row
            model, token_ids = Model.from_buffer_copy(model), torch.arange(count)
            model.embedding_kind, model.embedding, model.embedding_smooth = table_of(tokens)
            model.vocab = count
        last = torch.empty(count, self.size, dtype=self.dtype)
        inputs = torch.empty(count, len(layers) * self.size, dtype=self.dtype) if layers else last
        turns, of_tokens = self._turns.of(texts, last_position)
        held = [np.array(values, dtype=np.int32) for values in (slots, texts.lengths, texts.counts, layers)]
        slots_at, lengths, counts, kept = (array.ctypes.data for array in held)
        memory = addresses_of(texts.memory)
        ancestors = texts.ancestors
        moved = StatesOfPass(texts.states, texts.counts, writes=ancestors is not None) if texts.states else None
        self._native.draftheads_threads(native_threads())
        failure = self._native.draftheads_pass(
            model,
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
                cos=turns[0].data_ptr(),
                sin=turns[1].data_ptr(),
                num_turns=turns.shape[2],
                of_tokens=of_tokens,
                last_position=last_position,
                drafted=texts.drafted,
                kept_layers=kept,
                kept_states=inputs.data_ptr(),
                states=last.data_ptr(),
                **(moved.fields if moved else {}),
            ),
        )
        if failure == 1:
            raise IndexError(f"a token is outside the vocabulary, 0 to {self._model.vocab - 1}")
        if failure:
            raise IndexError(f"a position of {max(texts.lengths)} + {int(depths.max())} has no entry")
        if moved:
            moved.done()
        return last, inputs

    def _checked_slots(self, texts: SequenceBatch, count: int) -> list[int]:
        """An error in place of reading or writing other memory."""
        model, slots = self._model, [part.shape[3] for part in texts.memory]
        if len(texts.states) != len(texts.memory) * self.has_states:
            raise ValueError(f"{len(texts.states)} states, and memory of {len(texts.memory)}")
        for text in texts.states:
            forms = [
                (len(part), part.shape[-1], part.dtype, part.is_contiguous()) for part in (text.states, text.records)
            ]
            ours = [(self._recurrences, size, torch.float32, True) for size in self._sizes]
            if forms != ours or any(not 0 <= node < text.records.shape[1] for node in text.accepted):
                raise ValueError(f"states are {forms}, of which {text.accepted} are accepted; this model's are {ours}")
        shape = model.caches, 2, model.groups, model.head_size
        are_ours = all(
            (*part.shape[:3], part.shape[4]) == shape and part.dtype == self.cache_dtype and part.is_contiguous()
            for part in texts.memory
        )
        before = [length + texts.drafted for length in texts.lengths]
        fit = all(0 <= n <= most - old for n, old, most in zip(texts.counts, before, slots, strict=True))
        if not (are_ours and fit and sum(texts.counts) == count):
            shapes = [(tuple(part.shape), part.dtype) for part in texts.memory]
            raise ValueError(
                f"{count} tokens, of texts {texts.counts} after {before}, do not fit into memory of {shapes}; "
                f"this model's is {shape[:3]}, slots, {shape[3]} of {self.cache_dtype}"
            )
        return slots

    def _described(self, sizes: Sizes, final: Any, embedding: Any, positions: Any) -> Model:
        own = self._heads
        heads, groups, size = own.heads, own.groups, own.head_size
        queries = heads * size * (1 + own.has_gates)
        places = queries, queries + groups * size, size * (1 + own.has_gates), size
        if own.is_interleaved:
            places = size, 2 * size, 3 * size, 3 * size
        vocab = self._embedding.out_features if isinstance(self._embedding, NativeInt8) else len(self._embedding)
        table_kind, *table = table_of(self._embedding)
        return Model(
            *(self.size, heads, groups, size, self._turns.size, *places, len(self._layers)),
            *(KINDS[self.cache_dtype], KINDS[self.dtype], table_kind, vocab),
            *(sizes.is_parallel, self._turns.are_neighbours, own.norms_whole, own.has_gates, self._caches),
            *(own.scaling, own.cap, float(getattr(embedding, "embed_scale", 1.0)), sizes.residual_scale),
            Gate(*(sizes.gate or ())),
            self._norm(final, self.size),
            self._layers,
            *table,
            *((None, 0) if positions is None else (self._numbers(positions.weight), len(positions.weight))),
            self._recurrences,
            structures.Mixing(*astuple(self._mixing)),
        )

    def _layer(self, parts: LayerParts, window: int, turns: int) -> Layer:
        heads = self._heads
        widths = [heads.head_size * (n if heads.norms_whole else 1) for n in (heads.heads, heads.groups)]
        norms = [self._norm(norm, self.size) for norm in parts.norms]
        head_norms = map(self._norm, parts.head_norms, widths)
        qkv, rest = ([self._weight(part) for part in of] for of in (parts.qkv, parts.feed_forward))
        out = Weight() if parts.out is None else self._weight(parts.out)
        *inner, down = rest or [Weight(), Weight()]
        of_recurrence = [self._weight(part) for part in parts.recurrence.products] if parts.recurrence else []
        recurrence = self._recurrence(parts.recurrence, of_recurrence, qkv) if parts.recurrence else None
        if parts.heads is not None:
            self._check_sizes(qkv, out)
            self._caches += 1
        if rest:
            self._check_inner(inner, down)
        return Layer(
            (Weight * MOST_PRODUCTS)(*qkv, *of_recurrence),
            out,
            (Weight * 2)(*inner),
            down,
            *norms,
            *head_norms,
            None if parts.sinks is None else self._numbers(parts.sinks),
            None if parts.experts is None else self._experts(parts, parts.experts),
            window,
            turns,
            recurrence,
            self._caches - 1,
        )

    def _recurrence(self, parts: Recurrence, products: Sequence[Weight], others: Sequence[Weight]) -> Any:
        out, before = self._weight(parts.out), sum(other.out for other in others)
        mixing, heads = parts.mixing, parts.mixing.groups * parts.mixing.heads
        channels = mixing.groups * (2 * mixing.rows + mixing.heads * mixing.values)
        sizes = (mixing.rows, mixing.rows, *2 * [mixing.heads * mixing.values], *2 * [mixing.heads])
        ends = [first + (mixing.groups - 1) * step + n for (first, step), n in zip(parts.places, sizes, strict=True)]
        outputs = sum(part.out for part in products)
        fit = {part.in_ for part in products} == {self.size} and (out.in_, out.out) == (
            heads * mixing.values,
            self.size,
        )
        norm, epsilon = parts.norm or (torch.ones(heads * mixing.values), 0.0)
        of_heads = [part for part in (parts.decay, parts.step_bias, parts.skip) if part is not None]
        fit &= parts.taps.shape == (mixing.taps, channels) and norm.shape == (heads * mixing.values,)
        fit &= all(part.shape == (heads,) for part in of_heads) and max(ends) <= outputs
        fit &= not mixing.normed or (heads * mixing.values) % mixing.normed == 0
        if not fit or before + outputs > _MOST_OUTPUTS or not 0 < mixing.taps <= _MOST_TAPS:
            raise ValueError(f"a recurrence of {mixing} and outputs of {[part.out for part in products]}")
        numbers = (parts.taps, parts.tap_bias, parts.decay, parts.step_bias, parts.skip)
        places = [structures.Place(before + first, step) for first, step in parts.places]
        held = structures.Recurrence(
            out,
            *(None if part is None else self._numbers(part) for part in numbers),
            Norm(self._numbers(norm), None, epsilon),
            (structures.Place * len(places))(*places),
            self._recurrences,
        )
        self._recurrences += 1
        self._held.append(held)
        return ctypes.pointer(held)

    def _check_sizes(self, qkv: Sequence[Weight], out: Weight) -> None:
        """The library takes them for granted."""
        own = self._heads
        heads, groups, size = own.heads, own.groups, own.head_size
        outputs = [heads * size * (1 + own.has_gates), groups * size, groups * size]
        fit = groups > 0 and heads % groups == 0 and (heads == groups or not own.is_interleaved)
        fit &= [part.out for part in qkv] == (outputs if len(qkv) == 3 else [sum(outputs)])
        fit &= (out.in_, out.out) == (heads * size, self.size) and {part.in_ for part in qkv} == {self.size}
        if not fit or sum(outputs) > _MOST_OUTPUTS:
            given = ", ".join(str(part.out) for part in qkv)
            raise ValueError(f"outputs of {given} and {out.out} for {heads} and {groups} heads of {size}")

    def _check_inner(self, inner: Sequence[Weight], down: Weight) -> None:
        outputs = {part.out for part in inner}
        fits = {part.in_ for part in inner} == {self.size} == {down.out} and outputs == {down.in_}
        if not fits or down.in_ > _MOST_OUTPUTS:
            raise ValueError(f"inner sizes of {', '.join(map(str, sorted(outputs)))} and {down.in_}")

    def _experts(self, parts: LayerParts, experts: PackedExperts) -> Any:
        count, router = experts.num_experts, parts.router
        each = [*(tuple(map(Outputs, experts.expert(number))) for number in range(count)), parts.shared]
        held = [[self._weight(part) for part in one] for one in each if one]
        whole = [one if len(one) == 3 else [one[0], Weight(), one[1]] for one in held]
        weights = (Weight * (3 * len(whole)))(*(part for one in whole for part in one))
        forms = {(place % 3, one.kind, one.inputs, one.out, one.in_) for place, one in enumerate(weights[: 3 * count])}
        if len(forms) != 3 or router.top_k > count or tuple(router.weight.shape) != (count, self.size):
            raise ValueError("its experts differ")
        for first in (0, 3 * count)[: 2 if parts.shared else 1]:
            self._check_inner([part for part in weights[first : first + 2] if part.out], weights[first + 2])
        gate = None if parts.shared_gate is None else parts.shared_gate.weight
        if gate is not None and gate.shape != (1, self.size):
            raise ValueError("the shared expert has several gates")
        bias, is_lfm2 = getattr(router, "bias", None), hasattr(router, "use_expert_bias")
        are_sigmoids = is_lfm2 or hasattr(router, "e_score_correction_bias")
        if getattr(router, "num_group", 1) != getattr(router, "topk_group", 1):
            raise ValueError("experts are chosen among those of some groups")
        of_layer = Experts(
            weights,
            self._numbers(router.weight),
            None if bias is None else self._numbers(bias),
            None if parts.choice_bias is None else self._numbers(parts.choice_bias),
            None if gate is None else self._numbers(gate),
            count,
            router.top_k + bool(parts.shared),
            not getattr(router, "norm_topk_prob", True),
            bool(parts.shared),
            are_sigmoids,
            1e-6 if is_lfm2 else 1e-20,
            float(router.routed_scaling_factor) if are_sigmoids else 1.0,
        )
        self._held += [weights, of_layer]
        return ctypes.pointer(of_layer)

    def _norm(self, norm: Any, size: int) -> Norm:
        if norm is None:
            return Norm()
        scale, shift, epsilon, is_centred = norm_numbers(norm)
        if scale.shape != (size,):
            raise ValueError(f"a norm of {len(scale)} numbers where there are {size}")
        return Norm(self._numbers(scale), None if shift is None else self._numbers(shift), epsilon, is_centred)

    def _weight(self, part: Outputs) -> Weight:
        layer = part.layer
        product = getattr(layer, "product", None)
        low_rank: tuple[Tensor, Tensor] | None = getattr(product, "low_rank", None)  # of LoRA beside its base
        if low_rank is not None:
            product = product.base  # type: ignore[union-attr]
        if not isinstance(layer, PackedLinear) or not isinstance(product, Native):
            raise TypeError("a product is not a native one")
        if part.count is not None:
            product = product.part(part.first, part.count)
            low_rank = low_rank and (low_rank[0], low_rank[1][part.first : part.first + part.count])
        self._products.append(product)
        given = Weight.from_buffer_copy(product.given)
        if not isinstance(part.factor, float) or part.factor * part.input_factor != 1.0:
            factors = torch.as_tensor(part.factor).flatten().expand(given.out)
            given.scales = self._numbers(factors * part.input_factor)
            given.bias = None if product.bias is None else self._numbers(product.bias * factors)
        if low_rank is None:
            return given
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
        held = values.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()


class _Turns:
    """Cosines and sines of the positions, as the model's own module computes them: a table for each kind of layer."""

    def __init__(self, decoder: Any, layers: Sequence[bool], dtype: torch.dtype) -> None:
        self._rotary: Any = getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))  # LFM2-MoE's
        self._dtype = dtype
        self.of_layers, self.size, self.are_neighbours = [-1] * len(layers), 0, False
        self._kinds: list[tuple[str, ...]] = []
        if self._rotary is None:
            self._is_fixed, self._tables = True, torch.zeros(2, 1, 1, 0)
            return
        kinds: list[tuple[str, ...]] = [()] * len(layers)
        if hasattr(self._rotary, "layer_types"):
            kinds = [(kind,) for kind in decoder.config.layer_types]
        self._kinds = sorted(set(kinds))
        self.of_layers = [self._kinds.index(kind) if turns else -1 for kind, turns in zip(kinds, layers, strict=True)]
        types = self._rotary.rope_type
        # others depend on the length of the text
        self._is_fixed = {*types.values()} <= {*_FIXED_ROPES} if isinstance(types, dict) else types in _FIXED_ROPES
        self._is_half = False  # numbers of one half only
        few = self._computed(torch.arange(4))[0, 0]
        half = few.shape[-1] // 2
        self.are_neighbours = bool(torch.equal(few[:, ::2], few[:, 1::2]) and half > 1)
        self._is_half = not self.are_neighbours and not torch.equal(few[:, :half], few[:, half:])
        self._tables = self._computed(torch.arange(1))
        self.size = self._tables.shape[-1]

    def of(self, texts: SequenceBatch, last_position: int) -> tuple[Tensor, bool]:
        """(2, tables, P, d'): P are the tokens if the second value is true, or positions from 0 on."""
        longest = max(map(add, texts.lengths, texts.counts)) + texts.drafted
        needed = min(longest, last_position + 1)
        if not self._is_fixed:
            counts = torch.tensor(texts.counts)
            positions = texts.depths + torch.tensor(texts.lengths).repeat_interleave(counts)
            positions = positions.clamp(max=last_position)
            if texts.are_long is not None:
                positions = self._rotary.marked(positions, torch.tensor(texts.are_long).repeat_interleave(counts))
            return self._computed(positions), True
        if self.size and needed > self._tables.shape[2]:
            self._tables = self._computed(torch.arange(max(_FIRST_POSITIONS, 2 * needed)))
        return self._tables, False

    def _computed(self, positions: Tensor) -> Tensor:
        x = torch.empty(1, 1, 1, dtype=self._dtype)
        with torch.inference_mode():
            pairs = [self._rotary(x, positions[None], *kind) for kind in self._kinds]
            table = torch.stack([torch.cat([pair[place] for pair in pairs]).float() for place in range(2)])
        return torch.cat([table, table], -1) if self._is_half else table


def native_step(model: Any, windows: Sequence[int]) -> NativeStep | None:
    """The native form of a model whose linear layers are packed; None if there is none."""
    if load_library() is None or any(weight.device.type != "cpu" for weight in model.parameters()):
        return None
    try:
        return NativeStep(model, windows)
    except OTHERWISE_BUILT:
        return None
