"""A server of OpenAI's API on loopback that answers as a test tells it to."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

NEW_TOKENS = 24
Fields = dict[str, Any]
Behaviour = Callable[[Fields], tuple[int, Any]]  # status and JSON, or text; of 3xx an address; 0 breaks the connection


class FakeServer:
    """An OpenAI-compatible server on loopback; a context manager. Counts how many requests it has at the same time."""

    def __init__(self, behave: Behaviour, *, models: Any = ({"id": "fake"},), metrics: Callable[[], str] = str) -> None:
        self.behave, self.models, self.metrics = behave, models, metrics
        self.requests: list[Fields] = []
        self.keys: set[str | None] = set()
        self.headers: set[str] = set()  # names, of requests for answers
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
                server.keys.add(self.headers["authorization"])
                server.headers |= set(map(str.lower, self.headers))
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


def completion(text: Any, *, finish: str = "length", num_tokens: int | None = NEW_TOKENS, **more: Any) -> Fields:
    """The JSON of a chat's answer; ``more`` are further fields of its message."""
    usage = {} if num_tokens is None else {"usage": {"completion_tokens": num_tokens}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    return {"choices": [choice], **usage}


def repeating(request: Fields) -> tuple[int, Any]:
    """Repeats the conversation, so that it can be checked."""
    words = "/".join(message["content"] for message in request["messages"])
    return 200, completion(f"{words} at {request['temperature']} by {request['seed']}", finish="stop", num_tokens=3)


def asked(fields: Fields) -> str:
    """The prompt of a request with one."""
    return str(fields["prompt"] if "prompt" in fields else fields["messages"][-1]["content"])
