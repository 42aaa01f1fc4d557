"""Routes, errors and limits, one by one."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from draftheads.serve.api_error import ApiError
from draftheads.serve.guard import Access
from draftheads.serve.http_limits import HttpLimits
from draftheads.serve.metrics import Metrics
from draftheads.serve.scheduler import Limits, Scheduler
from draftheads.serve.state import Service
from scheduler_world import iterate, submit
from serve_world import NAME, USER, Running, metrics_of, running, tiny_engines


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


def nested_schema(depth: int) -> dict[str, Any]:
    return {"items": nested_schema(depth - 1)} if depth > 1 else {}


def said(content: Any, **others: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": content, **others}]}


def called(name: str, arguments: str) -> dict[str, Any]:
    """The model called a function."""
    call = {"id": "1", "function": {"name": name, "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def form(schema: dict[str, Any], kind: str = "json_schema", **others: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, "json_schema": {"schema": schema, **others}}}


def function(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **others}}


FORM, PLAIN = "response_format.json_schema", f"{NAME}:plain"
CHAT_ERRORS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no model": ({"model": None}, "model", "models of this server: tiny, tiny:plain"),
    "model of a wrong type": ({"model": 5}, "model", "model is 5"),
    "no messages": ({"messages": None}, "messages", "missing"),
    "messages of a wrong type": ({"messages": "hi"}, "messages", "list"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role", "system"),
    "no content": ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "string"),
    "an image": (
        said([{"type": "image_url", "image_url": {"url": "a"}}]),
        "messages[1].content[0].type",
        "is 'image_url'",
    ),
    "half a character in a name": ({"\ud800": 1}, "\\ud800", "unknown field"),
    "half a character in an inner name": (
        {"stream": True, "stream_options": {"\ud800": 1}},
        "stream_options.\\ud800",
        "unknown field",
    ),
    "half a character": (said("\ud800"), "messages[1].content", "half"),
    "temperature of a wrong type": ({"temperature": True}, "temperature", "number"),
    "temperature below 0": ({"temperature": -0.1}, "temperature", "0 (greedy)"),
    "temperature beyond floats": ({"temperature": 10**400}, "temperature", "is 1000"),
    "top_p": ({"top_p": 1.1}, "top_p", "at most 1"),
    "top_k": ({"top_k": -2}, "top_k", "top_k is -2"),
    "repetition_penalty": ({"repetition_penalty": 0}, "repetition_penalty", "positive"),
    "seed": ({"seed": 2**64}, "seed", "below 2**64"),
    "seed of a wrong type": ({"seed": 1.5}, "seed", "integer"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    "two limits": ({"max_completion_tokens": 3}, "max_tokens", "differ"),
    "n": ({"n": 129}, "n", "n is 129"),
    "best_of": ({"best_of": 2}, "best_of", "send n"),
    "stop, too many": ({"stop": ["a"] * 17}, "stop", "at most 16"),
    "stop, too long": ({"stop": "a" * 257}, "stop", "at most 256"),
    "stop, empty": ({"stop": [""]}, "stop", "none of them empty"),
    "logprobs": ({"logprobs": 2}, "logprobs", "logprobs is 2"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
    "logit_bias of a list": ({"logit_bias": [1]}, "logit_bias", "logit_bias is [1]"),
    "logit_bias of words": ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids"),
    "logit_bias too strong": ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    "logit_bias too many": ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
    "draft_nodes": ({"draft_nodes": 129}, "draft_nodes", "at most 128"),
    "draft_nodes without a head": ({"draft_nodes": 4, "model": PLAIN}, "draft_nodes", "leave draft_nodes out"),
    "stream_options without stream": ({"stream_options": {}}, "stream_options", "stream: true"),
    "stream_options": ({"stream": True, "stream_options": {"inc": 1}}, "stream_options.inc", "unknown"),
    "audio": ({"audio": {"voice": "a"}}, "audio", "not supported"),
    "modalities": ({"modalities": ["audio"]}, "modalities", "not supported"),
    "presence_penalty": ({"presence_penalty": 2.5}, "presence_penalty", "2.5; it must be a number from -2 to 2"),
    "frequency_penalty": ({"frequency_penalty": "1"}, "frequency_penalty", "is '1'"),
    "min_p": ({"min_p": -0.1}, "min_p", "-0.1; it must be a number from 0 to 1"),
    "min_tokens": ({"min_tokens": -1}, "min_tokens", "is -1"),
    "min_tokens above max_tokens": ({"min_tokens": 13}, "min_tokens", "13; it must be at most max_tokens, which is 12"),
    "min_tokens of a schema": ({"min_tokens": 3, **form({})}, "min_tokens", "is 3, but the form of the answer decides"),
    "stop_token_ids": ({"stop_token_ids": [-1]}, "stop_token_ids", "a list of token ids"),
    "stop_token_ids of words": ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "is 'a'"),
    "stop_token_ids, too many": ({"stop_token_ids": [3] * 129}, "stop_token_ids", "at most 128"),
    "skip_special_tokens": ({"skip_special_tokens": 0}, "skip_special_tokens", "is 0"),
    "a misspelt field": ({"max_token": 4}, "max_token", "did you mean max_tokens?"),
    "response_format": ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    "field of a schema": (form({}, stict=True), f"{FORM}.stict", "strict"),
    "no schema": ({"response_format": {"type": "json_schema"}}, FORM, "missing"),
    "a long schema": (form({"enum": ["a" * 70_000]}), f"{FORM}.schema", "at most 65536"),
    "a schema nested too deeply": (form(nested_schema(33)), f"{FORM}.schema", "33 levels deep; it must be at most 32"),
    "a pattern that takes long": (form({"pattern": "^(a{300}){300}$"}), None, "too complex"),
    "a schema without a use": (form({}, kind="text"), FORM, "only"),
    "tools that are none": ({"tools": [{"type": "web"}]}, "tools[0].type", "is 'web'"),
    "a tool's name": ({"tools": [function("a b")]}, "tools[0].function.name", "64"),
    "two tools of one name": ({"tools": [function("a")] * 2}, "tools", "same name"),
    "too many tools": ({"tools": [function("a")] * 65}, "tools", "at most 64"),
    "a tool that is not there": ({"tools": [function("a")], "tool_choice": function("b")}, "tool_choice", "'b'"),
    "tools nested too deeply": ({"tools": [function("a", parameters=nested_schema(40))]}, "tools", "at most 32"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "an unknown choice": ({"tools": [function("a")], "tool_choice": "some"}, "tool_choice", '"required"'),
    "tools and a schema": ({"tools": [function("a")], **form({})}, "response_format", "exclude each other"),
    "arguments of an earlier call, nested too deeply": (
        called("a", "[" * 100_000),
        "messages[1].tool_calls[0].function.arguments",
        "not valid JSON",
    ),
    "half a character in a call": (called("\ud800", "{}"), "messages", "half"),
}


@pytest.mark.parametrize("case", CHAT_ERRORS)
def test_wrong_fields_are_named(server: Running, case: str):
    fields, param, words = CHAT_ERRORS[case]
    response = server.chat(**fields)
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert words in error["message"]


@pytest.mark.parametrize(
    "prompt", [None, [], "", [[]], [1, "a"], [[1], "a", 5], 7, [1.5], [-1], [10**9], "cat " * 5000]
)
def test_wrong_prompts_are_named(server: Running, prompt: Any):
    response = server.complete(prompt=prompt)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt"), response.text


def test_prompts_times_n_are_limited(server: Running):
    assert error_of(server.complete(prompt=["a"] * 65, n=2))["param"] == "n"
    assert error_of(server.complete(prompt=["a"] * 129))["param"] == "prompt"


FIELDS: dict[str, dict[str, Any]] = {  # the same in requests and in settings
    "frequency_penalty": {"frequency_penalty": -2},
    "presence_penalty": {"presence_penalty": -2.0},
    "min_p": {"temperature": 1.5, "seed": 3, "min_p": 0.6},
}


@pytest.mark.parametrize("case", FIELDS)
def test_settings_of_requests_have_their_effect(server: Running, case: str):
    fields = FIELDS[case]
    expected = server.plain_answer([USER], max_new_tokens=12, **fields).text
    assert server.chat(**fields).json()["choices"][0]["message"]["content"] == expected
    ids = server.engines[NAME].model.tokenizer("the cat")["input_ids"]
    expected = server.plain_answer(ids, max_new_tokens=12, **fields).text
    assert server.complete(**{"temperature": 0, **fields}).json()["choices"][0]["text"] == expected
    without = {name: value for name, value in fields.items() if name in ("temperature", "seed")}
    assert server.complete(**{"temperature": 0, **without}).json()["choices"][0]["text"] != expected


def test_an_answer_ends_at_stop_tokens_and_not_before_its_shortest_length(server: Running):
    """With logprobs, whose tokens are those of the text."""
    answer = server.plain_answer([USER], max_new_tokens=12)
    pieces, ids = answer.pieces, answer.token_ids
    fields = {"stop_token_ids": [ids[2]], "logprobs": True}
    first, kept, longer = (
        server.chat(**fields, **more).json() for more in ({}, {"include_stop_str_in_output": True}, {"min_tokens": 3})
    )
    end = ids.index(ids[2])
    for response, length in ((first, end), (kept, end + 1)):
        choice = response["choices"][0]
        assert choice["message"]["content"] == "".join(pieces[:length])
        assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("stop", length)
        assert response["usage"]["completion_tokens"] == end + 1
    own = {"stop_token_ids": [ids[2]], "min_new_tokens": 3}
    assert longer["choices"][0]["message"]["content"] == server.plain_answer([USER], max_new_tokens=12, **own).text
    assert longer["usage"]["completion_tokens"] > 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_is_part_of_the_answer_if_it_is_asked_for(server: Running, is_stream: bool):
    whole = server.plain_answer([USER], max_new_tokens=12).text
    stop = whole[4:6]
    end = whole.index(stop)
    for keep, expected in ((False, whole[:end]), (True, whole[: end + 2])):
        fields = {"stop": stop, "include_stop_str_in_output": keep, "stream": is_stream}
        assert said_by(server.chat(**fields)) == expected


def said_by(response: httpx2.Response) -> str:
    """The content of an answer, streamed or not."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line and "[DONE]" not in line]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in choices)


@pytest.mark.parametrize("is_stream", [False, True])
def test_special_tokens_are_text_if_they_are_asked_for(server: Running, is_stream: bool):
    """The tiny model's only special token ends answers, so it is chosen by a bias, and ignored."""
    special = server.engines[NAME].model.tokenizer.eos_token_id
    fields = {"logit_bias": {str(special): 100}, "ignore_eos": True, "max_tokens": 3, "stream": is_stream}
    assert said_by(server.chat(**fields)) == ""
    assert said_by(server.chat(**fields, skip_special_tokens=False)) == "<eos>" * 3
    ended = server.chat(**{**fields, "ignore_eos": False}, skip_special_tokens=False)
    assert said_by(ended) == "", "the token that ends an answer is no part of it"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_server_limits_the_length_of_answers(name: str):
    with running(tiny_engines(), HttpLimits(max_tokens=5, default_tokens=9)) as server:
        error = error_of(server.chat(**{"max_tokens": None, name: 6}))
        assert (error["param"], error["message"]) == (name, f"{name} is 6; it must be at most 5 on this server")
        for fields in ({name: 5}, {}):
            usage = server.chat(**{"max_tokens": None, **fields}, ignore_eos=True).json()["usage"]
            assert usage["completion_tokens"] == 5
        assert server.complete(max_tokens=None, ignore_eos=True).json()["usage"]["completion_tokens"] == 5
        assert error_of(server.chat(max_tokens=None, min_tokens=6))["param"] == "min_tokens"


def test_fields_without_effect_are_accepted(server: Running):
    fields = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": None}
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "modalities": ["text"], "top_k": -1}
    answer = server.chat(**fields, **neutral, response_format={"type": "text"}, logit_bias={}, tools=[])
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == server.plain_answer([USER], max_new_tokens=12).text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/models", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("POST", "/nothing%0Ahere", 404, "unknown_url"),
    ],
)
def test_unknown_routes(server: Running, method: str, path: str, status: int, code: str):
    response = httpx2.request(method, server.url + path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"\xff\xfe", JSON, 400, "invalid_json"),
        (b"{", JSON, 400, "invalid_json"),
        (b'{"a": {"b": [NaN]}}', JSON, 400, "invalid_json"),
        (b'{"a": -Infinity}', JSON, 400, "invalid_json"),
        (b"", JSON, 400, None),
        (b"[]", JSON, 400, None),
        (b'{"a": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", JSON, 400, "invalid_json"),
        (b'{"a": 1' + b"0" * 5000 + b"}", JSON, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, None),
        (b"{}", {}, 415, None),
        (b" " * (5 << 20), JSON, 413, "body_too_large"),
    ],
)
def test_bodies_that_are_no_requests(
    server: Running, content: bytes, headers: dict[str, str], status: int, code: str | None
):
    for route in ("chat/completions", "completions"):
        response = httpx2.post(f"{server.url}/v1/{route}", content=content, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize("depth", [60, 400, 900, 960, 990, 5000])
def test_values_that_are_nested_deeply_are_no_error_of_the_server(server: Running, depth: int):
    deep = "[" * depth + "]" * depth
    messages = '"messages": [{"role": "user", "content": "a"}]'
    fields = [f'{messages}, "chat_template_kwargs": {{"x": {deep}}}', f'{messages}, "tool_choice": {deep}']
    fields += [f'"messages": [{{"role": {deep}, "content": "a"}}]', f'{messages}, "tools": {deep}']
    schema = f'{{"type": "json_schema", "json_schema": {{"schema": {{"x": {deep}}}}}}}'
    asked = [("chat/completions", each) for each in [*fields, f'{messages}, "response_format": {schema}']]
    asked += [("responses", f'"input": {deep}'), ("responses", f'"input": "a", "metadata": {{"x": {deep}}}')]
    for route, each in asked:
        body = f'{{"model": "{NAME}", "max_tokens": 2, {each}}}'
        response = httpx2.post(f"{server.url}/v1/{route}", content=body, headers=JSON, timeout=600)
        assert response.status_code in (200, 400), (each[:40], response.text)


def test_chunked_bodies_are_counted_while_they_are_read(server: Running):
    response = httpx2.post(f"{server.url}/v1/completions", content=(b" " * 100_000 for _ in range(50)), headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


def test_a_page_of_another_server_gets_nothing(server: Running):
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{server.address[1] + 1}", "http://["):
        response = server.chat({"origin": origin})
        assert (response.status_code, error_of(response)["code"]) == (403, "foreign_origin")
    assert server.chat({"origin": server.url}).status_code == 200
    assert "access-control-allow-origin" not in server.chat({"origin": server.url}).headers


def test_a_name_that_is_bound_to_this_address_is_refused(server: Running):
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "[", ""):
        response = server.chat({"host": host})
        assert response.status_code in (400, 403), host
        assert error_of(response)["code"] in ("unknown_host", "invalid_http")
    for host in ("localhost:1", "LOCALHOST", "127.0.0.1:99", "[::1]:5"):
        assert server.chat({"host": host}).status_code == 200, host


def test_headers_of_every_response(server: Running):
    for path in ("/health", "/nothing", "/v1/models"):
        headers = httpx2.get(server.url + path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


FIRST_KEY, SECOND_KEY = ({"authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))


@pytest.fixture(scope="module")
def limited() -> Any:
    """A server with keys and small limits."""
    limits = HttpLimits(request_seconds=0.4)
    access = Access(("first-key", "second-key"))
    with running(tiny_engines("chatml"), limits, access, max_rows=1, max_waiting=2) as one:
        yield one


def test_keys(limited: Running):
    wrong = ("Bearer", "Basic first-key", "Bearer wrong", "Bearer first-key2")
    for headers in ({}, *({"authorization": value} for value in wrong)):
        for path in ("/v1/models", "/metrics"):
            response = httpx2.get(limited.url + path, headers=headers)
            assert (response.status_code, error_of(response)["type"]) == (401, "authentication_error")
            assert response.headers["www-authenticate"] == "Bearer"
    for headers in (FIRST_KEY, SECOND_KEY):
        assert httpx2.get(limited.url + "/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ready", "/"):
        assert httpx2.get(limited.url + path).status_code == 200


def test_clients_with_keys_share_the_queue_by_key(limited: Running):
    def scope(headers: dict[str, str]) -> dict[str, Any]:
        raw = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
        return {"path": "/v1/models", "headers": raw, "client": ("10.0.0.9", 5)}

    access = limited.service.access
    assert access.client_of(scope(SECOND_KEY)) == "key 1"
    assert Access().client_of(scope({})) == "10.0.0.9"


def test_clients_without_keys_share_what_was_read():
    access = Access()
    assert access.cache_salt_of("10.0.0.9", "") == access.cache_salt_of("10.0.0.8", "")
    assert access.cache_salt_of("10.0.0.9", "a") != access.cache_salt_of("10.0.0.9", "")


def test_nobody_learns_from_cached_tokens_what_another_key_asked():
    """Unless both name the same salt, which is no name that a key has by itself."""
    question = {"prompt": "the cat sat on the mat " * 9, "temperature": 0}
    with running(tiny_engines(), access=Access(("first-key", "second-key"))) as server:

        def cached(headers: dict[str, str], **fields: Any) -> int:
            usage = server.post("completions", headers, **question, **fields).json()["usage"]
            count: int = usage["prompt_tokens_details"]["cached_tokens"]
            return count

        assert cached(FIRST_KEY) == 0
        assert cached(FIRST_KEY) > 50
        for salt in ("", "key 0", "first-key", "shared"):
            assert cached(SECOND_KEY, cache_salt=salt) == 0, salt
        assert cached(FIRST_KEY, cache_salt="shared") > 50
        assert cached(SECOND_KEY) > 50


def test_tools_need_a_template_that_has_them(limited: Running):
    response = limited.chat(FIRST_KEY, tools=[function("add")])
    assert (response.status_code, error_of(response)["param"]) == (400, "tools")
    assert "--chat-template hermes" in response.json()["error"]["message"]


def test_a_request_that_takes_too_long_ends_with_an_error(limited: Running):
    fields = {"max_tokens": 1900, "ignore_eos": True}
    response = limited.chat(FIRST_KEY, **fields)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline")
    stream = limited.chat(FIRST_KEY, **fields, stream=True)
    *chunks, error, done, _ = stream.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline"
    assert done == "data: [DONE]"
    assert len(chunks) > 2


def test_a_full_queue_refuses_and_says_when_to_come_back(limited: Running):
    """All of a request's answers wait, or none of them."""
    response = limited.chat(FIRST_KEY, n=40, max_tokens=200, ignore_eos=True)
    assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    assert limited.scheduler.snapshot().waiting == 0
    assert limited.chat(FIRST_KEY).status_code == 200


def test_what_can_never_fit_into_memory_is_refused():
    with running(tiny_engines(), kv_bytes=1 << 17) as small:
        response = small.chat(max_tokens=1500)
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert small.chat().status_code == 200


def test_clients_take_turns_to_be_read():
    read: list[str] = []
    service = Service()

    async def all_at_once() -> None:
        await asyncio.gather(*(service.read(name[0], read.append, name) for name in ("a1", "a2", "a3", "b1")))

    asyncio.run(all_at_once())
    service.close()
    assert read == ["a1", "b1", "a2", "a3"]


def test_before_the_model_is_loaded_and_while_it_drains():
    service = Service()
    with pytest.raises(ApiError, match="loading") as caught:
        _ = service.scheduler
    assert (caught.value.status_code, caught.value.headers) == (503, {"retry-after": "1"})
    with running(tiny_engines()) as server:
        server.service.phase = "draining"
        assert httpx2.get(server.url + "/ready").status_code == 503
        assert httpx2.get(server.url + "/health").status_code == 200
        for fields in ({}, {"n": 0}):  # before the body is checked
            assert error_of(server.chat(**fields))["code"] == "shutting_down"


def test_a_failing_step_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch):
    with running(tiny_engines()) as server:

        def failing(*_: object) -> None:
            raise RuntimeError("secret words")

        with monkeypatch.context() as patch:
            patch.setattr(type(server.engines[NAME].drafter), "start", failing)
            response = server.chat()
        assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
        assert "secret" not in response.text
        assert server.chat().status_code == 200


def test_metrics_count_what_happened():
    with running(tiny_engines()) as server:
        before = metrics_of(server.url)
        assert before["draftheads_requests_running"] == 0
        usage = server.chat(max_tokens=20).json()["usage"]
        server.chat(model="none")
        server.complete(prompt="the cat", model=PLAIN, temperature=0)
        found = metrics_of(server.url)
        draft = usage["draft"]
        for depth, (drafted, accepted) in enumerate(
            zip(draft["drafted_by_depth"], draft["accepted_by_depth"], strict=True), 1
        ):
            assert found[f'draftheads_draft_tokens_total{{depth="{depth}"}}'] == drafted
            assert found.get(f'draftheads_accepted_tokens_total{{depth="{depth}"}}', 0) == accepted
        assert found['draftheads_requests_total{route="/v1/chat/completions",status="200"}'] == 1
        assert found['draftheads_requests_total{route="/v1/chat/completions",status="404"}'] == 1
        assert found['draftheads_tokens_total{kind="answer"}'] == 32
        assert found['draftheads_tokens_total{kind="prompt"}'] == usage["prompt_tokens"] + 3
        assert found["draftheads_first_token_seconds_count"] == 2
        assert found["draftheads_between_tokens_seconds_count"] == draft["steps"] + 11
        assert found["draftheads_steps_total"] == draft["steps"] + 11
        assert found["draftheads_tree_nodes_sum"] == sum(draft["drafted_by_depth"])
        assert found["draftheads_answers_finished_total"] == 2
        assert found["draftheads_interruptions_total"] == 0


def test_interrupted_requests_are_counted():
    scheduler = Scheduler(tiny_engines(), Limits(kv_bytes=1 << 26, max_rows=2))
    metrics = Metrics(scheduler.snapshot, None)
    for client, rows in (("a", 2), ("b", 1)):  # the second row of the first client is given up
        for _ in range(rows):
            submit(scheduler, [5, 6, 7], client=client)
        iterate(scheduler)
    assert b"\ndraftheads_interruptions_total 1.0\n" in metrics.text()


def test_cached_prefixes_are_counted(server: Running):
    chat = [{"role": "system", "content": "be brief " * 20}, USER]
    first = server.chat(messages=chat).json()
    second = server.chat(messages=[*chat[:1], {"role": "user", "content": "the mat"}]).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
    again = server.chat(messages=chat).json()["usage"]  # only the last token of the prompt is read
    assert again["prompt_tokens_details"]["cached_tokens"] == (again["prompt_tokens"] - 1) // 8 * 8
    expected = server.plain_answer([*chat[:1], {"role": "user", "content": "the mat"}], max_new_tokens=12).text
    assert second["choices"][0]["message"]["content"] == expected


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
