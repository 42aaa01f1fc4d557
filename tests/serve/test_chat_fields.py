"""Fields of chats that clients of other servers send: what the model reads, and what answers have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftheads.serve.call import Call
from draftheads.serve.chat_completions import ChatFields, read_chat
from draftheads.serve.completions import CompletionFields, read_completion
from draftheads.serve.response_input import ResponseFields
from draftheads.serve.responses import read_response
from serve_world import NAME, USER, Running, running, tiny_engines

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
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose chat template reads variables."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    with running(tiny_engines(str(path))) as one:
        yield one


def read_by(server: Running, call: Call) -> str:
    """The text that the model reads before it answers."""
    [request] = call.requests
    return str(server.engines[NAME].model.tokenizer.decode(request.prompt_ids))


def read(server: Running, **fields: Any) -> str:
    body = ChatFields.model_validate({"model": NAME, "messages": [USER], **fields})
    return read_by(server, read_chat(body, server.service))


def problem(server: Running, **fields: Any) -> tuple[str, str]:
    response = server.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400
    return error["param"], error["message"]


def test_variables_of_the_chat_template(reasoning: Running):
    chat = "user: the cat sat on;\nassistant:"
    assert read(reasoning) == chat
    assert read(reasoning, chat_template_kwargs={"date": "may", "unknown": [1]}) == f"MAY\n{chat}"
    assert read(reasoning, chat_template_kwargs={"enable_thinking": False}) == f"thinking False\n{chat}"
    with_variable = reasoning.chat(chat_template_kwargs={"date": "may"}).json()
    ids = reasoning.engines[NAME].model.tokenizer(f"MAY\n{chat}")["input_ids"]
    assert with_variable["choices"][0]["message"]["content"] == reasoning.plain_answer(ids, max_new_tokens=12).text


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"])
def test_the_variables_do_not_replace_what_the_request_says(reasoning: Running, name: str):
    param, message = problem(reasoning, chat_template_kwargs={name: []})
    assert param == f"chat_template_kwargs.{name}"
    assert "leave it out" in message


def test_an_error_of_the_template_is_the_clients(reasoning: Running):
    param, message = problem(reasoning, chat_template_kwargs={"date": 5})
    assert (param, "refuses" in message) == ("messages", True)
    assert problem(reasoning, chat_template_kwargs=5)[0] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        ("high", "effort high\n"),
        ("minimal", "effort minimal\n"),
        ("none", "effort none\nthinking False\n"),
    ],
)
def test_templates_that_know_reasoning_effort_get_it(reasoning: Running, effort: str, variables: str):
    chat = "user: the cat sat on;\nassistant:"
    assert read(reasoning, reasoning_effort=effort) == variables + chat
    asked = {"model": NAME, "input": USER["content"], "reasoning": {"effort": effort, "summary": "auto"}}
    body = ResponseFields.model_validate(asked)
    assert read_by(reasoning, read_response(body, reasoning.service)) == variables + chat


def test_other_templates_take_no_reasoning_effort(server: Running, reasoning: Running):
    param, message = problem(server, reasoning_effort="low")
    assert param == "reasoning_effort"
    assert "org/tiny has no reasoning_effort" in message
    assert read(server, reasoning_effort="none") == read(server)
    assert problem(server, reasoning_effort="much")[0] == "reasoning_effort"
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert "exclude each other" in problem(reasoning, **both)[1]
    response = server.post("responses", input="the cat", reasoning={"effort": "low"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning.effort")


def test_an_answer_goes_on_in_the_last_message(server: Running, reasoning: Running):
    going_on = {"messages": PREFILLED, "add_generation_prompt": False, "continue_final_message": True}
    assert read(reasoning, **going_on) == "user: the cat sat on;\nassistant: the mat "
    expected = "<|im_start|>user\nthe cat sat on<|im_end|>\n<|im_start|>assistant\nthe mat "
    assert read(server, **going_on) == expected
    answer = server.chat(**going_on).json()
    ids = server.engines[NAME].model.tokenizer(expected)["input_ids"]
    assert answer["choices"][0]["message"]["content"] == server.plain_answer(ids, max_new_tokens=12).text
    assert read(server, messages=PREFILLED, add_generation_prompt=False) == f"{expected}<|im_end|>\n"


def test_a_new_message_and_the_last_one_exclude_each_other(server: Running):
    param, message = problem(server, messages=PREFILLED, continue_final_message=True)
    assert (param, "add_generation_prompt: false" in message) == ("continue_final_message", True)
    assert problem(server, continue_final_message=True, add_generation_prompt=True)[0] == "continue_final_message"
    tools = [{"type": "function", "function": {"name": "add"}}]
    forced = {"tools": tools, "tool_choice": "required", "add_generation_prompt": False}
    assert problem(server, **forced)[0] == "add_generation_prompt"


def test_messages_are_read_as_they_are(reasoning: Running):
    chat = [{"role": "user", "name": "ann", "content": ""}, {"role": "assistant", "content": "b"}]
    chat[1] |= {"reasoning_content": "so", "refusal": None, "audio": None, "function_call": None, "annotations": []}
    assert read(reasoning, messages=chat) == "user ann: ;\nassistant so: b;\nassistant:"


def test_an_empty_message_of_the_user(server: Running):
    for content in ("", [], " \n"):
        answer = server.chat(messages=[{"role": "user", "content": content}])
        assert answer.status_code == 200, answer.text
    assert read(server, messages=[{"role": "user", "content": ""}]) == (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "place", "words"),
    [
        ({"content": "a", "nam": "b"}, "messages[1].nam", "did you mean name?"),
        ({"content": "a", "user": "b"}, "messages[1].user", "unknown field 'messages[1].user'"),
        ({"content": [{"type": "text", "text": "a", "txt": "b"}]}, "messages[1].content[0].txt", "did you mean text?"),
        ({"tool_calls": [CALL | {"functoin": 1}]}, "messages[1].tool_calls[0].functoin", "did you mean function?"),
        ({"tool_calls": [CALL | {"type": "custom"}]}, "messages[1].tool_calls[0].type", "'function'"),
        (
            {"tool_calls": [CALL, CALL | {"function": {"name": "a", "arguments": "{}", "args": 1}}]},
            "messages[1].tool_calls[1].function.args",
            "did you mean arguments?",
        ),
    ],
)
def test_unknown_fields_inside_of_messages_are_named(server: Running, message: dict[str, Any], place: str, words: str):
    param, text = problem(server, messages=[USER, {"role": "assistant", **message}])
    assert param == place
    assert words in text
    assert server.chat(messages=[USER, {"role": "assistant", "tool_calls": [CALL]}]).status_code == 200


def test_top_p_of_zero_is_greedy(server: Running):
    expected = server.plain_answer([USER], max_new_tokens=12).text
    answer = server.chat(temperature=1.5, top_p=0, seed=3).json()
    assert answer["choices"][0]["message"]["content"] == expected
    ids = server.engines[NAME].model.tokenizer("the cat")["input_ids"]
    text = server.complete(temperature=1.5, top_p=0.0, seed=3).json()["choices"][0]["text"]
    assert text == server.plain_answer(ids, max_new_tokens=12).text
    assert problem(server, top_p=-0.1)[0] == "top_p"


def chunks_of(text: str) -> list[dict[str, Any]]:
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_counts_in_every_chunk(server: Running, route: str, n: int):
    prompt: dict[str, Any] = {"messages": [USER]} if route.startswith("chat") else {"prompt": "the cat"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {**prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "n": n}
    chunks = chunks_of(server.post(route, **fields, stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [40 * n, 40 * n]
    assert len(set(counts)) > 3
    whole = server.post(route, **fields).json()["usage"]
    assert {key: whole[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == chunks[-2]["usage"]
    assert "draft" in chunks[-1]["usage"]


def test_counts_of_a_chunk_are_those_of_its_text(server: Running):
    """Not those of the model, which can be further ahead."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 30, "logprobs": True, "ignore_eos": True, "stream": True, "stream_options": options}
    num_tokens = 0
    for chunk in chunks_of(server.chat(**fields).text)[:-1]:
        num_tokens += len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"])
        assert chunk["usage"]["completion_tokens"] == num_tokens
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + num_tokens


def test_counts_in_every_chunk_need_the_usage(server: Running):
    options = {"continuous_usage_stats": True}
    assert problem(server, stream=True, stream_options=options)[0] == "stream_options.continuous_usage_stats"
    only_last = chunks_of(server.chat(stream=True, stream_options={"include_usage": True}).text)
    assert {chunk["usage"] is None for chunk in only_last[:-1]} == {True}


def test_the_system_fingerprint_is_of_the_model_and_not_of_the_head(server: Running, reasoning: Running):
    answers = [server.chat().json(), server.chat(model=f"{NAME}:plain").json(), server.complete().json()]
    answers += chunks_of(server.chat(stream=True).text)
    answers.append(server.post("responses", input="the cat", max_output_tokens=4).json())
    [fingerprint] = {answer["system_fingerprint"] for answer in answers}
    assert fingerprint.startswith("fp_")
    body = CompletionFields.model_validate({"model": NAME, "prompt": "the cat"})
    with running(tiny_engines()) as restarted:
        assert read_completion(body, restarted.service).system_fingerprint == fingerprint
    assert read_completion(body, reasoning.service).system_fingerprint != fingerprint


def test_other_weights_have_another_system_fingerprint(server: Running):
    engines = tiny_engines()
    next(engines[NAME].model.model.parameters()).data += 1
    body = CompletionFields.model_validate({"model": NAME, "prompt": "the cat"})
    with running(engines) as other:
        fingerprints = {read_completion(body, one.service).system_fingerprint for one in (server, other)}
    assert len(fingerprints) == 2


@pytest.mark.parametrize("arguments", ["", " ", "null", None, {}, "{}", "left out"])
def test_calls_without_arguments_as_other_clients_send_them(reasoning: Running, arguments: Any):
    function = {"name": "add"} if arguments == "left out" else {"name": "add", "arguments": arguments}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    fields = ChatFields.model_validate({"model": NAME, "messages": [USER, called]})
    call = read_chat(fields, reasoning.service)
    assert call.messages is not None
    assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    items = [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "1", **function}]
    response = read_response(ResponseFields.model_validate({"model": NAME, "input": items}), reasoning.service)
    assert response.messages is not None
    assert response.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_seed_of_minus_one_is_a_random_one(server: Running):
    def seeds(seed: int | None) -> list[int | None]:
        body = ChatFields.model_validate({"model": NAME, "messages": [USER], "seed": seed, "n": 2})
        return [request.settings.seed for request in read_chat(body, server.service).requests]

    assert seeds(-1) == seeds(None) == [None, None]
    assert seeds(-2) == [-2, -1]
    assert seeds(0) == [0, 1]


def test_errors_name_the_folder_of_the_model_and_no_path(tmp_path: Path):
    engines = tiny_engines(None)
    for engine in engines.values():
        object.__setattr__(engine.model, "model_id", str(tmp_path / "my model"))
    with running(engines) as server:
        errors = [server.chat(), server.complete(prompt="a " * 3000), server.complete(prompt=[5] * 3000)]
    for response in errors:
        message = response.json()["error"]["message"]
        assert "my model" in message
        assert "/" not in message.replace("/v1/completions", "")


def test_an_answer_can_have_as_many_tokens_as_the_model_without_a_prompt(server: Running):
    body = ChatFields.model_validate({"model": NAME, "messages": [USER], "max_tokens": 2047})
    assert read_chat(body, server.service).requests[0].most_new_tokens > 1900
    for name in ("max_tokens", "max_completion_tokens"):
        param, message = problem(server, **{"max_tokens": None, name: 2048})
        assert (param, message) == (name, f"{name} is 2048; it must be at most 2047 on this server")
    response = server.post("responses", input="the cat", max_output_tokens=2048)
    assert response.json()["error"]["param"] == "max_output_tokens"
