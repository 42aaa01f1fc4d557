"""The messages of a chat request, as a chat template reads them, and their token ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, Json, WithJsonSchema

from draftheads.errors import DraftHeadsError, InvalidPrompt, first_line
from draftheads.models.chat_template import (
    effort_variables,
    render,
    reserved_names,
    template_of,
    thinking_tags,
    token_ids_of,
)
from draftheads.models.model import TargetModel
from draftheads.models.model_names import shown_name
from draftheads.serve.fields import ApiError, Fields, NoEffect, api_error_of, text_or_list, wrong
from draftheads.serve.request_params import CommonFields, RequestParams
from draftheads.serve.tools import OPEN, ToolUse, check_template
from draftheads.utils.messages import ROLES, half_character


def _as_json(arguments: Any) -> Any:
    """Arguments as JSON; clients also send none of them, "null" and objects."""
    if isinstance(arguments, str):
        return "{}" if arguments.strip() in ("", "null") else arguments
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


# values of the arguments of a call; the API has them as JSON text
Arguments = Annotated[Json[Any], BeforeValidator(_as_json, json_schema_input_type=str)]


class _Function(Fields):
    name: str
    arguments: Arguments = Field({})


class _Call(Fields):
    """An earlier call."""

    function: _Function
    type: Literal["function"] = "function"
    id: str | None = None
    index: NoEffect = None  # of a stream


class _TextPart(Fields):
    type: Literal["text", "input_text", "output_text"]  # the model reads only text
    text: str
    annotations: NoEffect = None  # of an answer that is sent back
    logprobs: NoEffect = None


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in text_or_list(content)]


Texts = Annotated[  # with all errors of a list, a request takes seconds
    list[_TextPart], FailFast(), BeforeValidator(_parts, json_schema_input_type=str | list[str | _TextPart])
]


_CONTENT: dict[str, Any] = {  # what for_template reads
    "required": ["role"],
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ],
}


class Message(Fields, json_schema_extra=_CONTENT):
    """One message."""

    role: Annotated[Any, WithJsonSchema({"enum": ROLES})] = None
    content: Texts = Field([])
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer servers' name of it
    tool_calls: Annotated[list[_Call], FailFast()] = Field([])
    tool_call_id: Any = None
    annotations: NoEffect = None  # of an answer that is sent back

    def for_template(self, place: str) -> dict[str, Any]:
        """The message as a chat template reads it."""
        if self.role not in ROLES:
            raise wrong(f"{place}.role", f"is {short_repr(self.role)}; it must be one of {', '.join(ROLES)}")
        if not self.tool_calls and "content" not in self.model_fields_set:
            raise wrong(f"{place}.content", "is missing; it must be a string or a list of text parts")
        message = message_of(self.role, self.content, f"{place}.content")
        message |= self.model_dump(include={"name", "reasoning_content"}, exclude_none=True)
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(call.function.name, call.function.arguments, call.id) for call in self.tool_calls
            ]
        if self.role == "tool" and isinstance(self.tool_call_id, str):
            message["tool_call_id"] = self.tool_call_id
        return message


def message_of(role: str, content: list[_TextPart] | str, place: str) -> dict[str, Any]:
    """A message as a chat template reads it."""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    if problem := half_character(text):
        raise wrong(place, problem)
    # models know no "developer", which is what OpenAI's API calls the system now
    return {"role": "system" if role == "developer" else role, "content": text}


def tool_call(name: str, arguments: Any, call_id: str | None) -> dict[str, Any]:
    """An earlier call as a chat template reads it, with its arguments as values."""
    call = {"function": {"name": name, "arguments": arguments}, "type": "function"}
    return call if call_id is None else {**call, "id": call_id}


@dataclass(frozen=True)
class Thinking:
    """How a model thinks before its answer."""

    tags: tuple[str, str]  # around the thought
    has_begun: bool  # whether the prompt ends in the thought


class ChatBody(CommonFields):
    """Fields of the routes of chats. Those about the chat template are as in vLLM."""

    names: ClassVar[Mapping[str, str]] = {}  # of fields in errors: "messages", "form", "effort", "max_tokens"

    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        raise NotImplementedError

    def tool_use(self) -> ToolUse | None:
        """What the request says of its tools; None if there are none, or none may be called."""
        raise NotImplementedError

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        raise NotImplementedError

    def read_prompt(
        self, params: RequestParams, messages: list[dict[str, Any]], tools: ToolUse | None
    ) -> tuple[list[int], Thinking | None]:
        """Token ids of the chat up to where its answer begins, and the thoughts that the answer may have."""
        model, param = params.engine.model, self.names["messages"]
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("continue_final_message", "begins no new message: send add_generation_prompt: false with it")
        if tools is not None and tools.forced and not self.add_generation_prompt:
            raise wrong("add_generation_prompt", "is false; a forced call begins a new message: use tool_choice auto")
        variables = self._variables(model)
        if template_of(model) is None:
            name = shown_name(model.model_id)
            fix = "use /v1/completions, or start the server with --chat-template"
            raise ApiError(400, f"{name} has no chat template: {fix}", param=param)
        if tools is not None:
            check_template(model)
        try:
            text = self._rendered(model, messages, tools, variables)
            thinking = None
            has_form = params.settings.grammar is not None  # which decides on the whole answer: it is no thought
            if tags := thinking_tags(model):
                # only the words of the model itself can begin a thought
                begun = str(messages[-1]["content"]) if self.continue_final_message else text.rstrip()[-len(tags[0]) :]
                thinking = Thinking(tags, begun.rfind(tags[0]) > begun.rfind(tags[1]))
                if thinking.has_begun and has_form:
                    text += f"\n{tags[1]}\n\n"
            if tools is not None and tools.forced:
                text += f"{OPEN}\n"  # the answer is the call itself
            ids = params.engine.encode(token_ids_of(model, text, add_special_tokens=False))
        except DraftHeadsError as error:
            raise api_error_of(error, param=param) from None
        return ids, None if has_form else thinking

    def _variables(self, model: TargetModel) -> dict[str, Any]:
        """Those of the chat template, with what the effort means for it."""
        given, param = dict(self.chat_template_kwargs), self.names["effort"]
        if reserved := given.keys() & reserved_names(model):
            raise wrong(f"chat_template_kwargs.{min(reserved)}", "is not a variable that can be set here: leave it out")
        if self.effort is None:
            return given
        if "reasoning_effort" in given:
            raise wrong(param, "and chat_template_kwargs.reasoning_effort exclude each other: send one of them")
        if (of_effort := effort_variables(model, self.effort)) is None:
            problem = f"but the chat template of {shown_name(model.model_id)} has no reasoning_effort"
            fix = "leave it out, or send what the template reads in chat_template_kwargs"
            raise wrong(param, f"is {self.effort!r}, {problem}: {fix}")
        return {**of_effort, **given}

    def _rendered(
        self, model: TargetModel, messages: list[dict[str, Any]], tools: ToolUse | None, variables: dict[str, Any]
    ) -> str:
        """The text of the chat."""
        try:
            text = render(
                model,
                messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=None if tools is None else list(tools.tools),
                variables=variables,
            )
        except Exception as error:  # a template is a program of the model's author: it may refuse in any way
            raise InvalidPrompt(f"the model's chat template refuses these messages: {first_line(error)}") from error
        if problem := half_character(text):  # of a call, a tool or a variable
            raise InvalidPrompt(f"the chat {problem}")
        return text
