"""A peer in a process of its own: started, asked and stopped. Knows nothing of tables."""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Ids = list[int]
_WORKERS = Path(__file__).parent / "workers"


class WorkerFailed(Exception):
    """A peer could not be loaded, or could not answer; the message is for the table."""


@dataclass(frozen=True)
class Reply:
    """Answers to a few prompts."""

    seconds: float
    num_tokens: tuple[int, ...]  # of each answer
    num_steps: int | None  # passes behind the prompts', all answers together, where the peer counts them
    token_ids: tuple[tuple[int, ...], ...] = ()  # the answers
    accepted_by_depth: tuple[int, ...] = ()  # accepted draft tokens at depth 1, 2, …, where the peer counts them
    decode_seconds: float | None = None  # of the tokens after the first one, where the peer measures it
    batch_seconds: tuple[float, ...] = ()  # of passes of several tokens, where the settings ask for them


class WorkerProcess:
    """A worker that loads its peer at once and answers until it is stopped.

    Args:
        python: of the peer's environment.
        script: in the folder ``workers``.
        settings: for the worker, JSON values.
        num_threads: that it may use.
        log: gets what the peer prints.
        timeout: seconds that loading or one request may take.
    """

    def __init__(
        self, python: Path, script: str, settings: dict[str, Any], *, num_threads: int, log: Path, timeout: float
    ) -> None:
        self._log, self._timeout = log, timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(  # noqa: S603 - our own workers
                [python, _WORKERS / script, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment(python, num_threads, cache=log.parent / "cache"),
            )

    def versions(self) -> dict[str, str]:
        """Of the peer's packages, as soon as it is loaded.

        Raises:
            WorkerFailed: it could not be loaded.
        """
        versions: dict[str, str] = self._read()["versions"]
        return versions

    def ask(self, prompts: list[Ids], max_new_tokens: int) -> Reply:
        """Answers to all prompts together.

        Raises:
            WorkerFailed: there is no answer.
        """
        assert self._process.stdin is not None
        request = json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens})
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        line = self._read()
        answers = tuple(map(tuple, line["token_ids"]))
        return Reply(
            line["seconds"],
            tuple(map(len, answers)),
            line["num_steps"],
            answers,
            tuple(line["accepted_by_depth"]),
            line["decode_seconds"],
            tuple(line["batch_seconds"]),
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()  # closes both pipes, also a broken one

    def _read(self) -> dict[str, Any]:
        """The next line. A reply is one line, so nothing stays in the buffer that select() cannot see."""
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], self._timeout)[0]:
            self._process.kill()
            raise WorkerFailed(f"no answer within {self._timeout:.0f} s")
        text = out.readline()
        if not text:
            raise WorkerFailed(self._last_words())
        line: dict[str, Any] = json.loads(text)
        if "error" in line:
            raise WorkerFailed(line["error"])
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"ended with status {code}: {lines[-1].strip() if lines else 'nothing printed'}"


def environment(python: Path, num_threads: int, *, cache: Path) -> dict[str, str]:
    """The environment variables of a worker: its own threads and programs, and no downloads."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    inherited = dict(os.environ)
    if python != Path(sys.executable):
        inherited.pop("PYTHONPATH", None)  # it is for this environment's packages
    return {
        **inherited,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # inductor's compiler asks for ninja
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
