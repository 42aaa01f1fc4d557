"""Calls whose arguments are texts in tags of their own, which the functions' schemas give their types."""

import re
from collections.abc import Callable

from draftheads.decode.answer_forms.form import CallForm, Members, Schemas, ToolCall, call_of, json_of_pairs

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_NAME = re.compile(r"\s*(?P<name>[^\s<{\[]+)\s*(?P<body>.*)", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _reader(call: re.Pattern[str], pair: re.Pattern[str]) -> Callable[[str, Schemas], list[ToolCall] | None]:
    def read(text: str, schemas: Schemas) -> list[ToolCall] | None:
        calls, at = list[ToolCall](), 0
        while text[at:].strip():
            found = call.match(text, at)
            if found is None or pair.sub("", found["body"]).strip():
                return None
            name = found["name"].strip()
            one = call_of(name, json_of_pairs(pair.findall(found["body"]), schemas.get(name, {})))
            if one is None:
                return None
            calls += one
            at = found.end()
        return calls or None

    return read


XML = CallForm(
    "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>",
    ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "", "\n</tool_call>"),
    ("<function=", ">\n", "</function>"),
    read=_reader(_FUNCTION, _PARAMETER),
    tags=("<tool_call>",),
    closings=("</tool_call>",),
    members=Members("<parameter={}>\n", "\n</parameter>\n", "", ""),
    pattern="<function=",
)
GLM = CallForm(
    "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
    ("<tool_call>", "</tool_call>\n<tool_call>", "", "</tool_call>"),
    ("", "\n", ""),
    read=_reader(_NAME, _PAIR),
    tags=("<tool_call>",),
    closings=("</tool_call>",),
    members=Members("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "", ""),
    pattern="<arg_key>",
    tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
