"""The forms of answers: calls and thoughts in texts, whole and in pieces, forced, cut off, and sent back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from byte_tokenizers import byte_level
from draftheads.decode.answer_forms import CallForm
from draftheads.decode.answer_forms.channels import GEMMA_4, HARMONY
from draftheads.decode.answer_forms.form import ToolCall
from draftheads.decode.answer_forms.json_calls import GRANITE, HERMES, LLAMA_3, MISTRAL, MISTRAL_LIST
from draftheads.decode.answer_forms.pairs import GLM, XML
from draftheads.decode.answer_forms.pythonic import LFM2, PYTHONIC
from draftheads.models.chat_template import render
from draftheads.models.pretrained import ModelTokenizer
from serve_world import Running, answered, only_read, tiny_engines

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
