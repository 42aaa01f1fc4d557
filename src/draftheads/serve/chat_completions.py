"""``/v1/chat/completions``: its fields, messages as chat templates read them, and answers as messages or chunks."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, FailFast, Field, Json, WithJsonSchema

from draftheads.decode.request import Request, StreamEvent
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
from draftheads.serve.call import Call, DraftPieces, chat_logprobs, tokens_with_logprobs
from draftheads.serve.fields import (
    ApiError,
    Fields,
    NoEffect,
    SentFields,
    Unsupported,
    api_error_of,
    only,
    text_or_list,
    wrong,
)
from draftheads.serve.request_params import ChoiceFields, CommonFields, RequestParams, read_params
from draftheads.serve.state import Service
from draftheads.serve.tools import (
    OPEN,
    TOOL_CHOICE,
    Tool,
    ToolCall,
    ToolCallText,
    ToolUse,
    as_sent,
    call_of,
    check_template,
    use_of,
)
from draftheads.settings import MOST_LOGPROBS, Effort
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


class _Call(SentFields):
    """An earlier call."""

    type: Literal["function"] = "function"
    function: _Function
    id: str | None = None


_TextKind = Literal["text", "input_text", "output_text", "refusal"]


class _TextPart(SentFields):
    type: Annotated[_TextKind, only(*get_args(_TextKind), fix="the model reads only text: leave this part out")]
    text: str


class _RefusalPart(Fields):
    type: Literal["refusal"]
    refusal: str


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.keys() == _RefusalPart.model_fields.keys():
        return {"type": part["type"], "text": part["refusal"]}
    return {"type": "text", "text": part} if isinstance(part, str) else part


def _parts(content: Any) -> list[Any]:
    return list(map(_part, text_or_list(content)))


Texts = Annotated[  # with all errors of a list, a request takes seconds
    list[_TextPart],
    FailFast(),
    BeforeValidator(_parts, json_schema_input_type=str | list[str | _TextPart | _RefusalPart]),
]


# what for_template reads
_TEXT: Any = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_MAY_BE_EMPTY = ("assistant", "tool", "function")  # these roles need no content
_EMPTY: Any = {"properties": {"role": {"enum": _MAY_BE_EMPTY}}}


class Message(SentFields, json_schema_extra={"required": ["role"], "anyOf": [_TEXT, _EMPTY]}):
    """One message."""

    role: Annotated[Any, WithJsonSchema({"enum": ROLES})] = None
    content: Texts = Field([])
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer servers' name of it
    tool_calls: Annotated[list[_Call], FailFast()] = Field([])
    tool_call_id: Any = None
    function_call: _Function | None = None  # the older form of a call
    refusal: str | None = None  # a text that was said in place of the content
    reasoning_details: NoEffect = None  # other servers' forms of the same thought
    thinking_blocks: NoEffect = None
    audio: Annotated[Any, Unsupported("the model reads only text; send what was said as content")] = None

    def for_template(self, place: str) -> dict[str, Any]:
        """The message as a chat template reads it."""
        if self.role not in ROLES:
            raise wrong(f"{place}.role", f"is {short_repr(self.role)}; it must be one of {', '.join(ROLES)}")
        if self.role not in _MAY_BE_EMPTY and "content" not in self.model_fields_set:
            raise wrong(f"{place}.content", "is missing; it must be a string or a list of text parts")
        content = (
            self.content if self.refusal is None else [*self.content, _TextPart(type="refusal", text=self.refusal)]
        )
        message = message_of(self.role, content, f"{place}.content")
        message |= self.model_dump(include={"name", "reasoning_content"}, exclude_none=True)
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        older = [] if self.function_call is None else [_Call(function=self.function_call)]
        calls = [tool_call(call.function.name, call.function.arguments, call.id) for call in (*self.tool_calls, *older)]
        if calls:
            message["tool_calls"] = calls
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

    names: ClassVar = {"messages": "messages", "form": "response_format", "effort": "reasoning_effort"}  # in errors
    length: ClassVar = "max_tokens"  # the name of this field

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    reasoning_effort: Effort | None = None
    tools: Annotated[list[dict[str, Any]], as_sent(Tool)] = Field([])
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        return self.reasoning_effort

    def tool_use(self) -> ToolUse | None:
        """What the request says of its tools; None if there are none, or none may be called."""
        return use_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        return [message.for_template(f"messages[{number}]") for number, message in enumerate(self.messages)]

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


@dataclass(frozen=True)
class ChatCall(Call):
    """A chat request that was read."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    tools: ToolUse | None
    thinking: Thinking | None  # None: answers have no thoughts apart from their text

    def response(self) -> dict[str, Any]:
        return self.whole([self._choice(index, request) for index, request in enumerate(self.requests)])

    async def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """Roles, texts and calls, and the ends."""
        streams = [AnswerStream(self, request) for request in self.requests]
        for index in range(len(streams)):
            yield self.chunk([_delta(index, {"role": "assistant", "content": ""})])
        num_sent = 0
        async for index, event in events:
            num_sent += len(event.token_ids)
            for choice in self._choices(index, streams[index].add(event)):
                yield self.chunk([choice], num_sent)
        if self.params.fields.stream_options.include_usage:
            yield self.chunk([])

    def _choice(self, index: int, request: Request) -> dict[str, Any]:
        part = AnswerStream(self, request).add(request)
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, **part.texts}
        if part.calls:
            calls = [call.as_json() for call in part.calls.values()]
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"index": index, "message": message, "logprobs": part.logprobs, "finish_reason": part.reason}

    def _choices(self, index: int, part: "AnswerPart") -> list[dict[str, Any]]:
        """Those of the chunks that a part becomes: texts, calls, the end."""
        more = {"logprobs": part.logprobs} if part.logprobs else {}
        choices = []
        for name, text in part.texts.items() or ([("content", "")] if more or part.pieces is not None else []):
            pieces = {} if part.pieces is None else {"pieces": part.pieces.get(name, [])}
            choices.append(_delta(index, {name: text}, **more, **pieces))
            more = {}
        choices += [_delta(index, {"tool_calls": [call.as_json(number)]}) for number, call in part.calls.items()]
        if part.reason is not None:
            choices.append(_delta(index, {}, finish_reason=part.reason))
        return choices


def _delta(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


@dataclass(frozen=True)
class AnswerPart:
    """What one event adds to an answer."""

    texts: dict[str, str]  # reasoning_content and content, if they have new text
    calls: dict[int, ToolCall]  # by their numbers in the answer
    logprobs: dict[str, Any] | None
    pieces: dict[str, list[list[Any]]] | None  # of texts: which were drafted, if that was asked for
    reason: str | None  # of the end


class AnswerStream:
    """Separates one answer into its parts, event by event; all routes of chats send these."""

    def __init__(self, call: ChatCall, request: Request) -> None:
        self._call, self._request = call, request
        tools, thinking = call.tools, call.thinking
        self._parts = None
        if thinking or (tools is not None and not tools.forced):
            tags, in_thought = (thinking.tags, thinking.has_begun) if thinking else (None, False)
            self._parts = ToolCallText(tags, in_thought=in_thought, has_tools=tools is not None)
        self._forced = ""  # the text of a forced call, which is the whole answer
        self._num_calls = 0
        has_pieces = call.params.fields.stream_options.include_draft
        self._pieces = DraftPieces(request.new_stream()) if has_pieces else None

    def add(self, event: StreamEvent | Request) -> AnswerPart:
        """What an event adds, or a whole finished request."""
        content, calls = self._separated(event.text, is_end=event.finish_reason is not None)
        texts = {"reasoning_content": self._parts.thought if self._parts else "", "content": content}
        texts = {name: text for name, text in texts.items() if text}
        tokens = tokens_with_logprobs(self._request, event)
        logprobs = None if tokens is None else chat_logprobs(self._call.names, *tokens)
        pieces = None
        if self._pieces is not None and isinstance(event, StreamEvent):
            self._pieces.add(event)
            pieces = {name: self._pieces.take(text) for name, text in texts.items()}
        reason = "tool_calls" if event.finish_reason is not None and self._num_calls else event.finish_reason
        return AnswerPart(texts, calls, logprobs, pieces, reason)

    def _separated(self, text: str, *, is_end: bool) -> tuple[str, dict[int, ToolCall]]:
        """The new text outside of calls and thoughts, and the calls that end in it."""
        tools = self._call.tools
        if self._parts is not None:
            content, calls = self._parts.push(text, is_end=is_end)
        elif tools is None:
            return text, {}
        else:
            self._forced += text
            call = call_of(self._forced) if is_end else None
            content, calls = ("" if call or not is_end else self._forced), [call] if call else []
        if tools is not None and not tools.parallel:
            calls = calls[: max(0, 1 - self._num_calls)]
        numbered = dict(enumerate(calls, self._num_calls))
        self._num_calls += len(calls)
        return content, numbered


class ChatFields(ChoiceFields, ChatBody):
    """The fields of a chat request."""

    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0

    @property
    def num_logprobs(self) -> int | None:
        if "top_logprobs" in self.model_fields_set and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        return self.top_logprobs if self.logprobs else None


def read_chat(fields: ChatBody, service: Service) -> ChatCall:
    """Reads a request of a chat. Runs on the thread that reads requests."""
    tools, names = fields.tool_use(), fields.names
    if tools is not None and fields.grammar is not None:
        raise wrong(names["form"], "and tools exclude each other: leave one of them out")
    params = read_params(fields, service, fields.grammar if tools is None else tools.grammar())
    messages = fields.template_messages()
    ids, thinking = fields.read_prompt(params, messages, tools)
    requests = params.requests(ids, param=names["messages"])
    params.check_logprobs(service.limits.logprobs, requests[0].most_new_tokens, tokens=fields.length)
    return ChatCall(params, len(ids), requests, messages, tools, thinking)
