"""``/v1/responses`` with the official client: what it gets is the answer of a chat."""

from collections import defaultdict
from typing import Any, Literal

import openai
import pydantic
import pytest

from draftheads.decode.answer_forms.form import ToolCall
from draftheads.serve.chat_completions import AnswerPart
from draftheads.serve.responses import ResponseEvents
from serve_world import NAME, USER, Running, check_wrong, chunks_of

ASK = {"model": NAME, "input": USER["content"], "max_output_tokens": 24, "temperature": 0}
CHAT = {"model": NAME, "messages": [USER], "max_tokens": 24, "temperature": 0}
LOGPROBS: Any = ["message.output_text.logprobs"]
DAY = {"type": "integer", "minimum": 1, "maximum": 7}
WEATHER = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "day": DAY}, "required": ["unit", "day"]}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "tells", "parameters": WEATHER | {"additionalProperties": False}}
    for name in ("get_weather", "get_tide")
]
AS_CHAT: Any = [
    {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} for tool in TOOLS
]
SEEDED = {"temperature": 0.9, "extra_body": {"seed": 7}}


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


def test_messages_with_roles_and_parts(client: openai.OpenAI, server: Running):
    words = [{"type": "input_text", "text": word} for word in ("the", "cat")]
    said = [{"type": "output_text", "text": "sat", "annotations": []}]
    items: list[Any] = [{"role": "user", "content": words}, {"type": "message", "role": "assistant", "content": said}]
    items += [{"role": "developer", "content": "be brief"}, USER]
    turns = (("system", "be kind"), ("user", "the\ncat"), ("assistant", "sat"), ("system", "be brief"))
    read = server.response_call(input=items, instructions="be kind").messages
    assert read == [*({"role": role, "content": content} for role, content in turns), USER]
    response = client.responses.create(**{**ASK, "input": items})
    again = client.responses.create(**{**ASK, "input": [USER, *response.output, USER]})
    assert again.output_text == chat_text(client, [USER, {"role": "assistant", "content": response.output_text}, USER])


@pytest.mark.parametrize("top", [None, 3])
@pytest.mark.parametrize("sampling", [{}, {**SEEDED, "top_p": 0.8}])
def test_streams_and_whole_responses_are_the_same(client: openai.OpenAI, top: int | None, sampling: dict[str, Any]):
    more = {} if top is None else {"include": LOGPROBS, "top_logprobs": top}
    fields = {**ASK, **sampling, **more}
    events = list(client.responses.create(**fields, stream=True))
    whole = client.responses.create(**fields)
    assert whole.output_text == chat_text(client, **sampling)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1].response
    assert without_ids(last.to_dict()) == without_ids(whole.to_dict())
    entries = [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert entries == [entry.to_dict() for entry in last.output[0].content[0].logprobs or []]
    if top is not None:
        chat = client.chat.completions.create(**CHAT | sampling, logprobs=True, top_logprobs=top)
        assert entries == [entry.to_dict() for entry in chat.choices[0].logprobs.content]


class Answer(pydantic.BaseModel):
    colour: Literal["red", "green"]
    sure: bool


def test_forms_of_the_text(client: openai.OpenAI):
    asked = {**ASK, "max_output_tokens": 100}
    assert isinstance(client.responses.parse(**asked, text_format=Answer).output_parsed, Answer)
    form: Any = {"type": "json_schema", "name": "answer", "schema": {"enum": ["red"]}, "strict": True}
    named = client.responses.create(**asked, text={"format": form})
    assert (named.output_text, named.text.to_dict()) == ('"red"', {"format": form})
    json_object = client.responses.create(**{**ASK, **SEEDED}, text={"format": {"type": "json_object"}})
    assert json_object.output_text == chat_text(client, **SEEDED, response_format={"type": "json_object"})
    free = client.responses.create(**ASK, text={"format": {"type": "text"}})
    assert free.output_text == chat_text(client) != json_object.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_tide"}])
def test_calls_that_must_come(client: openai.OpenAI, choice: Any):
    asked = {**ASK, "max_output_tokens": 100, "tools": TOOLS, "tool_choice": choice}
    response = client.responses.create(**asked)
    [call] = response.output
    with client.responses.stream(**asked) as stream:
        streamed = without_ids(stream.get_final_response().output[0].to_dict())
    assert {**streamed, "parsed_arguments": None} == {**without_ids(call.to_dict()), "parsed_arguments": None}
    assert (response.to_dict()["tools"], response.to_dict()["tool_choice"]) == (TOOLS, choice)
    chat_choice = choice if isinstance(choice, str) else {"type": "function", "function": {"name": "get_tide"}}
    chat = client.chat.completions.create(**CHAT | {"max_tokens": 100}, tools=AS_CHAT, tool_choice=chat_choice)
    [of_chat] = chat.choices[0].message.tool_calls
    assert (of_chat.function.name, of_chat.function.arguments) == (call.name, call.arguments)
    # without the token that ends the text, it is complete, too
    cut = client.responses.create(**{**asked, "max_output_tokens": response.usage.output_tokens - 1})
    assert without_ids(cut.to_dict()["output"]) == without_ids(response.to_dict()["output"])
    assert (cut.status, cut.incomplete_details) == ("completed", None)
    short = client.responses.create(**{**asked, "max_output_tokens": 5})
    assert (short.status, short.output[0].type) == ("incomplete", "message")


def test_a_conversation_with_tools_goes_on(client: openai.OpenAI, server: Running):
    """The calls of an answer are one message with its text, as in a chat."""
    function = {"name": "get_tide", "arguments": '{"unit": "C", "day": 1}'}
    items: list[Any] = [USER, {"role": "assistant", "content": "let me see"}]
    items += [{"type": "function_call", "call_id": call_id, **function, "id": f"fc_{call_id}"} for call_id in "ab"]
    outputs = (("a", "low"), ("b", [{"type": "input_text", "text": "high"}]))
    items += [{"type": "function_call_output", "call_id": call_id, "output": output} for call_id, output in outputs]
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in "ab"]
    chat: list[Any] = [USER, {"role": "assistant", "content": "let me see", "tool_calls": calls}]
    chat += [
        {"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in (("a", "low"), ("b", "high"))
    ]
    only_call = [USER, {"role": "assistant", "content": None, "tool_calls": calls[:1]}, chat[2]]
    for given, same in ((items, chat), ([USER, items[2], items[4]], only_call)):
        response = server.response_call(input=given, tools=TOOLS, parallel_tool_calls=False)
        of_chat = server.chat_call(messages=same, tools=AS_CHAT, parallel_tool_calls=False)
        assert (response.messages, response.tools) == (of_chat.messages, of_chat.tools)
        assert response.messages[-1]["tool_call_id"] == ("b" if same is chat else "a")
        assert response.requests[0].prompt_ids == of_chat.requests[0].prompt_ids
    none = client.responses.create(**ASK, tools=TOOLS, tool_choice="none")
    assert none.output_text == chat_text(client)


def test_text_and_calls_of_an_answer_are_items_in_this_order():
    events = ResponseEvents({"id": "resp_1"}, lambda: defaultdict(int))
    sent, calls = list(events.begin()), {0: ToolCall("add", '{"a": 1}'), 1: ToolCall("sum", "{}")}
    for text, token, reason in (("I ", None, None), ("", "a", None), ("add.", "b", None), ("", "c", "tool_calls")):
        logprobs = {"content": [{"token": token}]} if token else None
        sent += events.add(AnswerPart({"content": text}, calls if reason else {}, logprobs, None, reason))
    deltas = [event for event in sent if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == ["I ", "add.", ""]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [[], ["a", "b"], ["c"]]
    output = sent[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    added, done = ([each for each in sent if each["type"].endswith(f"item.{kind}")] for kind in ("added", "done"))
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    assert [event["item"] for event in done] == output
    assert len({item["id"] for item in output}) == 3


def test_a_stream_that_fails_ends_with_an_event_of_it(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ResponseEvents, "_delta", lambda *_: 1 / 0)
    [*_, last] = chunks_of(server.post("responses", input="the cat", max_output_tokens=4, stream=True))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "ZeroDivisionError" in caplog.text


def test_fields_of_this_server(client: openai.OpenAI, server: Running):
    own = {"draft_nodes": 0, "cache_salt": "mine", "seed": 3, "top_k": 5}
    response = client.responses.create(**{**ASK, "temperature": 1.0}, extra_body=own)
    expected = server.plain_answer([USER], max_new_tokens=24, temperature=1.0, seed=3, top_k=5)
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
    assert {drafted for event in deltas for _, drafted in event.model_extra["pieces"]} == {False, True}


def test_fields_without_effect_are_accepted(client: openai.OpenAI):
    fields: Any = {"user": "me", "store": True, "truncation": "disabled", "parallel_tool_calls": False}
    fields |= {"include": ["reasoning.encrypted_content"], "background": False, "previous_response_id": None}
    fields |= {"metadata": {"é" * 64: "b" * 512}, "reasoning": {"effort": "none", "summary": "auto"}}
    response = client.responses.create(**ASK, **fields, text={"verbosity": "medium"})
    assert response.output_text == chat_text(client)
    assert (response.metadata, response.parallel_tool_calls) == (fields["metadata"], False)
    assert response.to_dict()["store"] is False  # nothing is stored


def said(content: Any, **others: Any) -> list[Any]:
    return [USER, {"role": "user", "content": content, **others}]


def called(**others: Any) -> list[Any]:
    return [USER, {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}", **others}]


def form(**others: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, **others}}}


def tool(**others: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "a", **others}]}


# values of fields, all wrong
VALUES: dict[str, list[Any]] = {"model": [None], "input": [None, [], 5, "cat " * 2100], "n": [2], "temperature": [-1]}
VALUES |= {"instructions": [["a"], "\ud800"], "instruction": ["a"], "messages": [[USER]], "reasoning_effort": ["low"]}
VALUES |= {
    "max_output_tokens": [0],
    "max_tokens": [5],
    "max_completion_tokens": [5],
    "previous_response_id": ["resp_1"],
}
VALUES |= {"truncation": ["auto"], "top_logprobs": [2], "tool_choice": ["some", "required"], "stream_options": [{}]}
VALUES |= {"tools": [[*TOOLS, TOOLS[0]], [{**TOOLS[0], "description": "a" * 70_000}]], "background": [True]}
VALUES["metadata"] = [{str(n): "" for n in range(17)}]
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("input[0]", {"input": ["a"]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "a"}]}),
    ("input[0].type", {"input": [{"type": []}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "a"}]}),
    ("input[1].rol", {"input": said("a", rol="b")}),
    ("input[1].content", {"input": [USER, {"role": "user"}]}),
    ("input[1].content", {"input": said("\ud800")}),
    ("input[1].content[0].type", {"input": said([{"type": "input_image", "image_url": "a"}])}),
    ("input[1].arguments", {"input": called(arguments="{")}),
    ("input[1].name", {"input": called(name=None)}),
    ("reasoning.effort", {"reasoning": {"effort": "some"}}),
    ("include[0]", {"include": ["file_search_call.results"]}),
    ("top_logprobs", {"include": LOGPROBS, "top_logprobs": 21}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format.schema", form(schema=None)),
    ("text.format.schema", form(type="text")),
    ("tools", {**tool(description="\ud800"), "tool_choice": "none"}),
    ("tools[0].function", {"tools": AS_CHAT}),
    ("tool_choice", tool() | {"tool_choice": {"type": "function", "name": "b"}}),
    ("stream_options.continuous_usage_stats", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
]
PLACES += [("metadata.a", {"metadata": {"a": value}}) for value in (1, "b" * 513, "\ud800")]
PLACES += [(f"metadata.{'a' * 57}….[key]", {"metadata": {"a" * 65: "b"}})]
PLACES += [(name, {name: value}) for name, values in VALUES.items() for value in values]


@pytest.mark.parametrize(("param", "fields"), PLACES)
def test_wrong_fields_are_named(server: Running, param: str, fields: dict[str, Any]):
    check_wrong(server.post("responses", **{"input": "the cat", **fields}), param)
