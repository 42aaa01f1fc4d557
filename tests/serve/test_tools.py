"""Tool calls in texts, whole and in pieces."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftheads.serve.tools import ToolCall, ToolCallText, ToolUse
from structured_world import EOS, SlowGrammar, json_tokenizer

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
}


def parsed(pieces: list[str]) -> tuple[str, list[ToolCall], str]:
    parser, content, calls, thought = ToolCallText(("<think>", "</think>")), "", [], ""
    for text, found in (parser.push(piece, is_end=False) for piece in pieces):
        content += text
        calls += found
        thought += parser.thought
    text, found = parser.push("", is_end=True)
    return content + text, [*calls, *found], thought + parser.thought


@pytest.mark.parametrize("case", CASES)
@example([])
@settings(max_examples=20)
@given(st.lists(st.integers(0, 80), max_size=6))
def test_calls_in_a_text_however_it_is_cut(case: str, cuts: list[int]):
    text, *expected = CASES[case]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parsed([text[a:b] for a, b in pairwise(edges)]) == (*expected, "")[:3]


def test_text_that_is_no_tag_is_not_held_back():
    assert ToolCallText(None).push("1 < 2 and 3") == ("1 < 2 and 3", [])


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


def integers(name: str) -> dict[str, Any]:
    own = {"properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": False}
    return {"type": "object", **own}


@pytest.mark.parametrize(
    ("forced", "name", "arguments", "allowed"),
    [
        (("add",), "add", '{"a": 1}', True),
        (("sum",), "sum", '{"b": 1}', True),
        (("sum",), "add", '{"a": 1}', False),  # another function
        (("sum",), "sum", '{"a": 1}', False),  # another function's arguments
        (("add", "sum"), "sum", '{"b": 1}', True),
        (("add", "sum"), "add", '{"b": 1}', False),
        (("stop",), "stop", "{}", True),
        (("stop",), "stop", '{"a": 1}', False),  # a function without parameters
    ],
)
def test_forced_calls_have_a_forced_name_and_the_arguments_of_this_function(
    forced: tuple[str, ...], name: str, arguments: str, allowed: bool
):
    tools = (tool("add", parameters=integers("a")), tool("sum", parameters=integers("b")), tool("stop"))
    grammar = ToolUse(tools, forced).grammar()
    assert grammar is not None
    ids = json_tokenizer()(f'{{"name": "{name}", "arguments": {arguments}}}')["input_ids"]
    assert SlowGrammar(grammar).allows([*ids, EOS]) == allowed
