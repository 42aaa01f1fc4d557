"""Tool calls in texts, whole and in pieces."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftheads.models.model import TargetModel
from draftheads.serve.api_error import ApiError
from draftheads.serve.tools import ToolCall, ToolCallText, ToolUse, check_template
from serve_world import tiny_engines
from structured_world import EOS, SlowGrammar, json_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1}')
CASES = {
    "text only": ("a <b> c", "a <b> c", []),
    "call only": (CALL, "", [ADD]),
    "two calls": (f"{CALL}\n{CALL}", "", [ADD, ADD]),
    "text and call": (f"I add.\n\n{CALL}\n", "I add.", [ADD]),
    "cut before the closing tag": (CALL.removesuffix("</tool_call>"), "", [ADD]),
    "cut inside": (CALL[:30], CALL[:30], []),
    "no JSON": ("<tool_call>add</tool_call>", "<tool_call>add</tool_call>", []),
    "no arguments": ('<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
    "a beginning of a tag": ("1 <tool", "1 <tool", []),
    "spaces at the end": ("yes. \n", "yes. \n", []),
}


def parsed(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser, content, calls = ToolCallText(), "", []
    for text, found in [*map(parser.push, pieces), parser.flush()]:
        content += text
        calls += found
    return content, calls


@pytest.mark.parametrize("case", CASES)
def test_calls_in_a_whole_text(case: str):
    text, content, calls = CASES[case]
    assert parsed([text]) == (content, calls)


@given(st.sampled_from(list(CASES)), st.lists(st.integers(0, 80), max_size=6))
def test_calls_are_the_same_however_the_text_is_cut(case: str, cuts: list[int]):
    text, content, calls = CASES[case]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parsed([text[a:b] for a, b in pairwise(edges)]) == (content, calls)


def test_text_that_is_no_tag_is_not_held_back():
    assert ToolCallText().push("1 < 2 and 3") == ("1 < 2 and 3", [])


@pytest.mark.parametrize(("template", "has_tools"), [("hermes", True), ("chatml", False), ("vicuna", False)])
def test_templates_with_tools_are_found_by_rendering(template: str, has_tools: bool):
    model: TargetModel = tiny_engines(template)["tiny"].model
    if has_tools:
        check_template(model)
    else:
        with pytest.raises(ApiError, match="--chat-template hermes"):
            check_template(model)


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
