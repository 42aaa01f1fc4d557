"""The messages of a chat request, as a chat template reads them, and their token ids."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, Json, WithJsonSchema

from draftheads.decode.engine import Engine
from draftheads.errors import DraftHeadsError, InvalidPrompt
from draftheads.models.chat_template import render, template_of
from draftheads.models.prompt_text import token_ids_of
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.fields import Fields, text_or_list, wrong
from draftheads.serve.tools import OPEN, ToolUse, check_template
from draftheads.utils.messages import ROLES, half_character, short


class _Function(Fields, extra="ignore"):
    name: str
    arguments: Annotated[
        Json[Any], BeforeValidator(lambda text: "{}" if text == "" else text, json_schema_input_type=str)
    ]


class _Call(Fields, extra="allow"):
    """An earlier call. Templates read its arguments as values, and the API has them as JSON text."""

    function: _Function
    type: Any = "function"


class _TextPart(Fields, extra="ignore"):
    type: Literal["text"]  # the model reads only text
    text: str


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in text_or_list(content)]


_CONTENT: dict[str, Any] = {  # what for_template reads
    "required": ["role"],
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ],
}


class Message(Fields, extra="ignore", json_schema_extra=_CONTENT):
    """One message."""

    role: Annotated[Any, WithJsonSchema({"enum": ROLES})] = None
    content: Annotated[
        list[_TextPart], FailFast(), BeforeValidator(_parts, json_schema_input_type=str | list[str | _TextPart])
    ] = Field([])
    tool_calls: Annotated[list[_Call], FailFast()] = Field([])  # with all errors of a list, a request takes seconds
    tool_call_id: Any = None

    def for_template(self, place: str) -> dict[str, Any]:
        """The message as a chat template reads it.

        Raises:
            ApiError: a field is wrong; ``place`` names the message.
        """
        if self.role not in ROLES:
            raise wrong(f"{place}.role", f"is {short(repr(self.role))}; it must be one of {', '.join(ROLES)}")
        if not self.tool_calls and "content" not in self.model_fields_set:
            raise wrong(f"{place}.content", "is missing; it must be a string or a list of text parts")
        text = "\n".join(part.text for part in self.content)
        if problem := half_character(text):
            raise wrong(f"{place}.content", problem)
        # models know no "developer", which is what OpenAI's API calls the system now
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool" and isinstance(self.tool_call_id, str):
            message["tool_call_id"] = self.tool_call_id
        return message


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
    return token_ids_of(engine.model, text, add_special_tokens=False)
