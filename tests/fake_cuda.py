"""Stands for ``torch.cuda`` on a machine with two GPUs, where tensors in truth are on the CPU.

As on a GPU, an operator is captured only if it runs on the stream of the capture. A capture computes nothing: what it
would have changed is put back, and what it would have made holds garbage. What a replay leaves holds garbage from the
next replay on, since all graphs share one pool of memory.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftheads.runners import graphs
from draftheads.runners.graphs import Capture, capture_for

Place = Literal["begin", "operator", "end"]
GPU = torch.device("cuda", 1)  # where the tensors seem to be; the current device is another one


class Tape(TorchDispatchMode):
    """Stands for a ``torch.cuda.CUDAGraph``: replays operators with the very tensors that they met."""

    def __init__(self, cuda: "FakeCuda") -> None:
        super().__init__()
        self.cuda = cuda
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}  # by storage: the first tensor that showed it
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}  # storages of others, and what they held
        self.num_replays = 0

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads may allocate memory"
        self.cuda.check("begin")
        self.cuda.pools.append(pool)
        self.stream = self.cuda.current_stream()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        with torch.inference_mode():
            for storage, before in self.changed.values():
                storage.copy_(before)
        self.poison()
        self.cuda.check("end")
        self.cuda.tapes.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.cuda.current_stream(GPU) is not self.stream:
            return func(*args, **kwargs)  # on a GPU it would run at once, and the graph would be empty
        self.cuda.check("operator")
        known = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and _place(value) not in self.made:
                whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
                self.changed.setdefault(_place(value), (whole, whole.clone()))
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _place(leaf) not in known:
                self.made.setdefault(_place(leaf), leaf)
        self.calls.append((func, args, kwargs, out))
        return out

    def poison(self) -> None:
        """Other graphs have used the memory."""
        with torch.inference_mode():
            for tensor in self.made.values():
                is_number = tensor.is_floating_point() or tensor.dtype == torch.bool
                tensor.fill_(float("nan") if is_number else torch.iinfo(tensor.dtype).max)

    def replay(self) -> None:
        self.num_replays += 1
        self.cuda.last.poison()
        self.cuda.last = self
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():  # neither a view nor in place
                    old.copy_(value)

    def pool(self) -> str:
        return "a pool"


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(eq=False)
class Stream:
    """Notes for which streams it waits, and how often the host waits for it."""

    device: torch.device
    waits_for: list["Stream"] = field(default_factory=list)
    num_waits: int = 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def wait_stream(self, other: "Stream") -> None:
        assert other.device == self.device
        self.waits_for.append(other)


class FakeCuda:
    """Its captures, and what is current."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.pools: list[Any] = []  # that the captures were given
        self.last = Tape(self)  # that was replayed
        self.fails_at: Place | None = None  # of the next captures
        self._device = torch.device("cuda", 0)
        self._streams: dict[torch.device, Stream] = {}

    @property
    def capture(self) -> Capture:
        """How the second GPU is captured."""
        found = capture_for(GPU)
        assert found is not None
        return found

    def check(self, place: Place) -> None:
        """A capture fails there, if it is to fail."""
        if place == self.fails_at:
            raise RuntimeError("CUDA out of memory")

    def current_stream(self, device: torch.device | None = None) -> Stream:
        device = device or self._device
        return self._streams.setdefault(device, Stream(device))

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return self._changed(device, self.current_stream(device))

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return self._changed(stream.device, stream)

    @contextmanager
    def _changed(self, device: torch.device, stream: Stream) -> Iterator[None]:
        before, ran_on = self._device, self.current_stream(device)
        self._device, self._streams[device] = device, stream
        try:
            yield
        finally:
            self._device, self._streams[device] = before, ran_on

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place of ``torch.cuda``."""
        for name in ("current_stream", "device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Tape(self))
        monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: _expect(stream, self.current_stream(GPU)))
        monkeypatch.setattr(graphs, "_side_stream", cache(graphs._side_stream.__wrapped__))  # outlives no test


def _expect(found: Stream, expected: Stream) -> None:
    assert found is expected
