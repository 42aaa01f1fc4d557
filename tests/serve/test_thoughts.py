"""Thoughts of reasoning models: what the template writes, and the parts of answers, whole and in streams."""

from typing import Any

import pytest
from tokenizers import AddedToken

from byte_tokenizers import byte_level
from draftheads.decode.answer_forms import form_of
from draftheads.decode.request import Request
from draftheads.models.chat_template import effort_variables
from draftheads.models.pretrained import ModelTokenizer
from draftheads.settings import SamplingSettings
from serve_world import USER, Running, answered, events_of, only_read, tiny_engines

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


@pytest.fixture(scope="module")
def servers() -> dict[str, Running]:
    """One for each template."""
    return {name: only_read(tiny_engines(text)) for name, text in TEMPLATES.items()}


every = pytest.mark.parametrize("name", TEMPLATES)


@every
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thoughts_are_apart_from_the_answer(servers: dict[str, Running], name: str, step: int):
    opening, closing = {"other tags": ("[THINK]", "[/THINK]")}.get(name, ("<think>", "</think>"))
    text = f"So, {CALL}?\n{closing}\n\nIt is two.\n\n{CALL}\n\nDone. Well."
    text = text if name == "always" else f"{opening}\n{text}"
    tools = {"tools": TOOLS} if name in ("always", "optional") else {}
    parts = answered(servers[name], text, step=step, **tools)
    said = "It is two.\n\nDone. Well." if tools else f"It is two.\n\n{CALL}\n\nDone. Well."
    expected = {"reasoning_content": f"So, {CALL}?", "content": said, "calls": [("now", "{}")] if tools else []}
    never = {"reasoning_content": "", "content": text, "calls": []}
    assert parts.items() >= (expected if name != "never" else never).items()
    if name != "never":
        unfinished = answered(servers[name], text[: text.index("?")], step=step, **tools)
        assert unfinished.items() >= {"reasoning_content": f"So, {CALL}", "content": "", "calls": []}.items()


@every
def test_earlier_thoughts_go_to_the_template(servers: dict[str, Running], name: str):
    one, said = servers[name], {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."}
    assert "One and one." not in one.prompt_of(one.chat_call(messages=[USER, said, USER]))
    text = one.prompt_of(one.chat_call(messages=[USER, said], add_generation_prompt=False))
    assert ("One and one." in text) == (name != "never")


@every
def test_forms_and_forced_calls_close_the_thought_that_the_prompt_opens(servers: dict[str, Running], name: str):
    one = servers[name]
    form = one.chat_call(response_format={"type": "json_object"})
    assert form.reading is None
    assert one.prompt_of(form).endswith("assistant:<think>\n\n</think>\n\n") == (name == "always")
    assert answered(one, '{"a": "<think>"}', step=2, response_format={"type": "json_object"})["content"].endswith('"}')
    if name in ("always", "optional"):
        forced = one.chat_call(tools=TOOLS, tool_choice="required")
        end = "<think>\n\n</think>\n\n<tool_call>\n" if name == "always" else "assistant:<tool_call>\n"
        assert one.prompt_of(forced).endswith(end)


@pytest.mark.parametrize(("content", "has_begun"), [("<think>One", True), ("One", False), (None, False)])
def test_only_the_words_of_the_model_begin_a_thought(servers: dict[str, Running], content: str, *, has_begun: bool):
    messages: list[Any] = [{"role": "user", "content": "a <think>"}]
    messages += [] if content is None else [{"role": "assistant", "content": content}]
    ends = {"add_generation_prompt": content is None, "continue_final_message": content is not None}
    reading = servers["optional"].chat_call(messages=messages, **ends).reading
    assert reading is not None
    assert reading.in_thought == has_begun


def test_responses_have_no_thoughts_in_their_text(servers: dict[str, Running]):
    one = servers["optional"]
    call = one.response_call()
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
        ("◁think▷ ◁/think▷", ("<think>", "</think>"), ("◁think▷", "◁/think▷")),
        ("plain </tool_call> <|im_end|>", ("<|end|>",), None),
        (None, (), None),
    ],
)
def test_tags_of_the_template_else_of_the_tokenizer(template: str, tokens: tuple[str, ...], tags: Any):
    assert form_of(reader(template, *tokens)).thinking == tags


def test_switches_and_levels_of_effort():
    switch = "{% if thinking %}x{% endif %}"
    assert effort_variables(reader(switch), "low") == {"reasoning_effort": "low", "thinking": True}
    levels = effort_variables(reader("{{ reasoning_effort }} {{ enable_thinking }}"), "low")
    assert levels == {"reasoning_effort": "low"}
    assert effort_variables(reader("plain"), "low") is None
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert effort_variables(reader("plain"), "none") == off


@pytest.mark.parametrize("tags", [("<tool_call>", "</tool_call>"), ("[THINK]", "[/THINK]")])
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
