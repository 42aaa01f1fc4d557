"""Facts of this machine from the operating system: cores, their use, memory, an NVIDIA driver. Imports no torch."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_ROOT = Path("/")
IDLE_CORES = 0.3  # cores that other programs may use without being noticed, such as those of an idle desktop


class Cores(NamedTuple):
    """How many cores a process may use."""

    logical: int  # of the machine
    physical: int | None  # of the machine; None if it is not known
    allowed: int  # that this process may be scheduled on
    quota: float | None  # cores' worth of time by a limit of its control group (a container); None: no limit

    @property
    def usable(self) -> int:
        """Threads that can run at the same time."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota + 0.5)))


class Memory(NamedTuple):
    """Bytes of memory; None where they are not known."""

    total: int | None
    available: int | None
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
    """The cores of this machine, and the limits of this process; ``root`` is where /proc and /sys are."""
    logical = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quotas = list(_quotas(root))
    return Cores(logical, _physical_cores(root), allowed, min(quotas, default=None))


def find_memory(root: Path = _ROOT) -> Memory:
    """The memory of this machine, and the limit of this process; ``root`` is where /proc and /sys are."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), flags=re.MULTILINE))
    total = int(fields["MemTotal"]) * 1024 if "MemTotal" in fields else _posix_memory()
    available = int(fields["MemAvailable"]) * 1024 if "MemAvailable" in fields else None
    limits = [
        int(text)
        for folder in _group_folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name).strip()).isdigit()
    ]
    # version 1 of control groups has a very large number in place of "max"
    return Memory(total, available, min((limit for limit in limits if total is None or limit < total), default=None))


def has_nvidia_driver(root: Path = _ROOT) -> bool:
    """Whether the NVIDIA driver is loaded: on Linux, and in WSL."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def _quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time that each control group of this process allows."""
    for folder in _group_folders(root, "cpu"):
        match _text(folder / "cpu.max").split():
            case [quota, period] if quota.isdigit() and int(period):
                yield int(quota) / int(period)
        quota, period = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # version 1; -1 is no limit
            yield int(quota) / int(period)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups and those above them, in both versions of control groups."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        mount = mounts if number == "0" else mounts / controller
        # in a container the path may be that of the host: then the limits are in the mount itself
        inner = Path(path.lstrip("/"))
        yield from (mount / place for place in (inner, *inner.parents) if ".." not in place.parts)


def _physical_cores(root: Path) -> int | None:
    blocks = _text(root / "proc/cpuinfo").split("\n\n")
    found = set()
    for block in blocks:
        fields = dict(re.findall(r"^(physical id|core id)\s*:\s*(\d+)", block, flags=re.MULTILINE))
        if "core id" in fields:
            found.add((fields.get("physical id"), fields["core id"]))
    return len(found) or None


def _posix_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
