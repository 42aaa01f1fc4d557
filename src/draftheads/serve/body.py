"""Reads a request's body: at most so many bytes, in so many seconds, and JSON of limited depth."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from draftheads.serve.api_error import ApiError
from draftheads.serve.http_limits import HttpLimits
from draftheads.utils.messages import half_character

# possessive, and without a need for the closing quote: so no text takes quadratic time
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")  # of which two are a character
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_READ_ON = 16  # times the limit
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """The body's bytes."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type is {kind[:60]!r}; it must be application/json")
    body, num_bytes, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(limits.body_seconds):
            # a body that is too large is read on, to a point: most clients read the answer only after they sent all
            while more and num_bytes <= _READ_ON * limits.body_bytes:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part, more = message.get("body", b""), message.get("more_body", False)
                num_bytes += len(part)
                if num_bytes <= limits.body_bytes:
                    body += part
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_seconds:g} seconds", code="body_timeout"
        ) from None
    if num_bytes > limits.body_bytes:
        raise ApiError(
            413, f"the body is larger than {limits.body_bytes} bytes: send a shorter request", code="body_too_large"
        )
    return bytes(body)


def read_json(body: bytes, limits: HttpLimits) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_utf8") from None
    if too_deep(body, limits.json_depth):
        raise ApiError(
            400,
            f"the body is nested deeper than {limits.json_depth} levels, or its brackets do not match",
            code="invalid_json",
        )
    try:
        value = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if _HALF_CHARACTER.search(body) and (problem := next(filter(None, map(half_character, _names_in(value))), None)):
        raise ApiError(400, f"the name of a field {problem}", code="invalid_json")
    return value


def too_deep(body: bytes, most: int) -> bool:
    """Is JSON text nested more than ``most`` levels deep, or are its brackets unbalanced? Does not parse it.

    >>> too_deep(b'{"a": [[1], "]]]"]}', 3), too_deep(b'{"a": [[1]]}', 2), too_deep(b"[" * 10**6, 64)
    (False, True, True)
    """
    brackets = _STRING.sub(b"", body).translate(_AS_LISTS, _NO_BRACKETS)
    if brackets.find(b"[" * (most + 1)) >= 0:  # the rest would take time
        return True
    for _ in range(most):
        brackets = brackets.replace(b"[]", b"")  # the innermost level
    return bool(brackets)


def depth_of(value: Any) -> int:
    """Levels of lists and objects of a JSON value.

    >>> depth_of({"a": [1, {}]}), depth_of("x")
    (3, 0)
    """
    return sum(1 for _ in _levels_of(value))


def _names_in(value: Any) -> Iterator[str]:
    return (name for level in _levels_of(value) for inner in level if isinstance(inner, dict) for name in inner)


def _levels_of(value: Any) -> Iterator[list[Any]]:
    """The lists and objects of a JSON value, the outer ones first."""
    level = [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        yield level
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")
