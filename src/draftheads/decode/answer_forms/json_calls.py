"""Calls as JSON: ``{"name": …, "arguments": …}`` in tags, in lists or alone, and Mistral's name before the JSON."""

import re
from contextlib import suppress
from typing import Any

from draftheads.decode.answer_forms.form import CallForm, Schemas, ToolCall, call_of, raw_decode

_GAP = re.compile(r"[\s,;]*")  # between calls
_KEY = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_NAMED = re.compile(r"\s*(?P<name>[^\s\[{]+?)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?(?P<arguments>\s*\{.*)", re.DOTALL)


def json_calls(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """The calls of a text: an object, several, or a list."""
    calls, text = list[ToolCall](), text.strip()
    at = int(text.startswith("["))
    with suppress(ValueError, RecursionError):
        while (at := _GAP.match(text, at).end()) < len(text) and text[at:] != "]":  # type: ignore[union-attr]
            value, end = raw_decode(text, at)
            found = call_of_object(value, text[at:end])
            if found is None:
                return None
            calls += found
            at = end
        return calls or None
    return None


def call_of_object(value: Any, text: str) -> list[ToolCall] | None:
    """The call of an object with this text; its arguments may be a text of JSON."""
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return call_of(value.get("name"), arguments)
    for key in _KEY.finditer(text):  # the text of the arguments, as the model wrote it
        with suppress(ValueError):
            found, end = raw_decode(text, key.end())
            if found == arguments:
                return call_of(value.get("name"), text[key.end() : end])
    return None


def _bare(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """Other JSON is not a call: the name has to be that of a function."""
    calls = json_calls(text, schemas)
    return calls if calls and all(call.name in schemas for call in calls) else None


def _mistral(text: str, schemas: Schemas) -> list[ToolCall] | None:
    calls = list[ToolCall]()
    for part in text.split("[TOOL_CALLS]"):
        named = _NAMED.fullmatch(part)
        found = call_of(named["name"], named["arguments"]) if named else json_calls(part, schemas)
        if found is None:
            return None
        calls += found
    return calls


_ARGUMENTS = ('{"name": "', '", "arguments": ', "}")
HERMES = CallForm(
    '<tool_call>{"name": …, "arguments": …}</tool_call>',
    ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "", "\n</tool_call>"),
    *(_ARGUMENTS, json_calls, ("<tool_call>",), ("</tool_call>",)),
)
GRANITE = CallForm(
    '<|tool_call|>[{"name": …, "arguments": …}]',
    ("<|tool_call|>[", ", ", "]", ""),
    *(_ARGUMENTS, json_calls, ("<|tool_call|>",), ("<|/tool_call|>",)),
)
LLAMA_3 = CallForm(
    '{"name": …, "parameters": …}',
    ("", "; ", "", ""),
    *(('{"name": "', '", "parameters": ', "}"), _bare, ("<|python_tag|>",)),
    pattern=r'"name": (function name|"probe_of_template"), "parameters": (?!\{"type")',
    first=lambda _: ('{"name"', '{"type"'),
)
MISTRAL = CallForm(
    "[TOOL_CALLS]name[ARGS]{…}",
    ("[TOOL_CALLS]", "[TOOL_CALLS]", "", ""),
    *(("", "[ARGS]", ""), _mistral, ("[TOOL_CALLS]",)),
    pattern=r"\[ARGS\]",
    tokens=("[ARGS]", "[CALL_ID]"),
)
MISTRAL_LIST = CallForm(
    '[TOOL_CALLS][{"name": …, "arguments": …}]',
    ("[TOOL_CALLS][", ", ", "]", ""),
    *(_ARGUMENTS, _mistral, ("[TOOL_CALLS]",)),
)
