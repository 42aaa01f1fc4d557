"""What the scripts share: the machine, the real model and its prompts, and other programs as processes.

A *worker* is one program of ``workers/`` in an environment of its own, which answers prompts line by line (the protocol
is in ``workers/worker.py``); a *server* has OpenAI's HTTP interface. Imports no optional package.
"""

import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftheads.data.records import TextPrompt, own_prompts
from draftheads.models.gguf_models import SMOLLM2_135M, SMOLLM2_INSTALL, source_of
from draftheads.models.model_config import default_dtype
from draftheads.utils.provenance import provenance

Ids = list[int]
HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".peers"  # that environments.sh fills
TASKS = own_prompts("tasks")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
CPU_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16")  # of interest for products
_WORKERS = HERE / "workers"
_STOP_SECONDS = 20.0


say = partial(print, file=sys.stderr, flush=True)  # what is going on


def machine(num_threads: int) -> dict[str, Any]:
    """Kind of CPU, threads, commit and versions; plain JSON values."""
    path, facts = Path("/proc/cpuinfo"), dict[str, Any](provenance())
    flags = re.search(r"^flags\s*:(.*)", path.read_text(encoding="utf-8") if path.is_file() else "", re.MULTILINE)
    present = flags[1].split() if flags else []
    del facts["command"]  # its arguments are the machine's folders
    own = {"cpu": facts["processor"], "cpu_flags": [flag for flag in CPU_FLAGS if flag in present]}
    return {**facts, **own, "threads": num_threads}


def exact_precision(name: str) -> str:
    """bf16 or fp32 for ``auto``: bf16 on CPUs that have it."""
    return ("bf16" if default_dtype("cpu") == torch.bfloat16 else "fp32") if name == "auto" else name


def real_model() -> Path:
    """The folder of smollm2-135m; exits where it is not installed."""
    folder = source_of(None)
    if folder is None:
        sys.exit(f"error: {SMOLLM2_135M} is not installed: {SMOLLM2_INSTALL}")
    return folder


def encoded(prompts: Iterable[TextPrompt], model: Path) -> list[Ids]:
    """Token ids with the model's chat template: all programs get the same."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    tokenizer = AutoTokenizer.from_pretrained(model)
    messages: list[Any] = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; never outside the values.

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    (2.0, 3.0, 4.0)
    >>> quartiles([2.0])
    (2.0, 2.0, 2.0)
    """
    lower, middle, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return lower, middle, upper


def shown(values: Sequence[float], digits: int = 1) -> str:
    """The median, with quartiles in brackets."""
    lower, middle, upper = quartiles(values)
    return f"{middle:.{digits}f} ({lower:.{digits}f}–{upper:.{digits}f})"


def median_ms(action: Callable[[], object], repeats: int, *, wait: Callable[[], object] = lambda: None) -> float:
    """Milliseconds, after three calls that warm up; ``wait`` returns when a device has done its work."""
    times = []
    for _ in range(repeats + 3):
        wait()
        start = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[3:])


def print_setting(facts: dict[str, Any], *lines: str, width: int = 120) -> Console:
    """Prints the machine and what was measured; returns the console for the tables."""
    console = Console(width=None if sys.stdout.isatty() else width)
    console.print(f"{facts['cpu']} ({' '.join(facts['cpu_flags'])}), {facts['threads']} threads")
    for line in lines:
        console.print(line)
    return console


def table_of(*headings: str, title: str | None = None) -> Table:
    """An empty table; the first column has names."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=number > 0, justify="right" if number else "left")
    return table


def write_record(path: Path | None, facts: dict[str, Any], options: Any, names: Sequence[str], **found: Any) -> None:
    """Writes the JSON file, if there is to be one: the machine, these options, and what was found."""
    if path is not None:
        settings = {name: getattr(options, name) for name in names}
        record = {"machine": facts, "settings": settings, **found}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class ProgramFailed(Exception):
    """A program could not be started, or did not answer; the message is for the table."""


@dataclass(frozen=True)
class Reply:
    """A worker's answers to a few prompts."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    num_steps: int | None = None  # passes behind the prompts', all answers together, where they are counted
    accepted_by_depth: tuple[int, ...] = ()  # accepted draft tokens at depth 1, 2, …, where they are counted
    decode_seconds: float | None = None  # of the tokens after the first one, where it is measured
    batch_seconds: tuple[float, ...] = ()  # of passes of several tokens, where the settings ask for them

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Program:
    """Another program: started, and stopped at the end; ``options`` are Popen's.

    It has ``timeout`` seconds until it is ready, or has answered. ProgramFailed: it is not there.
    """

    def __init__(
        self, command: Sequence[str | Path], *, threads: int, log: Path, timeout: float, **options: Any
    ) -> None:
        self.log, self.timeout = log, timeout
        program = Path(command[0])
        if not program.exists():
            name = program.parent.parent.name
            raise ProgramFailed(f"skipped: no environment; run benchmarks/environments.sh {name}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            options = {"stdin": subprocess.DEVNULL, "stdout": file, **options}
            variables = environment(program, threads, cache=log.parent / "cache")
            self.process = subprocess.Popen(list(map(str, command)), stderr=file, env=variables, **options)  # noqa: S603

    def last_words(self) -> str:
        """How it ended, and the last line that it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"ended with status {self.process.wait()}: {lines[-1].strip() if lines else 'nothing printed'}"

    def stop(self) -> None:
        if self.process.stdin is None:
            self.process.terminate()
        try:
            self.process.communicate(timeout=_STOP_SECONDS)  # closes its pipes: a worker without requests ends
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class WorkerProcess(Program):
    """A worker that loads its program at once and answers until it is stopped; ``settings`` are JSON values."""

    def __init__(self, python: Path, script: str, settings: dict[str, Any], **limits: Any) -> None:
        command: list[str | Path] = [python, _WORKERS / script, json.dumps(settings)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **limits)

    def versions(self) -> dict[str, str]:
        """Of the program's packages, as soon as it is loaded. ProgramFailed: it could not be loaded."""
        versions: dict[str, str] = self._read()["versions"]
        return versions

    def ask(self, prompts: list[Ids], max_new_tokens: int) -> Reply:
        """Answers to all prompts together. ProgramFailed: there is no answer."""
        assert self.process.stdin is not None
        request = json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens})
        try:
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ProgramFailed(self.last_words()) from None
        line = self._read()
        tuples: dict[str, Any] = {name: tuple(line.pop(name)) for name in ("accepted_by_depth", "batch_seconds")}
        return Reply(token_ids=tuple(map(tuple, line.pop("token_ids"))), **tuples, **line)

    def _read(self) -> dict[str, Any]:
        """The next line. A reply is one line, so nothing stays in the buffer that select() cannot see."""
        out = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], self.timeout)[0]:
            self.process.kill()
            raise ProgramFailed(f"no answer within {self.timeout:.0f} s")
        text = out.readline()
        if not text:
            raise ProgramFailed(self.last_words())
        line: dict[str, Any] = json.loads(text)
        if "error" in line:
            raise ProgramFailed(line["error"])
        return line


class ServerProcess(Program):
    """A server on the loopback address, ready when it is made; ``url`` has no path, ``models`` are those it lists."""

    def __init__(self, command: Sequence[str | Path], **limits: Any) -> None:
        with socket.socket() as listener:  # a port that nothing listens on
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        super().__init__([*command, "--host", "127.0.0.1", "--port", port], **limits)
        try:
            self.models = self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> list[dict[str, Any]]:
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ProgramFailed(self.last_words())
            try:
                with urlopen(f"{self.url}/v1/models", timeout=5) as response:  # noqa: S310 - of this machine
                    models: list[dict[str, Any]] = json.load(response)["data"]
                    return models
            except OSError:
                time.sleep(0.5)
        self.process.kill()
        raise ProgramFailed(f"not ready after {self.timeout:.0f} s; it {self.last_words()}")


def environment(program: Path, num_threads: int, *, cache: Path) -> dict[str, str]:
    """The environment variables of a program: its own threads and packages, and no downloads."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    inherited = dict(os.environ)
    if program != Path(sys.executable):
        inherited.pop("PYTHONPATH", None)  # it is for this environment's packages
    return {
        **inherited,
        "PATH": f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # inductor's compiler asks for ninja
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def python_of(name: str, environments: Path = ENVIRONMENTS) -> Path:
    """The Python of another program's environment; of this one for ``draftheads``."""
    return Path(sys.executable) if name == "draftheads" else environments.absolute() / name / "bin" / "python"
