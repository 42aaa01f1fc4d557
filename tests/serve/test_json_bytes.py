"""Large responses as JSON: the same as of the encoder, in small pieces, on the writer's thread, and of limited size."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.serve import app, json_bytes
from draftheads.serve.http_limits import HttpLimits
from draftheads.serve.logprobs import TokenNames, chat_logprobs, completion_logprobs
from families import IntegerTokenizer
from serve_world import NAME, USER, Running, running, tiny_engines

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=40)


@settings(deadline=None)
@given(VALUES.filter(lambda value: "\\ud" not in json.dumps(value)))
def test_the_json_is_that_of_the_encoder(value: Any):
    assert json_bytes.json_bytes(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def test_no_piece_is_large(monkeypatch: pytest.MonkeyPatch):
    names, ids = TokenNames(IntegerTokenizer()), list(range(3, 60))
    scores = (names, ids, [-1.0] * len(ids), [tuple((token, -1.0) for token in range(20))] * len(ids))
    forms = [chat_logprobs(*scores), completion_logprobs(*scores)]
    sizes: list[int] = []
    encoded = json_bytes._encoded

    def noting(value: Any) -> str:
        sizes.append(len(encoded(value)))
        return encoded(value)

    monkeypatch.setattr(json_bytes, "_encoded", noting)
    choices = [{"index": index, "message": {}, "logprobs": form} for index, form in enumerate(forms)]
    size = len(json_bytes.json_bytes({"choices": choices}))
    assert size > 50 * max(sizes), "other threads run in between"


def test_responses_are_encoded_on_the_writers_thread(server: Running, monkeypatch: pytest.MonkeyPatch):
    threads = []

    def noting(value: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return json_bytes.json_bytes(value)

    monkeypatch.setattr(app, "json_bytes", noting)
    assert server.chat(logprobs=True, top_logprobs=2).json()["object"] == "chat.completion"
    assert server.complete().json()["object"] == "text_completion"
    assert len(threads) == 2
    assert all(name.startswith("draftheads-writer") for name in threads)


LONG = {"max_tokens": 1000, "logprobs": 20}


@pytest.mark.parametrize(
    ("route", "fields", "factors"),
    [
        (
            "chat/completions",
            {"n": 14, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20},
            "n × max_tokens × top_logprobs is 14 × 1000 × 20 = 280,000",
        ),
        ("completions", {"n": 14, **LONG}, "n × max_tokens × logprobs is 14 × 1000 × 20 = 280,000"),
        ("completions", {"prompt": ["a"] * 14, **LONG}, "n × tokens of prompts and answers × logprobs is 1 × 14000"),
        # a text of 3 tokens
        ("completions", {"n": 64, "echo": True, **LONG}, "× logprobs is 64 × 1003 × 20 = 1,283,840"),
    ],
)
def test_an_answer_has_a_limited_number_of_log_probabilities(
    server: Running, route: str, fields: dict[str, Any], factors: str
):
    prompt = {"messages": [{"role": "user", "content": "a"}]} if route == "chat/completions" else {"prompt": "the cat"}
    response = server.post(route, **{**prompt, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "top_logprobs" if "chat" in route else "logprobs"), error
    assert factors in error["message"]
    assert "it must be at most 262,144: ask for fewer" in error["message"]


def test_each_token_has_one_of_its_own():
    fields = {"model": NAME, "messages": [USER], "logprobs": True}
    with running(tiny_engines(), HttpLimits(logprobs=100)) as small:
        assert small.post("chat/completions", **fields, n=10, max_tokens=10).status_code == 200
        response = small.post("chat/completions", **fields, n=10, max_tokens=11)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
    assert "is 10 × 11 × 1 = 110 log-probabilities; it must be at most 100" in response.json()["error"]["message"]


def test_the_most_log_probabilities_are_allowed(server: Running):
    """As many as the limit, counted with the tokens that may be, not with those that are asked for."""
    room = 262_144 // (16 * 20)
    fields = {"n": 16, "max_tokens": room, "logprobs": True, "top_logprobs": 20, "stop": ["e", "a", "t", "\n", "�"]}
    assert server.chat(**fields).status_code == 200
    assert server.chat(**{**fields, "max_tokens": room + 1}).status_code == 400
