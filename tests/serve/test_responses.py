"""``/v1/responses`` with the official client: what it gets is the answer of a chat."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from draftheads.serve.chat_completions import ChatFields, read_chat
from draftheads.serve.response_input import ResponseFields
from draftheads.serve.response_output import ResponseEvents
from draftheads.serve.responses import read_response
from draftheads.serve.tools import ToolCall
from serve_world import NAME, USER, Running, metrics_of, running, tiny_engines

PLAIN = f"{NAME}:plain"
ASK = {"model": NAME, "input": USER["content"], "max_output_tokens": 24, "temperature": 0}
CHAT = {"model": NAME, "messages": [USER], "max_tokens": 24, "temperature": 0}
LOGPROBS: Any = ["message.output_text.logprobs"]
WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "day": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["unit", "day"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "tells", "parameters": WEATHER, "strict": True}
    for name in ("get_weather", "get_tide")
]
SEEDED = {"temperature": 0.9, "extra_body": {"seed": 7}}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as one:
        yield one


def chat_text(client: openai.OpenAI, messages: Any = (USER,), **fields: Any) -> str:
    answer = client.chat.completions.create(**{**CHAT, "messages": list(messages), **fields})
    return answer.choices[0].message.content or ""


def without_ids(value: Any) -> Any:
    """A response without what differs from request to request."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    differ = ("id", "call_id", "created_at", "completed_at", "usage")
    return {key: without_ids(item) for key, item in value.items() if key not in differ}


@pytest.mark.parametrize("model", [NAME, PLAIN])
@pytest.mark.parametrize("sampling", [{}, SEEDED, {**SEEDED, "top_p": 0.8}])
def test_the_text_is_that_of_a_chat(client: openai.OpenAI, server: Running, model: str, sampling: dict[str, Any]):
    response = client.responses.create(**{**ASK, **sampling, "model": model})
    assert response.output_text == chat_text(client, model=model, **sampling)
    settings = {"max_new_tokens": 24, "temperature": sampling.get("temperature", 0), "top_p": sampling.get("top_p", 1)}
    seed = sampling.get("extra_body", {})
    expected = server.plain_answer([USER], **settings, **seed)
    assert response.output_text == expected.text
    status = {"stop": "completed", "length": "incomplete"}[expected.finish_reason]
    assert (response.object, response.status, response.model) == ("response", status, model)


CONVERSATION: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "the"}, {"type": "input_text", "text": "cat"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "sat", "annotations": []}]},
    {"role": "system", "content": "be kind"},
    {"role": "developer", "content": "be brief"},
    USER,
]
AS_CHAT = [
    {"role": "user", "content": "the\ncat"},
    {"role": "assistant", "content": "sat"},
    {"role": "system", "content": "be kind"},
    {"role": "developer", "content": "be brief"},
    USER,
]


def test_messages_with_roles_and_parts(client: openai.OpenAI):
    response = client.responses.create(**{**ASK, "input": CONVERSATION})
    assert response.output_text == chat_text(client, AS_CHAT) != chat_text(client)


def test_instructions_are_the_first_message(client: openai.OpenAI):
    response = client.responses.create(**ASK, instructions="be brief")
    assert response.output_text == chat_text(client, [{"role": "system", "content": "be brief"}, USER])
    assert response.instructions == "be brief"
    assert response.output_text != chat_text(client)


def test_an_answer_is_sent_back_as_input(client: openai.OpenAI):
    first = client.responses.create(**ASK)
    items = [USER, *first.output, {"role": "user", "content": "and then"}]
    second = client.responses.create(**{**ASK, "input": items})
    chat = [USER, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and then"}]
    assert second.output_text == chat_text(client, chat)


TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def kinds_of(events: list[Any]) -> list[str]:
    """The types of events, in their order; the same one after another once."""
    kinds = [event.type for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("sampling", [{}, SEEDED])
def test_streams(client: openai.OpenAI, top: int | None, sampling: dict[str, Any]):
    more = {} if top is None else {"include": LOGPROBS, "top_logprobs": top}
    fields = {**ASK, **sampling, **more}
    events = list(client.responses.create(**fields, stream=True))
    whole = client.responses.create(**fields)
    assert kinds_of(events) == [*TEXT_EVENTS, f"response.{whole.status}"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas) == whole.output_text
    by_kind: dict[str, Any] = {event.type: event for event in events}
    assert by_kind["response.output_text.done"].text == whole.output_text
    assert by_kind["response.content_part.done"].part.text == whole.output_text
    assert by_kind["response.created"].response.status == by_kind["response.in_progress"].response.status
    assert (by_kind["response.created"].response.status, by_kind["response.created"].response.output) == (
        "in_progress",
        [],
    )
    last = events[-1].response
    assert without_ids(last.to_dict()) == without_ids(whole.to_dict())
    assert {event.item_id for event in deltas} == {last.output[0].id, by_kind["response.output_item.added"].item.id}
    entries = [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert entries == [entry.to_dict() for entry in last.output[0].content[0].logprobs]
    assert entries == [entry.to_dict() for entry in by_kind["response.output_text.done"].logprobs]
    assert bool(entries) == (top is not None)


def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI):
    response = client.responses.create(**ASK, include=LOGPROBS, top_logprobs=2)
    chat = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert [entry.to_dict() for entry in entries] == [entry.to_dict() for entry in chat.choices[0].logprobs.content]
    assert {len(entry.top_logprobs) for entry in entries} == {2}


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_of_tokens(client: openai.OpenAI, stream: bool):
    answer = client.responses.create(**{**ASK, "max_output_tokens": 5}, stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.max_output_tokens, response.usage.output_tokens) == ("incomplete", 5, 5)
    assert response.output_text == chat_text(client, max_tokens=5)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_by_itself_is_complete(client: openai.OpenAI, stream: bool):
    stop = chat_text(client)[7:9]
    answer = client.responses.create(**ASK, extra_body={"stop": stop}, stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert (response.output[0].status, response.completed_at >= response.created_at) == ("completed", True)
    assert response.output_text == chat_text(client, stop=stop)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_text_is_a_message_without_text(client: openai.OpenAI, stream: bool):
    first = chat_text(client)[0]
    answer = client.responses.create(**ASK, extra_body={"stop": first}, stream=stream)
    response = list(answer)[-1].response if stream else answer
    [message] = response.output
    assert (message.type, message.content[0].text, response.status) == ("message", "", "completed")


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(client: openai.OpenAI, stream: bool):
    form: Any = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(**{**ASK, "max_output_tokens": 100}, text={"format": form}, stream=stream)
    response = list(answer)[-1].response if stream else answer
    value = json.loads(response.output_text)
    assert value.keys() == {"colour", "sure"}
    assert value["colour"] in ("red", "green")
    assert (response.status, response.text.to_dict()) == ("completed", {"format": form})
    chat_form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert response.output_text == chat_text(client, max_tokens=100, response_format=chat_form)


def test_other_formats_of_the_text(client: openai.OpenAI):
    json_object = client.responses.create(**{**ASK, **SEEDED}, text={"format": {"type": "json_object"}})
    assert json_object.output_text == chat_text(client, **SEEDED, response_format={"type": "json_object"})
    free = client.responses.create(**ASK, text={"format": {"type": "text"}})
    assert free.output_text == chat_text(client) != json_object.output_text


class Answer(pydantic.BaseModel):
    colour: Literal["red", "green"]
    sure: bool


def test_the_client_parses_answers(client: openai.OpenAI):
    response = client.responses.parse(**{**ASK, "max_output_tokens": 100}, text_format=Answer)
    assert isinstance(response.output_parsed, Answer)
    with client.responses.stream(**{**ASK, "max_output_tokens": 100}, text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


CALL_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_tide"}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_must_come(client: openai.OpenAI, choice: Any, stream: bool):
    asked = {**ASK, "max_output_tokens": 100, "tools": TOOLS, "tool_choice": choice}
    answer = client.responses.create(**asked, stream=stream)
    events = list(answer) if stream else []
    response = events[-1].response if stream else answer
    [call] = response.output
    assert (call.type, call.status, response.status) == ("function_call", "completed", "completed")
    assert call.name in (["get_tide"] if isinstance(choice, dict) else ["get_weather", "get_tide"])
    arguments = json.loads(call.arguments)
    assert arguments["unit"] in ("C", "F")
    assert 1 <= arguments["day"] <= 7
    assert (response.to_dict()["tools"], response.to_dict()["tool_choice"]) == (TOOLS, choice)
    if stream:
        assert kinds_of(events) == CALL_EVENTS
        added, delta, done, item = events[2:6]
        assert (added.item.arguments, added.item.status, added.item.name) == ("", "in_progress", call.name)
        assert delta.delta == done.arguments == item.item.arguments == call.arguments
        assert {added.item.id, delta.item_id, done.item_id, item.item.id} == {call.id}
        assert added.item.call_id == item.item.call_id == call.call_id
    chat_choice = choice if isinstance(choice, str) else {"type": "function", "function": {"name": "get_tide"}}
    of_chat = client.chat.completions.create(
        **{**CHAT, "max_tokens": 100}, tools=as_chat(TOOLS), tool_choice=chat_choice
    )
    [chat_call] = of_chat.choices[0].message.tool_calls
    assert (chat_call.function.name, chat_call.function.arguments) == (call.name, call.arguments)


def as_chat(tools: Any) -> Any:
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} for tool in tools
    ]


def test_the_client_collects_the_calls_of_a_stream(client: openai.OpenAI):
    with client.responses.stream(**{**ASK, "max_output_tokens": 100}, tools=TOOLS, tool_choice="required") as stream:
        [call] = stream.get_final_response().output
    assert json.loads(call.arguments).keys() == {"unit", "day"}


def test_a_conversation_with_tools_goes_on(client: openai.OpenAI):
    """The calls of an answer are one message with its text, as in a chat."""
    function = {"name": "get_tide", "arguments": '{"unit": "C", "day": 1}'}
    items = [
        USER,
        {"role": "assistant", "content": "let me see"},
        *({"type": "function_call", "call_id": call_id, **function, "id": f"fc_{call_id}"} for call_id in "ab"),
        {"type": "function_call_output", "call_id": "a", "output": "low"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "high"}]},
    ]
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in "ab"]
    chat = [
        USER,
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "low"},
        {"role": "tool", "tool_call_id": "b", "content": "high"},
    ]
    response = client.responses.create(**{**ASK, "input": items}, tools=TOOLS)
    of_chat = client.chat.completions.create(**{**CHAT, "messages": chat}, tools=as_chat(TOOLS))
    assert response.output_text == of_chat.choices[0].message.content
    assert response.usage.input_tokens == of_chat.usage.prompt_tokens
    only_call = client.responses.create(**{**ASK, "input": [USER, items[2], items[4]]}, tools=TOOLS)
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls[:1]}, chat[2]]
    of_chat = client.chat.completions.create(**{**CHAT, "messages": chat}, tools=as_chat(TOOLS))
    assert only_call.output_text == of_chat.choices[0].message.content
    none = client.responses.create(**ASK, tools=TOOLS, tool_choice="none")
    assert none.output_text == chat_text(client)


def test_the_model_reads_what_it_reads_of_a_chat(server: Running):
    function = {"name": "get_tide", "arguments": "{}"}
    chat = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "low"},
    ]
    items = [
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": "low"},
    ]
    usual = {"model": NAME, "parallel_tool_calls": False}
    body = {**usual, "input": [{"role": "developer", "content": "be brief"}, *items], "tools": TOOLS}
    response = read_response(ResponseFields.model_validate(body), server.service)
    body = {**usual, "messages": chat, "tools": as_chat(TOOLS)}
    of_chat = read_chat(ChatFields.model_validate(body), server.service)
    assert (response.messages, response.tools) == (of_chat.messages, of_chat.tools)
    assert [message["role"] for message in response.messages] == ["system", "assistant", "tool"]
    assert response.messages[1]["tool_calls"][0] == {
        "id": "a",
        "type": "function",
        "function": {**function, "arguments": {}},
    }
    assert response.messages[2]["tool_call_id"] == "a"
    assert response.requests[0].prompt_ids == of_chat.requests[0].prompt_ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_fits_exactly_is_complete(client: openai.OpenAI, stream: bool):
    fields = {**ASK, "max_output_tokens": 100, "tools": TOOLS, "tool_choice": "required"}
    whole = client.responses.create(**fields)
    fields["max_output_tokens"] = whole.usage.output_tokens - 1  # without the token that ends the text
    answer = client.responses.create(**fields, stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert without_ids(response.to_dict()["output"]) == without_ids(whole.to_dict()["output"])
    assert (response.status, response.incomplete_details) == ("completed", None)
    fields["max_output_tokens"] -= 1
    cut = client.responses.create(**fields)
    assert (cut.status, cut.output[0].type) == ("incomplete", "message")


def test_text_and_calls_of_an_answer_are_items_in_this_order():
    events = ResponseEvents({"id": "resp_1"})
    calls = [ToolCall("add", '{"a": 1}'), ToolCall("sum", "{}")]
    sent = [*events.begin(), *events.add_text("I ", []), *events.add_text("", [{"token": "a"}])]
    sent += [*events.add_text("add.", [{"token": "b"}]), *events.add_text("", [{"token": "c"}])]
    sent += events.end(calls, {}, is_cut=False)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    deltas = [event for event in sent if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == ["I ", "add.", ""]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [[], ["a", "b"], ["c"]]
    response = sent[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    added = [event for event in sent if event["type"] == "response.output_item.added"]
    done = [event for event in sent if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    assert [event["item"] for event in done] == response["output"]
    assert len({item["id"] for item in response["output"]}) == 3
    assert response["output"][0]["content"][0]["text"] == "I add."


def test_the_usage_counts_as_a_chat(client: openai.OpenAI):
    chat = client.chat.completions.create(**CHAT).usage
    usage = client.responses.create(**ASK).usage
    counts = (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    assert counts == (chat.prompt_tokens, chat.completion_tokens, chat.total_tokens)
    assert usage.input_tokens_details.cached_tokens == (chat.prompt_tokens - 1) // 8 * 8  # it was read before
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.model_extra["draft"] == chat.model_extra["draft"]
    assert usage.model_extra["draft"]["steps"] > 0


def test_fields_of_this_server(client: openai.OpenAI, server: Running):
    own = {"draft_nodes": 0, "cache_salt": "mine", "seed": 3, "top_k": 5, "repetition_penalty": 1.3}
    response = client.responses.create(**{**ASK, "temperature": 1.0}, extra_body={**own, "logit_bias": {"5": -100}})
    settings = {"seed": 3, "top_k": 5, "repetition_penalty": 1.3, "logit_bias": {5: -100.0}}
    expected = server.plain_answer([USER], max_new_tokens=24, temperature=1.0, **settings)
    assert response.output_text == expected.text
    assert sum(response.usage.model_extra["draft"]["drafted_by_depth"]) == 0
    assert response.usage.input_tokens_details.cached_tokens == 0  # nobody else has this salt
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    items = [USER, {"role": "assistant", "content": "the mat"}]
    response = client.responses.create(**{**ASK, "input": items}, extra_body=going_on)
    assert response.output_text == chat_text(client, items, extra_body=going_on)


def test_drafted_pieces_of_a_stream(client: openai.OpenAI):
    options = {"stream_options": {"include_draft": True, "include_obfuscation": False, "include_usage": True}}
    events = list(client.responses.create(**ASK, stream=True, extra_body=options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    for event in deltas:
        assert "".join(text for text, _ in event.model_extra["pieces"]) == event.delta
    pieces = [piece for event in deltas for piece in event.model_extra["pieces"]]
    assert {drafted for _, drafted in pieces} == {False, True}
    assert "".join(text for text, _ in pieces) == events[-1].response.output_text


def test_fields_without_effect_are_accepted(client: openai.OpenAI):
    fields: Any = {"user": "me", "store": True, "truncation": "disabled", "parallel_tool_calls": False}
    fields |= {"service_tier": "auto", "prompt_cache_key": "a", "safety_identifier": "b", "max_tool_calls": 3}
    fields |= {"include": ["reasoning.encrypted_content"], "background": False, "previous_response_id": None}
    fields |= {"metadata": {"project": "seven", "é": ""}, "reasoning": {"effort": "none", "summary": "auto"}}
    response = client.responses.create(**ASK, **fields, text={"verbosity": "medium"})
    assert response.output_text == chat_text(client)
    assert response.metadata == fields["metadata"]
    assert (response.parallel_tool_calls, response.truncation, response.background) == (False, "disabled", False)
    assert response.to_dict()["store"] is False  # nothing is stored
    assert client.responses.create(**ASK, store=False).metadata == {}


def said(content: Any, **others: Any) -> dict[str, Any]:
    return {"input": [USER, {"role": "user", "content": content, **others}]}


def called(**others: Any) -> dict[str, Any]:
    return {"input": [USER, {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}", **others}]}


def form(**others: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, **others}}}


def tool(**others: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "a", **others}]}


ERRORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no model": ({"model": None}, "model", "models of this server: tiny, tiny:plain"),
    "no input": ({"input": None}, "input", "missing"),
    "an empty list": ({"input": []}, "input", "is []"),
    "an input of a wrong type": ({"input": 5}, "input", "5; it must be a string or a list"),
    "an item of a wrong type": ({"input": ["a"]}, "input[0]", "is 'a'"),
    "an unknown item": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "'function_call_output'"),
    "an item whose type is a list": ({"input": [{"type": []}]}, "input[0].type", "[]"),
    "a misspelt field of an item": (said("a", rol="b"), "input[1].rol", "did you mean role?"),
    "an unknown role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'developer'"),
    "no content": ({"input": [USER, {"role": "user"}]}, "input[1].content", "missing"),
    "an image": (said([{"type": "input_image", "image_url": "a"}]), "input[1].content[0].type", "'input_text'"),
    "a misspelt field of a part": (
        said([{"type": "input_text", "text": "a", "txt": "b"}]),
        "input[1].content[0].txt",
        "did you mean text?",
    ),
    "half a character": (said("\ud800"), "input[1].content", "half"),
    "half a character in an echo": ({"metadata": {"a": "\ud800"}}, "metadata", "half"),
    "half a character in a tool": ({**tool(description="\ud800"), "tool_choice": "none"}, "tools", "half"),
    "instructions of a wrong type": ({"instructions": ["a"]}, "instructions", "string"),
    "half a character in instructions": ({"instructions": "\ud800"}, "instructions", "half"),
    "arguments that are no JSON": (called(arguments="{"), "input[1].arguments", "not valid JSON"),
    "a call without a name": (called(name=None), "input[1].name", "missing"),
    "a misspelt field of a call": (called(callid="1"), "input[1].callid", "did you mean call_id?"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", "is 0"),
    "max_tokens": ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    "max_completion_tokens": ({"max_completion_tokens": 5}, "max_completion_tokens", "max_output_tokens"),
    "too many tokens": ({"input": "cat " * 2100}, "input", "takes at most"),
    "temperature": ({"temperature": -1}, "temperature", "0 (greedy)"),
    "top_p": ({"top_p": 2}, "top_p", "at most 1"),
    "n": ({"n": 2}, "n", "a request for each answer"),
    "messages": ({"messages": [USER]}, "messages", "use input"),
    "response_format": ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
    "reasoning_effort": ({"reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
    "effort without a template": ({"reasoning": {"effort": "low"}}, "reasoning.effort", "has no reasoning_effort"),
    "an unknown effort": ({"reasoning": {"effort": "some"}}, "reasoning.effort", "'minimal'"),
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored; send"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "nothing is stored; send"),
    "background": ({"background": True}, "background", "leave it out"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", "use instructions and input"),
    "truncation": ({"truncation": "auto"}, "truncation", "is 'auto'"),
    "include": ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    "top_logprobs": ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs", "is 21"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    "an unknown format": ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
    "no schema": (form(schema=None), "text.format.schema", "missing"),
    "a schema without a use": (form(type="text"), "text.format.schema", "only"),
    "a long schema": (form(schema={"enum": ["a" * 70_000]}), "text.format.schema", "at most 65536"),
    "a misspelt field of a format": (form(stict=True), "text.format.stict", "strict"),
    "tools that are none": (
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
        "is 'web_search'",
    ),
    "a tool's name": (tool(name="a b"), "tools[0].name", "64"),
    "tools of chats": ({"tools": as_chat(TOOLS)}, "tools[0].function", "unknown field 'tools[0].function'"),
    "too long tools": (tool(description="a" * 70_000), "tools", "at most 65536"),
    "two tools of one name": ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "same name"),
    "an unknown choice": ({"tool_choice": "some"}, "tool_choice", '{"type": "function", "name": …}'),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "a tool that is not there": (tool() | {"tool_choice": {"type": "function", "name": "b"}}, "tool_choice", "'b'"),
    "tools and a schema": ({**tool(), **form()}, "text.format", "exclude each other"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata", "'a'"),
    "long metadata": ({"metadata": {"a": "b" * 513}}, "metadata", "at most 512"),
    "long keys of metadata": ({"metadata": {"a" * 65: "b"}}, "metadata", "at most 64"),
    "too much metadata": ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "at most 16"),
    "stream_options": ({"stream_options": {}}, "stream_options", "stream: true"),
    "counts in every event": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "last event",
    ),
    "a misspelt field": ({"instruction": "a"}, "instruction", "did you mean instructions?"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_fields_are_named(server: Running, case: str):
    fields, param, words = ERRORS[case]
    response = server.post("responses", **{"input": "the cat", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert words in error["message"]


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**{**ASK, "model": "gpt-9"}, stream=True)
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):  # nothing is stored
        client.responses.retrieve("resp_1")


def test_events_have_names_and_no_other_end(server: Running):
    response = server.post("responses", input="the cat", max_output_tokens=4, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_an_answer_that_fails_ends_with_events_of_it(monkeypatch: pytest.MonkeyPatch):
    with running(tiny_engines()) as server:

        def failing(*_: object) -> None:
            raise RuntimeError("secret words")

        with monkeypatch.context() as patch:
            patch.setattr(type(server.engines[NAME].drafter), "start", failing)
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                events = list(client.responses.create(**ASK, stream=True))
                with pytest.raises(openai.InternalServerError):
                    client.responses.create(**ASK)
        *_, error, failed = events
        assert (error.type, error.code, error.message) == ("error", "error", "the answer could not be computed")
        assert (failed.type, failed.response.status, failed.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert server.post("responses", input="the cat", max_output_tokens=4).status_code == 200
        assert metrics_of(server.url)['draftheads_requests_total{route="/v1/responses",status="200"}'] == 2


def test_a_stream_may_be_left(client: openai.OpenAI, server: Running):
    before = server.scheduler.snapshot().cancelled
    with client.responses.create(**{**ASK, "max_output_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    response = client.responses.create(**ASK)  # at the latest after the next step the row is free
    assert response.output_text == chat_text(client)
    assert server.scheduler.snapshot().cancelled == before + 1


def test_the_asynchronous_client(server: Running, client: openai.OpenAI):
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:

            async def streamed(seed: int) -> str:
                fields = {**ASK, "temperature": 1.0, "extra_body": {"seed": seed}}
                stream = await one.responses.create(**fields, stream=True)
                events = [event async for event in stream]
                return "".join(event.delta for event in events if event.type == "response.output_text.delta")

            return await asyncio.gather(*[streamed(seed) for seed in range(6)])

    expected = [server.plain_answer([USER], max_new_tokens=24, temperature=1.0, seed=seed).text for seed in range(6)]
    assert asyncio.run(talk()) == expected
