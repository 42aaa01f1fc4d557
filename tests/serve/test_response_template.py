"""Tokenizers' ``response_template``: transformers' parser reads as our forms do, and what is in none of them."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from byte_tokenizers import byte_level
from draftheads.decode.answer_forms import AnswerForm, form_of, shown_tokens
from draftheads.decode.answer_forms.form import schemas_of
from draftheads.decode.text import AnswerText, read_answer
from draftheads.errors import ChatTemplateWarning
from draftheads.models.pretrained import ModelTokenizer
from draftheads.serve.fields import ApiError
from serve.test_answer_forms import FAMILIES, ONE, TOOLS, TWO, values
from serve_world import NAME, USER, Running, answered, events_of, only_read, sent_chunks, tiny_engines

parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers before 5.13 has no parser")
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(thought: tuple[str, ...], calls: dict[str, Any], name: str, **content: Any) -> dict[str, Any]:
    fields = {name: {"open": thought[0], "close": thought[1]}, "tool_calls": calls, "content": content}
    return {"start_anchor": "assistant:", "fields": fields}


# as in transformers/cli/serving/utils.py
THEIRS = {
    "hermes": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "qwen3.5": {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        "transform": CALL,
    },
    "gemma-4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": CALL,
    },
}
THOUGHTS = dict.fromkeys(THEIRS, ("<think>", "</think>")) | {"gemma-4": ("<|channel>thought\n", "<channel|>")}


@pytest.mark.parametrize("name", THEIRS)
def test_our_forms_read_as_transformers_does(name: str):
    """But for texts on both sides of a call, of which theirs drops the first one."""
    family = FAMILIES[name]
    theirs = template(THOUGHTS[name], THEIRS[name], "reasoning_content", close_pattern=r"\s*<\|im_end\|>")
    forms = AnswerForm(family.form, THOUGHTS[name], shows_tools=True), AnswerForm(None, None, True, theirs)
    thought, odd = family.thought % "\nSo, é?\n", {"at": '日 "q" {x}: [1],\né', "day": -3}
    for text in (
        *("Hello.", "1 < 2 and <b>", f"{thought}\n\nYes.", f"{family.thought % chr(10)}\n\nYes."),
        *(thought.rpartition("<")[0], family.calls(ONE), family.calls(ONE, TWO), family.calls(odd), family.calls({})),
        *(f"I look.\n\n{family.calls(TWO)}", f"{thought}\n\nI look.\n\n{family.calls(ONE, TWO)}"),
        *(f"{thought}{family.calls(ONE)}", "two  spaces\n\nand lines"),
    ):
        ours, other = (AnswerText(form, schemas_of(TOOLS)).push(text, is_end=True) for form in forms)
        assert (ours.texts(), values(ours.calls)) == (other.texts(), values(other.calls))
    text = f"One. {family.calls(ONE)} Two."
    assert AnswerText(forms[0], schemas_of(TOOLS)).push(text, is_end=True).texts() == {"content": "One. Two."}
    whole = AnswerText(forms[1], schemas_of(TOOLS)).push(text, is_end=True)
    assert (whole.texts(), whole.calls) == ({"content": text}, []), "nothing is dropped"


TAGS = ("<|START_MIND|>", "<|END_MIND|>", "<|START_SAY|>", "<|END_SAY|>", "<|START_DO|>", "<|END_DO|>")
CALLS: dict[str, Any] = {
    "open_pattern": re.escape(TAGS[4]),
    "close": TAGS[5],
    "content": "json",
    "transform_each": True,
}
CALLS |= {
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{inputs}"}},
}
OTHER = template(TAGS[:2], CALLS, "thinking", open=TAGS[2], close=TAGS[3])  # a form that is none of ours, as Cohere's
CHAT = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
CHAT += "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
THOUGHT = f"{TAGS[0]}Hm, é.{TAGS[1]}"


def said(text: str) -> str:
    return f"{TAGS[2]}{text}{TAGS[3]}"


def calls(*arguments: Any, tool: str = "get_tide") -> str:
    return f"{TAGS[4]}{json.dumps([{'tool': tool, 'inputs': each} for each in arguments])}{TAGS[5]}"


@pytest.fixture(scope="module")
def one() -> Running:
    engines = tiny_engines(CHAT, tokens=(*TAGS, "<|other|>"))
    engines[NAME].model.tokenizer.response_template = OTHER
    return only_read(engines)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_answers_in_none_of_our_forms(one: Running, step: int):
    """Its tags are special tokens, and other special tokens stay out of the text."""
    text = f"{THOUGHT}{said('I look.<|other|>')}{calls(ONE, TWO)}"
    found = answered(one, text, step=step, tools=TOOLS)
    assert (found["reasoning_content"], found["content"], found["reason"]) == ("Hm, é.", "I look.", "tool_calls")
    assert values(found["calls"]) == [("get_tide", ONE), ("get_tide", TWO)]
    assert found["tokens"] == b"I look."
    assert found["num_thought"] == len(one.ids(THOUGHT)) - 1, "without the closing tag"
    found = answered(one, f"{THOUGHT}{said('é é')}", step=step)
    assert (found["reasoning_content"], found["content"], found["tokens"]) == ("Hm, é.", "é é", "é é".encode())
    assert found["reason"] == "stop"
    found = answered(one, f"{THOUGHT}{said('Hm')}", step=step, tools=TOOLS)
    assert (found["tokens"], found["num_thought"]) == (b"Hm", len(one.ids(THOUGHT)) - 1)


UNREAD = {
    "tools were not sent": (calls(ONE), {}),
    "no tags": ("Hello.", {}),
    "no JSON": (f"{TAGS[4]}[{TAGS[5]}", {"tools": TOOLS}),
    "half a character": (calls(ONE, {"at": "\ud83d"}), {"tools": TOOLS}),
    "no object": (calls(ONE, 5), {"tools": TOOLS}),
    "deeper than Python reads": (f"{TAGS[4]}{'[' * 1500}{TAGS[5]}", {"tools": TOOLS, "max_tokens": 2000}),
    "two texts": (said("a") + said("b"), {}),
    "a tool that is not allowed": (
        calls({}, tool="now"),
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOLS[0]]}},
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_cannot_be_read_is_content(one: Running, case: str):
    text, fields = UNREAD[case]
    found = answered(one, text, step=3, **fields)
    assert (found["content"], found["calls"], found["reason"], found["tokens"]) == (text, [], "stop", text.encode())


def test_a_call_that_is_cut_off_is_content(one: Running):
    ids = one.ids(text := calls(ONE))
    for end in (3, len(ids) - 2, len(ids) - 1, len(ids)):
        found = answered(one, text, step=4, tools=TOOLS, max_tokens=end)
        part = one.engines[NAME].model.tokenizer.decode(ids[:end])
        assert (found["content"], found["reason"]) == ("" if end == len(ids) else part, "length")
        assert bool(found["calls"]) == (end == len(ids))


def test_a_thought_that_the_prompt_begins(one: Running):
    prompt = one.ids(f"user:aassistant:{TAGS[0]}")
    parts = read_answer(one.engines[NAME].model, prompt, f"Hm.{TAGS[1]}{said('Yes.')}")
    assert parts.texts() == {"reasoning_content": "Hm.", "content": "Yes."}
    last = {"role": "assistant", "content": "So"}
    going_on = one.chat_call(messages=[USER, last], add_generation_prompt=False, continue_final_message=True)
    assert going_on.reading is not None
    assert going_on.reading.prefix == "", "what the client has is no part of the answer"
    no_answer = one.chat_call(messages=[USER, last, USER], add_generation_prompt=False)
    assert no_answer.reading is not None
    assert no_answer.reading.prefix == "", "an earlier answer is no part of it"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_no_call_is_forced(one: Running, fields: dict[str, Any], param: str):
    with pytest.raises(ApiError, match="response_template") as error:
        one.chat_call(tools=TOOLS, **fields)
    assert error.value.param == param
    assert one.chat_call(response_format={"type": "json_object"}).reading is None, "it comes as it is written"


def test_texts_that_are_put_together_and_fields_that_nothing_reads():
    join = {"open": TAGS[2], "close": TAGS[3], "repeats": True, "join": " "}
    parts = template(TAGS[:2], CALLS, "thinking", **join)
    form = AnswerForm(None, None, True, parts)
    found = AnswerText(form).push(said("a") + said("b"), is_end=True)
    assert found.content == [(len(said("a") + said("b")), "a b")], "behind all tokens: it has no log-probabilities"
    parts["fields"]["other"] = {"open": "<o>", "close": "</o>"}
    text = f"{said('a')}<o>b</o>"
    assert AnswerText(form).push(text, is_end=True).texts() == {"content": text}


ENDLESS = {"open_pattern": "(?=x)", "close_pattern": "(?=x)"}  # it opens and closes without taking a character


def test_a_template_without_an_end_is_stopped_and_other_requests_are_served():
    engines = tiny_engines(CHAT)
    engines[NAME].model.tokenizer.response_template = {"start_anchor": "a", "fields": {"content": ENDLESS}}
    one = only_read(engines)
    one.service.limits = replace(one.service.limits, schema_seconds=0.2)
    assert answered(one, "yxy", step=1)["content"] == "yxy"
    call = one.chat_call(stream=True)

    async def others_during_the_end() -> int:
        num_rounds, events = 0, events_of(one, call.requests[0], "yxy", 1000)
        sending = asyncio.create_task(sent_chunks(call, events))
        while not sending.done():
            await asyncio.sleep(0)
            num_rounds += 1
        assert sending.result()[-1]["choices"][0]["finish_reason"] == "stop"
        return num_rounds

    assert asyncio.run(others_during_the_end()) > 20, "it runs beside the event loop"


def test_a_transformers_without_the_parser_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    tokenizer = byte_level()
    tokenizer.response_template = OTHER
    with pytest.warns(ChatTemplateWarning, match=r"install transformers 5\.13 or later"):
        assert form_of(ModelTokenizer(tokenizer, frozenset(), CHAT, None)).template is None


def test_special_tokens_that_end_an_answer_stay_hidden():
    one = only_read(tiny_engines(FAMILIES["hermes"].template, tokens=("<|im_end|>",)))
    given = template(THOUGHTS["hermes"], THEIRS["hermes"], "thinking", close="<|im_end|>")
    one.engines[NAME].model.tokenizer.response_template = given
    assert answered(one, "Yes.<|im_end|>", step=3)["content"] == "Yes."


def test_templates_that_are_used():
    """Only where no form of ours fits, and only those that transformers can load."""

    def found(text: str, given: Any) -> AnswerForm:
        tokenizer = byte_level()
        tokenizer.response_template = given
        return form_of(ModelTokenizer(tokenizer, frozenset(), text, None))

    assert found(CHAT, OTHER).template == OTHER
    assert found(CHAT, None).template is None
    no_tools = tiny_engines("{% for m in messages %}{{ m.content }}{% endfor %}assistant:")
    no_tools[NAME].model.tokenizer.response_template = OTHER
    with pytest.raises(ApiError, match="shows no tools"):
        only_read(no_tools).chat_call(tools=TOOLS)
    assert found(FAMILIES["hermes"].template, OTHER).template is None
    unknown = {"start_anchor": "a", "fields": {"b": {"open": "("}}, "c": 1}
    for wrong in ({"fields": {}}, {"fields": []}, {"fields": {"a": 1}}, unknown, "text"):
        assert shown_tokens(["<other>"], wrong) == set()
        with pytest.warns(ChatTemplateWarning, match="response_template is not used: "):
            assert found(CHAT, wrong).template is None
