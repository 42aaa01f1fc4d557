"""CPU kernels for linear layers. Pure products of tensors, without global state.

A *product* stores one weight in the format of its kernel and multiplies rows by it: (n, in) -> (n, out). The fastest
product depends on the machine, so :mod:`draftheads.cpu.kernel_choice` times the candidates in :data:`PRODUCTS` on the
model's own layers. To add a kernel, add a class and its entry in that list.

A kernel may add in another order for another number of rows. If the number of rows is a multiple of ``exact_rows``, the
bits of a row do not depend on the other rows. With ``batch_invariant``, rows are padded to such a multiple.
"""

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.native_library import KINDS, VARIABLE, Weight, load_library
from draftheads.cpu.threads import native_threads

# Any, because operators in PyTorch's namespaces have no Python signature
_MKL: Any = torch.ops.mkl
_ONEDNN: Any = torch.ops.mkldnn
_FBGEMM: Any = torch.ops.quantized
MAX_TREE_ROWS = 128  # with batch invariance, more rows are multiplied in pieces of this size
SMOOTHING = 0.7  # α; of 0.35, 0.5, 0.65 and 0.8 the last two have the least loss (LOG.md)
_LARGEST_HALF = 65504.0
_MOST_INT8_INPUTS = 65_536  # 127 times 255 for each


class Product(ABC):
    """X Wᵀ + b for one weight, by one kernel."""

    name: ClassVar[str]
    exact_rows: ClassVar[int]  # at multiples of this, a row's bits do not depend on the other rows

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = bias

    @classmethod
    @abstractmethod
    def fits(cls, weight: Tensor) -> bool:
        """Whether this build and machine support the weight. Only a quantised product may round it."""

    @abstractmethod
    def multiply(self, rows: Tensor) -> Tensor:
        """X Wᵀ of contiguous rows (n, in) in the weight's type -> (n, out)."""

    def __call__(self, rows: Tensor) -> Tensor:
        """X Wᵀ + b, (n, in) -> (n, out)."""
        out = self.multiply(rows)
        return out if self.bias is None else out + self.bias

    @property
    def weight(self) -> Tensor:
        """(out, in): the weight that the kernel uses, unpacked as its product with the identity."""
        return self.multiply(torch.eye(self.in_features, dtype=self.dtype)).T.contiguous()


class Plain(Product):
    """``F.linear``, PyTorch's default."""

    name = "plain"
    exact_rows = 8

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports any floating-point weight."""
        return weight.is_floating_point()

    @property
    def weight(self) -> Tensor:
        """(out, in)."""
        return self._weight

    def multiply(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        return F.linear(rows, self._weight)


class MklPacked(Product):
    """MKL in fp32, packed for a fixed number of rows: fewer rows are padded, more rows are split into pieces."""

    name = "mkl-packed"
    exact_rows = 1
    ROWS: ClassVar[int] = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = _MKL._mkl_reorder_linear_weight(weight.contiguous(), self.ROWS)
        # the kernel only reads the sizes of the plain weight, because the number of rows is always ROWS
        self._sizes = weight.new_zeros(1, 1).expand(weight.shape)

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports fp32 if PyTorch was built with MKL."""
        has_mkl = torch.backends.mkl.is_available() and hasattr(_MKL, "_mkl_linear")
        return has_mkl and weight.dtype == torch.float32 and weight.device.type == "cpu" and _runs(cls, weight.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        count = len(rows)
        pieces = F.pad(rows, (0, 0, 0, -count % self.ROWS)).split(self.ROWS)
        pieces = [_MKL._mkl_linear(piece, self._packed, self._sizes, None, self.ROWS) for piece in pieces]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count]


class OneDnnPacked(Product):
    """oneDNN in fp32, or in bf16 on CPUs with bf16 instructions. One packed weight serves all numbers of rows."""

    name = "onednn-packed"
    exact_rows = 8

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = _ONEDNN._reorder_linear_weight(weight.contiguous(), 16)
        self._multiply = _ONEDNN._linear_pointwise.default

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports fp32, and bf16 on CPUs with it, if PyTorch was built with oneDNN."""
        has_type = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and native_bf16())
        has_kernel = weight.device.type == "cpu" and hasattr(_ONEDNN, "_linear_pointwise")
        return has_type and has_kernel and _runs(cls, weight.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        out: Tensor = self._multiply(rows, self._packed, None, "none", [], "")
        return out


class HalfWeights(Product):
    """FBGEMM with fp16 weights and fp32 products: half the memory traffic of fp32, without rounding.

    The weight must be exact in fp16, or exact after multiplication by a power of two. That holds for nearly all
    models that were saved in bf16 or fp16.
    """

    name = "fbgemm-fp16"
    exact_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        scale = _half_scale(weight)
        assert scale is not None, "fits() was not checked"
        self._scale = 1.0 / scale
        self._packed = _FBGEMM.linear_prepack_fp16(weight.float() * scale, None)
        self._multiply = _FBGEMM.linear_dynamic_fp16.default  # looked up once: a look-up takes microseconds

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports weights that are exact in fp16, if PyTorch has FBGEMM."""
        fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        has_type = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
        return fbgemm and has_type and _runs(cls, weight.dtype) and _half_scale(weight) is not None

    def multiply(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        out: Tensor = self._multiply(rows.float(), self._packed)
        return (out if self._scale == 1.0 else out.mul_(self._scale)).to(self.dtype)


class Int8(Product):
    """FBGEMM with int8 weights (a scale per output) and int8 activations (a scale per row).

    SmoothQuant (Xiao et al. 2023, equation 4) moves outliers among the inputs into the weights: input j is divided by
    s_j = max|x_j|^α / max|w_j|^(1-α), and the weights of input j are multiplied by it.

    The kernel has one scale for all rows. So each row is divided by its largest magnitude, and an extra row fixes the
    range: then no row depends on another. Integer sums are exact, so a row's bits do not depend on the other rows.
    """

    name = "int8"
    exact_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: Tensor | None = None) -> None:
        """``inputs`` are the largest magnitudes max|x_j| (in,) of typical inputs; None disables SmoothQuant."""
        super().__init__(weight, bias)
        weight = weight.float()
        self._smooth = None if inputs is None else _smoothing(inputs, weight)
        if self._smooth is not None:
            weight = weight / self._smooth
        scales = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():  # the newer API for quantised tensors has no such product
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
        self._packed = _FBGEMM.linear_prepack(quantised, None)
        self._multiply = _FBGEMM.linear_dynamic.default
        self._reduce_range = not has_vnni()  # without VNNI, the sum of two full-range products overflows 16 bits
        # the range -(n + 1)/n … 1 has steps of 1/n, and zero is one of the steps
        steps = 63 if self._reduce_range else 127
        self._range = torch.zeros(1, self.in_features)
        self._range[0, 0], self._range[0, -1] = 1.0, -(steps + 1) / steps

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports fp32 and bf16 weights if PyTorch has FBGEMM."""
        fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
        has_type = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
        return fbgemm and has_type and weight.shape[1] >= 2 and _runs(cls, weight.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        rows = rows.float() if self._smooth is None else rows * self._smooth
        largest = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-12)  # one fused operator is ten times slower
        out: Tensor = self._multiply(torch.cat([rows / largest, self._range]), self._packed, self._reduce_range)
        return out[:-1].mul_(largest).to(self.dtype)


class Native(Product):
    """The native library's, with exact weights: fp32 numbers that are exact in 16 bits are stored in 16.

    Every output is summed in the same order, whatever the other rows. In bf16 rows are rounded to bf16, as everywhere.

    Args:
        weight: (out, in).
        bias: (out,), or None.
        halves: whether the weight is two below each other whose outputs belong together, as gate and up do.
    """

    name = "native"
    exact_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None, *, halves: bool = False) -> None:
        super().__init__(weight, bias)
        self._pack(_in_16_bits(weight) if weight.dtype == torch.float32 else weight, None, None, halves=halves)

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports fp32, bf16 and fp16 on a CPU for which the library was built."""
        return weight.device.type == "cpu" and weight.dtype in KINDS and load_library() is not None

    @property
    def halves(self) -> bool:
        """Whether the weight is two below each other."""
        return bool(self.given.halves)

    @property
    def weight(self) -> Tensor:
        """(out, in)."""
        return self._held().to(self.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out), with the bias.

        Raises:
            RuntimeError: rows of another type or size.
        """
        if rows.dtype != self.dtype or rows.shape[1:] != (self.in_features,) or rows.device.type != "cpu":
            shape = (*rows.shape, rows.dtype, rows.device.type)
            raise RuntimeError(f"rows are {shape}; this product takes (n, {self.in_features}) of {self.dtype} on a CPU")
        rows = rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        self._native.draftheads_threads(native_threads())
        self._native.draftheads_multiply(self.given, rows.data_ptr(), self.rows_kind, len(rows), out.data_ptr())
        return out

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        return self.multiply(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Native":
        """The same one: nothing in it changes."""
        return self

    def _pack(self, held: Tensor, scales: Tensor | None, smooth: Tensor | None, *, halves: bool) -> None:
        held = held.contiguous()
        kind, sizes = KINDS[held.dtype], (self.out_features, self.in_features, int(halves))
        self._native = load_library()
        self._packed = torch.empty(self._native.draftheads_packed_size(kind, *sizes), dtype=torch.uint8)
        self._stored = held.dtype
        self._native.draftheads_pack(kind, held.data_ptr(), _pointer(scales), *sizes, self._packed.data_ptr(), 0)
        self._bias = None if self.bias is None else self.bias.detach().float().contiguous()
        self._scales, self._smooth = scales, smooth
        self.rows_kind = KINDS[self.dtype]
        inputs = KINDS[torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32]
        pointers = (self._packed.data_ptr(), _pointer(self._bias), _pointer(smooth))
        self.given = Weight(kind, inputs, *sizes, *pointers)

    def _held(self) -> Tensor:
        given, held = self.given, torch.empty(self.out_features, self.in_features, dtype=self._stored)
        sizes = (given.out, given.in_, given.halves)
        self._native.draftheads_pack(given.kind, held.data_ptr(), None, *sizes, self._packed.data_ptr(), 1)
        return held


class NativeInt8(Native):
    """The native library's, with int8 weights (a scale per output) and int8 rows (a scale per row).

    SmoothQuant (Xiao et al. 2023, equation 4) moves outliers among the inputs into the weights: input j is divided by
    s_j = max|x_j|^α / max|w_j|^(1-α), and the weights of input j are multiplied by it.

    Args:
        weight: (out, in).
        bias: (out,), or None.
        inputs: (in,) the largest magnitudes max|x_j| of typical inputs; None disables SmoothQuant.
        halves: as for :class:`Native`.
    """

    name = "native-int8"

    def __init__(
        self, weight: Tensor, bias: Tensor | None, inputs: Tensor | None = None, *, halves: bool = False
    ) -> None:
        Product.__init__(self, weight, bias)
        weight = weight.float()
        smooth = None if inputs is None else _smoothing(inputs, weight)
        if smooth is not None:
            weight = weight / smooth
        scales = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        self._pack((weight / scales[:, None]).round().to(torch.int8), scales, smooth, halves=halves)

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Supports what the exact product does, if sums of all inputs fit into 32 bits."""
        return super().fits(weight) and weight.shape[1] <= _MOST_INT8_INPUTS

    @property
    def weight(self) -> Tensor:
        """(out, in): as it was rounded."""
        assert self._scales is not None
        rounded = self._held() * self._scales[:, None]
        return (rounded if self._smooth is None else rounded * self._smooth).to(self.dtype)


PRODUCTS: tuple[type[Product], ...] = (Plain, MklPacked, OneDnnPacked, HalfWeights, Native)  # all exact
QUANTISED: tuple[type[Product], ...] = (Int8, NativeInt8)


class PackedLinear(nn.Module):
    """Replaces an ``nn.Linear``. Stores its weight only in the format of the product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.multiple = 1  # rows are padded to a multiple of this
        self.inputs: Tensor | None = None  # (in,) largest magnitudes of typical inputs, used to prepare int8
        self.halves = False  # whether it is two layers below each other whose outputs belong together
        self.tied: Tensor | None = None  # (out, in): the weight, if it is tied to another module's

    @property
    def in_features(self) -> int:
        """Numbers in a row of the input."""
        return self.product.in_features

    @property
    def out_features(self) -> int:
        """Numbers in a row of the output."""
        return self.product.out_features

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
        out = self.rows(x.reshape(-1, self.product.in_features))
        return out.view(*x.shape[:-1], self.product.out_features)

    def rows(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out), without a gradient."""
        product, count = self.product, rows.shape[0]
        if count == 0:
            return rows.new_empty(0, product.out_features)
        if self.multiple == 1:
            return product(rows)
        rows = F.pad(rows, (0, 0, 0, -count % self.multiple))
        # bits are checked for up to this many rows; a large batch has more
        pieces = [product(piece) for piece in rows.split(MAX_TREE_ROWS)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count]


def replace_linears(module: nn.Module) -> list[PackedLinear]:
    """Replaces every plain ``nn.Linear`` by a :class:`PackedLinear`. Returns all packed layers of the module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.detach().clone()
                setattr(parent, name, PackedLinear(Plain(child.weight.detach(), bias)))
    return [layer for layer in module.modules() if isinstance(layer, PackedLinear)]


def stacked(layers: Sequence[nn.Linear]) -> PackedLinear:
    """One layer from several layers with the same input; their outputs are concatenated."""
    weight = layers[0].weight.detach() if len(layers) == 1 else torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return PackedLinear(Plain(weight, None))
    biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return PackedLinear(Plain(weight, torch.cat([bias.detach() for bias in biases])))


def first_largest(logits: Tensor) -> Tensor | None:
    """The first of the largest logits of each row, (…, V) -> (…) int64; None where there is no library for it."""
    library = load_library()
    if library is None or logits.device.type != "cpu" or logits.dtype not in KINDS:
        return None
    logits = logits.contiguous()
    values, places = (torch.empty(logits.shape[:-1], dtype=dtype) for dtype in (torch.float32, torch.int64))
    given = (KINDS[logits.dtype], logits.data_ptr(), places.numel(), logits.shape[-1], 1, 1.0)
    library.draftheads_threads(native_threads())
    library.draftheads_top(*given, values.data_ptr(), places.data_ptr(), None)
    return places


def largest(logits: Tensor, count: int, divisor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row, as log-probabilities need them.

    Args:
        logits: (…, V).
        count: k, at most V are returned.
        divisor: of the logits.

    Returns:
        The k largest quotients, the largest first, (…, k) float32; their places (…, k) int64; and the logarithm of
        the sum of all quotients' exponentials (…, 1) float32.
    """
    count = min(count, logits.shape[-1])
    library = load_library()
    if library is None or logits.device.type != "cpu" or logits.dtype not in KINDS:
        scaled = logits.float() if divisor == 1.0 else logits.float() / divisor
        top = scaled.topk(count, dim=-1)
        return top.values, top.indices, scaled.logsumexp(-1, keepdim=True)
    shape, logits = logits.shape[:-1], logits.contiguous()
    values = torch.empty(*shape, count, dtype=torch.float32)
    places = torch.empty(*shape, count, dtype=torch.int64)
    totals = torch.empty(*shape, 1, dtype=torch.float32)
    given = (KINDS[logits.dtype], logits.data_ptr(), totals.numel(), logits.shape[-1], count, divisor)
    library.draftheads_threads(native_threads())
    library.draftheads_top(*given, values.data_ptr(), places.data_ptr(), totals.data_ptr())
    return values, places, totals


@torch.inference_mode()
def keeps_bits(product: Product) -> bool:
    """Whether, on this machine, a row has the same bits at every multiple of the product's ``exact_rows``."""
    step = product.exact_rows
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MAX_TREE_ROWS, product.in_features, generator=generator).to(product.dtype)
    expected = product(rows[:step])
    for count in dict.fromkeys((2 * step, 3 * step, 5 * step, 16, 24, 40, 64, 96, MAX_TREE_ROWS)):
        if not torch.equal(product(torch.cat([rows[step:count], rows[:step]]))[-step:], expected):
            return False
    return True


def candidates(weights: Sequence[Tensor], *, quantised: bool = False) -> list[type[Product]]:
    """The products that support all of these weights; the native one alone, where it has the best instructions."""
    fitting = [kind for kind in (QUANTISED if quantised else PRODUCTS) if all(kind.fits(weight) for weight in weights)]
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    is_chosen = os.environ.get(VARIABLE) or (load_library() and load_library().draftheads_kernels(b"") != b"portable")
    native = [kind for kind in fitting if issubclass(kind, Native)]
    return native if native and not has_amx and is_chosen else fitting


@cache
@torch.inference_mode()
def _runs(kind: type[Product], dtype: torch.dtype) -> bool:
    """Whether a small product of that kind is right. PyTorch may change or remove its private operators."""
    rows, weight = torch.eye(2, 4, dtype=dtype), torch.arange(8.0).view(2, 4).to(dtype)
    try:
        found = kind(weight, None)(rows)
        return torch.allclose(found, rows @ weight.T, atol=0.1)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False


def native_bf16() -> bool:
    """Whether the CPU has bf16 instructions. Without them, bf16 is emulated and slower than fp32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def has_vnni() -> bool:
    """Whether the CPU has VNNI, which sums products of 8-bit numbers in 32 bits."""
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())


def _pointer(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()


def _smoothing(inputs: Tensor, weight: Tensor) -> Tensor:
    """(in,) the factors of the inputs, 1 / s_j, scaled to a geometric mean of 1."""
    scale = inputs.clamp_min(1e-4) ** SMOOTHING / weight.abs().amax(0).clamp_min(1e-5) ** (1 - SMOOTHING)
    return scale.log().mean().exp() / scale


def _in_16_bits(weight: Tensor) -> Tensor:
    """The same numbers in 16 bits, if they are exact in them."""
    for dtype in (torch.bfloat16, torch.float16):
        held = weight.to(dtype)
        if torch.equal(held.float(), weight):
            return held
    return weight


def _half_scale(weight: Tensor) -> float | None:
    """A power of two that makes the weight exact in fp16; None if there is none."""
    values = weight.float()
    largest = float(values.abs().max())
    if not 0.0 < largest < math.inf:
        return 1.0 if largest == 0.0 else None
    highest = 2.0 ** math.floor(math.log2(_LARGEST_HALF / largest))
    for scale in dict.fromkeys((1.0, highest)):
        scaled = values * scale
        if scale <= highest and torch.equal(scaled.half().float(), scaled):
            return scale
    return None
