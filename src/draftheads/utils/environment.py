"""The environment variables that the package reads, in one class. docs/python.md has them as a table."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


def _variable(name: str, meaning: str, read: Callable[[str | None], Any] = lambda value: value) -> Any:
    return field(default_factory=lambda: read(os.environ.get(name)), metadata={"name": name, "meaning": meaning})


@dataclass(frozen=True)
class Environment:
    """Their values at this moment: ``Environment().cache``. None: it is not set."""

    cache: str | None = _variable("DRAFTHEADS_CACHE", "the folder of the cache")
    shared_cache: str | None = _variable("XDG_CACHE_HOME", "the folder that has the cache, where that is not set")
    kernels: str | None = _variable("DRAFTHEADS_KERNELS", "instructions of the native library, or `off`")
    api_key: str | None = _variable("DRAFTHEADS_API_KEY", "a key that clients of `serve` need")
    admin_key: str | None = _variable("DRAFTHEADS_ADMIN_KEY", "the key for POST /admin/head of `serve`")
    num_threads: str | None = _variable("OMP_NUM_THREADS", "threads of PyTorch and of the native library")
    gpus: str | None = _variable("CUDA_VISIBLE_DEVICES", "GPUs that PyTorch may use")
    num_processes: int = _variable(
        "WORLD_SIZE", "processes of a training run, set by their launcher", lambda value: int(value or 1)
    )


NAMES = {each.name: each.metadata["name"] for each in fields(Environment)}  # of the variables, by field


def secret(variable: str) -> str | None:
    """A key in a variable that the user names, such as with ``--api-key-env``."""
    return os.environ.get(variable)
