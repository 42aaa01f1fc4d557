"""Answers in channels: those of gpt-oss (harmony) and of Gemma-4."""

import json
import re

from draftheads.decode.answer_forms.form import CallForm, Members, Schemas, ToolCall, call_of

_TO = re.compile(r".*?functions\.(?P<name>[\w.-]+).*?<\|message\|>(?P<arguments>.*)", re.DOTALL)
_FINAL = "<|channel|>final<|message|>"
_STRING = re.compile(r'<\|"\|>(.*?)(?:<\|"\|>|$)|("(?:[^"\\]|\\.)*")|([A-Za-z_][\w.-]*)\s*(?=:)', re.DOTALL)
_CALL = re.compile(r"call:(?P<name>[^\s{]+?)\s*(?P<arguments>\{.*)", re.DOTALL)


def _read_harmony(text: str, schemas: Schemas) -> list[ToolCall] | None:
    found = _TO.fullmatch(text)
    return call_of(found["name"], found["arguments"]) if found else None


def _read_gemma(text: str, schemas: Schemas) -> list[ToolCall] | None:
    found = _CALL.fullmatch(text)
    return call_of(found["name"], _STRING.sub(_as_json, found["arguments"])) if found else None


def _as_json(found: re.Match[str]) -> str:
    return found[2] or json.dumps(found[3] or found[1] or "", ensure_ascii=False)


HARMONY = CallForm(
    "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}",
    ("<|channel|>commentary to=functions.", None, "", ""),
    *(("", " <|constrain|>json<|message|>", ""), _read_harmony),
    ("<|channel|>commentary to=", "<|channel|>analysis to=", "<|start|>assistant to="),
    ("<|call|>", "<|end|>"),
    pattern=r"<\|channel\|>",
    first=lambda _: (" to=functions.",),
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
    marks=(
        *(_FINAL, "<|channel|>final <|constrain|>json<|message|>", "<|channel|>commentary<|message|>"),
        *("<|start|>assistant", "<|end|>", "<|call|>", "<|return|>"),
    ),
    tokens=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
    text_opening=_FINAL,
)
GEMMA_4 = CallForm(
    '<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>',
    ("<|tool_call>call:", "<tool_call|><|tool_call>call:", "", "<tool_call|>"),
    *(("", "{", "}"), _read_gemma, ("<|tool_call>",), ("<tool_call|>",), Members("{}:", "", ",", '<|"|>')),
    thinking=("<|channel>thought", "<channel|>"),
    tokens=("<|tool_call>", "<|channel>", "<channel|>", '<|"|>'),
)
