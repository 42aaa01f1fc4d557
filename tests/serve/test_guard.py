"""The access log: a line for each request, but not for what machines ask every few seconds."""

import asyncio
import logging
from typing import Any

import pytest

from draftheads.serve.fields import ApiError
from draftheads.serve.guard import Access, Guard


@pytest.mark.parametrize(
    ("path", "status", "is_logged"),
    [("/ready", 503, False), ("/metrics", 200, False), ("/metrics", 401, True), ("/v1/models", 503, True)],
)
def test_polls_are_logged_only_if_they_fail(
    path: str, status: int, *, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    async def ignore(_message: Any = None) -> Any:
        return None

    counted: list[tuple[str, int]] = []
    guard = Guard(app, access=Access(), count=lambda *found: counted.append(found), body_bytes=9)
    scope = {"type": "http", "path": path, "method": "GET", "headers": [(b"host", b"localhost")]}
    with caplog.at_level(logging.INFO, "draftheads.access"):
        asyncio.run(guard(scope, ignore, ignore))
    assert counted == [("other", status)]
    assert [f" {path} {status} " in line for line in caplog.messages] == [True] * is_logged


@pytest.mark.parametrize("given", ["Example.COM", "example.com:8443", "example.com."])
@pytest.mark.parametrize("sent", ["example.com", "EXAMPLE.com:80", "example.com."])
def test_names_of_the_server_are_compared_without_case_port_and_final_dot(given: str, sent: str) -> None:
    access = Access(hosts=frozenset({given, "::1"}))
    scope = {"path": "/", "headers": [(b"host", sent.encode())], "client": ("1.2.3.4", 5)}
    assert access.client_of(scope) == "1.2.3.4"
    assert access.client_of({**scope, "headers": [(b"host", b"[::1]:8000")]}) == "1.2.3.4"
    with pytest.raises(ApiError, match="not a name of this server"):
        access.client_of({**scope, "headers": [(b"host", b"sub." + sent.encode())]})
