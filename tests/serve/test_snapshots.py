"""What every route sends, byte by byte. A bias decides on the texts, and plain decoding on the chunks."""

import re
from typing import Any

import httpx2
import pytest

from serve_world import PLAIN, USER, Running, check_snapshot

CHAT, RESPONSE = {"messages": [USER], "max_tokens": 2}, {"input": USER["content"], "max_output_tokens": 2}
TEXT = {"prompt": "the cat", "max_tokens": 2}
OPTIONS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
DRAFT = {"stream": True, "stream_options": {"include_usage": True, "include_draft": True}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "instructions": "be brief"}
ONE = {"type": "object", "properties": {"day": {"const": 1}}, "required": ["day"], "additionalProperties": False}
TOOL = {"name": "get_tide", "parameters": ONE}
CALL = {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 60}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {**CHAT, "n": 2, "logprobs": True}),
    "chat-stream": ("chat/completions", {**CHAT, **OPTIONS, "logprobs": True}),
    "chat-drafted": ("chat/completions", {**CHAT, **DRAFT, "n": 2}),
    "chat-call": ("chat/completions", CALL),
    "chat-call-stream": ("chat/completions", {**CALL, "stream": True}),
    "completion": ("completions", {**TEXT, "n": 2, "echo": True, "logprobs": 0}),
    "completion-stream": ("completions", {**TEXT, **OPTIONS, "logprobs": 0}),
    "completion-echo": ("completions", {**TEXT, **DRAFT, "echo": True}),
    "response": ("responses", {**RESPONSE, **LOGPROBS}),
    "response-stream": ("responses", {**RESPONSE, **LOGPROBS, "stream": True}),
    "response-stopped": ("responses", {**RESPONSE, "stop": "t", "stream": True}),
    "response-call": (
        "responses",
        {**RESPONSE, "tools": [{"type": "function", **TOOL}], "tool_choice": "required", "max_output_tokens": 60}
        | {"stream": True},
    ),
}
STATES = {
    *("GET /health", "GET /ready", "GET /v1/models", f"GET /v1/models/{PLAIN}", "GET /v1/models/none", "GET /v2"),
    *("GET /v1/chat/completions", "DELETE /v1/models", "POST /nothing%0Ahere", "HEAD /v1/completions", "HEAD /ready"),
}
HEADERS = ("allow", "content-type", "x-accel-buffering")


def shown(response: httpx2.Response) -> str:
    """The status, some headers and the body; of a stream one answer after the other, as their order is by time."""
    events = sorted(response.text.split("\n\n"), key=lambda each: re.findall(r'"index":\d+', each)[:1] or ["~"])
    headers = [f"{name}: {response.headers[name]}" for name in HEADERS if name in response.headers]
    return "\n".join([str(response.status_code), *headers, "", "\n\n".join(events), ""])


@pytest.mark.parametrize("case", ASKED)
def test_answers(server: Running, case: str):
    route, fields = ASKED[case]
    bias = {} if "call" in case else {"logit_bias": {str(server.ids("the")[0]): 100}}
    response = server.post(route, **{"model": PLAIN, "temperature": 0, "cache_salt": case, **bias, **fields})
    check_snapshot(f"{case}.txt", shown(response))


def test_other_routes_and_the_headers_of_all_responses(server: Running):
    asked = {each: httpx2.request(each.split()[0], server.url + each.split()[1]) for each in sorted(STATES)}
    usual = {name: value for name, value in asked["GET /health"].headers.items() if name not in ("date", *HEADERS)}
    del usual["content-length"]
    for response in asked.values():
        assert usual.items() <= response.headers.items()
    parts = [f"{each}\n{shown(response)}" for each, response in asked.items()]
    check_snapshot("other-routes.txt", "\n".join([*map(": ".join, sorted(usual.items())), "", *parts]))
