"""Clients that keep connections open, and what it costs the server: nothing."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from draftheads.serve.guard import HttpLimits
from serve_process import wait_until
from serve_world import NAME, USER, Running, raw_request, running, tiny_engines

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MANY = {"model": NAME, "messages": [USER], "max_tokens": 1900, "ignore_eos": True}  # tokens


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server with little patience."""
    limits = HttpLimits(keep_alive_seconds=1, max_connections=8)
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


def test_large_headers_are_refused(hasty: Running):
    with connection(hasty) as client:
        client.sendall(b"GET /" + b"a" * 40_000)
        assert read_all(client).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/", "/v1/models/tiny"])
def test_head_is_get_without_the_body(hasty: Running, path: str):
    head, same = (httpx2.request(method, hasty.url + path) for method in ("HEAD", "GET"))
    assert (head.status_code, head.content, len(same.content) > 0) == (200, b"", True)
    assert head.headers.keys() == same.headers.keys()


def test_too_many_connections_are_refused_and_old_ones_live(hasty: Running):
    clients = [connection(hasty) for _ in range(7)]
    wait_until(lambda: num_connections(hasty) == 7)
    with connection(hasty) as one_more:
        one_more.sendall(HEALTH)
        assert read_all(one_more).startswith(b"HTTP/1.1 503")
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
