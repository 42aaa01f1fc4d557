"""Every field, and every alternative of its type, in the types of OpenAI's client: read, without effect, or named."""

import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Literal, Required, Union, get_args, get_origin

import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chats
from openai.types.responses import response_create_params as of_responses
from pydantic import BaseModel, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from draftheads.serve.chat_completions import ChatFields, read_chat
from draftheads.serve.completions import CompletionFields, read_completion
from draftheads.serve.fields import ApiError, validation_error
from draftheads.serve.responses import ResponseFields, read_response
from draftheads.serve.state import Untried
from draftheads.settings import Grammar
from serve_world import NAME, USER, Running, answered, check_wrong

CHAT = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a"}}]}
RESPONSE = {"input": "a", "tools": [{"type": "function", "name": "a"}]}
ROUTES: dict[str, tuple[Any, type[BaseModel], Callable[..., Any], dict[str, Any]]] = {
    "chat": (of_chats.CompletionCreateParamsStreaming, ChatFields, read_chat, CHAT),
    "completions": (of_completions.CompletionCreateParamsStreaming, CompletionFields, read_completion, {"prompt": "a"}),
    "responses": (of_responses.ResponseCreateParamsStreaming, ResponseFields, read_response, RESPONSE),
}

REFUSED = {  # by name; all other fields and alternatives are read, or change no answer
    "chat": """
        audio function_call functions messages.audio messages.content.type messages.tool_calls.type modalities
        moderation reasoning_effort tool_choice tools.type top_logprobs verbosity web_search_options""",
    "completions": "suffix",
    "responses": """
        background background_options context_management conversation include input.call_id input.caller
        input.content.type input.namespace input.role input.type moderation previous_response_id prompt
        prompt_cache_options.prewarm reasoning.context reasoning.effort reasoning.mode text.verbosity tool_choice
        tools.allowed_callers tools.defer_loading tools.type top_logprobs truncation""",
}


def samples(kind: Any, name: str = "", depth: int = 9) -> Iterator[Any]:
    """A value of each alternative of a type, and for each field of an object one with this field."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        yield from inner[:8]
    elif origin in (Union, UnionType, Required):
        for each in inner:
            yield from samples(each, name, depth)
    elif is_typeddict(kind) and depth:
        hints = get_type_hints(kind, include_extras=True)
        needed = {n: next(samples(hint, n, depth - 1)) for n, hint in hints.items() if get_origin(hint) is Required}
        yield needed
        for field, hint in hints.items():
            yield from ({**needed, field: value} for value in samples(hint, field, depth - 1))
    elif inner and origin is not dict:  # of a list
        yield from ([value] for value in samples(inner[0], name, depth))
    elif origin is not type(None):
        text = "{}" if name == "arguments" else "a"
        yield from {bool: [True, False], int: [1], float: [1.0], dict: [{}]}.get(origin, [text])


def refusal(route: str, fields: dict[str, Any], server: Running) -> str | None:
    """The field that is refused, without the numbers of parts; its error names a field that was sent."""
    _, body, read, base = ROUTES[route]
    base = base if "tool_choice" in fields else {**base, "tools": None}
    first = [USER] if fields.keys() & {"messages", "input"} else []
    fields = {name: [*first, *value] if isinstance(value, list) else value for name, value in fields.items()}
    try:
        server.read(read, body.model_validate({"model": NAME, "stream": True, **base, **fields}), compiles=False)
    except ValidationError as error:
        refused = validation_error(error.errors(include_url=False), "")
    except ApiError as error:
        refused = error
    except Untried:  # all is read, and a grammar may take long
        return None
    else:
        return None
    assert refused.status_code == 400
    assert refused.code != "unknown_field", refused
    assert str(refused.param).startswith(tuple(fields)), refused
    assert str(refused.param) in str(refused), "the message names it, too"
    return re.sub(r"\[\d+\]", "", str(refused.param))


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_of_the_clients_types(route: str, server: Running):
    found = set[str]()
    for field, hint in get_type_hints(ROUTES[route][0], include_extras=True).items():
        values = list(samples(hint, field)) if field not in ("model", "stream") else []
        found |= {refused for value in values if (refused := refusal(route, {field: value}, server))}
    assert found == set(REFUSED[route].split())


CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
READ_CALL = {**CALL, "function": {"name": "a", "arguments": {}}}
PART = {"type": "text", "text": "b"}
MARKS: Any = {"cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}, "id": 5}
OTHERS: Any = {"reasoning_details": [{}], "thinking_blocks": [{}], "annotations": [], "audio": None, **MARKS}
# messages of OpenAI's older API and of other programs, and what the template reads
MESSAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "assistant", "refusal": "no", "content": None}, {"content": "no"}),
    ({"role": "assistant", "refusal": "no", "content": "b"}, {"content": "b\nno"}),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, PART]}, {"content": "no\nb"}),
    ({"role": "assistant", "content": None}, {"content": ""}),
    ({"role": "tool", "tool_call_id": "1", "content": None}, {"content": "", "tool_call_id": "1"}),
    ({"role": "assistant", "content": "b", "reasoning": "c", **OTHERS}, {"content": "b", "reasoning_content": "c"}),
    ({"role": "user", "content": [{**PART, **MARKS, "prompt_cache_breakpoint": {}, "index": 0}]}, {"content": "b"}),
    (
        {"role": "assistant", "function_call": CALL["function"]},
        {"content": "", "tool_calls": [{"type": "function", "function": READ_CALL["function"]}]},
    ),
    (
        {"role": "assistant", "tool_calls": [{**MARKS, "index": 0, "extra_content": {}, **CALL}]},
        {"content": "", "tool_calls": [READ_CALL]},
    ),
]


@pytest.mark.parametrize(("message", "read"), MESSAGES)
def test_messages_of_other_programs(message: dict[str, Any], read: dict[str, Any], server: Running):
    assert server.chat_call(messages=[USER, message]).messages == [USER, {"role": message["role"], **read}]


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": "r",
        "content": [{"type": "reasoning_text", "text": text}],
        "summary": [],
        **more,
    }


def test_thoughts_among_items_belong_to_what_follows(server: Running):
    said: Any = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", **MARKS}]}
    call = {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}", "async": False, "id": "fc_1"}
    output = {"type": "function_call_output", "call_id": "1", "output": "1", "name": "a"}
    sealed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}], "encrypted_content": "x"}
    items = [USER, thought("c"), said, sealed, said, thought("d"), call, output, thought("e"), USER]
    answers = [{"content": "b", "reasoning_content": "c"}, {"content": "b"}]
    answers += [{"content": "", "reasoning_content": "d", "tool_calls": [READ_CALL]}]
    last = [{"role": "tool", "content": "1", "tool_call_id": "1"}]
    last += [{"role": "assistant", "content": "", "reasoning_content": "e"}]
    expected = [USER, *({"role": "assistant", **each} for each in answers), *last, USER]
    assert server.response_call(input=items).messages == expected


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}, **more}


def chosen(mode: str, *names: str, flat: bool = False) -> dict[str, Any]:
    allowed = {"mode": mode, "tools": [function(name) for name in names]}
    return {"type": "allowed_tools", **(allowed if flat else {"allowed_tools": allowed})}


@pytest.mark.parametrize(
    ("choice", "shown", "forced"),
    [
        (chosen("auto", "a", "c"), "ac", ""),
        (chosen("required", "c", "a"), "ac", "ac"),
        (chosen("required", "b", flat=True), "b", "b"),
        (chosen("auto"), "", ""),
        (chosen("auto", "d"), None, None),
        (chosen("required"), None, None),
        (chosen("any", "a"), None, None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["a"]}}, None, None),
    ],
)
def test_allowed_tools(choice: Any, shown: str | None, forced: str | None, server: Running):
    tools = [function(name, cache_control={"type": "ephemeral"}) for name in "abc"]
    if shown is None:
        with pytest.raises(ApiError, match="tool_choice"):
            server.chat_call(tools=tools, tool_choice=choice)
        return
    call = server.chat_call(tools=tools, tool_choice=choice)
    of_call = ((), ()) if call.tools is None else (call.tools.tools, call.tools.forced)
    assert of_call == (tuple(map(function, shown)), tuple(forced or ()))
    assert [f'"name": "{name}"' in server.prompt_of(call) for name in "abc"] == [name in shown for name in "abc"]


@pytest.mark.parametrize(("name", "is_call"), [("a", True), ("b", False), ("other", True)])
def test_a_call_of_a_tool_that_is_not_allowed_is_text(name: str, is_call: bool, server: Running):
    """One that no tool has is the client's to answer, as without the field."""
    text, tools = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>', [function(each) for each in "ab"]
    found = answered(server, text, step=3, tools=tools, tool_choice=chosen("auto", "a"))
    expected = ("", [(name, "{}")], "tool_calls") if is_call else (text, [], "stop")
    assert (found["content"], found["calls"], found["reason"]) == expected


def test_what_open_webui_sends_to_servers_other_than_ollama(server: Running):
    """Its own fields stay in its backend, and the settings of a model that it does not know pass through."""
    tuning = {"keep_alive": "5m", "num_batch": 512, "num_gpu": 1, "num_thread": 2, "use_mlock": True, "use_mmap": True}
    known = {"temperature": 0.5, "min_p": 0.1, "stop": ["a"], "seed": 1, "logit_bias": {"5": 1}, "user": {"id": "me"}}
    server.chat_call(**known, **tuning, stream=True, stream_options={"include_usage": True})
    for name in ("num_ctx", "num_keep", "mirostat", "tfs_z", "repeat_last_n", "think", "format", "chat_id", "features"):
        check_wrong(server.chat(**{name: 1}), name)


@pytest.mark.parametrize("n", [1, 2])
def test_the_best_of_as_many_answers_are_all_of_them(n: int, server: Running):
    for best_of in (1, n):
        body = CompletionFields.model_validate({"model": NAME, "prompt": "a", "n": n, "best_of": best_of})
        assert len(read_completion(body, server.service).requests) == n
    with pytest.raises(ValidationError, match=rf"is 3; it must be n \({n}\)"):
        server.chat_call(n=n, best_of=3)


def test_lengths_and_forms_of_other_programs(server: Running):
    chats = [server.chat_call(max_tokens=-1), server.chat_call(max_completion_tokens=-1), server.chat_call()]
    body = CompletionFields.model_validate({"model": NAME, "prompt": "a", "max_tokens": -1})
    calls = [*chats, server.response_call(max_output_tokens=-1), read_completion(body, server.service)]
    assert {call.params.settings.max_new_tokens for call in calls} == {2047}
    form = {"type": "json_schema", "json_schema": {"name": "a"}}
    assert server.chat_call(response_format=form).params.settings.grammar == Grammar.json_schema({})
