"""Answers in none of our forms: the parser of transformers reads them, by the tokenizer's ``response_template``."""

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from draftheads.decode.answer_forms.form import Schemas, ToolCall
from draftheads.decode.answer_forms.json_calls import call_of_object
from draftheads.errors import ChatTemplateWarning

Parse = Callable[[dict[str, Any]], Any]  # as :func:`parsed`, such as in another process
_PARSER = "transformers.utils.chat_parsing"  # since 5.13
_FIELDS = {"content", "reasoning_content", "thinking", "tool_calls"}  # thinking is the older name


def usable_template(tokenizer: Any) -> Any:
    """The tokenizer's own; None if there is none, or one that cannot be used, as a warning says."""
    given = getattr(tokenizer, "response_template", None)
    if given is not None:
        try:
            import_module(_PARSER).ResponseParser(given, "")
        except Exception as error:  # noqa: BLE001 - a template may fail in any way
            why = "install transformers 5.13 or later, which can read it" if isinstance(error, ImportError) else error
            warnings.warn(f"the tokenizer's response_template is not used: {why}", ChatTemplateWarning, stacklevel=2)
            given = None
    return given


def parsed(call: dict[str, Any]) -> Any:
    """What the parser makes of a text: the message, and the events before and at the end."""
    text, arguments = call["text"], {name: call[name] for name in ("response_template", "prefix", "tools")}
    parser = import_module(_PARSER).ResponseParser(**arguments)
    events = parser.feed(text)
    return *parser.finalize(), events


def read_by(
    template: Any, prefix: str, text: str, schemas: Schemas, parse: Parse = parsed
) -> tuple[str, str, list[ToolCall], bool] | None:
    """Thought, content and calls of an answer, and whether its end ends a call; None if it cannot be read."""
    tools = [{"name": name, "parameters": schema} for name, schema in schemas.items()]
    try:
        message, last, events = parse({"response_template": template, "prefix": prefix, "text": text, "tools": tools})
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [call_of_object(each, json.dumps(each, ensure_ascii=False)) for each in functions]
    except Exception:  # noqa: BLE001 - a template may fail in any way, and a process for it, too
        return None
    thought, content = message.get("reasoning_content") or message.get("thinking", ""), message.get("content", "")
    closed = [(each["field"], each["value"]) for each in (*events, *last) if each["type"] == "region_close"]
    lost = [field for field, value in closed if field not in _FIELDS or (field == "content" and value not in content)]
    if lost or None in calls or not (thought or content or calls):
        return None
    is_open = "tool_calls" in {event["field"] for event in last}
    return thought, content, [call for each in calls for call in each or ()], is_open
