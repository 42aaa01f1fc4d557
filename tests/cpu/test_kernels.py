"""Layers with other products than PyTorch's, and which layers get them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.cpu import kernels
from draftheads.cpu.kernels import Native, NativeInt8, PackedLinear, Plain, pack
from families import needs_library


def weight(dtype: torch.dtype = torch.float32, *, outputs: int = 40, inputs: int = 48) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)


def packed(*layers: PackedLinear, **options: bool) -> list[type]:
    pack(layers, **options)
    return [type(layer.product) for layer in layers]


# --- layers ---


@torch.inference_mode()
def test_layers_take_any_shape_and_no_rows():
    layer = PackedLinear(Plain(weight(), None))
    for _ in range(2):
        x = torch.randn(2, 20, 48)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
        torch.testing.assert_close(layer(x.transpose(0, 1)), F.linear(x, layer.weight).transpose(0, 1))
        assert layer(x[:0]).shape == (0, 20, 40)
        pack([layer])


def test_a_packed_layer_has_a_gradient():
    layer = PackedLinear(Plain(weight(), torch.randn(40)))
    pack([layer])
    x = torch.randn(12, 48, requires_grad=True)
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    F.linear(x, weight(), layer.bias).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


# --- which products ---


@needs_library
def test_layers_get_native_products(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_MOST_INT8_INPUTS", 60)
    layers = [PackedLinear(Plain(weight(dtype), None)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    expected = [layer.weight.clone() for layer in layers]
    assert packed(*layers, portable=True) == [Native, Native, Plain], "the library has no fp64"
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, expected, strict=True))
    rounded, wide = (PackedLinear(Plain(weight(inputs=inputs), None)) for inputs in (60, 61))
    assert packed(rounded, wide, bits=8, portable=True) == [NativeInt8, Native], "sums of int8 have a limit"
    assert packed(*layers, rounded, bits=8, portable=True) == [Native, Native, Plain, NativeInt8], "they stay"


@needs_library
@pytest.mark.parametrize(
    ("variable", "portable", "kind"), [("", False, Plain), ("portable", False, Native), ("", True, Native)]
)
def test_portable_products_are_for_those_who_ask(
    variable: str, portable: bool, kind: type, choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    choose("portable")
    monkeypatch.setenv("DRAFTHEADS_KERNELS", variable)
    assert packed(PackedLinear(Plain(weight(), None)), portable=portable) == [kind]


def test_without_the_library_layers_stay_plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "load_library", lambda: None)
    assert packed(PackedLinear(Plain(weight(), None)), bits=8, portable=True) == [Plain]
