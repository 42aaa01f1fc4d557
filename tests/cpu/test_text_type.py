"""The type for whole texts: the faster one, stored in a file, and measured again if the file is broken."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftheads.cpu import text_type
from draftheads.cpu.text_type import dtype_for_texts
from draftheads.errors import CacheWarning, InvalidSettings
from draftheads.utils.machine import OtherPrograms


class Products:
    """Stands in for ``F.linear``: products in bf16 take ``bf16`` seconds, and those in fp32 one second."""

    def __init__(self, bf16: float) -> None:
        self.bf16, self.now, self.count = bf16, 0.0, 0

    def linear(self, x: Tensor, weight: Tensor) -> None:
        self.count += 1
        self.now += self.bf16 if x.dtype == torch.bfloat16 else 1.0

    def faster(self) -> torch.dtype:
        return dtype_for_texts(clock=lambda: self.now)


@pytest.fixture(params=[0.5, 1.5])
def products(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Products:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    found = Products(request.param)
    monkeypatch.setattr(text_type, "F", found)
    return found


def test_texts_are_read_in_the_type_that_is_faster(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if products.bf16 < 1.0 else torch.float32
    before = torch.get_rng_state()
    assert products.faster() == dtype
    assert torch.equal(torch.get_rng_state(), before), "a training that measures begins as one that does not"
    measured = products.count
    assert products.faster() == dtype
    assert products.count == measured, "the stored type counts"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert products.faster() == dtype
    assert products.count == 2 * measured, "other threads may have another type"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"texts": "fp8"}', '{"texts": ["fp32"]}', "\0"])
def test_a_damaged_file_is_measured_again_with_one_warning(products: Products, tmp_path: Path, text: str) -> None:
    dtype = products.faster()
    (path,) = (tmp_path / "types").iterdir()
    good = path.read_text()
    path.write_text(text)
    with pytest.warns(CacheWarning, match=f"{path}.*measured again") as caught:
        assert products.faster() == dtype
    assert len(caught) == 1
    assert path.read_text() == good, "the file is whole again"


def test_a_folder_that_cannot_be_written_gives_one_warning(products: Products, tmp_path: Path) -> None:
    (tmp_path / "types").write_text("in the way")
    with pytest.warns(CacheWarning, match="is not kept") as caught:
        products.faster()
    assert len(caught) == 1


def test_where_there_is_no_place_it_is_measured_each_time(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise InvalidSettings("no home")

    monkeypatch.setattr(text_type, "cache_folder", nowhere)
    assert products.faster() == products.faster()
    assert products.count == 20


def test_what_other_programs_disturbed_is_not_stored(
    products: Products, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for busy, num_files in ((1000.0, 0), (0.0, 1)):
        monkeypatch.setattr(OtherPrograms, "busy_cores", lambda *_, busy=busy, **__: busy)
        products.faster()
        assert len(list(tmp_path.rglob("*.json"))) == num_files
