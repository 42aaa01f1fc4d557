"""Tool calls in Hermes' form, ``<tool_call>{"name": …, "arguments": …}</tool_call>``: the fields, and calls in text."""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, WithJsonSchema

from draftheads.decode.grammar import ONE_LINE
from draftheads.decode.text import TaggedText
from draftheads.models.chat_template import CALL_TAGS, render
from draftheads.models.model import TargetModel
from draftheads.models.model_names import shown_name
from draftheads.serve.fields import ApiError, Fields, check_schema, only, wrong
from draftheads.settings import Grammar
from draftheads.utils.messages import short

OPEN, CLOSE = CALL_TAGS
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CHOSEN = {"type": {"const": "function"}, "function": _NAMED}
_FUNCTION = {"type": "object", "properties": _CHOSEN, "required": ["type", "function"]}
_LISTED = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _FUNCTION}}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {"type": "object", "properties": _LISTED, "required": ["mode", "tools"]},
    },
    "required": ["type", "allowed_tools"],
}
TOOL_CHOICE: dict[str, Any] = {"anyOf": [{"enum": ["none", "auto", "required"]}, _FUNCTION, _ALLOWED]}  # what is read
_NOT_SHOWN = {"async", "cache_control", "allowed_callers", "defer_loading"}  # to the model, of a tool
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools."""

    tools: tuple[dict[str, Any], ...]  # for the chat template
    forced: tuple[str, ...] = ()  # one of these must be called; none: the model decides
    parallel: bool = True  # an answer may have several calls

    def grammar(self) -> Grammar | None:
        """Of an answer that is one of the forced calls, without its tags; None if the model decides."""
        if not self.forced:
            return None
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}
        rules = [f"start: {' | '.join(f'call{i}' for i in range(len(self.forced)))}"]
        for i, name in enumerate(self.forced):
            start = json.dumps(f'{{"name": "{name}", "arguments": ')
            schema = {**(parameters[name] or _NOTHING), "x-guidance": ONE_LINE}
            rules += [f'call{i}: {start} arguments{i} "}}"', f"arguments{i}: %json {json.dumps(schema)}"]
        return Grammar.lark("\n".join(rules))


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer."""

    name: str
    arguments: str  # JSON

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """In OpenAI's form; calls in streams have an index."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _tool_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"is {short(repr(name))}; it must have 1 to 64 letters, digits, _ or -")
    return name


ToolName = Annotated[
    str, AfterValidator(_tool_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]


FunctionType = Annotated[
    Literal["function"], only("function", fix="only functions can be called here: leave this tool out")
]


class _Function(Fields, extra="ignore"):
    name: ToolName
    parameters: dict[str, Any] = Field({})


class Tool(Fields, extra="ignore"):
    """A tool of a chat."""

    type: FunctionType
    function: _Function


def as_sent(kind: type[Fields]) -> BeforeValidator:
    """Checks a list of tools of a kind, which stay as they were sent.

    Templates show all of their fields, in the same order, and responses repeat them.
    """
    tools = Annotated[list[kind], Field(max_length=64)]  # type: ignore[valid-type]
    adapter: TypeAdapter[list[Any]] = TypeAdapter(tools)

    def check(given: Any) -> Any:
        names = [getattr(tool, "function", tool).name for tool in adapter.validate_python(check_schema(given))]
        if len(set(names)) < len(names):
            raise ValueError("has two functions of the same name")
        return given

    return BeforeValidator(check, json_schema_input_type=tools)


def use_of(tools: Sequence[dict[str, Any]], choice: Any, *, parallel: bool) -> ToolUse | None:
    """What the field ``tool_choice`` says of tools, in the form of either route."""
    tools = list(map(_shown, tools))
    names = tuple(tool["function"]["name"] for tool in tools)
    match choice:
        case "none":
            return None
        case "auto":
            return ToolUse(tuple(tools), (), parallel) if names else None
        case _ if not names:
            raise wrong("tool_choice", "needs tools")
        case "required":
            return ToolUse(tuple(tools), names, parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*listed]}} | {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": [*listed],
        }:
            chosen = list(map(_name_of, listed))
        case _:
            mode, chosen = "", [_name_of(choice)]
    if None in chosen:
        form = '{"type": "function", "function": {"name": …}}'
        raise wrong("tool_choice", f'must be "none", "auto", "required", {form} or a list of these in "allowed_tools"')
    for name in chosen:
        if name not in names:
            raise wrong("tool_choice", f"names {short(repr(name))}, which is not among the tools: {', '.join(names)}")
    if mode:  # the model is shown no others
        return use_of([tool for tool in tools if tool["function"]["name"] in chosen], mode, parallel=parallel)
    return ToolUse(tuple(tools), (name,), parallel)


def _name_of(chosen: Any) -> str | None:
    """Of a function that ``tool_choice`` names."""
    match chosen:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """What the model is shown of a tool."""
    shown = {key: value for key, value in tool.items() if key not in _NOT_SHOWN}
    return {**shown, "function": _shown(shown["function"])} if "function" in shown else shown


def check_template(model: TargetModel) -> None:
    """Does the model's chat template show tools to the model, in Hermes' form?"""
    probe = {"type": "function", "function": {"name": "probe_of_template", "description": "", "parameters": _NOTHING}}
    try:
        text = render(model, [{"role": "user", "content": "?"}], tools=[probe])
    except Exception as error:  # noqa: BLE001 - a template is a program of the model's author
        text = str(error)
    if "probe_of_template" not in text or OPEN not in text:
        problem = f"the chat template of {shown_name(model.model_id)} has no tools in Hermes' form ({OPEN})"
        fix = "leave tools out, or start the server with a template that has, such as --chat-template hermes"
        raise ApiError(400, f"{problem}: {fix}", param="tools")


class TrimmedText:
    """Text without the spaces beside the tags that were cut out of it."""

    def __init__(self) -> None:
        self._space = ""  # at the end of the text so far
        self._space_behind: str | None = None  # what follows a cut, which was the last thing; None: there was none
        self._has_begun = False

    def cut(self) -> None:
        self._space_behind = ""

    def push(self, text: str, *, is_end: bool = False) -> str:
        """Adds text and returns what is certain."""
        if self._space_behind is not None:
            trimmed = text.lstrip()
            self._space_behind += text[: len(text) - len(trimmed)]
            if not trimmed:
                return ""
            self._space = (self._space or self._space_behind) if self._has_begun else ""
            text, self._space_behind = trimmed, None
        text = self._space + text
        certain = text if is_end else text.rstrip()
        self._space = text[len(certain) :]
        self._has_begun |= bool(certain)
        return certain


class ToolCallText:
    """Finds the calls in a text that comes in pieces, and the thoughts, from which no call is read.

    After each piece, ``thought`` is what the model thought in it.

    >>> text = ToolCallText(("<think>", "</think>"))
    >>> text.push('Let me see. <tool'), text.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (('Let me see.', []), ('', [ToolCall(name='add', arguments='{"a": 1}')]))
    """

    def __init__(self, thinking: tuple[str, str] | None, *, in_thought: bool = False, has_tools: bool = True) -> None:
        tags = {"call": CALL_TAGS} if has_tools else {}
        tags |= {"thought": thinking} if thinking else {}
        self._parts = TaggedText(tags, "thought" if in_thought else "text")
        self._content, self._thoughts = TrimmedText(), TrimmedText()
        self._thoughts.cut()
        if in_thought:
            self._content.cut()
        self._call: str | None = None  # the text of a call that has begun
        self.thought = ""

    def push(self, text: str, *, is_end: bool = False) -> tuple[str, list[ToolCall]]:
        """Adds text; returns the new text outside of calls and thoughts, and the calls that ended."""
        content, calls = "", list[ToolCall]()
        self.thought = ""
        for kind, part in self._parts.push(text, is_end=is_end):
            if self._call is not None:
                self._call += part
                if part == CLOSE:
                    content += self._end_call(calls)
            elif part == OPEN and kind == "tag":
                self._call = OPEN
            elif kind == "tag":
                self._content.cut()
                self._thoughts.cut()
            elif kind == "thought":
                self.thought += self._thoughts.push(part)
            else:
                content += self._content.push(part)
        if is_end:
            if self._call is not None:  # the end of the answer can take the place of the closing tag
                content += self._end_call(calls)
            content += self._content.push("", is_end=True)
        return content, calls

    def _end_call(self, calls: list[ToolCall]) -> str:
        """Adds the call; a text that is none is returned."""
        text, self._call = self._call or "", None
        call = call_of(text.removeprefix(OPEN).removesuffix(CLOSE))
        if call is None:
            return self._content.push(text)
        calls.append(call)
        self._content.cut()
        return ""


def call_of(text: str) -> ToolCall | None:
    """The call in a text without its tags; None if it is none, or was cut."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        case {"name": str(name), "arguments": str(arguments)}:
            return ToolCall(name, arguments)
    return None
