"""Sets of instructions, and numbers of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch

from draftheads.cpu.native_library import load_library, sets_here
from draftheads.utils.machine import Environment


@pytest.fixture
def choose() -> Iterator[Callable[[str], None]]:
    """Chooses a set of instructions, until the end of the test."""
    before = load_library().draftheads_kernels(b"")

    def choose(name: str) -> None:
        assert load_library().draftheads_kernels(name.encode()) == name.encode()

    yield choose
    load_library().draftheads_kernels(before)


def _sets() -> list[str]:
    asked = Environment().kernels
    return [] if load_library() is None else [asked] if asked else sets_here(load_library())


@pytest.fixture(params=_sets())
def instructions(request: pytest.FixtureRequest, choose: Callable[[str], None]) -> str:
    """Each set of instructions that this machine has, or the one that the environment names."""
    choose(request.param)
    return str(request.param)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
