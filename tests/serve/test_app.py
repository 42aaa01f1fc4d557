"""Routes, errors and limits, one by one."""

import asyncio
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx2
import pytest

from draftheads.serve.fields import ApiError
from draftheads.serve.guard import Access, HttpLimits
from draftheads.serve.state import Service
from draftheads.settings import Grammar
from serve_world import (
    NAME,
    PLAIN,
    USER,
    Running,
    check_wrong,
    chunks_of,
    error_of,
    metrics_of,
    running,
    texts_of,
    tiny_engines,
)


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth > 1 else {}


def said(content: Any, **others: Any) -> list[Any]:
    return [USER, {"role": "user", "content": content, **others}]


def called(name: str, arguments: str) -> list[Any]:
    """The model called a function."""
    return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]


def form(schema: Any, kind: str = "json_schema", **others: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, "json_schema": {"schema": schema, **others}}}


def function(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **others}}


# values of fields, all wrong; ranges of settings are one rule
VALUES: dict[str, list[Any]] = {"model": [None, 5], "messages": [None, "hi", called("\ud800", "{}")], "top_k": [-2]}
VALUES |= {"temperature": [True, -0.1, 10**400], "seed": [2**64, 1.5], "frequency_penalty": ["1"], "n": [129]}
VALUES |= {"max_tokens": [0], "min_tokens": [-1, 13], "draft_nodes": [-1, 129], "max_token": [4], "stop": [["a"] * 17]}
VALUES |= {"skip_special_tokens": [0], "stop_token_ids": [[-1], [3] * 129], "logprobs": [2], "top_logprobs": [2]}
VALUES |= {"logit_bias": [[1], {str(i): 0 for i in range(1025)}], "stream_options": [{}], "tool_choice": ["required"]}
VALUES |= {"best_of": [2], "audio": [{"voice": "a"}], "modalities": [["audio"]]}
VALUES |= {"acceptance": ["typical", "fast"], "typical_epsilon": [0.2], "typical_delta": [0.3]}
VALUES["tools"] = [[function("a")] * 2, [function("a")] * 65, [function("a", parameters=nested(40))]]
PLACES: list[tuple[str | None, dict[str, Any]]] = [
    ("messages[0].role", {"messages": [{"content": "a"}]}),
    ("messages[1].content", {"messages": [USER, {"role": "user"}]}),
    ("messages[1].content[0].type", {"messages": said([{"type": "image_url", "image_url": {"url": "a"}}])}),
    ("messages[1].content", {"messages": said("\ud800")}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": called("a", "[" * 100_000)}),
    ("\\ud800", {"\ud800": 1}),
    ("stream_options.inc", {"stream": True, "stream_options": {"inc": 1}}),
    ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
    *(("stop[0]", {"stop": stop}) for stop in ("a" * 257, [""])),
    ("logit_bias.cat.[key]", {"logit_bias": {"cat": 1}}),
    ("logit_bias.1", {"logit_bias": {"1": 101}}),
    ("messages", {"messages": said("cat " * 2100)}),
    ("max_tokens", {"max_completion_tokens": 3}),
    ("min_tokens", {"min_tokens": 3, **form({})}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("draft_nodes", {"draft_nodes": 4, "model": PLAIN}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema.stict", form({}, stict=True)),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema", form({}, kind="text")),
    ("response_format.json_schema.schema", form({"enum": ["a" * 70_000]})),
    ("response_format.json_schema.schema", form(nested(33))),
    ("response_format", form({"pattern": "^(a{300}){300}$"})),
    (None, form({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/properties/a"}}})),  # on the way
    ("tools[0].type", {"tools": [{"type": "web"}]}),
    ("tools[0].function.name", {"tools": [function("a b")]}),
    ("tool_choice", {"tools": [function("a")], "tool_choice": function("b")}),
    ("tool_choice", {"tools": [function("a")], "tool_choice": "some"}),
]
PLACES += [(name, {name: value}) for name, values in VALUES.items() for value in values]


@pytest.mark.parametrize(("param", "fields"), PLACES)
def test_wrong_fields_are_named(server: Running, param: str | None, fields: dict[str, Any]):
    check_wrong(server.chat(**fields), param)


@pytest.mark.parametrize(
    "prompt", [None, [], "", [[]], [1, "a"], [[1], "a", 5], 7, [-1], [10**9], "cat " * 5000, ["a"] * 129]
)
def test_wrong_prompts_are_named(server: Running, prompt: Any):
    check_wrong(server.complete(prompt=prompt), "prompt")


def test_the_largest_values_are_allowed(server: Running):
    largest = {"n": 1, "min_tokens": 12, "top_p": 0, "stop": ["\0" * 256] * 16, "logit_bias": {"1": 100}}
    assert server.chat(**largest).status_code == 200
    assert server.chat(max_tokens=60, **form(nested(32))).status_code == 200
    check_wrong(server.complete(prompt=["a"] * 65, n=2), "n")
    check_wrong(server.complete(echo=True, logprobs=1, stream=True), "echo")


SEEDED = {"temperature": 1.0, "seed": 3}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of requests, and the settings that they are
    ({**SEEDED, "top_p": 0}, {}),
    ({**SEEDED, "top_k": 5, "repetition_penalty": 1.3}, {**SEEDED, "top_k": 5, "repetition_penalty": 1.3}),
    ({**SEEDED, "top_k": 0, "draft_nodes": 0}, SEEDED),
    ({"logit_bias": {"42": 100}}, {"logit_bias": {42: 100.0}}),
    ({**SEEDED, "response_format": {"type": "json_object"}}, {**SEEDED, "grammar": Grammar.json_object()}),
]


@pytest.mark.parametrize(("fields", "settings"), FIELDS)
def test_fields_are_settings(server: Running, fields: dict[str, Any], settings: dict[str, Any]):
    ids, settings = server.ids("the cat"), {"max_new_tokens": 12, **settings}
    assert texts_of(server.chat(**fields)) == [server.plain_answer([USER], **settings).text]
    expected = server.plain_answer(ids, **settings).text
    assert texts_of(server.complete(**{"temperature": 0, **fields})) == [expected]
    assert fields.get("top_p") == 0 or expected != server.plain_answer(ids, max_new_tokens=12).text


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_typical_acceptance_where_the_server_allows_it(server: Running, temperature: float):
    """Two answers of one batch are the offline engine's; every route says in its usage that they are not lossless."""
    typical = {"acceptance": "typical", "typical_epsilon": 1e-3, "typical_delta": 0.9}
    asked, settings = {"temperature": temperature, "seed": 3}, {"temperature": temperature, "max_new_tokens": 12}
    prompts, last = [server.ids("the cat"), server.ids("a dog ran")], {"stream_options": {"include_usage": True}}
    with running(tiny_engines(), HttpLimits(allow_typical=True)) as one:
        results = one.engines[NAME].generate(prompts, **settings, **typical)
        found = one.complete(prompt=prompts, **asked, **typical)
        assert texts_of(found) == [result.text for result in results]
        assert found.json()["usage"]["draft"]["steps"] == sum(result.num_steps for result in results)
        exact = [one.plain_answer(ids, **settings, seed=3).text for ids in prompts]
        assert (texts_of(found) == exact) == (temperature == 0)
        streamed = one.complete(prompt=prompts, stream=True, **last, **asked, **typical)
        responses = [one.post("responses", input="a", stream=each, **asked, **typical) for each in (False, True)]
        for response in (found, streamed, one.chat(**typical), *responses):
            whole = chunks_of(response)[-1]
            assert whole.get("response", whole)["usage"]["acceptance"] == "typical"
        for others in ({}, {"acceptance": "rejection"}):  # which is exact, as no draft tokens are drawn
            response = one.complete(prompt=prompts, **asked, **others)
            assert texts_of(response) == exact
            assert "acceptance" not in response.json()["usage"]
    assert "acceptance is 'typical', which is not lossless" in error_of(server.chat(acceptance="typical"))["message"]


def test_an_answer_ends_at_stop_tokens_and_not_before_its_shortest_length(server: Running):
    """With logprobs, whose tokens are those of the text."""
    ids = server.plain_answer([USER], max_new_tokens=12).token_ids
    stop, end = {"stop_token_ids": [ids[2]]}, ids.index(ids[2])
    for fields, length in (({}, end), ({"include_stop_str_in_output": True}, end + 1)):
        response = server.chat(**stop, **fields, logprobs=True).json()
        [choice] = response["choices"]
        assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("stop", length)
        assert response["usage"]["completion_tokens"] == end + 1
    expected = server.plain_answer([USER], max_new_tokens=12, **stop, min_new_tokens=3)
    assert texts_of(server.chat(**stop, min_tokens=3)) == [expected.text]
    assert len(expected.token_ids) > 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_server_limits_the_length_of_answers(server: Running, name: str):
    assert error_of(server.chat(**{"max_tokens": None, name: 2048}))["param"] == name
    with running(tiny_engines(), HttpLimits(max_tokens=5)) as small:
        assert error_of(small.chat(**{"max_tokens": None, name: 6}))["param"] == name
        for fields in ({name: 5}, {}):
            usage = small.chat(**{"max_tokens": None, **fields}, ignore_eos=True).json()["usage"]
            assert usage["completion_tokens"] == 5
        assert small.complete(max_tokens=None, ignore_eos=True).json()["usage"]["completion_tokens"] == 5
        assert error_of(small.chat(max_tokens=None, min_tokens=6))["param"] == "min_tokens"


def test_fields_without_effect_are_accepted(server: Running):
    fields = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": None}
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "modalities": ["text"], "top_k": -1}
    answer = server.chat(**fields, **neutral, response_format={"type": "text"}, logit_bias={}, tools=[])
    assert texts_of(answer) == [server.plain_answer([USER], max_new_tokens=12).text]


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"\xff\xfe", JSON, 400, "invalid_json"),
        (b"{", JSON, 400, "invalid_json"),
        (b'{"a": {"b": [NaN]}}', JSON, 400, "invalid_json"),
        (b"", JSON, 400, None),
        (b"[]", JSON, 400, None),
        (b'{"a": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", JSON, 400, "invalid_json"),
        (b'{"a": 1' + b"0" * 5000 + b"}", JSON, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, None),
        (b"{}", {}, 415, None),
        (b" " * (5 << 20), JSON, 413, "body_too_large"),
        ((b" " * 100_000 for _ in range(50)), JSON, 413, "body_too_large"),  # counted while it is read
    ],
)
def test_bodies_that_are_no_requests(server: Running, content: Any, headers: Any, status: int, code: str | None):
    response = httpx2.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize("depth", [400, 960, 990, 5000])
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


def test_pages_and_names_of_other_servers_get_nothing(server: Running):
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{server.address[1] + 1}", "http://["):
        response = server.chat({"origin": origin})
        assert (response.status_code, error_of(response)["code"]) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in server.chat({"origin": server.url}).headers
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "[", ""):
        response = server.chat({"host": host})
        assert (response.status_code, error_of(response)["code"]) in ((403, "unknown_host"), (400, "invalid_http"))
    for headers in ({"origin": server.url}, *({"host": host} for host in ("localhost:1", "LOCALHOST", "[::1]:5"))):
        assert server.chat(headers).status_code == 200, headers


FIRST_KEY, SECOND_KEY = ({"authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))


@pytest.fixture(scope="module")
def limited() -> Iterator[Running]:
    """A server with keys and small limits."""
    limits, access = HttpLimits(request_seconds=0.4), Access(("first-key", "second-key"))
    with running(tiny_engines("chatml"), limits, access, max_rows=1, max_waiting=2) as one:
        yield one


def test_keys(limited: Running):
    wrong = ("Bearer", "Basic first-key", "Bearer wrong", "Bearer first-key2")
    for headers, path in product(({}, *({"authorization": value} for value in wrong)), ("/v1/models", "/metrics")):
        response = httpx2.get(limited.url + path, headers=headers)
        assert (response.status_code, error_of(response)["type"]) == (401, "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"
    free = (("/health", {}), ("/ready", {}), ("/", {}))
    for path, headers in (("/v1/models", FIRST_KEY), ("/v1/models", SECOND_KEY), *free):
        assert httpx2.get(limited.url + path, headers=headers).status_code == 200


def test_nobody_learns_from_cached_tokens_what_another_key_asked():
    """Unless both name the same salt, which is no name that a key has by itself."""
    question = {"prompt": "the cat sat on the mat " * 9, "temperature": 0}
    with running(tiny_engines(), access=Access(("first-key", "second-key"))) as server:

        def cached(headers: dict[str, str], **fields: Any) -> int:
            usage = server.post("completions", headers, **question, **fields).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached(FIRST_KEY) == 0
        once = cached(FIRST_KEY)
        assert cached(FIRST_KEY, n=3) == once > 50
        for salt in ("", "key 0", "first-key", "shared"):
            assert cached(SECOND_KEY, cache_salt=salt) == 0, salt
        assert cached(FIRST_KEY, cache_salt="shared") > 50
        assert cached(SECOND_KEY) > 50
    access = Access()  # all clients without keys share what was read
    assert access.cache_salt_of("10.0.0.9", "") == access.cache_salt_of("10.0.0.8", "")
    assert access.cache_salt_of("10.0.0.9", "a") != access.cache_salt_of("10.0.0.9", "")


def test_tools_need_a_template_that_has_them(limited: Running):
    assert error_of(limited.chat(FIRST_KEY, tools=[function("add")]))["param"] == "tools"


def test_a_request_that_takes_too_long_ends_with_an_error(limited: Running):
    fields = {"max_tokens": 1900, "ignore_eos": True}
    response = limited.chat(FIRST_KEY, **fields)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline")
    *chunks, error = chunks_of(limited.chat(FIRST_KEY, **fields, stream=True))
    assert error["error"]["code"] == "deadline"
    assert len(chunks) > 2


def test_a_full_queue_refuses_and_says_when_to_come_back(limited: Running):
    """All of a request's answers wait, or none of them."""
    response = limited.chat(FIRST_KEY, n=40, max_tokens=200, ignore_eos=True)
    assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    assert ApiError(429, "", retry_after=1.2).headers == {"retry-after": "2"}
    assert limited.scheduler.snapshot().waiting == 0
    assert limited.chat(FIRST_KEY).status_code == 200


def test_what_can_never_fit_into_memory_is_refused():
    with running(tiny_engines(), kv_bytes=1 << 17) as small:
        assert error_of(small.chat(max_tokens=1500))["code"] == "context_length_exceeded"
        assert small.chat().status_code == 200


def test_clients_take_turns_to_be_read():
    read: list[str] = []
    service = Service()

    async def all_at_once() -> None:
        names = ("a1", "a2", "a3", "b1")
        await asyncio.gather(*(service.read(name[0], lambda name, _: read.append(name), name) for name in names))

    asyncio.run(all_at_once())
    service.close()
    assert read == ["a1", "b1", "a2", "a3"]


def test_a_failing_step_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch):
    with running(tiny_engines()) as server:

        def failing(*_: object) -> None:
            raise RuntimeError("secret words")

        with monkeypatch.context() as patch:
            patch.setattr(type(server.engines[NAME].drafter), "start", failing)
            response = server.chat()
            events = chunks_of(server.post("responses", input="the cat", stream=True))
        assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
        assert "secret" not in response.text
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert (events[-2]["code"], events[-1]["response"]["error"]["code"]) == ("error", "server_error")
        assert "secret" not in str(events)
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
    for kind, counts in (("draft", draft["drafted_by_depth"]), ("accepted", draft["accepted_by_depth"])):
        metric = [found.get(f'draftheads_{kind}_tokens_total{{depth="{n}"}}', 0) for n in range(1, len(counts) + 1)]
        assert metric == counts
    expected = {
        'requests_total{route="/v1/chat/completions",status="200"}': 1,
        'requests_total{route="/v1/chat/completions",status="404"}': 1,
        'tokens_total{kind="answer"}': 32,
        'tokens_total{kind="prompt"}': usage["prompt_tokens"] + 3,
        "first_token_seconds_count": 2,
        "between_tokens_seconds_count": draft["steps"] + 11,
        "steps_total": draft["steps"] + 11,
        "tree_nodes_sum": sum(draft["drafted_by_depth"]),
        "answers_finished_total": 2,
        "interruptions_total": 0,
    }
    assert {name: found[f"draftheads_{name}"] for name in expected} == expected


def test_an_answer_has_a_limited_number_of_log_probabilities(server: Running):
    """Counted with the tokens that may be, each of which has one of its own."""
    with running(tiny_engines(), HttpLimits(logprobs=100)) as small:
        assert small.chat(logprobs=True, n=10, max_tokens=10).status_code == 200
        for response, product, param in (
            (small.chat(logprobs=True, n=10, max_tokens=11), "110", "top_logprobs"),
            (small.chat(logprobs=True, top_logprobs=5, n=2, max_tokens=11), "110", "top_logprobs"),
            (small.complete(n=4, echo=True, max_tokens=10, logprobs=2), "104", "logprobs"),  # a text of 3 tokens
            (server.complete(prompt=["a"] * 14, max_tokens=1000, logprobs=20), "280,000", "logprobs"),
        ):
            check_wrong(response, param)
            assert f" = {product} " in response.text
