"""Facts of this machine: cores, their use, memory, limits of a container, an NVIDIA driver; and environment variables.

Also work for all cores, and work that is done ahead.

Imports no torch. No other module reads environment variables; docs/python.md has them as a table.
"""

import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

_ROOT = Path("/")
_CHUNK = 64  # items that another process is given at once
_ALONE = 16  # chunks before there are other processes
_NO_THREADS = "TOKENIZERS_PARALLELISM"  # tokenizers' own; "false" in forked processes, else it writes a warning
S = TypeVar("S")
T = TypeVar("T")
IDLE_CORES = 0.3  # cores that other programs may use without being noticed, such as those of an idle desktop


class Cores(NamedTuple):
    """How many cores a process may use."""

    logical: int  # of the machine
    allowed: int  # that this process may be scheduled on
    quota: float | None  # cores' worth of time by a limit of its control group (a container); None: no limit

    @property
    def usable(self) -> int:
        """Threads that can run at the same time."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota + 0.5)))


class Memory(NamedTuple):
    """Bytes of memory."""

    total: int
    available: int
    limit: int | None  # of the control group (a container); None: no limit


class OtherPrograms:
    """How much other programs compute on the cores that this process may use.

    Time that a hypervisor gives to other machines counts as theirs.
    """

    def __init__(self) -> None:
        self.num_cores = find_cores().allowed
        self._last = self._times()

    def busy_cores(self, *, least_seconds: float = 0.0) -> float | None:
        """Cores' worth of time that they used since the last call; None if that was too short a time ago.

        The system counts in hundredths of a second, so after less than 0.2 seconds the result is rough.
        """
        before, now = self._last, self._times()
        total, busy, own = (new - old for new, old in zip(now, before, strict=True))
        seconds = total / self.num_cores
        if seconds <= max(least_seconds, 0.0):
            return None
        self._last = now
        return min(max(0.0, (busy - own) / seconds), float(self.num_cores))

    def disturb(self, threads: int) -> bool:
        """Whether they used cores that so many threads of this process needed, since the last call."""
        busy = self.busy_cores()
        return busy is not None and busy + threads > self.num_cores + IDLE_CORES

    def _times(self) -> tuple[float, float, float]:
        """Seconds of all cores, of those that were not idle, and of this process."""
        cores = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            allowed = os.sched_getaffinity(0)
            cores = [times for number, times in enumerate(cores) if number in allowed] or cores
        total = sum(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) for times in cores)
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in cores)
        return total, total - idle, time.process_time()


def find_cores(root: Path = _ROOT) -> Cores:
    """The cores of this machine, and the limits of this process; ``root`` is where /proc/self and /sys are."""
    logical = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    limits = _limits(root, "cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    quota = min((quota / period for quota, period in limits), default=None)
    return Cores(logical, allowed, quota)


def find_memory(root: Path = _ROOT) -> Memory:
    """The memory of this machine, and the limit of this process; ``root`` is where /proc/self and /sys are."""
    memory = psutil.virtual_memory()
    # version 1 of control groups has a very large number in place of "max"
    limits = [limit for (limit,) in _limits(root, "memory", ["memory.max"], ["memory.limit_in_bytes"])]
    return Memory(
        memory.total, memory.available, min((limit for limit in limits if limit < memory.total), default=None)
    )


def has_nvidia_driver(root: Path = _ROOT) -> bool:
    """Whether the NVIDIA driver is loaded: on Linux, and in WSL."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def _limits(root: Path, controller: str, *files: list[str]) -> Iterator[list[int]]:
    """The numbers in these files of this process's control groups and those above them; psutil does not read them.

    ``controller`` is "cpu" or "memory"; ``files`` are the names in version 2 of control groups, and in version 1.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if number == "0" else controller)
        # in a container the path may be that of the host: then the limits are in the mount itself
        inner = Path(path.lstrip("/"))
        for place in (inner, *inner.parents):
            for names in files:
                words = " ".join(_text(mount / place / name) for name in names).split()
                if ".." not in place.parts and words and all(map(str.isdecimal, words)):  # not "max" and not -1
                    yield [int(word) for word in words]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- work for all cores, and ahead ---


def by_all_cores(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """The function of every item, in order; few items are ahead. Of many items by forked processes, on Linux.

    The function is inherited. Its results are pickled.
    """
    items, cores = iter(items), find_cores().usable
    yield from map(function, islice(items, _ALONE * _CHUNK))
    first = list(islice(items, _CHUNK))
    if not first or cores == 1 or sys.platform != "linux":
        yield from map(function, chain(first, items))
        return
    with _forked(function, cores) as pool:
        chunks = chain([first], iter(lambda: list(islice(items, _CHUNK)), []))
        yield from chain.from_iterable(ahead(pool, _of_chunk, chunks, 2 * cores))


def ahead(pool: Executor, function: Callable[[S], T], items: Iterable[S], number: int) -> Iterator[T]:
    """The function of every item, in order, computed in the pool for so many items ahead.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(1) as pool:
    ...     print(*ahead(pool, abs, [-1, 2, -3], 1))
    1 2 3
    """
    waiting = deque[Any]()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > number:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _forked(function: Callable[[Any], Any], number: int) -> Iterator[Executor]:
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "false"
    pool = ProcessPoolExecutor(number, get_context("fork"), _begin, (function,))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, whose locks are not used
            pool.submit(int).result()  # forks all of them
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


_inherited: list[Callable[[Any], Any]] = []


def _begin(function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends this one
    _inherited[:] = [function]


def _of_chunk(items: list[Any]) -> list[Any]:
    return list(map(_inherited[0], items))


# --- environment variables ---


def _variable(name: str, meaning: str, read: Callable[[str | None], Any] = lambda value: value) -> Any:
    return field(default_factory=lambda: read(os.environ.get(name)), metadata={"name": name, "meaning": meaning})


@dataclass(frozen=True)
class Environment:
    """Their values at this moment: ``Environment().cache``. None: it is not set."""

    cache: str | None = _variable("DRAFTHEADS_CACHE", "the folder of the cache")
    shared_cache: str | None = _variable("XDG_CACHE_HOME", "the folder that has the cache, where that is not set")
    kernels: str | None = _variable("DRAFTHEADS_KERNELS", "instructions of the native library, or `off`")
    auto: str | None = _variable("DRAFTHEADS_AUTO", "only for tests: what `auto` is on a CPU, `bf16` or `fp32`")
    api_key: str | None = _variable("DRAFTHEADS_API_KEY", "a key that clients of `serve` need")
    admin_key: str | None = _variable("DRAFTHEADS_ADMIN_KEY", "the key for POST /admin/head of `serve`")
    num_threads: str | None = _variable("OMP_NUM_THREADS", "threads of PyTorch and of the native library")
    gpus: str | None = _variable("CUDA_VISIBLE_DEVICES", "GPUs that PyTorch may use")
    num_processes: int = _variable(
        "WORLD_SIZE", "processes of a training run, set by their launcher", lambda value: int(value or 1)
    )
    host: int = _variable("GROUP_RANK", "number of the host, set by `torchrun`", lambda value: int(value or 0))


NAMES = {each.name: each.metadata["name"] for each in fields(Environment)}  # of the variables, by field
