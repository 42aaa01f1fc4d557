"""Bodies that no parser should see."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.serve.api_error import ApiError
from draftheads.serve.body import depth_of, read_json, too_deep
from draftheads.serve.chat_completions import ChatFields
from draftheads.serve.fields import read_fields
from draftheads.serve.http_limits import HttpLimits

VALUES = st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_the_depth_that_is_counted_without_parsing_is_that_of_the_value(value: Any):
    body, depth = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"), depth_of(value)
    assert not too_deep(body, depth)
    assert depth == 0 or too_deep(body, depth - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 4_000_000,
        b"[]," * 1_000_000,
        b'{"a":' * 800_000,
        b'"\\"' * 1_000_000,
        b'"' + b'\\"' * 2_000_000,
        b"[{" * 1_000_000,
    ],
)
def test_no_body_takes_long(body: bytes):
    start = time.process_time()
    with pytest.raises(ApiError):
        read_json(body, HttpLimits())
    assert time.process_time() - start < 10  # quadratic time would be hours


@pytest.mark.parametrize("field", ["content", "tool_calls"])
def test_of_a_list_of_errors_only_the_first_is_read(field: str):
    message = {"role": "user", "content": "a", field: [5] * 600_000}
    start = time.process_time()
    with pytest.raises(ApiError, match=rf"messages\[0\].{field}\[0\] is 5; it must be an object"):
        read_fields(ChatFields, {"messages": [message]})
    assert time.process_time() - start < 2  # reading all errors takes twice as long


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"\xff{}", "invalid_utf8", "byte 0"),
        (b"{", "invalid_json", "brackets"),
        (b'{"a": NaN}', "invalid_json", "NaN"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "invalid_json", "not valid JSON"),
        (b"[]", "invalid_json", "object"),
        (b"", "invalid_json", "not valid JSON"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "invalid_json", "64 levels"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, code: str, words: str):
    with pytest.raises(ApiError, match=words) as caught:
        read_json(body, HttpLimits())
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"\ud800": 1}',
        rb'{"a\uDFFFb": null}',
        rb'{"metadata": {"\ud800": 1}}',
        rb'{"messages": [{"tool_calls": [{"\ud83d": 1, "\ud83d\ude00": 2}]}]}',
    ],
)
def test_half_a_character_in_a_name_is_an_error(body: bytes):
    with pytest.raises(ApiError, match="the name of a field holds half a character") as caught:
        read_json(body, HttpLimits())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_whole_characters_in_names_are_none():
    assert read_json(rb'{"\ud83d\ude00": "\ud800"}', HttpLimits()) == {"\U0001f600": "\ud800"}


def test_brackets_in_strings_are_text():
    assert read_json(b'{"a": "[[[[\\"{{"}', HttpLimits(json_depth=1)) == {"a": '[[[["{{'}
