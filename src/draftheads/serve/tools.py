"""Tool calls in Hermes' form, ``<tool_call>{"name": …, "arguments": …}</tool_call>``: the fields, and calls in text."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftheads.models.chat_template import render
from draftheads.models.model import TargetModel
from draftheads.serve.api_error import ApiError
from draftheads.serve.body import depth_of
from draftheads.serve.fields import Fields
from draftheads.serve.http_limits import HttpLimits
from draftheads.settings import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # llguidance's options
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAYBE_OPEN = re.compile(r"\s*(?:" + "|".join(re.escape(OPEN[:n]) for n in range(len(OPEN), -1, -1)) + r")\Z")


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
        rules = [f"start: {' | '.join(f'call{i}' for i in range(len(self.forced)))}"]
        for i, name in enumerate(self.forced):
            schema = next(_function(tool).get("parameters") for tool in self.tools if _function(tool)["name"] == name)
            start = json.dumps(f'{{"name": "{name}", "arguments": ')
            schema = {**(schema or _NOTHING), "x-guidance": _ONE_LINE}
            rules += [f'call{i}: {start} arguments{i} "}}"', f"arguments{i}: %json {json.dumps(schema)}"]
        return Grammar.lark("\n".join(rules))


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer."""

    name: str
    arguments: str  # JSON

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """In OpenAI's form; calls in streams have an index."""
        own = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**own, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def read_tools(fields: Fields, limits: HttpLimits) -> ToolUse | None:
    """The tools of a request; None if there are none, or none may be called.

    Raises:
        ApiError: a field is wrong.
    """
    values = fields.list("tools", most=limits.tools)
    choice = fields.any("tool_choice", "auto")
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not values:
        if choice not in ("auto", "none"):
            raise fields.wrong("tool_choice", "needs tools")
        return None
    for number, tool in enumerate(values):
        _check_tool(fields, f"tools[{number}]", tool)
    check_schema(fields, "tools", values, limits)
    names = tuple(dict.fromkeys(_function(tool)["name"] for tool in values))
    if len(names) < len(values):
        raise fields.wrong("tools", "has two functions of the same name")
    return _chosen(fields, choice, ToolUse(tuple(values), parallel=parallel), names)


def _chosen(fields: Fields, choice: Any, use: ToolUse, names: tuple[str, ...]) -> ToolUse | None:
    match choice:
        case "none":
            return None
        case "auto":
            return use
        case "required":
            return ToolUse(use.tools, names, use.parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise fields.wrong(
                    "tool_choice", f"names {name[:80]!r}, which is not among the tools: {', '.join(names)}"
                )
            return ToolUse(use.tools, (name,), use.parallel)
    raise fields.wrong(
        "tool_choice", 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    )


def _check_tool(fields: Fields, place: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise fields.wrong(place, 'must be {"type": "function", "function": {"name": …, "parameters": {…}}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise fields.wrong(f"{place}.function.name", "must have 1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise fields.wrong(f"{place}.function.parameters", "must be a JSON schema")


def check_schema(fields: Fields, field: str, schema: Any, limits: HttpLimits) -> None:
    """Refuses a JSON schema that is too large or nested too deeply.

    Raises:
        ApiError: it is.
    """
    if (size := len(json.dumps(schema))) > limits.schema_bytes:
        raise fields.wrong(field, f"has {size} bytes; it must have at most {limits.schema_bytes}")
    if (depth := depth_of(schema)) > limits.schema_depth:
        raise fields.wrong(field, f"is nested {depth} levels deep; it must be at most {limits.schema_depth}")


def check_template(model: TargetModel) -> None:
    """Does the model's chat template show tools to the model, in Hermes' form?

    Raises:
        ApiError: it does not.
    """
    probe = {"type": "function", "function": {"name": "probe_of_template", "description": "", "parameters": _NOTHING}}
    try:
        text = render(model, [{"role": "user", "content": "?"}], tools=[probe])
    except Exception as error:  # noqa: BLE001 - a template is a program of the model's author
        text = str(error)
    if "probe_of_template" not in text or OPEN not in text:
        raise ApiError(
            400,
            f"the chat template of {model.model_id} has no tools in Hermes' form ({OPEN}): leave tools out, or start "
            "the server with a template that has, such as --chat-template hermes",
            param="tools",
        )


def forced_call(text: str) -> ToolCall | None:
    """The call that is the whole answer; None if it was cut."""
    return _call_of(text)


class ToolCallText:
    """Finds the calls in a text that comes in pieces.

    >>> text = ToolCallText()
    >>> text.push('Let me see. <tool'), text.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (('Let me see.', []), ('', [ToolCall(name='add', arguments='{"a": 1}')]))
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._called = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Adds text; returns the new text outside of calls, and the calls that ended."""
        self._held += text
        content, calls = "", list[ToolCall]()
        while True:
            if self._inside:
                inside, end, rest = self._held.partition(CLOSE)
                if not end:
                    return content, calls
                call = _call_of(inside)
                content += "" if call else f"{OPEN}{inside}{CLOSE}"
                calls += [call] if call else []
                self._held, self._inside, self._called = rest, False, True
            if self._called:
                self._held = self._held.lstrip()
            outside, start, rest = self._held.partition(OPEN)
            if not start:
                match = _MAYBE_OPEN.search(self._held)
                cut = match.start() if match else len(self._held)
                content, self._held = content + self._held[:cut], self._held[cut:]
                return content, calls
            content += outside.rstrip()
            self._held, self._inside = rest, True

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The text has ended."""
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        call = _call_of(held)  # the end of the answer can take the place of the closing tag
        return ("", [call]) if call else (OPEN + held, [])


def _call_of(text: str) -> ToolCall | None:
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


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"])


def calls_as_json(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The calls of a whole answer."""
    return [call.as_json() for call in calls]
