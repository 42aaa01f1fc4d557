"""Answers in none of our forms: the parser of transformers reads them, by the tokenizer's ``response_template``."""

import json
import warnings
from importlib import import_module
from typing import Any

from draftheads.decode.answer_forms.form import Schemas, ToolCall
from draftheads.decode.answer_forms.json_calls import call_of_object
from draftheads.errors import ChatTemplateWarning

_PARSER = "transformers.utils.chat_parsing"  # since 5.13
_FIELDS = {"content", "reasoning_content", "thinking", "tool_calls"}  # thinking is the older name
_ERRORS = (ValueError, KeyError, TypeError, AttributeError)  # of templates, and of texts that do not fit them


def response_template(tokenizer: Any) -> Any:
    """The tokenizer's own; None if there is none, or one that cannot be used, as a warning says."""
    given = getattr(tokenizer, "response_template", None)
    if given is not None:
        try:
            import_module(_PARSER).ResponseParser(given, "")
        except _ERRORS as error:
            warnings.warn(f"the tokenizer's response_template is not used: {error}", ChatTemplateWarning, stacklevel=2)
            given = None
    return given


def read_by(template: Any, prefix: str, text: str, schemas: Schemas) -> tuple[str, str, list[ToolCall], bool] | None:
    """Thought, content and calls of an answer, and whether its end ends a call; None if it cannot be read."""
    tools = [{"name": name, "parameters": schema} for name, schema in schemas.items()]
    try:
        parser = import_module(_PARSER).ResponseParser(template, prefix, tools=tools)
        events = parser.feed(text)
        message, last = parser.finalize()
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [call_of_object(each, json.dumps(each, ensure_ascii=False)) for each in functions]
    except _ERRORS:
        return None
    thought, content = message.get("reasoning_content") or message.get("thinking", ""), message.get("content", "")
    closed = [(each["field"], each["value"]) for each in (*events, *last) if each["type"] == "region_close"]
    lost = [field for field, value in closed if field not in _FIELDS or (field == "content" and value not in content)]
    if lost or None in calls or not (thought or content or calls):
        return None
    is_open = "tool_calls" in {event["field"] for event in last}
    return thought, content, [call for each in calls for call in each or ()], is_open
