"""Server-sent events: one JSON object each, and ``[DONE]`` at the end."""

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftheads.serve.answers import unless_gone
from draftheads.serve.api_error import ApiError

_LOG = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold chunks back
]


class EventStream(Response):
    """A stream of chunks. It ends when the client disconnects; an error in it is its last event.

    Args:
        chunks: JSON objects. The generator is closed at the end in any case.
        at_end: called last, also if the stream never began.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]], at_end: Callable[[], object]) -> None:
        super().__init__()
        self._chunks = chunks
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._at_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await _send_event(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
            except ApiError as error:
                await _send_event(send, json.dumps(error.body()))
            except Exception:  # noqa: BLE001 - logged; too late for another status
                _LOG.exception("a stream failed")
                await _send_event(send, json.dumps(ApiError(500, "the server could not finish the answer").body()))
        await _send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
