"""Products of linear layers on a CPU. Pure functions of tensors, without global state.

A *product* stores one weight in the format of its kernel and multiplies rows by it: (n, in) -> (n, out). Those of the
native library sum every output in the same order, so the bits of a row do not depend on the other rows.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.native_library import BLOCK, INT4, KINDS, Weight, load_library, native_threads
from draftheads.errors import InvalidSettings
from draftheads.utils.machine import Environment

SMOOTHING = 0.7  # α; of 0.35, 0.5, 0.65 and 0.8 the last two have the least loss (research/LOG.md)
_PART_SIZE = 2**22  # numbers that are converted at a time
_SAVED = ("out_features", "in_features", "dtype", "bias", "_stored", "_packed", "_smooth")
_MOST_INT8_INPUTS = 65_536  # 127 times 255 for each


class Product(ABC):
    """X Wᵀ + b for one weight."""

    name: ClassVar[str]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = bias

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """(out, in), as the product uses it."""

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """X Wᵀ + b of rows in the weight's type, (n, in) -> (n, out)."""


class Plain(Product):
    """``F.linear``, PyTorch's default."""

    name = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight

    @property
    def weight(self) -> Tensor:
        """(out, in)."""
        return self._weight

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        return F.linear(rows, self._weight, self.bias)


class Native(Product):
    """The native library's, with exact weights: fp32 numbers that are exact in 16 bits are stored in 16.

    Every output is summed in the same order, whatever the other rows. In bf16 rows are rounded to bf16, as everywhere.

    Args:
        weight: (out, in).
        bias: (out,), or None.
    """

    name = "native"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        held = in_16_bits(weight) if weight.dtype == torch.float32 else weight
        self._stored = held.dtype
        self._make_room(KINDS[held.dtype], None)
        self._convert(held.contiguous())

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports fp32, bf16 and fp16 on a CPU for which the library was built."""
        return weight.device.type == "cpu" and weight.dtype in KINDS and load_library() is not None

    @property
    def weight(self) -> Tensor:
        """(out, in): as it is stored, which may be rounded."""
        return self._held().to(self.dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        rows = self._checked(rows)
        out = rows.new_empty(len(rows), self.out_features)
        self._native.draftheads_multiply(self.given, rows.data_ptr(), self.rows_kind, len(rows), out.data_ptr())
        return out

    def largest(self, rows: Tensor, scale: float) -> Tensor:
        """The place of the first of the largest outputs times a scale of each row, (n, in) -> (n,); none is stored."""
        rows = self._checked(rows)
        places = torch.empty(len(rows), dtype=torch.int64)
        given = (self.given, rows.data_ptr(), self.rows_kind, len(rows), scale)
        self._native.draftheads_best_outputs(*given, places.data_ptr())
        return places

    def _checked(self, rows: Tensor) -> Tensor:
        if rows.dtype != self.dtype or rows.shape[1:] != (self.in_features,) or rows.device.type != "cpu":
            shape = (*rows.shape, rows.dtype, rows.device.type)
            raise RuntimeError(f"rows are {shape}; this product takes (n, {self.in_features}) of {self.dtype} on a CPU")
        self._native.draftheads_threads(native_threads())
        return rows.contiguous()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Native":
        """The same one: nothing in it changes."""
        return self

    def part(self, first: int, count: int) -> "Native":
        """Of some outputs alone: a view of this one's memory where they are whole blocks.

        Raises:
            ValueError: they are not, and the weights are rounded.
        """
        block = self._native.draftheads_packed_size(self.given.kind, 1, self.in_features)
        if first % BLOCK == 0:
            part = copy.copy(self)
            part.given = Weight.from_buffer_copy(self.given)
            part.out_features = part.given.out = count
            part.given.packed += first // BLOCK * block
            if self._bias is not None:
                part.given.bias += first * self._bias.itemsize
            return part
        if type(self) is not Native:
            raise ValueError(f"outputs {first} and on are no whole blocks of {BLOCK}")
        bias = None if self.bias is None else self.bias[first : first + count]
        return Native(self.weight[first : first + count], bias)

    @property
    def nbytes(self) -> int:
        """Of its weight in memory."""
        return self._packed.nbytes

    def saved(self) -> dict[str, Any]:
        """What :func:`restored` needs: tensors, numbers and words."""
        return {"name": self.name, "kind": self.given.kind, **{name: getattr(self, name) for name in _SAVED}}

    def _make_room(self, kind: int, smooth: Tensor | None, packed: Tensor | None = None) -> None:
        sizes = (self.out_features, self.in_features)
        self._native = load_library()
        size = self._native.draftheads_packed_size(kind, *sizes)
        self._packed = torch.empty(size, dtype=torch.uint8) if packed is None else packed
        if self._packed.nbytes != size:
            raise ValueError(f"a weight of {sizes} takes {size} bytes and not {self._packed.nbytes}")
        self._bias = None if self.bias is None else self.bias.detach().float().contiguous()
        self._smooth = smooth
        self.rows_kind = KINDS[self.dtype]
        inputs = KINDS[torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32]
        pointers = (self._packed.data_ptr(), _pointer(self._bias), _pointer(smooth))
        self.given = Weight(kind, inputs, *sizes, *pointers)

    def _convert(self, held: Tensor, of_inputs: Tensor | None = None, *, first: int = 0, back: bool = False) -> None:
        """Packs the weights of the outputs from ``first`` on, or unpacks them; blocks of outputs stay whole."""
        kind, size = self.given.kind, self.in_features
        at = self._packed.data_ptr() + self._native.draftheads_packed_size(kind, first, size)
        self._native.draftheads_threads(native_threads())
        self._native.draftheads_pack(kind, held.data_ptr(), _pointer(of_inputs), len(held), size, at, back)

    def _round(self, weight: Tensor, of_inputs: Tensor | None) -> None:
        first = 0
        for (part,) in _in_parts(weight):
            self._convert(part.float().contiguous(), of_inputs, first=first)
            first += len(part)

    def _held(self) -> Tensor:
        held = torch.empty(self.out_features, self.in_features, dtype=self._stored)
        self._convert(held, back=True)
        return held


class NativeInt8(Native):
    """The native library's, with int8 weights (a scale per output) and int8 rows (a scale per row).

    SmoothQuant (Xiao et al. 2023, equation 4) moves outliers among the inputs into the weights: input j is divided by
    s_j = max|x_j|^α / max|w_j|^(1-α), and the weights of input j are multiplied by it.

    Args:
        weight: (out, in).
        bias: (out,), or None.
        smooth: (in,) the factors 1 / s_j of the inputs, from :func:`smoothing`; None disables SmoothQuant.
    """

    name = "native-int8"

    def __init__(self, weight: Tensor, bias: Tensor | None, smooth: Tensor | None = None) -> None:
        Product.__init__(self, weight, bias)
        self._stored = torch.int8
        self._make_room(KINDS[torch.int8], smooth)
        self._round(weight, smooth)

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports what the exact product does, if sums of all inputs fit into 32 bits."""
        return super().fits(weight) and weight.shape[1] <= _MOST_INT8_INPUTS

    @property
    def weight(self) -> Tensor:
        """(out, in): as it was rounded."""
        rounded = self._held() * self._scales[:, None]
        return (rounded if self._smooth is None else rounded * self._smooth).to(self.dtype)

    @property
    def _scales(self) -> Tensor:
        """(out,) behind the numbers of each block, before their sums."""
        blocks = self._packed.view(-1, self._packed.numel() // -(-self.out_features // BLOCK))
        return blocks[:, -8 * BLOCK : -4 * BLOCK].contiguous().view(torch.float32).flatten()[: self.out_features]

    def rows_of(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, (…) -> (…, in), as an embedding has them."""
        groups = -(-self.in_features // 4)
        numbers = self._packed.view(torch.int8).view(-1, self._packed.numel() // -(-self.out_features // BLOCK))
        numbers = numbers[:, : 4 * groups * BLOCK].view(-1, groups, BLOCK, 4)[outputs // BLOCK, :, outputs % BLOCK]
        rounded = numbers.flatten(-2)[..., : self.in_features] * self._scales[outputs, None]
        return (rounded if self._smooth is None else rounded * self._smooth).to(self.dtype)


class NativeInt4(Native):
    """The native library's, with int4 weights and int8 rows, both with a scale for 32 inputs.

    Weights are a q + b with q from 0 to 15; a and b, in bf16, have the least squared error. So a weight takes 5 bits.

    Args:
        weight: (out, in).
        bias: (out,), or None.
        sizes: (in,) mean squares of typical inputs, which weight the errors; None: all are equal.
    """

    name = "native-int4"

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Tensor | None = None) -> None:
        super(Native, self).__init__(weight, bias)
        self._stored = torch.float32
        self._make_room(INT4, None)
        if sizes is not None:  # other texts may have inputs that this one has not
            sizes = sizes.clamp_min(1e-4 * float(sizes.mean())).contiguous()
        self._round(weight, sizes)


def restored(saved: Mapping[str, Any]) -> Native:
    """The product that :meth:`Native.saved` describes, which shares the memory of its tensors.

    Raises:
        ValueError: the packed weight has another size.
    """
    kind = next(kind for kind in (Native, NativeInt8, NativeInt4) if kind.name == saved["name"])
    product = kind.__new__(kind)
    vars(product).update({name: saved[name] for name in _SAVED})
    product._make_room(saved["kind"], saved["_smooth"], saved["_packed"])  # noqa: SLF001 - it is a new one
    return product


def smoothing(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """(in,) the factors 1 / s_j of inputs that several weights read, scaled to a geometric mean of 1.

    Args:
        inputs: (in,) the largest magnitudes max|x_j| of typical inputs.
        weights: (out, in) each.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    scale = inputs.clamp_min(1e-4) ** SMOOTHING / largest.clamp_min(1e-5) ** (1 - SMOOTHING)
    return scale.log().mean().exp() / scale


class PackedLinear(nn.Module):
    """Replaces an ``nn.Linear``. Stores its weight only in the format of the product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = product.in_features, product.out_features
        self.smooth: Tensor | None = None  # (in,) factors of the inputs, used to prepare int8
        self.sizes: Tensor | None = None  # (in,) mean squares of the inputs, used to prepare int4
        self.tied: Tensor | None = None  # (out, in): the weight, if it is tied to another module's

    @property
    def weight(self) -> Tensor:
        """(out, in). Unless tied, it is unpacked at each call: use it to copy weights, not to decode."""
        return self.product.weight if self.tied is None else self.tied

    @property
    def bias(self) -> Tensor | None:
        """(out,)."""
        return self.product.bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        if torch.is_grad_enabled() and x.requires_grad:  # packed products have no gradient
            return F.linear(x, self.weight, self.bias)
        return self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def rows(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out), without a gradient."""
        return self.product(rows) if len(rows) else rows.new_empty(0, self.out_features)


def is_linear(module: nn.Module) -> bool:
    """Whether a packed layer can take its place: ``nn.Linear``, and GPT-2's ``Conv1D``, whose weight is (in, out)."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def replace_linears(module: nn.Module) -> list[PackedLinear]:
    """Replaces linear layers by :class:`PackedLinear`. Returns all packed layers of the module."""
    for parent in list(module.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            if is_linear(child):
                weight = child.weight.detach()
                weight = weight if type(child) is nn.Linear else weight.T.contiguous()
                bias = None if child.bias is None else child.bias.detach().clone()
                setattr(parent, name, PackedLinear(Plain(weight, bias)))
    return [layer for layer in module.modules() if isinstance(layer, PackedLinear)]


def pack(layers: Sequence[PackedLinear], *, bits: int | None = None, portable: bool = False) -> None:
    """Gives a native product to each plain layer that the library supports, if the library is fast or asked for.

    With portable instructions ``F.linear`` is faster.

    Args:
        layers: what is packed already stays as it is.
        bits: of rounded weights, 8 or 4; None: they stay exact.
        portable: also with portable instructions; they are asked for in the environment, too.
    """
    library = load_library()
    is_asked = portable or Environment().kernels
    if library is None or (library.draftheads_kernels(b"") == b"portable" and not is_asked):
        return
    for layer in layers:
        if type(layer.product) is Plain and Native.fits(weight := layer.product.weight):
            if bits == 4:
                layer.product = NativeInt4(weight, layer.bias, layer.sizes)
            elif bits == 8 and NativeInt8.fits(weight):
                layer.product = NativeInt8(weight, layer.bias, layer.smooth)
            else:
                layer.product = Native(weight, layer.bias)
            layer.smooth = layer.sizes = None


def native_bf16() -> bool:
    """Whether the CPU has bf16 instructions. Without them, bf16 is emulated and slower than fp32.

    Tests say it by a variable, so that they do the same on every machine.
    """
    if wanted := Environment().auto:
        if wanted not in ("bf16", "fp32"):
            raise InvalidSettings(f"DRAFTHEADS_AUTO is {wanted!r}; set bf16 or fp32, or unset it")
        return wanted == "bf16"
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


class HalfEmbedding(nn.Module):
    """An embedding in 16 bits, for a model that computes in fp32 and whose embedding is exact in 16 bits."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.dtype, self.embed_scale = dtype, scale  # Gemma scales its embeddings

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight).to(self.dtype) * self.embed_scale


class RoundedEmbedding(nn.Module):
    """An embedding in 8 bits, as a product stores it: a tied lm_head's, so that there is one copy."""

    def __init__(self, product: NativeInt8, scale: float = 1.0) -> None:
        super().__init__()
        self.product, self.embed_scale = product, scale

    @property
    def weight(self) -> Tensor:
        """(V, D), unpacked at each call."""
        return self.product.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.product.rows_of(token_ids) * self.embed_scale


def table_of(embedding: Tensor | NativeInt8) -> tuple[int, int, int | None]:
    """An embedding (V, D) for the library: its kind, its place, and that of its factors."""
    if isinstance(embedding, NativeInt8):
        return embedding.given.kind, embedding.given.packed, embedding.given.smooth
    return KINDS[embedding.dtype], embedding.data_ptr(), None


def _pointer(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()


def in_16_bits(weight: Tensor) -> Tensor:
    """The same numbers in 16 bits, if they are exact in them."""
    for dtype in (torch.bfloat16, torch.float16):
        held = torch.empty(weight.shape, dtype=dtype)
        if all(torch.equal(half.copy_(part).float(), part) for part, half in _in_parts(weight, held)):
            return held
    return weight


def _in_parts(weight: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each at a time, so that copies of a large weight need little memory."""
    rows = max(1, _PART_SIZE // max(1, BLOCK * weight.shape[1])) * BLOCK  # whole blocks of outputs
    return zip(*(tensor.split(rows) for tensor in (weight, *others)), strict=True)
