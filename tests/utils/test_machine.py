"""Facts of the operating system, from folders that look like /proc and /sys of other machines."""

import os
import re
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from draftheads.utils.machine import (
    NAMES,
    Cores,
    Environment,
    OtherPrograms,
    find_cores,
    find_memory,
    has_nvidia_driver,
)

busy_cores = OtherPrograms.busy_cores


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four cores of two threads each, all for this process, and 16 GB."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * 10**9, available=8 * 10**9))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write(tmp_path, {"proc/self/cgroup": "0::/\n"})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


CGROUP = "sys/fs/cgroup"
VERSION_1 = {
    "proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n3:cpuset:/\n",
    f"{CGROUP}/cpu/docker/1/cpu.cfs_quota_us": "-1\n",
    f"{CGROUP}/cpu/docker/1/cpu.cfs_period_us": "100000\n",
    f"{CGROUP}/cpu/cpu.cfs_quota_us": "25000\n",
    f"{CGROUP}/cpu/cpu.cfs_period_us": "100000\n",
    f"{CGROUP}/memory/docker/1/memory.limit_in_bytes": "9223372036854771712\n",  # the number for "no limit"
}


@pytest.mark.parametrize(
    ("files", "quota", "usable", "memory"),
    [
        ({f"{CGROUP}/cpu.max": "max 100000\n", f"{CGROUP}/memory.max": "max\n"}, None, 8, None),
        (  # version 2: the smallest limit of the groups above counts
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                f"{CGROUP}/user.slice/job/cpu.max": "400000 100000\n",
                f"{CGROUP}/user.slice/cpu.max": "250000 100000\n",
                f"{CGROUP}/user.slice/job/memory.max": "max\n",
                f"{CGROUP}/user.slice/memory.max": "4000000000\n",
            },
            *(2.5, 3, 4_000_000_000),
        ),
        (  # in a container the path of the group is the host's, and the limits are in the mount
            {"proc/self/cgroup": "0::/../../docker/123\n", f"{CGROUP}/cpu.max": "150000 100000\n"},
            *(1.5, 2, None),
        ),
        (VERSION_1, 0.25, 1, None),  # not 0 cores
        ({**VERSION_1, f"{CGROUP}/memory/memory.limit_in_bytes": "2000000000\n"}, 0.25, 1, 2_000_000_000),
    ],
)
def test_the_limits_of_control_groups(
    root: Path, files: dict[str, str], quota: float | None, usable: int, memory: int | None
) -> None:
    write(root, files)
    cores = find_cores(root)
    assert cores == Cores(logical=8, allowed=8, quota=quota)
    assert cores.usable == usable
    assert find_memory(root) == (16 * 10**9, 8 * 10**9, memory)


def test_a_process_may_be_bound_to_some_cores_and_other_systems_have_no_limits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    assert find_cores(root).usable == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    (root / "proc/self/cgroup").unlink()
    assert find_cores(root) == Cores(logical=8, allowed=8, quota=None)
    assert find_memory(root).limit is None


def test_an_nvidia_driver_is_found(tmp_path: Path) -> None:
    assert not has_nvidia_driver(tmp_path)
    write(tmp_path, {"proc/driver/nvidia/version": "NVRM version: 570\n"})
    assert has_nvidia_driver(tmp_path)


# --- other programs ---


class Times(NamedTuple):
    """As psutil's: seconds of one core by what it did."""

    user: float
    idle: float
    steal: float = 0.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Three cores, of which this process may use two, and its own seconds."""
    now = SimpleNamespace(cores=[Times(5.0, 10.0)] * 3, own=2.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda *, percpu: now.cores)
    monkeypatch.setattr(time, "process_time", lambda: now.own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(OtherPrograms, "busy_cores", busy_cores)
    return now


def test_the_cores_that_other_programs_use(machine: SimpleNamespace) -> None:
    others = OtherPrograms()
    assert others.num_cores == 2
    assert others.busy_cores() is None, "no time has passed"
    # four seconds: core 0 was busy for three and core 1 for one, of which this process used 1.6; core 2 is not ours
    machine.cores, machine.own = [Times(8.0, 11.0), Times(6.0, 13.0), Times(99.0, 99.0)], 3.6
    assert others.busy_cores(least_seconds=9.0) is None, "a longer time is asked for, and the time goes on"
    assert others.busy_cores() == pytest.approx(2.4 / 4.0)
    assert others.busy_cores() is None
    machine.cores, machine.own = [Times(9.0, 11.0), Times(7.0, 13.0)], 5.6
    assert others.busy_cores() == pytest.approx(0.0)
    machine.cores = [Times(9.0, 11.0, 1.0), Times(7.0, 14.0)]
    assert others.busy_cores() == pytest.approx(1.0), "another virtual machine has the core"


def test_other_programs_disturb_threads_that_need_their_core(machine: SimpleNamespace) -> None:
    one, two = OtherPrograms(), OtherPrograms()
    machine.cores, machine.own = [Times(6.0, 10.0), Times(6.0, 10.0)], 3.0
    assert (one.disturb(1), two.disturb(2)) == (False, True)


def test_this_machine_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, memory = find_cores(), find_memory()
    assert 1 <= cores.usable <= cores.logical
    assert 10**8 < memory.available < memory.total
    monkeypatch.setattr(OtherPrograms, "busy_cores", busy_cores)
    others, found = OtherPrograms(), None
    while found is None:  # the system counts in hundredths of a second
        found = others.busy_cores()
    assert 0.0 <= found <= others.num_cores


# --- environment variables ---

ROOT = Path(__file__).parents[2]


def test_the_manual_has_all_variables():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([A-Z_]+)` \| (.+) \|$", page, re.MULTILINE)
    assert shown == [(each.metadata["name"], each.metadata["meaning"]) for each in fields(Environment)]
    build = (ROOT / "hatch_build.py").read_text(encoding="utf-8")
    assert all(f"`{name}" in page for name in re.findall(r'environ\.get\("(\w+)"', build))


def test_no_other_file_reads_the_environment():
    files = (ROOT / "src" / "draftheads").rglob("*.py")
    readers = {path.name for path in files if re.search(r"\bos\.(environ|getenv)", path.read_text(encoding="utf-8"))}
    assert readers - {"endpoint.py"} == {"machine.py"}, "a server's key is in a variable that the user names"


def test_values_are_those_of_this_moment(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    assert (Environment().cache, Environment().num_processes) == (None, 1)
    monkeypatch.setenv("DRAFTHEADS_CACHE", "here")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (Environment().cache, Environment().num_processes, Environment().gpus) == ("here", 4, "")
