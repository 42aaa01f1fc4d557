"""Sets of instructions, and numbers of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch

from draftheads.cpu.native_library import load_library, sets_here


@pytest.fixture
def choose() -> Iterator[Callable[[str], None]]:
    """Chooses a set of instructions, until the end of the test."""
    before = load_library().draftheads_kernels(b"")

    def choose(name: str) -> None:
        assert load_library().draftheads_kernels(name.encode()) == name.encode()

    yield choose
    load_library().draftheads_kernels(before)


@pytest.fixture(params=sets_here(load_library()) if load_library() else [])
def instructions(request: pytest.FixtureRequest, choose: Callable[[str], None]) -> str:
    """Each set of instructions that this machine has."""
    choose(request.param)
    return str(request.param)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
