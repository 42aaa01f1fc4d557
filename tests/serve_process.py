"""``draftheads serve`` in a process of its own on a free port of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Self

import httpx2

from draftheads.models.gguf_models import place_in_cache

ADMIN_KEY = "an-admin-key"


class ServerProcess:
    """A running server; a context manager, on leaving which it is asked to stop."""

    def __init__(
        self, folder: Path, *arguments: str, port: int = 0, program: tuple[str, ...] = ("-m", "draftheads")
    ) -> None:
        converted, cache = place_in_cache(), folder / "cache"
        cache.mkdir(exist_ok=True)
        if converted.is_dir() and not (cache / converted.name).exists():  # the default model is not converted again
            (cache / converted.name).symlink_to(converted)
        own = {"DRAFTHEADS_CACHE": str(cache)}
        environment = {"DRAFTHEADS_ADMIN_KEY": ADMIN_KEY, **os.environ, "OMP_NUM_THREADS": "1", **own}
        command = [sys.executable, *program, "serve", *arguments, "--port", str(port)]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()
        assert self.process.stdout is not None
        welcome = self.process.stdout.readline()
        found = re.search(r" at (http://\S+)$", welcome)
        assert found, (welcome, self.errors)
        self.client = httpx2.Client(base_url=found[1], timeout=300)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends the process by a signal, and waits for it."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(timeout=600)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        """The response to a greedy chat request with one message."""
        response = self.client.post("/v1/chat/completions", json=chat_body(text, **fields))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def text(self, text: str, **fields: Any) -> str:
        """The answer to a greedy chat request with one message."""
        return str(self.chat(text, **fields)["choices"][0]["message"]["content"])

    def stream(self, text: str, **fields: Any) -> Generator[tuple[int, str]]:
        """Streamed answers: the number of an answer and a piece of its text, as they come."""
        body = chat_body(text, stream=True, **fields)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        yield choice["index"], choice["delta"].get("content") or ""

    def exchange_head(self, head: Any, key: str | None = ADMIN_KEY, **fields: Any) -> httpx2.Response:
        """The response of ``POST /admin/head``."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.post("/admin/head", json={"model": "model", "head": head, **fields}, headers=headers)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request with one message."""
    return {"model": "model", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits up to ten minutes for something that another thread or process does."""
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
