"""A tiny model for audits, with what it says offline, and a server that answers as a test tells it to."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch

import draftheads
from cli_world import PROMPTS
from draftheads.decode.engine import Engine
from target_rows import Target

NEW_TOKENS = 24
Fields = dict[str, Any]
Behaviour = Callable[[Fields], tuple[int, Any]]  # status and JSON, or text; of 3xx an address; 0 breaks the connection


class FakeServer:
    """An OpenAI-compatible server on loopback; a context manager. Counts how many requests it has at the same time."""

    def __init__(self, behave: Behaviour, *, models: Any = ({"id": "fake"},), metrics: Callable[[], str] = str) -> None:
        self.behave, self.models, self.metrics = behave, models, metrics
        self.requests: list[Fields] = []
        self.keys: set[str | None] = set()
        self.now = self.most = 0
        self.is_stopped = False
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.keys.add(self.headers["authorization"])
                if self.path == "/metrics":
                    self.reply(200, server.metrics())
                elif self.path == "/v1/models" and server.models is not None:
                    self.reply(200, {"data": list(server.models)})
                else:
                    self.reply(404, {"error": {"message": f"no {self.path}"}})

            def do_POST(self) -> None:
                fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server._lock:
                    server.requests.append({**fields, "path": self.path})
                    server.now += 1
                    server.most = max(server.most, server.now)
                status, body = server.behave(fields)
                with server._lock:
                    server.now -= 1
                if status:
                    self.reply(status, body)
                self.close_connection |= server.is_stopped or not status

            def reply(self, status: int, body: Any) -> None:
                content = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                if 300 <= status < 400:
                    self.send_header("location", str(body))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Refuses all further connections, and ends those that there are after their request."""
        if not self.is_stopped:
            self.is_stopped = True
            self.http.shutdown()
            self.http.server_close()


def completion(text: str, *, finish: str = "length", num_tokens: int | None = NEW_TOKENS, **more: Any) -> Fields:
    """The JSON of a chat's answer."""
    usage = {} if num_tokens is None else {"usage": {"completion_tokens": num_tokens}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"choices": [choice], **usage, **more}


def asked(fields: Fields) -> str:
    """The prompt of a request with one."""
    return str(fields["prompt"] if "prompt" in fields else fields["messages"][-1]["content"])


class World:
    """The model in a folder, and the answers of its plain decoding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.engine: Engine = draftheads.load(self.model, precision="fp32")
        results = self.engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        self.plain = {prompt: result.text for prompt, result in zip(PROMPTS, results, strict=True)}
        self.ids = {prompt: result.token_ids for prompt, result in zip(PROMPTS, results, strict=True)}
        (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")

    def scores(self, prompt: str, place: int) -> torch.Tensor:
        """(V,) log-probabilities after so many tokens of the plain answer."""
        context = [*self.engine.encode(prompt), *self.ids[prompt][:place]]
        logits, _ = Target(self.engine.model).prefill([context])
        return logits[0].log_softmax(-1)

    def answer(self, fields: Fields, changed: Mapping[str, str] | None = None) -> tuple[int, Fields]:
        """The plain answer to a request, or the one to which it was changed."""
        prompt = asked(fields)
        return 200, completion({**self.plain, **(changed or {})}[prompt])

    def changed(self, *, is_tie: bool) -> tuple[str, int, float, str]:
        """The place where another letter is least unlikely, or one where it is very unlikely.

        Returns the prompt, the place, the gap in nats, and the changed answer.
        """
        found = []
        for prompt, ids in self.ids.items():
            for place in range(4, NEW_TOKENS - 4):
                scores = self.scores(prompt, place)
                others = scores.clone()
                others[ids[place]] = others[:4] = -torch.inf  # special tokens are no letters
                best = int(others.argmax())
                gap = float(scores[ids[place]] - scores[best])
                text = self.plain[prompt]
                letter = self.engine.model.tokenizer.decode([best])
                found.append((prompt, place, gap, text[:place] + letter + "mob" * 8))
        found = [(prompt, place, gap, text[:NEW_TOKENS]) for prompt, place, gap, text in found]
        choose = min if is_tie else max
        return choose(found, key=lambda one: one[2])
