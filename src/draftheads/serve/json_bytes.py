"""A value as JSON, made in pieces: the encoder of Python lets no other thread run while it encodes one value."""

import json
from collections.abc import Iterator
from typing import Any

_LEVELS = 7  # down to the entries of tokens: an item of a response has parts, and those have log-probabilities
_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: Any) -> bytes:
    """The value as JSON in UTF-8. Takes a while for many log-probabilities; other threads run between the pieces.

    >>> json_bytes({"a": [1, {"b": None}], "c": {}})
    b'{"a":[1,{"b":null}],"c":{}}'
    """
    return "".join(_pieces(value, _LEVELS)).encode()


def _pieces(value: Any, levels: int) -> Iterator[str]:
    match value:
        case dict() if value and levels:
            start, end = "{}"
            entries = ((f"{_encoded(name)}:", inner) for name, inner in value.items())
        case list() if value and levels:
            start, end = "[]"
            entries = (("", inner) for inner in value)
        case _:
            yield _encoded(value)
            return
    for name, inner in entries:
        yield start + name
        yield from _pieces(inner, levels - 1)
        start = ","
    yield end
