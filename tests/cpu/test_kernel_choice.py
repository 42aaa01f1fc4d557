"""The choice of kernels: the fastest is chosen, stored in a file, and measured again if the file is broken."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftheads.cpu import kernel_choice
from draftheads.cpu.kernel_choice import BUDGET_SECONDS, choose, dtype_for_texts, fastest, pack
from draftheads.cpu.kernels import PackedLinear, Plain, Product
from draftheads.errors import CacheWarning
from draftheads.utils.machine import OtherPrograms


class Clock:
    """Time that products make pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Timed(Plain):
    """Takes a fixed time, and more for each row."""

    start, each = 1e-4, 0.0

    def multiply(self, rows: Tensor) -> Tensor:
        CLOCK.now += self.start + self.each * len(rows)
        return super().multiply(rows)


class Steady(Timed):
    name = "steady"
    start, each = 10e-4, 0.0


class ForFew(Timed):
    name = "for-few"
    start, each = 1e-4, 1e-4


class Moody(Timed):
    name = "moody"
    exact_rows = 1

    def multiply(self, rows: Tensor) -> Tensor:
        return super().multiply(rows) * (1 + 1e-6 * len(rows))


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[type[Product]]:
    found: list[type[Product]] = [Steady, ForFew]
    monkeypatch.setattr("draftheads.cpu.kernels.PRODUCTS", found)
    monkeypatch.setattr(kernel_choice, "PRODUCTS", found)
    return found


def weights(*sizes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(*size) for size in sizes for _ in range(3)]


def test_the_product_with_the_least_weighted_time_is_chosen(
    kinds: list[type[Product]], monkeypatch: pytest.MonkeyPatch
):
    few, many = weights((8, 4)), {1: 0.1, 64: 5.0}
    assert fastest(few, kinds, seconds=9.0, clock=CLOCK) is ForFew
    monkeypatch.setattr(kernel_choice, "ROW_WEIGHTS", many)
    assert fastest(few, kinds, seconds=9.0, clock=CLOCK) is Steady


def test_measuring_stops_after_its_time_budget(kinds: list[type[Product]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Steady, "start", 0.05)
    monkeypatch.setattr(ForFew, "start", 0.04)
    start = CLOCK.now
    chosen = choose(weights((8, 4), (4, 8), (6, 6)), clock=CLOCK)
    assert set(chosen.values()) == {ForFew}
    assert CLOCK.now - start < 1.5 * BUDGET_SECONDS


def test_products_that_do_not_keep_bits_are_no_candidates_for_batch_invariant(kinds: list[type[Product]]):
    kinds[:] = [Moody, Steady]
    assert choose(weights((8, 4)), clock=CLOCK) == {(8, 4): Moody}
    assert choose(weights((8, 4)), batch_invariant=True, clock=CLOCK) == {(8, 4): Steady}
    kinds[:] = [Moody]
    assert choose(weights((8, 4)), batch_invariant=True, clock=CLOCK) == {(8, 4): Plain}


def test_a_choice_is_stored(kinds: list[type[Product]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    layers = weights((8, 4), (4, 8))
    first = choose(layers, folder=tmp_path / "kernels", clock=CLOCK)
    before = CLOCK.now
    assert choose(layers, folder=tmp_path / "kernels", clock=CLOCK) == first
    assert CLOCK.now == before, "nothing was measured"
    choose(weights((8, 5)), folder=tmp_path / "kernels", clock=CLOCK)
    assert CLOCK.now > before, "other shapes are another choice"
    assert len(list((tmp_path / "kernels").glob("*.json"))) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    before = CLOCK.now
    choose(layers, folder=tmp_path / "kernels", clock=CLOCK)
    assert CLOCK.now > before, "other threads are another choice"


def test_a_choice_that_other_programs_disturbed_is_not_stored(
    kinds: list[type[Product]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for busy, num_files in ((1000.0, 0), (0.0, 2)):
        monkeypatch.setattr(OtherPrograms, "busy_cores", lambda *_, busy=busy, **__: busy)
        choose(weights((8, 4)), folder=tmp_path, clock=CLOCK)
        dtype_for_texts(folder=tmp_path)
        assert len(list(tmp_path.iterdir())) == num_files


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"8x4": "no-such-kernel"}', '{"8x4": ["plain"]}', "\0"])
def test_a_damaged_file_is_measured_again_with_one_warning(kinds: list[type[Product]], tmp_path: Path, text: str):
    layers = weights((8, 4))
    choose(layers, folder=tmp_path, clock=CLOCK)
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    file.write_text(text)
    with pytest.warns(CacheWarning, match=str(file)) as caught:
        assert choose(layers, folder=tmp_path, clock=CLOCK) == {(8, 4): ForFew}
    assert len(caught) == 1
    assert json.loads(file.read_text()) == json.loads(good), "the file is whole again"


def test_a_folder_that_cannot_be_written_gives_one_warning(kinds: list[type[Product]], tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(CacheWarning) as caught:
        assert choose(weights((8, 4)), folder=tmp_path / "file" / "kernels", clock=CLOCK) == {(8, 4): ForFew}
    assert len(caught) == 1


@torch.inference_mode()
def test_a_layer_gets_the_chosen_product_only_if_its_weight_fits(monkeypatch: pytest.MonkeyPatch):
    layers = [PackedLinear(Plain(weight, None)) for weight in weights((8, 4))]
    expected = [layer.weight.clone() for layer in layers]
    monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: {(8, 4): Steady})
    monkeypatch.setattr(Steady, "fits", classmethod(lambda _, weight: weight is not last))
    last = layers[2].product.weight
    pack(layers, batch_invariant=True)
    assert [type(layer.product) for layer in layers] == [Steady, Steady, Plain]
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, expected, strict=True))
    assert [layer.multiple for layer in layers] == [8, 8, 8]
    pack(layers)
    assert type(layers[0].product) is Steady, "what is packed stays as it is"


def test_a_part_of_a_large_weight_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.cpu.kernel_choice._SAMPLE_BYTES", 4 * 8 * 10)  # ten rows of eight numbers
    large, small = torch.randn(25, 8), torch.randn(4, 8)
    (part,) = kernel_choice._sample([large, large])
    assert torch.equal(part, large[:10])
    assert len(kernel_choice._sample([small] * 5)) == 2


@pytest.mark.parametrize(("bf16", "dtype"), [(0.5, torch.bfloat16), (1.5, torch.float32)])
def test_texts_are_read_in_the_type_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: float, dtype: torch.dtype
) -> None:
    """Products in bf16 take ``bf16`` seconds, and those in fp32 one second."""
    calls: list[torch.dtype] = []

    def linear(x: Tensor, weight: Tensor) -> None:
        calls.append(x.dtype)
        CLOCK.now += bf16 if x.dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(kernel_choice.F, "linear", linear)
    before = torch.get_rng_state()
    assert dtype_for_texts(folder=tmp_path, clock=CLOCK) == dtype
    assert torch.equal(torch.get_rng_state(), before), "a training that measures begins as one that does not"
    measured = len(calls)
    assert dtype_for_texts(folder=tmp_path, clock=CLOCK) == dtype
    assert len(calls) == measured, "the stored choice counts"
    (path,) = tmp_path.iterdir()
    path.write_text('{"texts": "fp8"}')
    with pytest.warns(CacheWarning, match="measured again"):
        assert dtype_for_texts(folder=tmp_path, clock=CLOCK) == dtype
    assert len(calls) == 2 * measured
