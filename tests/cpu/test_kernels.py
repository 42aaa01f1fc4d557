"""Each product equals the reference; rows are independent of each other where the product guarantees it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu import kernels
from draftheads.cpu.kernels import (
    MAX_TREE_ROWS,
    PRODUCTS,
    QUANTISED,
    HalfWeights,
    Int8,
    MklPacked,
    OneDnnPacked,
    PackedLinear,
    Plain,
    Product,
    candidates,
    keeps_bits,
    replace_linears,
)

COUNTS = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200]
TYPES = [torch.float32, torch.bfloat16]


def half_exact(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """A weight that bf16 and fp16 both hold."""
    torch.manual_seed(0)
    return (torch.randn(out_features, in_features) * 0.1).bfloat16().clamp(-1, 1).mul(64).round().div(64).to(dtype)


def product(
    kind: type[Product], dtype: torch.dtype, *, bias: bool = False, sizes: tuple[int, int] = (40, 48)
) -> Product:
    weight = half_exact(*sizes, dtype)
    if not kind.fits(weight):
        pytest.skip(f"{kind.name} does not run here in {dtype}")
    return kind(weight, torch.randn(sizes[0]).to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", PRODUCTS)
@torch.inference_mode()
def test_a_product_equals_the_matrix_product(kind: type[Product], bias: bool, dtype: torch.dtype):
    weight = half_exact(40, 48, dtype)
    found = product(kind, dtype, bias=bias)
    x = torch.randn(200, 48).to(dtype)
    for count in COUNTS:
        expected = F.linear(x[:count].double(), weight.double(), None if found.bias is None else found.bias.double())
        out = found(x[:count])
        assert out.dtype == dtype
        assert out.shape == (count, 40)
        # 48 products of about 1 · 0.1; bf16 rounds the sum, and once more with the bias
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", PRODUCTS)
@torch.inference_mode()
def test_a_product_unpacks_its_weight(kind: type[Product], dtype: torch.dtype):
    assert torch.equal(product(kind, dtype, bias=True).weight, half_exact(40, 48, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [*PRODUCTS, *QUANTISED])
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_others(kind: type[Product], dtype: torch.dtype):
    """Sizes of smollm2-135m, where some kernels add in another order for few rows."""
    found = product(kind, dtype, sizes=(96, 1536))
    if not keeps_bits(found):
        pytest.skip(f"{kind.name} does not keep bits on this CPU, and is then not a candidate")
    layer = PackedLinear(found)
    layer.multiple = kind.exact_rows
    x = torch.randn(COUNTS[-1], 1536).to(dtype)
    x[3] *= 1000  # one row's size must not show in another
    whole = layer(x)
    assert COUNTS[-1] > MAX_TREE_ROWS, "a batch of trees may have more rows than are multiplied at once"
    for count in COUNTS:
        assert torch.equal(layer(x[:count]), whole[:count]), count
        assert torch.equal(layer(x[-count:]), whole[-count:]), count
        assert torch.equal(layer(x[:count].flip(0)), whole[:count].flip(0)), count


# --- fp16 weights ---


@pytest.mark.skipif(not HalfWeights.fits(torch.ones(2, 2)), reason="this build has no FBGEMM")
@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (1.0, True),
        (65504.0, True),
        (2.0**-24, True),
        (1.0 + 2.0**-10, True),
        (1.0 + 2.0**-11, False),  # one digit too many
        (2.0**-40, True),  # scaled up
        (2.0**20, True),  # scaled down
        (float("inf"), False),
        (float("nan"), False),
        (0.0, True),
    ],
)
@torch.inference_mode()
def test_fp16_weights_need_exact_weights(value: float, fits: bool):
    weight = torch.full((16, 32), value)
    assert HalfWeights.fits(weight) is fits
    if fits:
        x = torch.randn(3, 32)
        torch.testing.assert_close(HalfWeights(weight, None)(x), x @ weight.T, rtol=1e-4, atol=1e-5 * abs(value))


@pytest.mark.skipif(not HalfWeights.fits(torch.ones(2, 2)), reason="this build has no FBGEMM")
@torch.inference_mode()
def test_tiny_and_large_weights_together_may_not_fit_fp16():
    """Both are held where one power of two suits both; else the kernel is no candidate."""
    together = torch.tensor([[1.0, 2.0**-20 * 1.75], [0.5, 0.25]])
    assert HalfWeights.fits(together), "2 ** 15 times these are ordinary fp16 numbers"
    assert torch.equal(HalfWeights(together, None).weight, together)
    assert not HalfWeights.fits(torch.tensor([[60000.0, 2.0**-25], [0.5, 0.25]]))
    assert HalfWeights not in candidates([torch.ones(4, 4), torch.full((4, 4), 1 + 2.0**-20)])


# --- private operators ---


@pytest.mark.parametrize("kind", [MklPacked, OneDnnPacked, HalfWeights, Int8])
@pytest.mark.parametrize("change", ["removed", "raises", "wrong"])
def test_a_product_whose_operator_changed_is_no_candidate(
    kind: type[Product], change: str, monkeypatch: pytest.MonkeyPatch
):
    if not kind.fits(torch.ones(2, 2)):
        pytest.skip(f"this build has no {kind.name}")
    own = kind.__init__

    def changed(self: Product, *given: Any) -> None:
        if change == "removed":
            raise AttributeError("no such operator")
        own(self, *given)
        self.multiply = raising if change == "raises" else lambda rows: torch.ones(len(rows), self.out_features)

    def raising(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("deprecated")

    kernels._runs.cache_clear()
    monkeypatch.setattr(kind, "__init__", changed)
    try:
        assert not kind.fits(torch.ones(2, 2))
        assert kind not in candidates([torch.ones(4, 4)], quantised=kind is Int8)
    finally:
        kernels._runs.cache_clear()


# --- int8 ---


@pytest.mark.skipif(not Int8.fits(torch.ones(2, 2)), reason="this build has no FBGEMM")
@torch.inference_mode()
def test_int8_equals_its_definition():
    """A slow twin: round weights per output and inputs per row, multiply integers, scale back."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 48), torch.randn(7, 48) * torch.logspace(-3, 3, 7)[:, None]
    steps = 63 if Int8(weight, None)._reduce_range else 127
    weight_scale = weight.abs().amax(1) / 127
    row_scale = x.abs().amax(1) / steps
    integers = (x / row_scale[:, None]).round().double() @ (weight / weight_scale[:, None]).round().double().T
    expected = integers * row_scale[:, None].double() * weight_scale.double()
    found = Int8(weight, None)(x).double()
    # a number half way between two steps may be rounded either way
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 2e-3
    exact = x.double() @ weight.double().T
    assert float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max()) < (0.03 if steps == 63 else 0.015)


@pytest.mark.skipif(not Int8.fits(torch.ones(2, 2)), reason="this build has no FBGEMM")
@torch.inference_mode()
def test_int8_smooths_outliers_of_its_inputs():
    torch.manual_seed(0)
    weight, x = torch.randn(40, 48), torch.randn(64, 48)
    x[:, 7] *= 60  # an outlier in every row leaves few steps for the other inputs
    expected = x @ weight.T
    errors = [(Int8(weight, None, inputs)(x) - expected).norm() for inputs in (None, x.abs().amax(0))]
    assert errors[1] < 0.4 * errors[0]
    torch.testing.assert_close(Int8(weight, None, x.abs().amax(0)).weight, weight, rtol=0.05, atol=0.2)


@torch.inference_mode()
def test_int8_of_a_row_of_zeros():
    found = product(Int8, torch.float32, bias=True)
    out = found(torch.zeros(2, 48))
    assert torch.equal(out, torch.stack([found.bias, found.bias]))


# --- layers ---


@torch.inference_mode()
def test_layers_take_any_shape_and_no_rows():
    layer = PackedLinear(Plain(half_exact(40, 48, torch.float32), None))
    for multiple in (1, 8):
        layer.multiple = multiple
        x = torch.randn(2, 20, 48)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
        torch.testing.assert_close(layer(x.transpose(0, 1)), F.linear(x, layer.weight).transpose(0, 1))
        assert layer(x[:0]).shape == (0, 20, 40)


def test_a_packed_layer_has_a_gradient():
    layer = PackedLinear(product(PRODUCTS[-1], torch.float32, bias=True))
    x = torch.randn(12, 48, requires_grad=True)
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    F.linear(x, half_exact(40, 48, torch.float32), layer.bias).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_every_linear_layer_of_a_module_is_replaced():
    module = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 2, bias=False)}), nn.LayerNorm(4))
    x = torch.randn(3, 4)
    expected = module[0](x), module[1]["a"](x)
    layers = replace_linears(module)
    assert layers == [module[0], module[1]["a"]]
    torch.testing.assert_close((module[0](x), module[1]["a"](x)), expected)
    assert replace_linears(module) == layers, "a second time nothing changes"
