"""Calls as Python writes them: ``[f(a=1, b="x")]``."""

import ast
import json
import keyword
import re
import warnings
from contextlib import suppress

from draftheads.decode.answer_forms.form import NO_VALUE, CallForm, Members, Schemas, ToolCall, call_of, value_text

_MARK = "_is_no_keyword_of_python_"
_KEYWORD = re.compile(rf"(?<![\w.\"'])({'|'.join(keyword.kwlist)})(?==[^=])")


def _read(text: str, schemas: Schemas) -> list[ToolCall] | None:
    source = _KEYWORD.sub(rf"{_MARK}\1", text)
    with warnings.catch_warnings(action="ignore"), suppress(*NO_VALUE):
        tree = ast.parse(source, mode="eval").body
        calls = [call_of(*_call(node, source)) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
        return None if None in calls else [call for each in calls for call in each or ()] or None
    return None


def _call(node: ast.AST, source: str) -> tuple[str, str]:
    """Its name and arguments."""
    if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
        raise ValueError
    pairs = ((str(each.arg), ast.get_source_segment(source, each.value) or "") for each in node.keywords)
    members = [f"{json.dumps(name)}: {value_text(value)}" for name, value in pairs]
    return ast.unparse(node.func), f"{{{', '.join(members)}}}".replace(_MARK, "")


_AS_KEYWORDS = Members("{}=", "", ", ", None)
LFM2 = CallForm(
    '<|tool_call_start|>[name(key="value")]<|tool_call_end|>',
    ("<|tool_call_start|>[", ", ", "]", "<|tool_call_end|>"),
    *(("", "(", ")"), _read, ("<|tool_call_start|>",), ("<|tool_call_end|>",), _AS_KEYWORDS),
    needs_identifiers=True,
)
PYTHONIC = CallForm(
    '[name(key="value")]',
    ("[", ", ", "]", ""),
    *(("", "(", ")"), _read, ("<|python_start|>",), ("<|python_end|>",), _AS_KEYWORDS),
    needs_identifiers=True,
    pattern=r"\[(func_name1|probe_of_template)\(|<\|python_start\|>",
    first=lambda schemas: [f"[{name}(" for name in schemas],
)
