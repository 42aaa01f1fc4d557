"""Clients that keep connections open, and what it costs the server: nothing."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from draftheads.serve import app
from draftheads.serve.guard import HttpLimits
from draftheads.serve.options import listen
from serve_process import wait_until
from serve_world import NAME, USER, Running, metrics_of, raw_request, running, tiny_engines

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MANY = {"model": NAME, "messages": [USER], "max_tokens": 1900, "ignore_eos": True}  # tokens


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server with little patience."""
    limits = HttpLimits(keep_alive_seconds=1, max_connections=8, incoming_seconds=0.5)
    with running(tiny_engines(), limits) as one:
        yield one


def connection(server: Running, *, buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(20)
    client.connect(server.address)
    return client


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            received += piece
    return received


def num_connections(server: Running) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.parametrize("rest", [b"", b"GET"])  # also if it sends something that is no whole request
def test_a_connection_is_closed_some_time_after_its_last_request(hasty: Running, rest: bytes):
    with connection(hasty) as client:
        client.sendall(HEALTH + rest)
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])  # also if all of them come at once
def test_large_headers_are_refused(hasty: Running, end: bytes):
    with connection(hasty) as client:
        client.sendall(HEALTH[:-2] + b"X: " + b"a" * 40_000 + end)
        assert read_all(client).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/", "/v1/models/tiny"])
def test_head_is_get_without_the_body(hasty: Running, path: str):
    head, same = (httpx2.request(method, hasty.url + path) for method in ("HEAD", "GET"))
    assert (head.status_code, head.content, len(same.content) > 0) == (200, b"", True)
    assert head.headers.keys() == same.headers.keys()


def test_accepted_connections_do_not_hold_answers_back():
    with listen("127.0.0.1", 0) as one, socket.create_connection(one.getsockname()), one.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("sent", "status"), [(b"", None), (POST, 408), (POST + b"Content-Length: 9\r\n\r\n{", 400)])
def test_a_request_that_stops_coming_ends(
    hasty: Running, sent: bytes, status: int | None, caplog: pytest.LogCaptureFixture
):
    name = f'draftheads_requests_total{{route="{"/v1/completions" if status == 400 else "other"}",status="{status}"}}'
    before = metrics_of(hasty.url).get(name, 0)
    with caplog.at_level(logging.INFO, "draftheads.access"), connection(hasty) as client:
        client.sendall(sent)
        assert read_all(client) == b""
    if status is not None:
        wait_until(lambda: metrics_of(hasty.url).get(name, 0) == before + 1)
    assert len(caplog.messages) == (status is not None), "it is logged, unless nothing came"


@pytest.mark.parametrize("first", [0, 1])
def test_a_request_with_two_ends_is_refused_and_its_connection_closed(hasty: Running, first: int):
    ends = [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"]
    with connection(hasty) as client:
        client.sendall(POST + ends[first] + ends[1 - first] + b"\r\n0\r\n\r\n" + HEALTH)
        received = read_all(client)
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1, "what follows may be a part of it"


@pytest.mark.parametrize("size", [10, app._LARGE_BODY])
def test_a_large_body_holds_up_no_other_request(hasty: Running, size: int, monkeypatch: pytest.MonkeyPatch):
    threads = []
    read = app._no_number
    monkeypatch.setattr(app, "_no_number", lambda word: threads.append(threading.current_thread().name) or read(word))
    response = hasty.complete(prompt="a" * size, max_tokens=float("nan"))
    assert "NaN is not a number of JSON" in response.text
    assert [name.startswith("asyncio_") for name in threads] == [size > 10]


def test_too_many_connections_are_refused_and_old_ones_live(hasty: Running, caplog: pytest.LogCaptureFixture):
    clients = [connection(hasty) for _ in range(7)]
    wait_until(lambda: num_connections(hasty) == 7)
    with caplog.at_level(logging.INFO, "draftheads.access"), connection(hasty) as one_more:
        one_more.sendall(HEALTH.replace(b"/health", b"/v1/models"))
        assert read_all(one_more).startswith(b"HTTP/1.1 503")
    assert "GET /v1/models 503" in caplog.text
    wait_until(lambda: num_connections(hasty) == 7)
    clients[0].sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert read_all(clients[0]).startswith(b"HTTP/1.1 200 OK")
    for client in clients:
        client.close()
    wait_until(lambda: num_connections(hasty) == 0)


def test_who_does_not_read_holds_no_row(hasty: Running):
    before = hasty.scheduler.snapshot().finished
    fields = {"stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}  # many bytes for each token
    with connection(hasty, buffer=2048) as client:
        client.sendall(raw_request("chat/completions", {**MANY, **fields, "max_tokens": 700}))
        wait_until(lambda: hasty.scheduler.snapshot().finished == before + 4)
        assert hasty.scheduler.snapshot().running == 0
    wait_until(lambda: num_connections(hasty) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_rows(hasty: Running, stream: bool):
    before = hasty.scheduler.snapshot().cancelled
    with connection(hasty) as client:
        client.sendall(raw_request("chat/completions", {**MANY, "stream": stream, "n": 2}))
        wait_until(lambda: hasty.scheduler.snapshot().running == 2)
    wait_until(lambda: hasty.scheduler.snapshot().cancelled == before + 2)
    wait_until(lambda: hasty.scheduler.snapshot().running == 0)


def test_a_client_that_goes_before_its_body_is_complete(hasty: Running):
    with connection(hasty) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: num_connections(hasty) == 1)
    wait_until(lambda: num_connections(hasty) == 0)
    assert hasty.chat().status_code == 200
