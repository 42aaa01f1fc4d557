"""Captures functions of tensors as CUDA graphs and replays them: one launch instead of a thousand.

Knows nothing of models and caches. The caller gives a key that identifies all shapes and addresses that a function
uses. The function must run on the device only; :class:`StaticOnly` checks this on any device. All of it is tested on
CPUs with a stand-in for ``torch.cuda``; :func:`capture_cuda` has not been run on a GPU yet.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.cuda import CUDAGraph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)
Outputs = tuple[Tensor, ...]
_ONE_CAPTURE = Lock()  # PyTorch allows one capture at a time in a process


class NeedsHost(RuntimeError):
    """An operator cannot be captured. It did not run."""


# Calls a function and then captures it, in the memory of another graph's pool if that is not None.
# Returns the results of the call, and the graph with the buffers of its results, or why there is no graph.
Capture = Callable[[Callable[[], Outputs], Any], tuple[Outputs, tuple[CUDAGraph, Outputs] | str]]


@dataclass(frozen=True)
class _Captured:
    """A graph and its buffers."""

    graph: CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Outputs

    def replay(self, inputs: Sequence[Tensor]) -> Outputs:
        """The results for these inputs, copied: the next replay of any graph may overwrite the buffers."""
        for buffer, value in zip(self.inputs, inputs, strict=True):
            buffer.copy_(value)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class StepGraphs:
    """Runs functions. The second run with a key is captured, and later runs replay it.

    The first run loads kernels, and a shape that occurs once needs no graph. After a failure nothing is captured.
    Beyond the limit of graphs, the least recently used one is dropped.
    """

    def __init__(self, capture: Capture | None, *, limit: int = 32) -> None:
        self.capture = capture
        self.limit = limit
        self.failure: str | None = None  # why a capture failed
        self._generation = 0
        self._met: set[Hashable] = set()
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, generation: int, function: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        """The function's results.

        Args:
            key: equal only if the function, the shapes of the inputs and all other tensors that it uses are the same.
            generation: if it changes, all graphs are dropped: the tensors that they use have moved.
            function: runs on the device only. No reference to it is kept.
            inputs: the tensors that differ from run to run.

        A failed capture is logged: a warning may be an error, and a step must not end half done.
        """
        if generation != self._generation:
            self.clear()
            self._generation = generation
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key].replay(inputs)
        if self.capture is not None and key in self._met:
            return self._captured_now(self.capture, key, function, inputs)
        self._met.add(key)
        return function(*inputs)

    def clear(self) -> None:
        """Drops all graphs and their memory."""
        self._met.clear()
        self._captured.clear()

    def _captured_now(
        self, capture: Capture, key: Hashable, function: Callable[..., Outputs], inputs: Sequence[Tensor]
    ) -> Outputs:
        buffers = tuple(value.clone(memory_format=torch.contiguous_format) for value in inputs)
        pool = next(iter(self._captured.values())).graph.pool() if self._captured else None
        try:
            results, captured = capture(lambda: function(*buffers), pool)
        except NeedsHost as error:
            self._give_up(str(error))
            return function(*inputs)
        if isinstance(captured, str):
            self._give_up(captured)
            return results  # it has run: a second time it might change what it changed already
        graph, outputs = captured
        self._captured[key] = _Captured(graph, buffers, outputs)
        if len(self._captured) > self.limit:
            self._captured.popitem(last=False)
        return results

    def _give_up(self, reason: str) -> None:
        self.clear()
        self.capture, self.failure = None, reason
        logger.warning("decoding goes on without CUDA graphs: %s", reason)


def capture_for(device: torch.device) -> Capture | None:
    """How to capture on that device; None where it cannot be done."""
    return partial(capture_cuda, device) if device.type == "cuda" else None


def capture_cuda(
    device: torch.device, run: Callable[[], Outputs], pool: Any
) -> tuple[Outputs, tuple[CUDAGraph, Outputs] | str]:
    """Runs once on a side stream, which also checks that it can be captured, and then captures, which computes nothing.

    Not by ``torch.cuda.graph``, which waits for all streams and returns all cached memory before each capture. The
    device need not be the current one; the pool has the memory of other graphs, or is None.
    """
    with _ONE_CAPTURE, torch.cuda.device(device):
        current, stream = torch.cuda.current_stream(device), _side_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                with StaticOnly():  # a failed capture would leave the allocator in a bad state
                    results = run()
                captured = _on_this_stream(run, pool)
        finally:
            current.wait_stream(stream)
        for result in results:
            result.record_stream(current)
    return results, captured


def _on_this_stream(run: Callable[[], Outputs], pool: Any) -> tuple[CUDAGraph, Outputs] | str:
    """The graph and the buffers of its results, or why there is none."""
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads may allocate memory during the capture
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # it would only say that something failed before
                graph.capture_end()
            raise
        graph.capture_end()
    except RuntimeError as error:  # of CUDA and of PyTorch, out of memory included
        return str(error)
    return graph, outputs


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device, because cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


class StaticOnly(TorchDispatchMode):
    """Raises :class:`NeedsHost` for a value or shape that depends on data, or a copy to another device.

    >>> with StaticOnly():
    ...     torch.arange(3).nonzero()
    Traceback (most recent call last):
        ...
    draftheads.runners.graphs.NeedsHost: aten.nonzero.default needs the host: it cannot be captured
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_host(func, args, kwargs):
            raise NeedsHost(f"{func} needs the host: it cannot be captured")
        with self:  # check the parts of a composite operator
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def _needs_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = func.name().split(".")[0]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    if name == "aten::lift_fresh":  # behind torch.tensor(…), which has copied numbers if it is not on the CPU
        return devices != {"cpu"}
    if name == "aten::_to_copy" and kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    if len(devices) > 1:  # a single number may be an argument of a kernel, but torch.where copies it to the device
        return torch.Tag.pointwise not in func.tags or name == "aten::where"
    if name in _INDEXING:  # PyTorch tags these as if every index were a mask
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return bool(masks) and (name == "aten::index" or args[2].numel() != 1)
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
