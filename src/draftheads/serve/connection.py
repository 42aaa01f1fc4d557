"""A connection of the server: uvicorn's, with time limits for its headers, its readers and the number of all.

The only file that knows uvicorn's protocol class and h11, which parses HTTP for it.
"""

import asyncio
import json
import re
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftheads.serve.api_error import ApiError
from draftheads.serve.http_limits import HttpLimits

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)  # host, path, query
_CHUNKED = b"transfer-encoding"


class _UnclearLength(h11.RemoteProtocolError):
    """A proxy before the server may see another end of this request than the server does."""


class _Parser(h11.Connection):
    """h11 with what it leaves to servers: the size of whole headers, requests of two lengths, and whole URLs."""

    def __init__(self, header_bytes: int) -> None:
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of a request."""
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if sum(len(name) + len(value) for name, value in [(event.method, event.target), *event.headers]) > (
            self._header_bytes
        ):
            raise h11.RemoteProtocolError("the headers came in one piece", error_status_hint=431)
        names = {name for name, _ in event.headers}
        if _CHUNKED in names and (b"content-length" in names or event.http_version < b"1.1"):  # RFC 9112, 6.1
            raise _UnclearLength("Transfer-Encoding is for HTTP/1.1 only, and without Content-Length: send one of them")
        return _in_origin_form(event)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """A request for a path. That of a URL is for its path, and for its host whatever Host is (RFC 9112, 3.2.2)."""
    match = _ABSOLUTE.fullmatch(request.target)
    if match is None:
        return request
    host, path, query = match.groups(b"")
    headers = [(b"host", host), *(header for header in request.headers if header[0] != b"host")]
    target = (path or b"/") + query
    return h11.Request(method=request.method, target=target, headers=headers, http_version=request.http_version)


class Connection(H11Protocol):
    """One client's connection. :func:`connections_with` binds the limits."""

    limits: HttpLimits

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Parser(self.limits.header_bytes)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses connections beyond the limit, and waits for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refused = True
            busy = ApiError(503, "the server has too many connections: retry later", code="too_many_connections")
            self._answer_at_once(busy)
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Headers must be complete in time; what a client sends a byte at a time does not extend it."""
        if self._refused:
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()
        else:
            _stop(self._header_timer)
            self._header_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._header_timer)
        _stop(self._write_timer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """The client reads too slowly: it has some seconds to go on."""
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._write_timer)

    def on_response_complete(self) -> None:
        """What is still to be read must be read in time, if the connection closes."""
        super().on_response_complete()
        self._expect_reader_of_last_bytes()

    def shutdown(self) -> None:
        super().shutdown()
        self._expect_reader_of_last_bytes()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reader_of_last_bytes()

    def send_400_response(self, msg: str) -> None:
        """The request is not HTTP, or is refused for the error that is being handled."""
        match sys.exception():
            case h11.RemoteProtocolError(error_status_hint=431):
                words = f"the headers are larger than {self.limits.header_bytes} bytes: send smaller ones"
                error = ApiError(431, words, code="headers_too_large")
            case _UnclearLength() as unclear:
                error = ApiError(400, str(unclear), code="invalid_http")
            case _:
                error = ApiError(400, msg, code="invalid_http")
        self._answer_at_once(error)

    def _expect_headers(self) -> None:
        if self._header_timer is None:  # once a request was answered, the client may also wait before the next one
            waits = 0.0 if self.cycle is None else self.limits.keep_alive_seconds
            self._header_timer = self.loop.call_later(self.limits.header_seconds + waits, self.transport.abort)

    def _expect_reader(self) -> None:
        _stop(self._write_timer)
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def _expect_reader_of_last_bytes(self) -> None:
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._expect_reader()

    def _answer_at_once(self, error: ApiError) -> None:
        """Writes a response outside of the application and closes the connection."""
        body = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with suppress(h11.LocalProtocolError):  # in the middle of a response there is no room for another one
            head = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase)
            parts = [self.conn.send(head), self.conn.send(h11.Data(data=body)), self.conn.send(h11.EndOfMessage())]
            self.transport.write(b"".join(part for part in parts if part))
        self.transport.close()
        self._expect_reader_of_last_bytes()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def connections_with(limits: HttpLimits) -> type[Connection]:
    """The class of connections with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
