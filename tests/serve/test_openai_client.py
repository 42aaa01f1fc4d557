"""The official client against the server: what it gets is the offline engine's plain answer."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from draftheads.settings import Grammar
from serve_world import NAME, USER, Running


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PARAMETERS = schema(unit={"enum": ["C", "F"]}, day={"type": "integer", "minimum": 1, "maximum": 7})
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "get_tide")
]
SCHEMA = schema(colour={"enum": ["red", "green"]}, sure={"type": "boolean"})
CHAT = {"model": NAME, "messages": [USER], "max_tokens": 24, "temperature": 0}
TEXT = {"model": NAME, "prompt": "the cat sat", "max_tokens": 24, "temperature": 0}
PLAIN = f"{NAME}:plain"
VLLM = {"top_k": 5, "repetition_penalty": 1.3}  # fields that only vLLM has


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as one:
        yield one


def plain(server: Running, prompt: Any = (USER,), **settings: Any) -> str:
    return server.plain_answer(list(prompt), **{"max_new_tokens": 24, **settings}).text


def text_ids(server: Running, text: str) -> list[int]:
    return server.engines[NAME].model.tokenizer(text)["input_ids"]


def said(answer: Any) -> list[tuple[Any, Any]]:
    """The choices of an answer or of the chunks of a stream, each with its message or a part of it."""
    parts = answer if isinstance(answer, openai.Stream) else [answer]
    return [(choice, getattr(choice, "delta", None) or choice.message) for part in parts for choice in part.choices]


@pytest.mark.parametrize("model", [NAME, PLAIN])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "top_p": 0.8, "seed": 1}]
)
def test_chats(client: openai.OpenAI, server: Running, model: str, sampling: dict[str, Any]):
    answer = client.chat.completions.create(**{**CHAT, **sampling, "model": model})
    result = server.plain_answer([USER], max_new_tokens=24, **sampling)
    assert answer.choices[0].message.content == result.text
    assert (answer.choices[0].finish_reason, answer.model) == (result.finish_reason, model)
    assert (answer.usage.completion_tokens, answer.object) == (len(result.token_ids), "chat.completion")


@pytest.mark.parametrize("nodes", [0, 8])
def test_the_number_of_draft_nodes_changes_no_text(client: openai.OpenAI, server: Running, nodes: int):
    answer = client.chat.completions.create(**CHAT, extra_body={"draft_nodes": nodes})
    assert answer.choices[0].message.content == plain(server)
    draft = answer.usage.model_extra["draft"]
    assert draft["steps"] * (nodes > 0) * (nodes - 1) == sum(draft["drafted_by_depth"])


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"max_tokens": None, "max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 1.0, "seed": 3, "extra_body": VLLM}, {"temperature": 1.0, "seed": 3, **VLLM}),
        (
            {"temperature": 1.0, "seed": 3, "response_format": {"type": "json_object"}},
            {"temperature": 1.0, "seed": 3, "grammar": Grammar.json_object()},
        ),
    ],
)
def test_fields_are_settings(client: openai.OpenAI, server: Running, fields: dict[str, Any], settings: dict[str, Any]):
    answer = client.chat.completions.create(**{**CHAT, **fields})
    assert answer.choices[0].message.content == plain(server, **settings) != plain(server)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_seeds_in_a_row(client: openai.OpenAI, server: Running, stream: bool):
    stop = "#" if stream else "never"
    fields = {**CHAT, "temperature": 1.0, "seed": 2**64 - 2, "n": 3, "stop": stop}
    answer = client.chat.completions.create(**fields, stream=stream)
    texts = ["", "", ""]
    for choice, message in said(answer):
        texts[choice.index] += message.content or ""
    assert texts == [plain(server, temperature=1.0, seed=seed, stop=stop) for seed in (2**64 - 2, 2**64 - 1, 0)]
    assert len(set(texts)) == 3
    if not stream:  # the prompt counts once
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (56, 72)


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings(client: openai.OpenAI, server: Running, as_list: bool):
    whole = plain(server)
    stop = whole[7:9]
    answer = client.chat.completions.create(**CHAT, stop=[stop, "never"] if as_list else stop)
    assert answer.choices[0].message.content == plain(server, stop=stop)
    assert answer.choices[0].finish_reason == "stop"


def test_logit_bias(client: openai.OpenAI, server: Running):
    first = server.plain_answer([USER], max_new_tokens=1).token_ids[0]
    answer = client.chat.completions.create(**CHAT, logit_bias={str(first): -100})
    assert answer.choices[0].message.content == plain(server, logit_bias={first: -100.0}) != plain(server)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chats(client: openai.OpenAI, server: Running, stream: bool):
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, stream=stream)
    content = [entry for choice, _ in said(answer) if choice.logprobs for entry in choice.logprobs.content]
    expected = server.plain_answer([USER], max_new_tokens=24, logprobs=3)
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == expected.text
    assert [entry.logprob for entry in content] == pytest.approx(expected.logprobs, abs=1e-5)
    for entry, top in zip(content, expected.top_logprobs, strict=True):
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx([value for _, value in top], abs=1e-5)


def test_a_conversation_with_roles_and_parts(client: openai.OpenAI, server: Running):
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]},
        {"role": "assistant", "content": "sat"},
        USER,
    ]
    answer = client.chat.completions.create(**{**CHAT, "messages": chat})
    chat[1] = {"role": "user", "content": "the\ncat"}
    assert answer.choices[0].message.content == plain(server, chat)
    developer = client.chat.completions.create(**{**CHAT, "messages": [{**chat[0], "role": "developer"}, *chat[1:]]})
    assert developer.choices[0].message.content == answer.choices[0].message.content


def test_streams_of_chats(client: openai.OpenAI, server: Running):
    options = {"include_usage": True, "include_draft": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    *texts, last, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == plain(server)
    assert (last.choices[0].finish_reason, usage.choices, usage.usage.completion_tokens) == ("length", [], 24)
    pieces = [piece for chunk in texts for piece in chunk.choices[0].model_extra.get("pieces", [])]
    assert "".join(text for text, _ in pieces) == plain(server)
    assert sum(drafted for _, drafted in pieces) <= sum(usage.usage.model_extra["draft"]["accepted_by_depth"])
    assert any(drafted for _, drafted in pieces)


def test_a_stream_may_be_left(client: openai.OpenAI, server: Running):
    before = server.scheduler.snapshot().cancelled
    with client.chat.completions.create(**{**CHAT, "max_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    answer = client.chat.completions.create(**CHAT)  # at the latest after the next step the row is free
    assert answer.choices[0].message.content == plain(server)
    assert server.scheduler.snapshot().cancelled == before + 1


def test_completions_read_raw_text(client: openai.OpenAI, server: Running):
    ids = text_ids(server, "the cat sat")
    expected = plain(server, ids)
    for prompt in ("the cat sat", ids):
        answer = client.completions.create(**{**TEXT, "prompt": prompt})
        assert (answer.choices[0].text, answer.object) == (expected, "text_completion")


def test_completions_of_several_prompts(client: openai.OpenAI, server: Running):
    prompts = ["the cat", "naïve café", "日本語"]
    expected = [plain(server, text_ids(server, prompt)) for prompt in prompts]
    answer = client.completions.create(**{**TEXT, "prompt": prompts})
    assert [choice.text for choice in answer.choices] == expected
    ids = [text_ids(server, prompt) for prompt in prompts]
    twice = client.completions.create(**{**TEXT, "prompt": ids}, n=2)
    assert [choice.text for choice in twice.choices] == [text for text in expected for _ in range(2)]
    assert [choice.index for choice in twice.choices] == list(range(6))


def test_streams_of_completions(client: openai.OpenAI, server: Running):
    chunks = client.completions.create(**TEXT, stream=True, echo=True)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == "the cat sat" + plain(server, text_ids(server, "the cat sat"))


def test_completions_have_sixteen_tokens_and_temperature_one_by_default(client: openai.OpenAI, server: Running):
    answer = client.completions.create(model=NAME, prompt="the cat", seed=9)
    ids = text_ids(server, "the cat")
    assert answer.choices[0].text == plain(server, ids, max_new_tokens=16, temperature=1.0, seed=9)


def test_echo_with_log_probabilities_scores_the_prompt(client: openai.OpenAI, server: Running):
    ids = text_ids(server, "the cat sat on the mat")
    answer = client.completions.create(**{**TEXT, "prompt": ids, "max_tokens": 1}, echo=True, logprobs=2)
    found = answer.choices[0].logprobs
    for place, token in enumerate(ids):  # the answer of one token to the text before it, which may be any other token
        if place == 0:
            assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
            continue
        bias = {token: 100.0}
        forced = server.plain_answer(ids[:place], max_new_tokens=1, logprobs=2, logit_bias=bias)
        assert forced.token_ids == (token,)
        assert found.token_logprobs[place] == pytest.approx(forced.logprobs[0], abs=1e-4)
        best = max(found.top_logprobs[place].values())
        assert best == pytest.approx(forced.top_logprobs[0][0][1], abs=1e-4)
    assert answer.choices[0].text == "the cat sat on the mat" + plain(server, ids, max_new_tokens=1)
    assert found.text_offset[:2] == [0, 3]
    only = client.completions.create(**{**TEXT, "prompt": ids, "max_tokens": 0}, echo=True, logprobs=2)
    assert only.choices[0].logprobs.token_logprobs == found.token_logprobs[:-1]
    assert only.usage.completion_tokens == 0


@pytest.mark.parametrize("echo", [False, True])
def test_zero_log_probabilities_are_those_of_the_tokens_alone(client: openai.OpenAI, server: Running, echo: bool):
    fields = {**TEXT, "max_tokens": 4, "echo": echo}
    two, zero = (client.completions.create(**fields, logprobs=count).choices[0] for count in (2, 0))
    assert two.logprobs.top_logprobs is not None
    assert (zero.text, zero.logprobs.top_logprobs) == (two.text, None)
    for part in ("tokens", "token_logprobs", "text_offset"):
        assert getattr(zero.logprobs, part) == getattr(two.logprobs, part)
    assert len(zero.logprobs.tokens) == 4 + echo * len(text_ids(server, TEXT["prompt"]))
    streamed = [] if echo else list(client.completions.create(**fields, logprobs=0, stream=True))
    choices = [choice for chunk in streamed for choice in chunk.choices if choice.logprobs]
    assert all(choice.logprobs.top_logprobs is None for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(client: openai.OpenAI, server: Running, stream: bool):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    fields = {**CHAT, "max_tokens": 100, "response_format": form}
    parts = said(client.chat.completions.create(**fields, stream=stream))
    text, reason = "".join(message.content or "" for _, message in parts), parts[-1][0].finish_reason
    value = json.loads(text)
    assert value.keys() == {"colour", "sure"}
    assert value["colour"] in ("red", "green")
    assert isinstance(value["sure"], bool)
    assert reason == "stop"
    assert text == plain(server, max_new_tokens=100, grammar=Grammar.json_schema(SCHEMA))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_tide"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_that_must_come(client: openai.OpenAI, choice: Any, stream: bool):
    fields = {**CHAT, "max_tokens": 100, "tools": TOOLS, "tool_choice": choice}
    parts = said(client.chat.completions.create(**fields, stream=stream))
    (call,) = [call for _, message in parts for call in message.tool_calls or []]
    assert stream or parts[0][1].content is None
    assert call.function.name in (["get_tide"] if isinstance(choice, dict) else ["get_weather", "get_tide"])
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] in ("C", "F")
    assert 1 <= arguments["day"] <= 7
    assert parts[-1][0].finish_reason == "tool_calls"


def test_a_conversation_with_a_tool_goes_on(client: openai.OpenAI, server: Running):
    function = {"name": "get_tide", "arguments": '{"unit": "C", "day": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "low"},
    ]
    fields = {**CHAT, "messages": chat, "tools": TOOLS}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content  # a random model calls nothing
    without = client.chat.completions.create(**fields, tool_choice="none")
    assert without.usage.prompt_tokens < answer.usage.prompt_tokens


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [NAME, PLAIN]
    own = client.models.retrieve(PLAIN).model_extra["draftheads"]
    assert own == {"head": None, "base": NAME, "context": 2048, "chat": True, "thinks": False}


def test_the_asynchronous_client(server: Running):
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed(seed: int) -> str:
                fields = {**CHAT, "temperature": 1.0, "seed": seed}
                stream = await client.chat.completions.create(**fields, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def whole(seed: int) -> str:
                answer = await client.chat.completions.create(**{**CHAT, "temperature": 1.0, "seed": seed})
                return answer.choices[0].message.content or ""

            return await asyncio.gather(*[(streamed if seed % 2 else whole)(seed) for seed in range(8)])

    expected = [plain(server, temperature=1.0, seed=seed) for seed in range(8)]
    assert asyncio.run(talk()) == expected


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"messages": [{"role": "user", "content": "cat " * 2100}]}, openai.BadRequestError, "messages"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    ],
)
def test_errors_are_the_clients_own(client: openai.OpenAI, fields: dict[str, Any], kind: type, param: str):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**CHAT, **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
