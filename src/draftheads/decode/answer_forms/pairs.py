"""Calls whose arguments are texts in tags of their own, which the functions' schemas give their types."""

import re
from collections.abc import Mapping
from typing import Any

from draftheads.decode.answer_forms.form import CallForm, Lark, ReadCalls, Schemas, ToolCall, call_of_pairs

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_NAME = re.compile(r"\s*(?P<name>[^\s<{\[]+)\s*(?P<body>.*)", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _reader(call: re.Pattern[str], pair: re.Pattern[str]) -> ReadCalls:
    def read(text: str, schemas: Schemas, *, is_cut: bool = False) -> list[ToolCall] | None:
        calls, at = list[ToolCall](), 0
        while text[at:].strip():
            found = call.match(text, at)
            if found is None or (pair.sub("", found["body"]).strip() and not is_cut):
                return calls if is_cut and calls else None
            calls += call_of_pairs(found["name"], pair.findall(found["body"]), schemas, is_cut=is_cut) or []
            at = found.end()
        return calls or None

    return read


def _write_xml(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    beginning = f"<function={name}>\n"
    members = lark.members(schema, lambda key: f"<parameter={key}>\n", "\n</parameter>\n", "", "")
    return f"{lark.text(beginning)} {members} {lark.text('</function>')}"


def _write_pairs(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    beginning, end = f"{name}\n", "</arg_value>\n"
    members = lark.members(schema, lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>", end, "", "")
    return f"{lark.text(beginning)} {members}"


XML = CallForm(
    "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>",
    ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "", "\n</tool_call>"),
    *(_reader(_FUNCTION, _PARAMETER), _write_xml, ("<tool_call>",), ("</tool_call>",)),
    pattern="<function=",
)
GLM = CallForm(
    "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
    ("<tool_call>", "</tool_call>\n<tool_call>", "", "</tool_call>"),
    *(_reader(_NAME, _PAIR), _write_pairs, ("<tool_call>",), ("</tool_call>",)),
    pattern="<arg_key>",
    tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
