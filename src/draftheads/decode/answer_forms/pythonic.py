"""Calls as Python writes them: ``[f(a=1, b="x")]``."""

import ast
import json
import keyword
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from draftheads.decode.answer_forms.form import NO_VALUE, CallForm, Lark, Schemas, ToolCall, call_of, value_text

_MARK = "_is_no_keyword_of_python_"
_KEYWORD = re.compile(rf"(?<![\w.\"'])({'|'.join(keyword.kwlist)})(?==[^=])")


def _read(text: str, schemas: Schemas, *, is_cut: bool = False) -> list[ToolCall] | None:
    source = _KEYWORD.sub(rf"{_MARK}\1", text)
    ends = [found.start() for found in re.finditer(",|$", source)] if is_cut else []
    for each in (source, *(f"{source[:end]})]" for end in reversed(ends))):
        with warnings.catch_warnings(action="ignore"), suppress(*NO_VALUE):
            tree = ast.parse(each, mode="eval").body
            calls = [_call(node, each) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
            if is_cut:  # the last one goes on
                name, arguments = calls.pop()
                return [*(ToolCall(*call) for call in calls), ToolCall(name, arguments[:-1], is_cut=True)]
            return [call for pair in calls for call in call_of(*pair) or ()] or None
    return None


def _call(node: ast.AST, source: str) -> tuple[str, str]:
    """Its name and arguments."""
    if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
        raise ValueError
    pairs = ((str(each.arg), ast.get_source_segment(source, each.value) or "") for each in node.keywords)
    members = [f"{json.dumps(name)}: {value_text(value)}" for name, value in pairs]
    return ast.unparse(node.func), f"{{{', '.join(members)}}}".replace(_MARK, "")


def _write(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    if not name.isidentifier():
        raise ValueError(f"the name {name!r}")
    return f"{lark.text(f'{name}(')} {lark.members(schema, lambda key: f'{key}=', '', ', ', None)} {lark.text(')')}"


LFM2 = CallForm(
    '<|tool_call_start|>[name(key="value")]<|tool_call_end|>',
    ("<|tool_call_start|>[", ", ", "]", "<|tool_call_end|>"),
    *(_read, _write, ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
)
PYTHONIC = CallForm(
    '[name(key="value")]',
    ("[", ", ", "]", ""),
    *(_read, _write, ("<|python_start|>",), ("<|python_end|>",)),
    pattern=r"\[(func_name1|probe_of_template)\(|<\|python_start\|>",
    first=lambda schemas: [f"[{name}(" for name in schemas],
)
