"""Clients that keep connections open, and what it costs the server: nothing."""

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from draftheads.serve.http_limits import HttpLimits
from serve_world import NAME, USER, Running, running, tiny_engines


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server with little patience."""
    limits = HttpLimits(header_seconds=0.4, write_seconds=0.4, keep_alive_seconds=1, max_connections=8)
    with running(tiny_engines(), limits) as one:
        yield one


def connection(server: Running, *, buffer: int | None = None) -> socket.socket:
    one = socket.socket()
    if buffer is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    one.settimeout(20)
    one.connect(server.address)
    return one


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    try:
        while piece := client.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def settled(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def request(body: bytes, route: str = "/v1/chat/completions", *headers: str) -> bytes:
    lines = [f"POST {route} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def num_connections(server: Running) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.parametrize("start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: local"])
def test_headers_that_never_end(hasty: Running, start: bytes):
    with connection(hasty) as client:
        client.sendall(start)
        assert read_all(client) == b""
    settled(lambda: num_connections(hasty) == 0)


def test_a_byte_at_a_time_wins_no_time(hasty: Running):
    with connection(hasty) as client:
        try:
            for byte in b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 500:  # for 10 s
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        except ConnectionError:
            return
    pytest.fail("the server waits")


def test_a_connection_is_closed_some_time_after_its_last_request(hasty: Running):
    with connection(hasty) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")
    with connection(hasty) as client:  # also if it sends something that is no whole request
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET")
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")


def test_what_is_not_http_is_an_error_of_the_same_form(hasty: Running):
    for start in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 40_000):
        with connection(hasty) as client:
            client.sendall(start)
            head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), start
        assert json.loads(body)["error"]["code"] == "invalid_http"


def test_too_many_connections_are_refused_and_old_ones_live(hasty: Running):
    clients = [connection(hasty) for _ in range(8)]
    settled(lambda: num_connections(hasty) == 8)
    with connection(hasty) as one_more:
        head, _, body = read_all(one_more).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    clients[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert read_all(clients[0]).startswith(b"HTTP/1.1 200 OK")
    for client in clients:
        client.close()
    settled(lambda: num_connections(hasty) == 0)


def test_who_does_not_read_is_cut_off(hasty: Running):
    """Its rows are free then."""
    before = hasty.scheduler.snapshot().cancelled
    fields = {"model": NAME, "messages": [USER], "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 4}
    body = json.dumps({**fields, "logprobs": True, "top_logprobs": 20}).encode()  # many bytes for each token
    with connection(hasty, buffer=2048) as client:
        client.sendall(request(body))
        settled(lambda: num_connections(hasty) == 1)
        settled(lambda: num_connections(hasty) == 0)  # while the client still holds its side
        settled(lambda: hasty.scheduler.snapshot().running == 0)
    assert hasty.scheduler.snapshot().cancelled == before + 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_rows(hasty: Running, stream: bool):
    before = hasty.scheduler.snapshot().cancelled
    fields = {"model": NAME, "messages": [USER], "max_tokens": 1900, "ignore_eos": True, "stream": stream, "n": 2}
    with connection(hasty) as client:
        client.sendall(request(json.dumps(fields).encode()))
        settled(lambda: hasty.scheduler.snapshot().running == 2)
    settled(lambda: hasty.scheduler.snapshot().cancelled == before + 2)
    settled(lambda: hasty.scheduler.snapshot().running == 0)


def test_a_client_that_goes_before_its_body_is_complete(hasty: Running):
    with connection(hasty) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        settled(lambda: num_connections(hasty) == 1)
    settled(lambda: num_connections(hasty) == 0)
    assert hasty.chat().status_code == 200


def test_requests_of_one_connection_are_answered_in_order(hasty: Running):
    bodies = [json.dumps({"model": NAME, "prompt": "the cat", "max_tokens": n, "seed": 1}).encode() for n in (1, 2, 3)]
    with connection(hasty) as client:
        client.sendall(b"".join(request(body, "/v1/completions") for body in bodies))
        answers = read_all(client).split(b"HTTP/1.1 200 OK")[1:]
    counts = [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] for answer in answers]
    assert counts == [1, 2, 3]
