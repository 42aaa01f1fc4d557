"""Clients that keep connections open, and what it costs the server: nothing."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from draftheads.serve.http_limits import HttpLimits
from serve_process import wait_until
from serve_world import NAME, USER, Running, raw_request, running, tiny_engines

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MANY = {"model": NAME, "messages": [USER], "max_tokens": 1900, "ignore_eos": True}  # tokens


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server with little patience."""
    limits = HttpLimits(header_seconds=0.4, write_seconds=0.4, keep_alive_seconds=1, max_connections=8)
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


def error_of(client: socket.socket) -> tuple[bytes, str]:
    """The first words of the response, and the code of its error."""
    head, _, body = read_all(client).partition(b"\r\n\r\n")
    return head[:12], json.loads(body)["error"]["code"]


def num_connections(server: Running) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.parametrize("start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: local"])
def test_headers_that_never_end(hasty: Running, start: bytes):
    with connection(hasty) as client:
        client.sendall(start)
        assert read_all(client) == b""
    wait_until(lambda: num_connections(hasty) == 0)


def test_a_byte_at_a_time_wins_no_time(hasty: Running):
    with connection(hasty) as client:
        try:
            for byte in b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 500:  # for 10 s
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        except ConnectionError:
            return
    pytest.fail("the server waits")


@pytest.mark.parametrize("rest", [b"", b"GET"])  # also if it sends something that is no whole request
def test_a_connection_is_closed_some_time_after_its_last_request(hasty: Running, rest: bytes):
    with connection(hasty) as client:
        client.sendall(HEALTH + rest)
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("start", [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_not_http_is_an_error_of_the_same_form(hasty: Running, start: bytes):
    with connection(hasty) as client:
        client.sendall(start)
        assert error_of(client) == (b"HTTP/1.1 400", "invalid_http")


BEFORE_LAST = HEALTH.removesuffix(b"\r\n")


@pytest.mark.parametrize(
    "start",
    [
        b"GET /" + b"a" * 40_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        BEFORE_LAST + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        BEFORE_LAST + b"X: a\r\n" * 20_000 + b"\r\n",
    ],
)
@pytest.mark.parametrize("earlier", [b"", HEALTH])
def test_large_headers_are_refused_also_if_they_come_at_once(hasty: Running, start: bytes, earlier: bytes):
    with connection(hasty) as client:
        client.sendall(earlier + start)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200") == (1 if earlier else 0)
    head, _, body = answer[answer.index(b"HTTP/1.1 431 ") :].partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == (
        "headers_too_large",
        "the headers are larger than 32768 bytes: send smaller ones",
    )


CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n" + CHUNKED,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"Content-Length: 5\r\n",
        b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n" + CHUNKED,
    ],
)
def test_a_request_of_unclear_length_is_refused_and_what_follows_is_not_read(hasty: Running, head: bytes):
    with connection(hasty) as client:
        client.sendall(head + b"\r\n0\r\n\r\n" + HEALTH)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 400") + answer.count(b"HTTP/1.1 200") == 1
    assert answer.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"connection: close" in answer.lower()
    assert "Transfer-Encoding" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def answer_to(server: Running, target: bytes, host: bytes = b"localhost", method: bytes = b"GET") -> bytes:
    with connection(server) as client:
        client.sendall(b"%b %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (method, target, host))
        return read_all(client)


@pytest.mark.parametrize("target", [b"http://localhost:80/v1/models", b"HTTP://LOCALHOST/v1/models?a=/b"])
def test_a_target_may_be_a_whole_url(hasty: Running, target: bytes):
    answer = answer_to(hasty, target)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["object"] == "list"
    assert b"<!doctype html>" in answer_to(hasty, b"http://localhost").lower()
    assert b"<!doctype html>" in answer_to(hasty, b"http://localhost?a").lower()


def test_the_host_of_a_url_takes_the_place_of_the_header(hasty: Running):
    assert b"unknown_host" in answer_to(hasty, b"http://evil.example/v1/models")
    assert answer_to(hasty, b"http://localhost/v1/models", host=b"evil.example").startswith(b"HTTP/1.1 200 OK")
    for target in (b"http://localhost@evil.example/health", b"ftp://localhost/health", b"http:///health"):
        assert answer_to(hasty, target).startswith(b"HTTP/1.1 404"), target


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/metrics", b"/v1/models", b"/", b"/v1/models/tiny"])
def test_head_is_get_without_the_body(hasty: Running, path: bytes):
    head, _, body = answer_to(hasty, path, method=b"HEAD").partition(b"\r\n\r\n")
    same, _, text = answer_to(hasty, path).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body == b""
    assert text
    names = [{line.partition(b":")[0] for line in lines.split(b"\r\n")} for lines in (head, same)]
    assert names[0] == names[1]
    assert answer_to(hasty, b"/v1/completions", method=b"HEAD").startswith(b"HTTP/1.1 405")


def test_too_many_connections_are_refused_and_old_ones_live(hasty: Running):
    clients = [connection(hasty) for _ in range(8)]
    wait_until(lambda: num_connections(hasty) == 8)
    with connection(hasty) as one_more:
        assert error_of(one_more) == (b"HTTP/1.1 503", "too_many_connections")
    clients[0].sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert read_all(clients[0]).startswith(b"HTTP/1.1 200 OK")
    for client in clients:
        client.close()
    wait_until(lambda: num_connections(hasty) == 0)


def test_who_does_not_read_is_cut_off(hasty: Running):
    """Its rows are free then."""
    before = hasty.scheduler.snapshot().cancelled
    fields = {"stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}  # many bytes for each token
    with connection(hasty, buffer=2048) as client:
        client.sendall(raw_request("chat/completions", {**MANY, **fields}))
        wait_until(lambda: num_connections(hasty) == 1)
        wait_until(lambda: num_connections(hasty) == 0)  # while the client still holds its side
        wait_until(lambda: hasty.scheduler.snapshot().running == 0)
    assert hasty.scheduler.snapshot().cancelled == before + 4


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


def test_requests_of_one_connection_are_answered_in_order(hasty: Running):
    asked = [{"model": NAME, "prompt": "the cat", "max_tokens": n, "seed": 1} for n in (1, 2, 3)]
    with connection(hasty) as client:
        client.sendall(b"".join(raw_request("completions", fields) for fields in asked))
        answers = read_all(client).split(b"HTTP/1.1 200 OK")[1:]
    counts = [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] for answer in answers]
    assert counts == [1, 2, 3]
