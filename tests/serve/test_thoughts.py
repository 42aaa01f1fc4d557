"""Thoughts of reasoning models: what the template writes, and the parts of answers, whole and in streams."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from byte_tokenizers import byte_level
from draftheads.decode.request import Request, StreamEvent
from draftheads.models.chat_template import effort_variables, thinking_tags
from draftheads.models.pretrained import ModelTokenizer
from draftheads.serve.chat_completions import ChatCall, ChatFields, read_chat
from draftheads.serve.response_input import ResponseFields
from draftheads.serve.responses import read_response
from draftheads.settings import SamplingSettings
from serve_world import NAME, USER, Running, running, tiny_engines

_TURNS = (
    "{%- for m in messages %}{{ m.role }}:"
    "{%- if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{{ m.content.split('</think>')[-1] }};{% endfor %}"
    "{%- if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{%- if add_generation_prompt %}assistant:"
)
TEMPLATES = {
    "always": _TURNS + "<think>\n{% endif %}",
    "optional": _TURNS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "other tags": (_TURNS + "{% endif %}").replace("<think>", "[THINK]").replace("</think>", "[/THINK]"),
    "never": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATES[request.param])
    with running(tiny_engines(str(path))) as one:
        yield request.param, one


def chat_of(server: Running, **fields: Any) -> ChatCall:
    return read_chat(ChatFields.model_validate({"model": NAME, "messages": [USER], **fields}), server.service)


def prompt_of(server: Running, call: ChatCall) -> str:
    return str(server.engines[NAME].model.tokenizer.decode(call.requests[0].prompt_ids))


def events_of(server: Running, request: Request, text: str, step: int) -> list[tuple[int, StreamEvent]]:
    """As if the model wrote this text, and its end."""
    ids = [*server.engines[NAME].model.tokenizer(text)["input_ids"], 0]
    runs = [ids[at : at + step] for at in range(0, len(ids), step)]
    return [(0, request.append(run, num_drafted=len(run) - 1)) for run in runs]


async def _chunks(call: Any, events: list[tuple[int, StreamEvent]]) -> list[dict[str, Any]]:
    async def given() -> AsyncGenerator[tuple[int, StreamEvent]]:
        for event in events:
            yield event

    return [chunk async for chunk in call.chunks(given())]


def answered(server: Running, text: str, *, step: int, **fields: Any) -> dict[str, Any]:
    """The message of an answer; that of the stream has to be the same."""
    options = {"stream": True, "stream_options": {"include_draft": True}}
    streamed: dict[str, Any] = {"reasoning_content": "", "content": ""}
    call = chat_of(server, **fields, **options)
    for chunk in asyncio.run(_chunks(call, events_of(server, call.requests[0], text, step))):
        [choice] = chunk["choices"]
        for name in streamed.keys() & choice["delta"].keys():
            streamed[name] += choice["delta"][name]
            if "pieces" in choice:
                assert "".join(piece for piece, _ in choice["pieces"]) == choice["delta"][name]
        for each in choice["delta"].get("tool_calls", ()):
            streamed.setdefault("calls", []).append(each["function"]["name"])
    whole = call.response()["choices"][0]["message"]
    parts = {"reasoning_content": whole.get("reasoning_content", ""), "content": whole["content"] or ""}
    if whole.get("tool_calls"):
        parts["calls"] = [each["function"]["name"] for each in whole["tool_calls"]]
    assert streamed == parts
    return parts


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thoughts_are_apart_from_the_answer(server: tuple[str, Running], step: int):
    name, one = server
    opening, closing = {"other tags": ("[THINK]", "[/THINK]")}.get(name, ("<think>", "</think>"))
    text = f"So, {CALL}?\n{closing}\n\nIt is two.\n\n{CALL}\n\nDone. Well."
    text = text if name == "always" else f"{opening}\n{text}"
    tools = {"tools": TOOLS} if name in ("always", "optional") else {}
    parts = answered(one, text, step=step, **tools)
    if name == "never":
        assert parts == {"reasoning_content": "", "content": text}
        return
    assert parts["reasoning_content"] == f"So, {CALL}?"
    if tools:
        assert (parts["calls"], parts["content"]) == (["now"], "It is two.\n\nDone. Well.")
    else:
        assert parts["content"] == f"It is two.\n\n{CALL}\n\nDone. Well."
    unfinished = answered(one, text[: text.index("?")], step=step, **tools)
    assert unfinished == {"reasoning_content": f"So, {CALL}", "content": ""}


def test_earlier_thoughts_go_to_the_template(server: tuple[str, Running]):
    name, one = server
    said = {"role": "assistant", "content": "Two."}
    for field in ("reasoning_content", "reasoning"):
        messages = [USER, {**said, field: "One and one."}, USER]
        assert "One and one." not in prompt_of(one, chat_of(one, messages=messages))
        last = {"add_generation_prompt": False, "continue_final_message": False}
        text = prompt_of(one, chat_of(one, messages=messages[:2], **last))
        assert ("One and one." in text) == (name != "never")


def test_forms_and_forced_calls_close_the_thought_that_the_prompt_opens(server: tuple[str, Running]):
    name, one = server
    form = chat_of(one, response_format={"type": "json_object"})
    assert form.thinking is None
    assert prompt_of(one, form).endswith("assistant:<think>\n\n</think>\n\n") == (name == "always")
    assert answered(one, '{"a": "<think>"}', step=2, response_format={"type": "json_object"})["content"].endswith('"}')
    if name in ("always", "optional"):
        forced = chat_of(one, tools=TOOLS, tool_choice="required")
        end = "<think>\n\n</think>\n\n<tool_call>\n" if name == "always" else "assistant:<tool_call>\n"
        assert prompt_of(one, forced).endswith(end)


def test_an_answer_that_is_continued_goes_on_in_its_thought(server: tuple[str, Running]):
    name, one = server
    if name == "optional":
        going_on = {"add_generation_prompt": False, "continue_final_message": True}
        for content, begun in (("<think>One", True), ("One", False)):
            messages = [{"role": "user", "content": "a <think>"}, {"role": "assistant", "content": content}]
            thinking = chat_of(one, messages=messages, **going_on).thinking
            assert thinking is not None
            assert thinking.has_begun == begun
        thinking = chat_of(one, messages=[{"role": "user", "content": "a <think>"}]).thinking
        assert thinking is not None
        assert not thinking.has_begun


def test_effort(server: tuple[str, Running]):
    name, one = server
    if name == "optional":
        assert prompt_of(one, chat_of(one, reasoning_effort="none")).endswith("</think>\n\n")
        assert prompt_of(one, chat_of(one, reasoning_effort="high")).endswith("assistant:")
    else:
        assert prompt_of(one, chat_of(one, reasoning_effort="none")) == prompt_of(one, chat_of(one))
        assert one.chat(reasoning_effort="high").status_code == 400


def test_responses_have_no_thoughts_in_their_text(server: tuple[str, Running]):
    name, one = server
    if name == "optional":
        body = ResponseFields.model_validate({"model": NAME, "input": "the cat"})
        call = read_response(body, one.service)
        events_of(one, call.requests[0], "<think>Hm.</think>\nYes.", 4)
        assert call.response()["output"][-1]["content"][0]["text"] == "Yes."


def reader(template: str | None, *tokens: str) -> Any:
    tokenizer = byte_level()
    tokenizer.add_tokens(list(tokens))
    return ModelTokenizer(tokenizer, frozenset(), template, None)


@pytest.mark.parametrize(
    ("template", "tokens", "tags"),
    [
        ("{{ m.split('</think>') }}", (), ("<think>", "</think>")),
        ("{{ '<seed:think>' }}</seed:think>", (), ("<seed:think>", "</seed:think>")),
        ("plain", ("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
        ("<|START_THINKING|> <|END_THINKING|>", (), ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("plain", ("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|begin_of_thought|>", "<|end_of_thought|>")),
        ("<|inner_prefix|> <|inner_suffix|>", (), ("<|inner_prefix|>", "<|inner_suffix|>")),
        ("◁think▷ ◁/think▷", ("<think>", "</think>"), ("◁think▷", "◁/think▷")),
        ("plain </tool_call> <|im_end|>", ("<|end|>",), None),
        (None, (), None),
    ],
)
def test_tags_of_the_template_else_of_the_tokenizer(template: str, tokens: tuple[str, ...], tags: Any):
    assert thinking_tags(reader(template, *tokens)) == tags


def test_switches_and_levels_of_effort():
    switch = "{% if thinking %}x{% endif %}"
    assert effort_variables(reader(switch), "low") == {"reasoning_effort": "low", "thinking": True}
    levels = effort_variables(reader("{{ reasoning_effort }} {{ enable_thinking }}"), "low")
    assert levels == {"reasoning_effort": "low"}
    assert effort_variables(reader("plain"), "low") is None
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert effort_variables(reader("plain"), "none") == off


@pytest.mark.parametrize("tags", [("<tool_call>", "</tool_call>"), ("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_tags_that_are_special_tokens_are_in_the_text_and_others_are_not(tags: tuple[str, str]):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in (*tags, "<|turn|>")], special_tokens=True)
    text = f"a {tags[0]}é日{tags[1]}<|turn|> b"
    for skip in (True, False):
        settings = SamplingSettings(max_new_tokens=99, skip_special_tokens=skip)
        request = Request([5], settings, tokenizer=tokenizer, eos_ids=frozenset({0}), max_length=None)
        for token in [*tokenizer(text)["input_ids"], 0]:
            request.append([token], num_drafted=0)
        assert request.text == (text.replace("<|turn|>", "") if skip else text)


@pytest.mark.parametrize("step", [1, 7, 500])
def test_calls_of_a_stream_are_numbered_in_their_order(server: tuple[str, Running], step: int):
    """Whether they come with one event or with several."""
    name, one = server
    if name != "other tags":
        return
    call = chat_of(one, tools=TOOLS, stream=True)
    chunks = asyncio.run(_chunks(call, events_of(one, call.requests[0], f"{CALL}\n{CALL}\n{CALL}", step)))
    calls = [each for chunk in chunks for choice in chunk["choices"] for each in choice["delta"].get("tool_calls", ())]
    assert [each["index"] for each in calls] == [0, 1, 2]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
