"""``/v1/chat/completions``: its fields, messages as chat templates read them, and answers as messages or chunks."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, FailFast, Field, Json, PrivateAttr, WithJsonSchema

from draftheads.decode.answer_forms import AnswerForm, form_of
from draftheads.decode.answer_forms.form import ToolCall
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.text import AnswerParts, AnswerText
from draftheads.errors import DraftHeadsError, InvalidPrompt, first_line
from draftheads.models.chat_template import effort_variables, render, reserved_names, template_of, token_ids_of
from draftheads.models.model import TargetModel
from draftheads.models.model_names import shown_name
from draftheads.serve.call import Call, TokenLogprob, TokenTexts, chat_logprobs, tokens_with_logprobs
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
from draftheads.serve.state import Service, Untried
from draftheads.serve.tools import TOOL_CHOICE, Tool, ToolUse, as_sent, call_form, call_json, use_of
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
    parsed_arguments: NoEffect = None  # of clients that read them


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


_SLOW_TEMPLATE = "takes more than {} for the model's chat template: send a shorter chat, or other chat_template_kwargs"

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
class Reading:
    """How an answer is read."""

    form: AnswerForm
    in_thought: bool = False  # whether the prompt ends in a thought
    prefix: str = ""  # the prompt


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

    _text_or_problem: tuple[str | None, str] | None = PrivateAttr(None)  # of a slow chat template

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
    ) -> tuple[list[int], Reading | None]:
        """Token ids of the chat up to where its answer begins, and how the answer is read; None: it is text."""
        model, param = params.engine.model, self.names["messages"]
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("continue_final_message", "begins no new message: send add_generation_prompt: false with it")
        variables = self._variables(model)
        if template_of(model) is None:
            name = shown_name(model.model_id)
            fix = "use /v1/completions, or start the server with --chat-template"
            raise ApiError(400, f"{name} has no chat template: {fix}", param=param)
        calls, form = None if tools is None else call_form(model), form_of(model)
        try:
            text = self._rendered(params, messages, tools, variables)
            in_thought = False
            if tags := form.thinking:
                # only the words of the model itself can begin a thought
                begun = str(messages[-1]["content"]) if self.continue_final_message else text.rstrip()[-len(tags[0]) :]
                in_thought = begun.rfind(tags[0]) > begun.rfind(tags[1])
            has_form = params.settings.grammar is not None  # which decides on the whole answer: it is no thought
            if has_form and form.thinking and in_thought:
                text += f"\n{form.thinking[1]}\n\n"
            if calls is not None and tools is not None and tools.forced:
                text += calls.opening  # the answer is the call itself
            elif has_form and calls is None and form.calls is not None and self.add_generation_prompt:
                text += form.calls.text_opening
            ids = params.engine.encode(token_ids_of(model, text, add_special_tokens=False))
        except DraftHeadsError as error:
            raise api_error_of(error, param=param) from None
        if has_form:
            form, in_thought = replace(form, thinking=None, template=None), False
        reading = Reading(form, in_thought, text if self.add_generation_prompt else "")
        return ids, reading if form.thinking or form.template or tools is not None else None

    def _run(self, service: Service, call: dict[str, Any]) -> str:
        """The text of the chat template, which is a program of the model's author, from another process."""
        accept = partial(setattr, self, "_text_or_problem")
        trial = Untried(None, lambda: call, self.names["messages"], _SLOW_TEMPLATE, accept)
        text, problem = self._text_or_problem or service.rendered(trial)
        if text is None:
            raise InvalidPrompt(problem)
        return str(text)

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
        self, params: RequestParams, messages: list[dict[str, Any]], tools: ToolUse | None, variables: dict[str, Any]
    ) -> str:
        """The text of the chat."""
        try:
            text = render(
                params.engine.model,
                messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=None if tools is None else list(tools.tools),
                variables=variables,
                run=partial(self._run, params.service),
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
    reading: Reading | None  # None: answers are text, without thoughts and calls
    streams: list["AnswerStream"] = field(init=False, default_factory=list)  # of the answers that are sent

    def open(self) -> list["AnswerStream"]:
        """Begins to send the answers."""
        self.streams[:] = [AnswerStream(self, request) for request in self.requests]
        return self.streams

    def usage(self) -> dict[str, Any]:
        """Also the tokens of thoughts, of models that think."""
        if self.reading is None or not (self.reading.form.thinking or self.reading.form.template):
            return super().usage()
        count = sum(stream.num_thought for stream in self.streams)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": count}}

    def response(self) -> dict[str, Any]:
        parts = [stream.add(request) for stream, request in zip(self.open(), self.requests, strict=True)]
        return self.whole([self._choice(index, part) for index, part in enumerate(parts)])

    async def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """Roles, texts and calls, and the ends."""
        streams = self.open()
        for index in range(len(streams)):
            yield self.chunk([_delta(index, {"role": "assistant", "content": ""})])
        num_sent = 0
        async for index, event in events:
            num_sent += len(event.token_ids)
            for choice in self._choices(index, await streams[index].added(event)):
                yield self.chunk([choice], num_sent)
        if self.params.fields.stream_options.include_usage:
            yield self.chunk([])

    def _choice(self, index: int, part: "AnswerPart") -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, **part.texts}
        if part.calls:
            calls = [call_json(call) for call in part.calls.values()]
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"index": index, "message": message, "logprobs": part.logprobs, "finish_reason": part.reason}

    def _choices(self, index: int, part: "AnswerPart") -> list[dict[str, Any]]:
        """Those of the chunks that a part becomes: texts, calls, the end."""
        choices, texts = [], dict(part.texts)
        if part.logprobs or (not texts and part.pieces is not None):
            texts.setdefault("content", "")
        for name, text in texts.items():
            more: dict[str, Any] = {} if part.pieces is None else {"pieces": part.pieces.get(name, [])}
            more |= {"logprobs": part.logprobs} if name == "content" else {}
            choices.append(_delta(index, {name: text}, **more))
        for number, call in part.calls.items():  # some clients take no arguments from the chunk with the name
            whole = call_json(call, number)
            arguments = {"index": number, "function": {"arguments": call.arguments}}
            begun = {**whole, "function": {"name": call.name, "arguments": ""}}
            choices += [_delta(index, {"tool_calls": [each]}) for each in (begun, arguments)]
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
        tools, reading = call.tools, call.reading
        self._parts, self._is_forced = None, tools is not None and bool(tools.forced)
        if reading is not None:
            schemas, in_thought = None if tools is None else tools.schemas, reading.in_thought
            self._parts = AnswerText(reading.form, schemas, in_thought=in_thought, is_forced=self._is_forced)
            self._parts.prefix, self._parts.barred = reading.prefix, () if tools is None else tools.barred
            self._parts.parse = call.params.service.parsed
        self._at, self._num_calls = 0, 0  # characters of a text without parts; calls
        self.num_thought = 0  # tokens of thoughts
        self._has_pieces = call.params.fields.stream_options.include_draft
        thinks = reading is not None and bool(reading.form.thinking or reading.form.template)
        is_needed = self._has_pieces or thinks or (reading and request.settings.logprobs is not None)
        self._tokens = TokenTexts(request.new_stream()) if is_needed else None

    async def added(self, event: StreamEvent) -> AnswerPart:
        """As of :meth:`add`, on a thread where a process reads the whole answer."""
        is_slow = event.finish_reason is not None and self._parts is not None and self._parts.is_read_at_end
        return await asyncio.to_thread(self.add, event) if is_slow else self.add(event)

    def add(self, event: StreamEvent | Request) -> AnswerPart:
        """What an event adds, or a whole finished request."""
        is_end, is_cut = event.finish_reason is not None, event.finish_reason == "length"
        if self._parts is None:
            parts = AnswerParts(content=[(self._at, event.text)] if event.text else [])
            self._at += len(event.text)
        else:
            parts = self._parts.push(event.text, is_end=is_end, is_cut=is_cut)
        entries, pieces = self._of_tokens(event, parts, is_end=is_end)
        is_whole = isinstance(event, Request)
        has_logprobs = entries is not None and (entries or is_whole or self._parts is None)
        logprobs = chat_logprobs(self._call.names, entries or ()) if has_logprobs else None
        most = len(parts.calls) if self._call.tools is None or self._call.tools.parallel else 1 - self._num_calls
        calls = dict(enumerate(parts.calls[: max(0, most)], self._num_calls))
        self._num_calls += len(calls)
        # a forced call that is whole is all of the answer
        is_whole_call = not is_cut or (self._is_forced and not any(call.is_cut for call in parts.calls))
        reason = "tool_calls" if is_end and self._num_calls and is_whole_call else event.finish_reason
        return AnswerPart(parts.texts(), calls, logprobs, None if is_whole else pieces, reason)

    def _of_tokens(
        self, event: StreamEvent | Request, parts: AnswerParts, *, is_end: bool
    ) -> tuple[list[TokenLogprob] | None, dict[str, list[list[Any]]] | None]:
        """The log-probabilities of the content, if they were asked for, and which text was drafted, if that was."""
        entries = tokens_with_logprobs(self._request, event)
        if self._tokens is None:
            return entries, None
        self._tokens.add(event.token_ids, entries or (), num_drafted=getattr(event, "num_drafted", 0))
        if self._parts is not None:
            self.num_thought += self._tokens.num_in(self._parts.thoughts, None if is_end else self._parts.at)
        pieces: dict[str, list[list[Any]]] = {"reasoning_content": [], "content": []}
        of_content = list[TokenLogprob]()
        spans = [("reasoning_content", *span) for span in parts.thought] + [
            ("content", *span) for span in parts.content
        ]
        for name, start, text in sorted(spans, key=lambda span: span[1]):
            found, own = self._tokens.take(start, text)
            pieces[name] += found
            of_content += own if name == "content" else []
        entries = of_content if entries is not None and self._parts is not None else entries
        return entries, pieces if self._has_pieces else None


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
    """Reads a request of a chat. Runs on a thread that reads requests."""
    tools, names = fields.tool_use(), fields.names
    grammar = fields.grammar
    if tools is not None and tools.forced and not fields.add_generation_prompt:
        raise wrong("add_generation_prompt", "is false; a forced call begins a new message: use tool_choice auto")
    if tools is not None and fields.model and (tools.forced or grammar is not None):
        grammar = tools.grammar(service.engine(fields.model).model, grammar, names["form"])
    params = read_params(fields, service, grammar)
    messages = fields.template_messages()
    ids, reading = fields.read_prompt(params, messages, tools)
    requests = params.requests(ids, param=names["messages"])
    params.check_logprobs(service.limits.logprobs, requests[0].most_new_tokens, tokens=fields.length)
    return ChatCall(params, len(ids), requests, messages, tools, reading)
