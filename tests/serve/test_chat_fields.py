"""Fields of chats that clients of other servers send: what the model reads, and what answers have."""

from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import get_annotations
from pathlib import Path
from typing import Any, get_args

import pytest

from draftheads.serve import request_params
from draftheads.serve.chat_completions import ChatFields
from draftheads.serve.completions import CompletionFields, read_completion
from draftheads.serve.fields import ApiError
from draftheads.serve.responses import ResponseFields
from draftheads.settings import SamplingSettings
from serve_world import NAME, PLAIN, USER, Running, check_wrong, chunks_of, error_of, running, texts_of, tiny_engines

TEMPLATE = (
    "{%- if reasoning_effort is defined %}effort {{ reasoning_effort }}\n{% endif %}"
    "{%- if enable_thinking is defined %}thinking {{ enable_thinking }}\n{% endif %}"
    "{%- if date is defined %}{{ date.upper() }}\n{% endif %}"
    "{%- for message in messages %}{{ message.role }}"
    "{{ ' ' + message.name if message.name is defined }}"
    "{{ ' ' + message.reasoning_content if message.reasoning_content }}"
    ": {{ message.content }};\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PREFILLED = [USER, {"role": "assistant", "content": "the mat "}]


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Running]:
    """A server whose chat template reads variables."""
    with running(tiny_engines(TEMPLATE)) as one:
        yield one


GOING_ON = {"messages": PREFILLED, "add_generation_prompt": False, "continue_final_message": True}
BEGUN = "<|im_start|>user\nthe cat sat on<|im_end|>\n<|im_start|>assistant\nthe mat "
ANSWERED = {"role": "assistant", "content": "b", "refusal": None, "audio": None, "annotations": []}
NAMED = {"role": "user", "name": "ann", "content": ""}
CHAT = "user: the cat sat on;\nassistant:"
CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}
READ: list[tuple[dict[str, Any], str]] = [
    ({}, CHAT),
    ({"chat_template_kwargs": {"date": "may", "unknown": [1]}}, f"MAY\n{CHAT}"),
    ({"reasoning_effort": "high"}, f"effort high\n{CHAT}"),
    ({"reasoning_effort": "none"}, f"effort none\nthinking False\n{CHAT}"),
    (GOING_ON, "user: the cat sat on;\nassistant: the mat "),
    *(
        ({"messages": [NAMED, {**ANSWERED, name: "so"}]}, "user ann: ;\nassistant so: b;\nassistant:")
        for name in ("reasoning_content", "reasoning")
    ),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, f"{CHAT[:21]}\nassistant: ;\nassistant:"),
]


@pytest.mark.parametrize(("fields", "text"), READ)
def test_what_the_template_reads(reasoning: Running, fields: dict[str, Any], text: str):
    assert reasoning.prompt_of(reasoning.chat_call(**fields)) == text
    if "reasoning_effort" in fields:
        effort = {"effort": fields["reasoning_effort"], "summary": "auto"}
        assert reasoning.prompt_of(reasoning.response_call(reasoning=effort)) == text
    expected = reasoning.plain_answer(reasoning.ids(text), max_new_tokens=12).text
    assert texts_of(reasoning.chat(**fields)) == [expected]


def test_an_answer_goes_on_in_the_last_message(server: Running):
    empty = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    for given, text in (
        (GOING_ON, BEGUN),
        ({"messages": PREFILLED, "add_generation_prompt": False}, f"{BEGUN}<|im_end|>\n"),
        ({"reasoning_effort": "none"}, server.prompt_of(server.chat_call())),
        *(({"messages": [{"role": "user", "content": content}]}, empty) for content in ("", [])),
    ):
        assert server.prompt_of(server.chat_call(**given)) == text


FORCED = {"tools": [{"type": "function", "function": {"name": "add"}}], "tool_choice": "required"}
WRONG: list[tuple[str, dict[str, Any]]] = [
    *((f"chat_template_kwargs.{name}", {"chat_template_kwargs": {name: []}}) for name in ("messages", "tokenize")),
    ("chat_template_kwargs", {"chat_template_kwargs": 5}),
    ("messages", {"chat_template_kwargs": {"date": 5}}),  # an error of the template
    ("reasoning_effort", {"reasoning_effort": "much"}),
    ("reasoning_effort", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
    ("continue_final_message", {"messages": PREFILLED, "continue_final_message": True}),
    ("add_generation_prompt", {**FORCED, "add_generation_prompt": False}),
    ("stream_options.continuous_usage_stats", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
]
MESSAGES: dict[str, dict[str, Any]] = {
    "user": {"content": "a", "user": "b"},
    "content[0].txt": {"content": [{"type": "text", "text": "a", "txt": "b"}]},
    "tool_calls[0].type": {"tool_calls": [CALL | {"type": "custom"}]},
    "tool_calls[1].function.args": {"tool_calls": [CALL, CALL | {"function": {"name": "a", "args": 1}}]},
}
WRONG += [(f"messages[1].{name}", {"messages": [USER, {"role": "user", **each}]}) for name, each in MESSAGES.items()]


@pytest.mark.parametrize(("param", "fields"), WRONG)
def test_wrong_fields_are_named(reasoning: Running, param: str, fields: dict[str, Any]):
    check_wrong(reasoning.chat(**fields), param)


@pytest.mark.parametrize("n", [1, 3])
def test_counts_of_a_chunk_are_those_of_its_text(server: Running, n: int):
    """Not those of the model, which can be further ahead."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 30, "logprobs": True, "ignore_eos": True, "n": n}
    *chunks, last = chunks_of(server.chat(**fields, stream=True, stream_options=options))
    num_tokens = 0
    for chunk in chunks:
        num_tokens += len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"])
        assert chunk["usage"]["completion_tokens"] == num_tokens
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + num_tokens
    assert last["usage"].items() >= chunks[-1]["usage"].items()
    assert num_tokens == 30 * n


def test_the_system_fingerprint_is_of_the_model_and_not_of_the_head(server: Running, reasoning: Running):
    answers = [server.chat().json(), server.chat(model=PLAIN).json(), server.complete().json()]
    answers.append(server.post("responses", input="the cat", max_output_tokens=4).json())
    [fingerprint] = {answer["system_fingerprint"] for answer in answers}
    engines = tiny_engines()
    body = CompletionFields.model_validate({"model": NAME, "prompt": "the cat"})
    with running(tiny_engines()) as restarted, running(engines) as other:
        next(engines[NAME].model.model.parameters()).data += 1
        found = [read_completion(body, one.service).system_fingerprint for one in (restarted, reasoning, other)]
    assert [each == fingerprint for each in found] == [True, False, False]


@pytest.mark.parametrize("arguments", [" ", "null", None, {}, "{}", "left out"])
def test_calls_without_arguments_as_other_clients_send_them(reasoning: Running, arguments: Any):
    function = {"name": "add"} if arguments == "left out" else {"name": "add", "arguments": arguments}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    items = [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "1", **function}]
    for call in (reasoning.chat_call(messages=[USER, called]), reasoning.response_call(input=items)):
        assert call.messages is not None
        assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_seed_of_minus_one_is_a_random_one(server: Running):
    def seeds(seed: int | None) -> list[int | None]:
        return [request.settings.seed for request in server.chat_call(seed=seed, n=2).requests]

    assert seeds(-1) == seeds(None) == [None, None]
    assert (seeds(0), seeds(2**64 - 1)) == ([0, 1], [2**64 - 1, 0])
    with pytest.raises(ApiError, match="seed is -2; it must be an integer from 0"):
        seeds(-2)


def test_errors_name_the_folder_of_the_model_and_no_path(tmp_path: Path):
    engines = tiny_engines(None)
    for engine in engines.values():
        object.__setattr__(engine.model, "model_id", str(tmp_path / "my model"))
    with running(engines) as server:
        errors = [server.chat(), server.complete(prompt="a " * 3000), server.complete(prompt=[5] * 3000)]
    for response in errors:
        message = error_of(response)["message"]
        assert "my model" in message
        assert "/" not in message.replace("/v1/completions", "")


def test_no_two_fields_of_a_route_have_the_same_name() -> None:
    for body in (ChatFields, CompletionFields, ResponseFields):
        names = [field.alias or name for name, field in body.model_fields.items()]
        of_bases = [set(base.model_fields) - get_annotations(body).keys() for base in body.__bases__]
        assert len(set(names)) == len(names)
        assert len(set().union(*of_bases)) == sum(map(len, of_bases)), "one would hide the other"


def test_what_models_do_not_have_is_refused(server: Running):
    """Effort without a template that reads it, and more tokens than the model's texts have."""
    check_wrong(server.chat(reasoning_effort="low"), "reasoning_effort")
    check_wrong(server.post("responses", input="the cat", reasoning={"effort": "low"}), "reasoning.effort")
    check_wrong(server.post("responses", input="the cat", max_output_tokens=2048), "max_output_tokens")
    assert server.chat_call(max_tokens=2047).params.settings.max_new_tokens == 2047


def test_every_setting_is_a_field_or_named_as_none() -> None:
    """A new setting is a field of requests at once; one that is read under another name or not at all is listed."""
    settings, derived = {field.name for field in fields(SamplingSettings)}, set(request_params._SAMPLING)
    assert settings - derived == request_params._OTHERWISE
    assert derived <= request_params.CommonFields.model_fields.keys()
    page = (Path(__file__).parents[2] / "docs" / "serve" / "fields.md").read_text(encoding="utf-8")
    assert not [name for name in derived if f"`{name}`" not in page], "the manual names each"


@pytest.mark.parametrize("name", [name for name in request_params._SAMPLING if not name.startswith("typical")])
def test_every_derived_field_reaches_the_settings(name: str, reasoning: Running) -> None:
    kind, default = request_params._field_of_setting(name)
    by_type = {bool: not default, int: 3, float: 0.5}
    values = {"stop": ["w"], "stop_token_ids": [3], "logit_bias": {"3": 1.0}, "acceptance": "block"}
    value = values.get(name, by_type.get(get_args(kind)[0]))
    [request] = reasoning.chat_call(**{name: value}).requests
    expected = replace(SamplingSettings(), **{name: {3: 1.0} if name == "logit_bias" else value})
    assert getattr(request.settings, name) == getattr(expected, name)
