"""The forms of answers: calls and thoughts in texts, whole and in pieces, forced, cut off, and sent back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from byte_tokenizers import byte_level
from draftheads.decode.answer_forms import FORMS, AnswerForm, form_of, shown_tokens
from draftheads.decode.answer_forms.channels import GEMMA_4, HARMONY
from draftheads.decode.answer_forms.form import CallForm, ToolCall, schemas_of, typed
from draftheads.decode.answer_forms.json_calls import GRANITE, HERMES, LLAMA_3, MISTRAL, MISTRAL_LIST
from draftheads.decode.answer_forms.pairs import GLM, XML
from draftheads.decode.answer_forms.pythonic import LFM2, PYTHONIC
from draftheads.decode.text import AnswerText
from draftheads.models.chat_template import render
from draftheads.models.pretrained import ModelTokenizer
from draftheads.serve.fields import ApiError
from serve_world import NAME, USER, Running, answered, only_read, tiny_engines

PAIRS = "{%% for k, v in f.arguments.items() %%}%s{%% endfor %%}"
VALUE = "{{ v if v is string else v | tojson }}"
JSON = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
NAMED = "{{ f.name }}%s{{ f.arguments | tojson }}"
PYTHON = "{{ f.name }}(" + PAIRS % "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}" + ")"
GEMMA = (
    "{{ ',' if not loop.first }}{{ k }}:{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v | tojson }}{% endif %}"
)
HERMES_TAGS = ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")


@dataclass(frozen=True)
class Family:
    """A form as a short template shows it."""

    form: CallForm
    around: tuple[str, str, str]  # before, between and behind calls
    call: str  # as the template writes it
    tokens: tuple[str, ...] = ()  # special ones
    thought: str = "<think>%s</think>"
    words: str = "%s"
    is_alone: bool = False  # no words are before a call
    can_go_on: bool = True  # words may be behind a call

    @property
    def template(self) -> str:
        before, between, behind = self.around
        calls = f"{{% set f = c.function %}}{self.call}"
        calls += f"{{{{ {json.dumps(between)} if not loop.last else {json.dumps(behind)} }}}}"
        turn = (
            "{% if m.reasoning_content %}" + self.thought % "{{ m.reasoning_content }}" + "{% endif %}{{ m.content }}"
        )
        turn += f"{{% for c in m.tool_calls or [] %}}{{{{ {json.dumps(before)} if loop.first }}}}{calls}{{% endfor %}}"
        return (
            "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:" + turn + ";{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )

    def calls(self, *arguments: dict[str, Any]) -> str:
        """Calls of get_tide in an answer."""
        before, between, behind = self.around
        return before + between.join(self.written(each) for each in arguments) + behind

    def written(self, arguments: dict[str, Any]) -> str:
        called = {"function": {"name": "get_tide", "arguments": arguments}}
        text = render(reader(self.template), [{"role": "assistant", "content": "", "tool_calls": [called]}])
        return text.removeprefix(f"assistant:{self.around[0]}").removesuffix(f"{self.around[2]};")


FAMILIES = {
    "hermes": Family(HERMES, HERMES_TAGS, JSON, ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "granite": Family(GRANITE, ("<|tool_call|>[", ", ", "]"), JSON, ("<|tool_call|>",), can_go_on=False),
    "llama-3": Family(
        LLAMA_3, ("", "; ", ""), JSON.replace("'arguments'", "'parameters'"), is_alone=True, can_go_on=False
    ),
    "qwen3.5": Family(
        XML,
        HERMES_TAGS,
        "<function={{ f.name }}>\n" + PAIRS % f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n" + "</function>",
    ),
    "glm": Family(
        GLM,
        ("<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>"),
        "{{ f.name }}\n" + PAIRS % f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "lfm2": Family(
        LFM2,
        ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        PYTHON,
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama-4": Family(PYTHONIC, ("[", ", ", "]"), PYTHON, is_alone=True, can_go_on=False),
    "gpt-oss": Family(
        HARMONY,
        ("<|start|>assistant<|channel|>commentary to=functions.", "", "<|call|>"),
        NAMED % " <|constrain|>json<|message|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"),
        "<|channel|>analysis<|message|>%s<|end|>",
        "<|start|>assistant<|channel|>commentary<|message|>%s<|end|>",
    ),
    "gemma-4": Family(
        GEMMA_4,
        ("<|tool_call>call:", "<tool_call|><|tool_call>call:", "<tool_call|>"),
        "{{ f.name + '{' }}" + PAIRS % GEMMA + "{{ '}' }}",
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        "<|channel>thought\n%s<channel|>",
    ),
    "mistral": Family(
        MISTRAL,
        ("[TOOL_CALLS]", "[TOOL_CALLS]", ""),
        NAMED % "[ARGS]",
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        "[THINK]%s[/THINK]",
        can_go_on=False,
    ),
    "mistral-list": Family(MISTRAL_LIST, ("[TOOL_CALLS][", ", ", "]"), JSON, ("[TOOL_CALLS]",), can_go_on=False),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "maxLength": 6},
        "day": {"type": "integer", "minimum": 0, "maximum": 99},
        "high": {"type": "boolean"},
        "kind": {"enum": ["sea", "river"]},
    },
    "required": ["at", "day"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_tide", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ONE, TWO = {"at": "3", "day": 2}, {"at": "é b", "day": 7, "high": True, "kind": "sea"}
every = pytest.mark.parametrize("name", FAMILIES)


def reader(template: str | None, *tokens: str) -> Any:
    tokenizer = byte_level()
    tokenizer.add_tokens(list(tokens))
    return ModelTokenizer(tokenizer, frozenset(), template, None)


@cache
def world(name: str, *, has_tokens: bool = True) -> Running:
    family = FAMILIES[name]
    return only_read(tiny_engines(family.template, tokens=family.tokens if has_tokens else ()))


def values(calls: Sequence[Any]) -> list[tuple[str, Any]]:
    pairs = [(call.name, call.arguments) if isinstance(call, ToolCall) else call for call in calls]
    return [(name, json.loads(arguments)) for name, arguments in pairs]


def an_answer(name: str) -> tuple[str, dict[str, Any]]:
    """With everything that the form can have, and what is read of it."""
    family = FAMILIES[name]
    calls = [ONE] if name == "gpt-oss" else [ONE, TWO]
    thought, words = family.thought % "So, é?\n", "" if family.is_alone else family.words % "I look.\n\n"
    text, has_more = f"{thought}{words}{family.calls(*calls)}", family.can_go_on and name != "gpt-oss"
    text += f"\n{family.thought % 'Done'} Well 日." if has_more else ""
    content = f"{words and 'I look.'}{chr(10) * 2 + 'Well 日.' if has_more else ''}"
    said = {
        "reasoning_content": f"So, é?{chr(10) + 'Done' if has_more else ''}",
        "content": content,
        "reason": "tool_calls",
    }
    return text, {**said, "calls": [("get_tide", each) for each in calls]}


@every
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_whole_and_streamed_answers(name: str, step: int):
    """Also drafted in runs."""
    text, expected = an_answer(name)
    found = answered(world(name), text, step=step, tools=TOOLS)
    tokens, num_thought, found["calls"] = found.pop("tokens"), found.pop("num_thought"), values(found["calls"])
    assert found == expected
    assert tokens.decode().replace("\n", "") == expected["content"].replace("\n", "")
    thoughts = [FAMILIES[name].thought % part for part in ("So, é?\n", "Done")]
    most = sum(len(world(name).ids(part)) for part in thoughts if part in text)
    assert 0 <= most - num_thought <= 4 * bool(FAMILIES[name].tokens)


@every
def test_a_text_may_be_cut_into_pieces_anywhere(name: str):
    text, expected = an_answer(name)
    form = form_of(world(name).engines[NAME].model)
    found = set()
    for at in range(len(text)):
        separator = AnswerText(form, schemas_of(TOOLS))
        parts = [separator.push(text[:at]), separator.push(text[at:]), separator.push("", is_end=True)]
        texts = ["".join(part.texts().get(each, "") for part in parts) for each in ("reasoning_content", "content")]
        found.add((*texts, *(call.arguments for part in parts for call in part.calls)))
    [(thought, content, *arguments)] = found
    assert (thought, content) == (expected["reasoning_content"], expected["content"])
    assert [("get_tide", json.loads(each)) for each in arguments] == expected["calls"]


@every
def test_answers_that_are_cut_off(name: str):
    """Whole calls are calls, and the rest is text."""
    family, one = FAMILIES[name], world(name)
    text = family.calls(ONE) if name == "gpt-oss" else family.calls(ONE, TWO)
    for end in range(1, len(one.ids(text)), 3):
        found = answered(one, text, step=4, tools=TOOLS, max_tokens=end)
        assert found["reason"] == "length"
        assert values(found["calls"]) == [("get_tide", each) for each in (ONE, TWO)][: len(found["calls"])]


def forced_texts(name: str) -> tuple[str, str]:
    """A call as it is forced, and one with everything of the schema."""
    end = FAMILIES[name].form.layout[2]
    return FAMILIES[name].written(ONE) + end, FAMILIES[name].written(TWO) + end


@pytest.mark.parametrize("has_tokens", [False, True])
@every
def test_forced_calls(name: str, *, has_tokens: bool):
    """As a model writes them that the grammar alone leads, as they are read, and as they are cut off."""
    one = world(name, has_tokens=has_tokens)
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    for text, arguments in zip(forced_texts(name), (ONE, TWO), strict=True):
        found = answered(one, text, step=3, **forced)
        assert (values(found["calls"]), found["content"], found["reason"]) == (
            [("get_tide", arguments)],
            "",
            "tool_calls",
        )
        seen = set()
        for end in range(1, len(one.ids(text)), 2):
            found = answered(one, text, step=3, **forced, max_tokens=end)
            is_whole = bool(found["calls"]) and found["calls"][0][1].endswith("}")
            assert (found["reason"], found["content"]) == ("tool_calls" if is_whole else "length", "")
            seen |= {arguments for _, arguments in found["calls"]}
        assert len(seen) > 1
        assert all(each[:1] in ("", "{") for each in seen)
    call = one.chat_call(**forced, max_tokens=400, logit_bias={str(one.ids(each)[0]): 9.0 for each in '"}])'})
    [request], engine = call.requests, one.engines[NAME]
    core = engine.core()
    core.add(request)
    assert list(engine.events(core))[-1].finish_reason == "stop"
    [written] = call.response()["choices"][0]["message"]["tool_calls"]
    assert written["function"]["name"] in ("get_tide", "now")
    arguments = json.loads(written["function"]["arguments"])
    assert (arguments == {}) == (written["function"]["name"] == "now")
    assert "at" not in arguments or (len(arguments["at"]) <= 6 and type(arguments["day"]) is int)


@every
def test_grammars_of_calls_allow_no_others(name: str):
    one, written = world(name), FAMILIES[name].written
    wrong = {"name": ({"at": "3", "day": 2}, "get_tide", "get_time"), "type": ({"at": "3", "day": "x"}, "", "")}
    wrong |= {"missing": ({"at": "3"}, "", ""), "long": ({"at": "3456789", "day": 2}, "", "")}
    for arguments, old, new in wrong.values():
        state = one.chat_call(tools=TOOLS, tool_choice="required").requests[0].grammar_state
        text = written(arguments).replace(old, new) if old else written(arguments)
        ids = [*one.ids(text), 0]
        assert state is not None
        assert state.num_allowed(ids) < len(ids)


@pytest.mark.parametrize(
    ("parameters", "allowed", "refused"),
    [
        ({"properties": {"a": {"const": "x"}}}, {"a": "x"}, {"a": "y"}),
        ({"properties": {"a": {"enum": ["x", 5]}}}, {"a": "x"}, {"a": "y"}),
        ({"properties": {"a": {"type": "string", "minLength": 2}}}, {"a": "xy"}, {"a": "x"}),
        ({"properties": {"a": {"type": "string", "maxLength": 2}}}, {"a": "xy"}, {"a": "xyz"}),
        ({"required": ["b"]}, {"b": 5}, {}),
        ({"properties": {"a": {"type": "integer"}}}, {}, {"a": "x"}),
        (
            {"properties": {"a": {"items": {"$ref": "#/$defs/n"}}}, "$defs": {"n": {"enum": [5]}}},
            {"a": [5]},
            {"a": [6]},
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen3.5", "glm", "gemma-4", "lfm2"])
def test_grammars_of_single_arguments(name: str, parameters: Any, allowed: Any, refused: Any):
    one, family = world(name), FAMILIES[name]
    tool = {"name": "get_tide", "parameters": {"type": "object", **parameters}}
    for arguments, is_allowed in ((allowed, True), (refused, False)):
        fields: dict[str, Any] = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        state = one.chat_call(**fields).requests[0].grammar_state
        ids = [*one.ids(family.written(arguments) + family.form.layout[2]), 0]
        assert state is not None
        assert (state.num_allowed(ids) == len(ids)) == is_allowed


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        (GEMMA_4, 'get_tide{at:<|"|>3<|"|>,day:2,hi', '{"at": "3", "day": 2'),
        (LFM2, 'get_tide(at="3", day=2, hi', '{"at": "3", "day": 2'),
        (
            XML,
            "<function=get_tide>\n<parameter=at>\n3\n</parameter>\n<parameter=day>\n2\n</par",
            '{"at": "3", "day": 2',
        ),
        (HERMES, '{"name": "get_tide", "arguments": {"at": "3"', '{"at": "3"'),
    ],
)
def test_the_members_of_a_call_that_is_cut_off(form: CallForm, text: str, arguments: str):
    assert form.part(text, schemas_of(TOOLS)) == [ToolCall("get_tide", arguments, is_cut=True)]


def test_a_token_that_ends_a_text_has_what_is_before_it_in_the_text():
    one = only_read(tiny_engines(FAMILIES["qwen3.5"].template, tokens=("</parameter>",)))
    state = one.chat_call(tools=TOOLS, tool_choice="required").requests[0].grammar_state
    ids = one.ids(FAMILIES["qwen3.5"].written({"at": "3", "day": 2}))
    assert state is not None
    assert state.num_allowed(ids) == len(ids)


def test_a_function_without_parameters_takes_no_arguments():
    assert schemas_of([{"name": "a"}]) == {"a": {"type": "object", "properties": {}, "additionalProperties": False}}


@every
def test_calls_can_be_sent_back(name: str):
    """A template writes the calls of a message as the model would; from there they are the same."""
    one = world(name)
    text, expected = an_answer(name)
    calls = [
        {"type": "function", "function": {"name": called, "arguments": arguments}}
        for called, arguments in answered(one, text, step=5, tools=TOOLS)["calls"]
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    prompt = one.prompt_of(one.chat_call(messages=[USER, message], add_generation_prompt=False, tools=TOOLS))
    parts = AnswerText(form_of(one.engines[NAME].model), schemas_of(TOOLS))
    sent = prompt[prompt.rindex("assistant:") + 10 :].removesuffix(";")
    assert values(parts.push(sent, is_end=True).calls) == expected["calls"]


@every
def test_a_format_together_with_tools(name: str):
    """An answer is calls or a text of the format."""
    family, one = FAMILIES[name], world(name)
    answer = {"json_schema": {"schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}}
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": {"type": "json_schema", **answer}}
    if name == "llama-3":
        with pytest.raises(ApiError, match="cannot be told from other JSON") as error:
            one.chat_call(**fields)
        assert error.value.param == "response_format"
        return
    found = answered(one, family.form.text_opening + '{"a": 1}', step=3, **fields)
    assert (found["content"], found["calls"], found["reason"]) == ('{"a": 1}', [], "stop")
    calls = [ONE] if name == "gpt-oss" else [ONE, TWO]
    text = family.calls(*calls).removeprefix("<|start|>assistant").removesuffix("<|call|>")
    assert values(answered(one, text, step=3, **fields)["calls"]) == [("get_tide", each) for each in calls]
    state = one.chat_call(**fields, parallel_tool_calls=False).requests[0].grammar_state
    ids, wrong = one.ids(text), one.ids('{"a": 2}')
    assert state is not None
    assert (state.num_allowed(ids) == len(ids)) == (len(calls) == 1)
    assert state.num_allowed(wrong) < len(wrong)


SHOWN = {
    "qwen3.5": ("Call so: <tool_call>\n<function=NAME>", ()),
    "glm": ("Call so: <tool_call>NAME\n<arg_key>KEY</arg_key>", ()),
    "hermes": ("Call so: <tool_call>{}</tool_call>", ()),
    "llama-3": ('Respond in the format {"name": function name, "parameters": values}', ()),
    "llama-4": ("Call so: [func_name1(params_name1=params_value1)]", ()),
    "lfm2": ("", ("<|tool_call_start|>", "<think>", "</think>")),
    "gpt-oss": ("", ("<|channel|>", "<|message|>")),
    "gemma-4": ("{# <|tool_call>call: #}", ()),
    "mistral": ("", ("[TOOL_CALLS]", "[ARGS]")),
    "mistral-list": ("{# [TOOL_CALLS] #}", ()),
    "granite": ("answer with <|tool_call|> and a list", ()),
}


@every
def test_the_template_or_the_tokens_show_the_form(name: str):
    shown, tokens = SHOWN[name]
    start = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    form = form_of(reader(start + shown, *tokens))
    assert (form.calls, form.shows_tools) == (FAMILIES[name].form, True)
    assert form_of(reader(FAMILIES[name].template)).calls is FAMILIES[name].form
    assert not form_of(reader(shown, *tokens)).shows_tools
    assert form_of(reader(start)).calls is None
    assert set(FORMS) == {family.form for family in FAMILIES.values()}


PYTHON_TAGS = "<|python_start|>%s<|python_end|>"
NAME_OF_TOOL = '{"name": "{{ t.function.name }}", "parameters": {{ t.function.parameters | tojson }}}'
COMMENTARY = "<|channel|>commentary to=functions.%s<|message|>{}"
TO = "<|start|>assistant to=functions.%s<|channel|>commentary json<|message|>{}<|call|>"
# texts that the families' templates do not write, the content, and what is called
OTHERWISE: list[tuple[str, str, str, str]] = [
    ("gpt-oss", "<|channel|>analysis to=functions.now <|constrain|>json<|message|>{}<|call|>", "", "now {}"),
    ("gpt-oss", f"<|channel|>final<|message|>Hi<|end|>{TO % 'now'}", "Hi", "now {}"),
    ("gpt-oss", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", "now {}"),
    ("gpt-oss", COMMENTARY % "a-b.c" + "<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", "a-b.c {}"),
    ("gpt-oss", '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', '{"a": 1}', ""),
    ("gpt-oss", "<|channel|>final<|message|>Hi<|call|>", "Hi", ""),
    ("gemma-4", '<|tool_call>call:a-b{c:{"d":"e\\" f: g"}}<tool_call|>', "", 'a-b {"c":{"d":"e\\" f: g"}}'),
    ("llama-3", '{"type": "function", "name": "now", "parameters": {}}', "", "now {}"),
    ("llama-3", '{"name": "now", "parameters": {}}; {"name": "a", "parameters": {}}', "both", ""),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}", "", "now {}"),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>Hi', "Hi", "now {}"),
    (
        "qwen3.5",
        "<tool_call><function= get_tide ><parameter=at>3</parameter></function></tool_call>",
        "",
        'get_tide {"at": "3"}',
    ),
    ("qwen3.5", "<tool_call><function=now>5</function></tool_call>", "both", ""),
    ("llama-4", PYTHON_TAGS % "[now()]", "", "now {}"),
    ("llama-4", '[now(from=1, a="\\d")]', "", 'now {"from": 1, "a": "\\\\d"}'),
    ("llama-4", "[now(1)]", "both", ""),
    ("llama-4", "[now(**{'a': 1})]", "both", ""),
]


@pytest.mark.parametrize(("name", "text", "content", "called"), OTHERWISE)
def test_what_models_write_otherwise(name: str, text: str, content: str, called: str):
    form = FAMILIES[name].form
    found = AnswerText(AnswerForm(form, form.thinking, shows_tools=True), schemas_of(TOOLS)).push(text, is_end=True)
    assert found.texts() == ({"content": text if content == "both" else content} if content else {})
    assert " ".join(f"{call.name} {call.arguments}" for call in found.calls) == called


def test_what_shows_a_form_otherwise():
    tools = "{% for t in tools or [] %}%s{% endfor %}"
    assert form_of(reader(tools.replace("%s", "<|python_start|>"))).calls is PYTHONIC
    assert form_of(reader(tools.replace("%s", NAME_OF_TOOL))).calls is None, "so a tool is shown, and no call"
    refusing = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    shown = form_of(reader(refusing + tools.replace("%s", "{{ t | tojson }}<tool_call>")))
    assert (shown.calls, shown.shows_tools) == (HERMES, True), "a template may refuse calls"
    assert form_of(reader("<|begin_of_thought|>a<|end_of_thought|>")).thinking == (
        "<|begin_of_thought|>",
        "<|end_of_thought|>",
    )
    assert form_of(reader(FAMILIES["gpt-oss"].template)).thinking == ("<|channel|>analysis<|message|>", "<|end|>")
    assert form_of(reader("", "<|channel|>")).thinking == HARMONY.thinking
    special = {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"}
    special |= {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    special |= {"<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>', "<|inner_prefix|>"}
    assert shown_tokens([*special, "<|other|>"]) == special
    assert shown_tokens(["<|end|>", "[CALL_ID]"]) == set(), "they are tags only beside the others"


def test_what_begins_no_call_is_not_held_back():
    separator = AnswerText(AnswerForm(PYTHONIC, None, shows_tools=True), schemas_of(TOOLS))
    assert separator.push("[1, 2] and").texts() == {"content": "[1, 2] and"}


def test_an_answer_of_gpt_oss_has_one_call_and_its_forms_have_a_channel():
    text = '{"type": "object"}'
    one, several = (HARMONY.grammar(schemas_of(TOOLS), {}, text=text, parallel=each) for each in (False, True))
    assert one == several
    assert '"<|channel|>final<|message|>" r' in one
    free = world("gpt-oss").chat_call(response_format={"type": "json_object"})
    assert world("gpt-oss").prompt_of(free).endswith("assistant:<|channel|>final<|message|>")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1}')
CASES: dict[str, tuple[Any, ...]] = {  # text, content, calls, thought
    "text only": ("a <b> c", "a <b> c", []),
    "call only": (CALL, "", [ADD]),
    "two calls": (f"{CALL}\n{CALL}", "", [ADD, ADD]),
    "text and call": (f"I add.\n\n{CALL}\n", "I add.", [ADD]),
    "cut before the closing tag": (CALL.removesuffix("</tool_call>"), "", [ADD]),
    "cut inside": (CALL[:30], CALL[:30], []),
    "arguments in a text": ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
    "no JSON": ("<tool_call>add</tool_call>", "<tool_call>add</tool_call>", []),
    "no arguments": ('<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
    "a beginning of a tag": ("1 <tool", "1 <tool", []),
    "spaces at the end": ("yes. \n", "yes. \n", []),
    "text around a call": (f"One.\n\n{CALL}\n Two  words. \n", "One.\n\nTwo  words. \n", [ADD]),
    "text after a call": (f"{CALL}\n\nIt is 1 + 1. ", "It is 1 + 1. ", [ADD]),
    "words beside a call": (f"One.{CALL}\nTwo.", "One.\nTwo.", [ADD]),
    "spaces around what is no call": ("a <tool_call>x</tool_call> b", "a <tool_call>x</tool_call> b", []),
    "a thought": ("<think>\nHm, 1?\n</think>\n\nYes.", "Yes.", [], "Hm, 1?"),
    "an empty thought": ("<think>\n\n</think>\n\nYes.", "Yes.", [], ""),
    "a thought that is cut": (f"<think>Perhaps {CALL} or", "", [], f"Perhaps {CALL} or"),
    "a call in a thought": (f"<think>{CALL}</think>{CALL}", "", [ADD], CALL),
    "two thoughts": (f"<think>a</think>b {CALL} <think> c </think> d", "b d", [ADD], "a c"),
    "a thought in a call": (
        '<tool_call>{"name": "add", "arguments": {"a": "<think>"}}</tool_call>.',
        ".",
        [ToolCall("add", '{"a": "<think>"}')],
    ),
    "an end without a beginning": ("a </think> b", "a </think> b", []),
    "arguments in another member": (
        '<tool_call>{"b": {"arguments": {"c": 2}}, "name": "add", "arguments": {"a": 1}}</tool_call>',
        "",
        [ADD],
    ),
    "spaces in a name": (CALL.replace('"add"', '" add "'), "", [ADD]),
    "no name": (CALL.replace("add", " "), CALL.replace("add", " "), []),
    "half a character in a name": (CALL.replace("add", "\\ud83d"), CALL.replace("add", "\\ud83d"), []),
}


def odd(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


KEPT = [
    '{"x": 1e999}',
    '{"x": 0.12345678901234567891}',
    '{"x": 1.10,  "y": "\\ud83d\\ude00"}',
    '{"arguments": {"x": 1}}',
]
NO_CALLS = ["NaN", '{"x": NaN}', '{"x": -Infinity}', '{"x": "\\ud83d"}', "[1]", '"text"', '"{}{"', "5", "[" * 5000]
CASES |= {each: (odd(each), "", [ToolCall("add", each)]) for each in KEPT}
CASES |= {each[:20]: (odd(each), odd(each), []) for each in NO_CALLS}


@pytest.mark.parametrize("case", CASES)
@example([])
@settings(max_examples=20)
@given(st.lists(st.integers(0, 80), max_size=6))
def test_calls_in_a_text_however_it_is_cut(case: str, cuts: list[int]):
    text, *expected = CASES[case]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    separator = AnswerText(AnswerForm(HERMES, ("<think>", "</think>"), shows_tools=True), {})
    parts = [separator.push(text[a:b]) for a, b in pairwise(edges)] + [separator.push("", is_end=True)]
    thought, content = (
        "".join(part.texts().get(each, "") for part in parts) for each in ("reasoning_content", "content")
    )
    assert (content, [call for part in parts for call in part.calls], thought) == (*expected, "")[:3]


HALF = '"\\ud83d"'  # of a character: no client can send it back
UNREADABLE = {
    "qwen3.5": f"<tool_call><function=a></function><function=a><parameter=b>{HALF}</parameter></function></tool_call>",
    "glm": f"<tool_call>a<arg_key>b</arg_key><arg_value>{HALF}</arg_value></tool_call>",
    "lfm2": f"<|tool_call_start|>[a(b=1), a(b={HALF})]<|tool_call_end|>",
    "granite": f'<|tool_call|>[{{"name": "a", "arguments": {{}}}}, {{"name": "a", "arguments": {{"b": {HALF}}}}}]',
    "mistral": f'[TOOL_CALLS]a[ARGS]{{}}[TOOL_CALLS]a[ARGS]{{"b": {HALF}}}',
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_calls_are_text_where_one_of_them_cannot_be_read(name: str):
    """None of them vanishes."""
    form, texts = AnswerForm(FAMILIES[name].form, None, shows_tools=True), UNREADABLE[name]
    found = AnswerText(form, {}).push(texts, is_end=True)
    assert (found.texts(), found.calls) == ({"content": texts}, [])
    assert AnswerText(form, {}).push(texts.replace(HALF, '"c"'), is_end=True).calls


def test_text_that_is_no_tag_is_not_held_back():
    assert AnswerText(AnswerForm(None, None, shows_tools=False)).push("1 < 2 and 3").content == [(0, "1 < 2 and 3")]


@pytest.mark.parametrize("arguments", [*KEPT, "{}"])
def test_odd_arguments_can_be_sent_back(arguments: str):
    function = {"name": "add", "arguments": arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert world("hermes").chat_call(messages=[USER, message], tools=TOOLS).messages is not None


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("3", {"type": "string"}, '"3"'),
        ("3", {"enum": ["3", "4"]}, '"3"'),
        ("3", {"const": "3"}, '"3"'),
        ("3", {"$ref": "#/$defs/text"}, '"3"'),
        ("3", {"$ref": "#/$defs/text", "description": "a text"}, '"3"'),
        ("3", {"allOf": [{"anyOf": [{"type": "string"}]}]}, '"3"'),
        ("3", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"3"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        (" 3\n", {"type": "integer"}, "3"),
        ("(1e999,)", {"type": "array"}, '"(1e999,)"'),
        ("3", {}, "3"),
        ("3.10", {"type": "number"}, "3.10"),
        ("True", {"type": "boolean"}, "true"),
        ("{'a': None}", {"type": "object"}, '{"a": null}'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("1e999", {"type": "number"}, "1e999"),
        ("é", {"type": "integer"}, '"é"'),
        ("5", {"$ref": "#/$defs/loop"}, "5"),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(text: str, schema: Any, expected: str):
    root = {"$defs": {"text": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
    assert typed(text, schema, root) == expected


@pytest.mark.parametrize(
    ("name", "tool", "problem"),
    [
        ("qwen3.5", {"name": "a", "parameters": {"anyOf": []}}, "'anyOf' of parameters"),
        ("glm", {"name": "a", "parameters": {"properties": {"b": {"type": "string", "pattern": "a+"}}}}, "pattern"),
        ("lfm2", {"name": "a-b"}, "the name 'a-b'"),
        ("llama-4", {"name": "a-b"}, "the name 'a-b'"),
    ],
)
def test_calls_that_a_form_cannot_write_are_not_forced(name: str, tool: dict[str, Any], problem: str):
    with pytest.raises(ApiError, match=problem) as error:
        world(name).chat_call(tools=[{"type": "function", "function": tool}], tool_choice="required")
    assert (error.value.status_code, error.value.param) == (400, "tool_choice")
