"""The messages of a chat request, as a chat template reads them, and their token ids."""

import json
from typing import Any

from draftheads.decode.engine import Engine
from draftheads.errors import DraftHeadsError, InvalidPrompt
from draftheads.models.chat_template import render, template_of
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.fields import Fields
from draftheads.serve.http_limits import HttpLimits
from draftheads.serve.tools import OPEN, ToolUse, check_template
from draftheads.utils.messages import ROLES, half_character


def read_messages(fields: Fields, limits: HttpLimits) -> list[dict[str, Any]]:
    """The messages, their contents as one text each.

    Raises:
        ApiError: a field is wrong.
    """
    values = fields.list("messages", most=limits.messages)
    if not values:
        raise fields.wrong("messages", "is missing or empty")
    return [_message(fields, f"messages[{number}]", value) for number, value in enumerate(values)]


def prompt_ids_of(engine: Engine, messages: list[dict[str, Any]], tools: ToolUse | None) -> list[int]:
    """Token ids of a chat up to where its answer begins.

    Raises:
        ApiError: the template is missing, refuses the messages, or has no tools; or the prompt is too long.
    """
    model = engine.model
    if template_of(model) is None:
        raise ApiError(
            400,
            f"{model.model_id} has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
        )
    if tools is not None:
        check_template(model)
    try:
        if tools is None and all(message.keys() == {"role", "content"} for message in messages):
            return engine.encode(messages)
        return engine.encode(_with_tools(engine, messages, tools))
    except DraftHeadsError as error:
        raise api_error_of(error, param="messages") from None


def _with_tools(engine: Engine, messages: list[dict[str, Any]], tools: ToolUse | None) -> list[int]:
    try:
        text = render(
            engine.model, messages, add_generation_prompt=True, tools=None if tools is None else list(tools.tools)
        )
    except Exception as error:  # a template is a program of the model's author: it may refuse in any way
        raise InvalidPrompt(f"the model's chat template refuses these messages: {error}") from error
    if problem := half_character(text):  # of a call or a tool
        raise InvalidPrompt(f"the chat {problem}")
    if tools is not None and tools.forced:
        text += f"{OPEN}\n"  # the answer is the call itself
    return list(engine.model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _message(fields: Fields, place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.wrong(place, "must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise fields.wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    content = _content(fields, f"{place}.content", value.get("content"), needed=not value.get("tool_calls"))
    # models know no "developer", which is what OpenAI's API calls the system now
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if value.get("tool_calls"):
        found["tool_calls"] = _calls(fields, f"{place}.tool_calls", value["tool_calls"])
    if role == "tool" and isinstance(value.get("tool_call_id"), str):
        found["tool_call_id"] = value["tool_call_id"]
    return found


def _content(fields: Fields, place: str, value: Any, *, needed: bool) -> str:
    if value is None and not needed:
        return ""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise fields.wrong(place, "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise fields.wrong(
                f"{place}[{number}]", "must be a part of type text, with its text: the model reads only text"
            )
        texts.append(part["text"])
    text = "\n".join(texts)
    if problem := half_character(text):
        raise fields.wrong(place, problem)
    return text


def _calls(fields: Fields, place: str, values: Any) -> list[dict[str, Any]]:
    """Earlier calls; templates read their arguments as values, and the API has them as JSON text."""
    if not isinstance(values, list):
        raise fields.wrong(place, "must be a list of calls")
    calls = []
    for number, value in enumerate(values):
        match value:
            case {"function": {"name": str(name), "arguments": str(arguments)}}:
                try:
                    parsed = json.loads(arguments or "{}")
                except (ValueError, RecursionError) as error:
                    problem = f"is not valid JSON: {error}"
                    raise fields.wrong(f"{place}[{number}].function.arguments", problem) from None
                calls.append({**value, "type": "function", "function": {"name": name, "arguments": parsed}})
            case _:
                raise fields.wrong(f"{place}[{number}]", "must have a function with name and arguments")
    return calls
