"""Torch has one thread while the native library has all."""

from typing import Any

import pytest
import torch

from draftheads.cpu.native_library import native_threads, single_torch_thread
from draftheads.cpu.native_step import NativeStep
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane
from families import PROMPTS, needs_library, tiny_model

pytestmark = [pytest.mark.parametrize("threads", [4], indirect=True), pytest.mark.usefixtures("threads")]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The threads of torch and of the library in each native pass."""
    seen: list[tuple[int, int]] = []
    own = NativeStep.run

    def run(*arguments: Any, **options: Any) -> Any:
        seen.append((torch.get_num_threads(), native_threads()))
        return own(*arguments, **options)

    monkeypatch.setattr(NativeStep, "run", run)
    return seen


@needs_library
def test_torch_has_one_thread_while_the_native_library_has_all(passes: list[tuple[int, int]]) -> None:
    Engine(tiny_model("llama").sped_up()).generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    assert {*passes} == {(1, 4)}
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


@needs_library
def test_an_adapter_beside_its_base_does_not_slow_it_down(passes: list[tuple[int, int]]) -> None:
    """Torch has one thread in the base's steps, whatever the adapter's layers are computed by."""
    base, adapted = Engine(tiny_model("llama").sped_up()), Engine(tiny_model("llama"))
    core = EngineCore({"base": base, "adapter": adapted}, CoreLimits())
    requests = [engine.requests([[3, 4, 5]], max_new_tokens=6, ignore_eos=True)[0] for engine in (base, adapted)]
    for request, name in zip(requests, core.engines, strict=True):
        core.add(request, Lane(name))
    while core.has_work:
        core.step()
    assert {*passes} == {(1, 4)}
    assert requests[0].token_ids == requests[1].token_ids
