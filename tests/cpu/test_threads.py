"""Torch has one thread while the native library has all."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftheads.cpu.native_library import native_threads, single_torch_thread
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane
from families import PROMPTS, tiny_model


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_torch_has_one_thread_while_the_native_library_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").sped_up()
    if model.native is None:
        pytest.skip("the native library was not built: no C++ compiler")
    seen = set()
    own = type(model.native).run

    def run(*arguments: Any, **options: Any) -> Any:
        seen.add((torch.get_num_threads(), native_threads()))
        return own(*arguments, **options)

    monkeypatch.setattr(type(model.native), "run", run)
    Engine(model).generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    assert seen == {(1, 4)}
    assert (torch.get_num_threads(), native_threads()) == (4, 4)


def test_the_number_comes_back_after_an_error_and_one_that_the_caller_sets_stays() -> None:
    def fails() -> None:
        with single_torch_thread(), single_torch_thread():
            assert (torch.get_num_threads(), native_threads()) == (1, 4)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (torch.get_num_threads(), native_threads()) == (4, 4)
    torch.set_num_threads(3)
    with single_torch_thread():
        assert native_threads() == 3
    assert torch.get_num_threads() == 3


def test_an_adapter_beside_its_base_does_not_slow_it_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has one thread in the base's steps, whatever the adapter's layers are computed by."""
    model = tiny_model("llama").sped_up()
    if model.native is None:
        pytest.skip("the native library was not built: no C++ compiler")
    base, adapted = Engine(model), Engine(tiny_model("llama"))
    seen: list[int] = []
    own = type(model.native).run

    def run(*arguments: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return own(*arguments, **options)

    monkeypatch.setattr(type(model.native), "run", run)
    core = EngineCore({"base": base, "adapter": adapted}, CoreLimits())
    requests = [engine.requests([[3, 4, 5]], max_new_tokens=6, ignore_eos=True)[0] for engine in (base, adapted)]
    for request, name in zip(requests, core.engines, strict=True):
        core.add(request, Lane(name))
    while core.has_work:
        core.step()
    assert {*seen} == {1}
    assert requests[0].token_ids == requests[1].token_ids
