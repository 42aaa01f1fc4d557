"""``/v1/responses``: requests as chats, and their answers as output items or as events. Nothing is stored."""

import json
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationError

from draftheads.decode.answer_forms.form import ToolCall
from draftheads.decode.request import StreamEvent
from draftheads.serve.chat_completions import (
    AnswerPart,
    Arguments,
    ChatBody,
    ChatCall,
    Texts,
    message_of,
    read_chat,
    tool_call,
)
from draftheads.serve.fields import (
    ApiError,
    Fields,
    NoEffect,
    SentFields,
    Unsupported,
    check_schema,
    text_or_list,
    validation_error,
    wrong,
)
from draftheads.serve.request_params import NamedSchema, RequestParams, StreamOptions, Unlimited, grammar_of
from draftheads.serve.state import Service
from draftheads.serve.tools import FunctionType, ToolName, ToolUse, as_sent, use_of
from draftheads.settings import MOST_LOGPROBS, Effort, Grammar
from draftheads.utils.messages import half_character

_LOG = logging.getLogger(__name__)
LOGPROBS = "message.output_text.logprobs"  # in the field include


class _Item(SentFields):
    """One part of the input; these fields are those of a part of an answer that is sent back."""

    status: NoEffect = None
    phase: NoEffect = None

    @abstractmethod
    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """Adds it to the messages of a chat template; ``place`` names the item."""


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """A thought belongs to the message of the model behind it."""
        message = message_of(self.role, self.content, f"{place}.content")
        is_thought = messages and messages[-1].keys() == {"role", "content", "reasoning_content"}
        if self.role == "assistant" and is_thought and not messages[-1]["content"]:
            messages[-1] |= message
        else:
            messages.append(message)


class _ThoughtPart(SentFields):
    type: Literal["reasoning_text"]
    text: str


class _Thought(_Item):
    type: Literal["reasoning"]
    content: Annotated[list[_ThoughtPart], FailFast()] = Field([])
    summary: NoEffect = None
    encrypted_content: NoEffect = None  # which only the server that wrote it can read

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        text = "\n".join(part.text for part in self.content)
        if problem := half_character(text):
            raise wrong(f"{place}.content", problem)
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})


class _OfCalls(_Item):
    """Of a call or its output."""

    is_async: NoEffect = Field(None, alias="async")
    caller: Annotated[Any, Unsupported("leave it out", only={"type": "direct"})] = None
    namespace: Annotated[Any, Unsupported("functions have names alone; leave it out")] = None


class _FunctionCall(_OfCalls):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = Field({})

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        """Calls belong to the message of the model before them, as in a chat."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(tool_call(self.name, self.arguments, self.call_id))


class _FunctionCallOutput(_OfCalls):
    type: Literal["function_call_output"]
    call_id: str
    name: NoEffect = None  # the call has it, too
    output: Texts

    def add_to(self, messages: list[dict[str, Any]], place: str) -> None:
        message = message_of("tool", self.output, f"{place}.output")
        messages.append({**message, "tool_call_id": self.call_id})


_ITEMS: dict[Any, type[_Item]] = {
    "message": _Message,
    "reasoning": _Thought,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
}


def _items(value: Any) -> list[Any]:
    return [{"role": "user", "content": value}] if isinstance(value, str) else text_or_list(value)


class _FunctionTool(Fields):
    type: FunctionType
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field({})
    strict: bool | None = None  # changes no answer: forced calls always follow the schema
    output_schema: dict[str, Any] | None = None
    cache_control: NoEffect = None
    is_async: NoEffect = Field(None, alias="async")  # the client may send the output later
    allowed_callers: Annotated[Any, Unsupported("leave it out", only=["direct"])] = None
    defer_loading: Annotated[Any, Unsupported("all tools are shown; leave it out", only=False)] = None


class _TextFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]
    of_answers: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = Field(None, alias="schema")


class _TextOptions(Fields):
    format: _TextFormat = _TextFormat(type="text", schema=None)
    verbosity: Annotated[Any, Unsupported("leave it out", only="medium")] = None


class _Reasoning(Fields):
    effort: Effort | None = None
    summary: NoEffect = None  # answers have no reasoning apart from their text
    generate_summary: NoEffect = None
    context: Annotated[Any, Unsupported("the chat template decides; leave it out", only="auto")] = None
    mode: Annotated[Any, Unsupported("leave it out", only="standard")] = None


_ITS_USAGE = "the last event has the usage; leave it out"
_WAITS = "an answer is made while its client waits; leave it out"
_NOT_STORED = "nothing is stored; send the earlier items in input"


class _StreamOptions(StreamOptions):
    include_usage: Annotated[Any, Unsupported(_ITS_USAGE, only=True)] = False
    continuous_usage_stats: Annotated[Any, Unsupported(_ITS_USAGE, only=False)] = False


class ResponseFields(ChatBody):
    """The fields of a request for a response."""

    names: ClassVar = {"messages": "input", "form": "text.format", "effort": "reasoning.effort"}
    length: ClassVar = "max_output_tokens"

    input: Annotated[list[dict[str, Any]], FailFast(), BeforeValidator(_items)] = Field(min_length=1, max_length=2048)
    instructions: str | None = None
    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Unlimited] = Field(
        None, alias="max_output_tokens"
    )
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    tools: Annotated[list[dict[str, Any]], as_sent(_FunctionTool)] = Field([])
    tool_choice: Any = "auto"
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([])
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
    ] = Field({})
    truncation: Literal["disabled"] = "disabled"
    stream_options: _StreamOptions = _StreamOptions()
    max_tool_calls: NoEffect = None  # of tools that a server runs itself
    access_programs: NoEffect = None
    image: NoEffect = None
    background: Annotated[Any, Unsupported(_WAITS, only=False)] = None
    background_options: Annotated[Any, Unsupported(_WAITS)] = None
    context_management: Annotated[Any, Unsupported("nothing is shortened; leave it out", only=[])] = None
    conversation: Annotated[Any, Unsupported(_NOT_STORED)] = None
    max_tokens: Annotated[Any, Unsupported("use max_output_tokens")] = None
    messages: Annotated[Any, Unsupported("use input")] = None
    n: Annotated[Any, Unsupported("send a request for each answer", only=1)] = 1
    previous_response_id: Annotated[Any, Unsupported(_NOT_STORED)] = None
    prompt: Annotated[Any, Unsupported("no prompts are stored; use instructions and input")] = None
    reasoning_effort: Annotated[Any, Unsupported("use reasoning.effort")] = None
    response_format: Annotated[Any, Unsupported("use text.format")] = None

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise wrong("top_logprobs", f'needs include: ["{LOGPROBS}"]')
        return self.top_logprobs if LOGPROBS in self.include else None

    @property
    def grammar(self) -> Grammar | None:
        return grammar_of(self.text.format.type, self.text.format.of_answers, "text.format.schema")

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort

    def tool_use(self) -> ToolUse | None:
        own = [{key: value for key, value in tool.items() if key != "type"} for tool in self.tools]
        tools = [{"type": "function", "function": function} for function in own]
        return use_of(tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def template_messages(self) -> list[dict[str, Any]]:
        """The instructions and the input as a chat template reads them."""
        messages = [] if self.instructions is None else [message_of("system", self.instructions, "instructions")]
        for number, item in enumerate(self.input):
            _read_item(item, f"input[{number}]").add_to(messages, f"input[{number}]")
        return messages


def _read_item(item: dict[str, Any], place: str) -> _Item:
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ITEMS:
        names = list(map(repr, _ITEMS))
        raise wrong(f"{place}.type", f"is {short_repr(kind)}; it must be {', '.join(names[:-1])} or {names[-1]}")
    try:
        return _ITEMS[kind].model_validate(item)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), place) from None


class ResponseEvents:
    """The events of one response, in their order. The last one has the whole response.

    An answer is a message, if it has text or calls nothing, and then its calls.

    Args:
        head: the fields of the response that do not change.
        usage: gives the counts of the whole answer, in the names of chats.
    """

    def __init__(self, head: dict[str, Any], usage: Callable[[], dict[str, Any]]) -> None:
        self._head, self._usage = head, usage
        self._numbers = count()
        self._output: list[dict[str, Any]] = []
        self._message_id: str | None = None  # None: no message has begun
        self._text = ""
        self._calls: list[ToolCall] = []
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: dict[str, list[Any]] = {}  # what belongs to text that comes with a later event

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def add(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """A part of the answer. Calls are sent at the end, after those before them."""
        self._calls += part.calls.values()
        self._waiting.setdefault("logprobs", []).extend(part.logprobs["content"] if part.logprobs else ())
        if part.pieces is not None:
            self._waiting.setdefault("pieces", []).extend(part.pieces.get("content", ()))
        if text := part.texts.get("content"):
            yield from self._begun()
            yield self._delta(text)
        if part.reason is not None:
            yield from self._end(is_cut=part.reason == "length")

    def _end(self, *, is_cut: bool) -> Iterator[dict[str, Any]]:
        """The answer is finished; ``is_cut`` if it reached its limit of tokens."""
        status = "incomplete" if is_cut else "completed"
        if not self._calls:
            yield from self._begun()
        if self._message_id is not None:
            yield from self._message_done(status)
        for call in self._calls:
            yield from self._called(call, status if call.is_cut else "completed")
        counts = self._usage()
        thoughts = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
        usage = {"input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"]}
        usage |= {"output_tokens": counts["completion_tokens"], "output_tokens_details": thoughts}
        usage |= {name: counts[name] for name in ("total_tokens", "draft", "acceptance") if name in counts}
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {"completed_at": int(time.time())}
        response = self._response(status, output=self._output, usage=usage, **more)
        yield self._event(f"response.{status}", response=response)

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield self._event("error", code=error.code, message=error.detail, param=error.param)
        problem = {"code": "server_error", "message": error.detail}
        yield self._event("response.failed", response=self._response("failed", error=problem))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        empty: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._head, "status": status, **empty, **fields}

    def _begun(self) -> Iterator[dict[str, Any]]:
        """The events that begin the message, before its first text."""
        if self._message_id is None:
            self._message_id = f"msg_{uuid.uuid4().hex}"
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._place(), part=_text_part("", []))

    def _delta(self, text: str) -> dict[str, Any]:
        waiting, self._waiting = self._waiting, {}
        self._text += text
        self._logprobs += waiting.get("logprobs", ())
        return self._event("response.output_text.delta", **self._place(), delta=text, **{"logprobs": [], **waiting})

    def _message_done(self, status: str) -> Iterator[dict[str, Any]]:
        if any(self._waiting.values()):  # of tokens without text
            yield self._delta("")
        place, part = self._place(), _text_part(self._text, self._logprobs)
        yield self._event("response.output_text.done", **place, text=self._text, logprobs=self._logprobs)
        yield self._event("response.content_part.done", **place, part=part)
        yield self._item_done(self._message(status, [part]))

    def _called(self, call: ToolCall, status: str) -> Iterator[dict[str, Any]]:
        item_id, place = f"fc_{uuid.uuid4().hex}", len(self._output)
        item = {"id": item_id, "type": "function_call", "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": call.name}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        event = "response.function_call_arguments"
        yield self._event(f"{event}.delta", item_id=item_id, output_index=place, delta=call.arguments)
        # newer clients also read the name
        whole = {"name": call.name, "arguments": call.arguments}
        yield self._event(f"{event}.done", item_id=item_id, output_index=place, **whole)
        yield self._item_done({**item, "arguments": call.arguments, "status": status})

    def _item_done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        usual = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**usual, "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        """The message is the first item, and its text the only part."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(frozen=True)
class ResponseCall(ChatCall):
    """A request for a response that was read."""

    id_prefix = "resp_"
    has_named_events = True

    echo: dict[str, Any]  # what the response repeats of the request

    def response(self) -> dict[str, Any]:
        """The response, which is the same as in the last event of a stream."""
        ([request], [stream]) = self.requests, self.open()
        *_, last = self._events().add(stream.add(request))
        response: dict[str, Any] = last["response"]
        return response

    async def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """Events; an answer that fails ends with an event of it."""
        sent, [stream] = self._events(), self.open()
        for item in sent.begin():
            yield item
        try:
            async for _, event in events:
                for item in sent.add(await stream.added(event)):
                    yield item
        except Exception as error:  # noqa: BLE001 - logged, and sent as what went wrong
            if not isinstance(error, ApiError):
                _LOG.exception("a stream failed")
            known = error if isinstance(error, ApiError) else ApiError(500, "the server could not finish the answer")
            for item in sent.fail(known):
                yield item

    def _events(self) -> ResponseEvents:
        model = {"model": self.params.lane.model, "system_fingerprint": self.system_fingerprint}
        head = {"id": self.id, "object": "response", "created_at": self.created, **model, **self.echo}
        return ResponseEvents(head, self.usage)


def read_response(fields: ResponseFields, service: Service) -> ResponseCall:
    """Reads a request for a response. Runs on a thread that reads requests."""
    chat = read_chat(fields, service)
    parts = (chat.params, chat.num_prompt_tokens, chat.requests, chat.messages, chat.tools, chat.reading)
    return ResponseCall(*parts, _echo(fields, chat.params))


def _echo(fields: ResponseFields, params: RequestParams) -> dict[str, Any]:
    """What a response repeats of its request, and the fields that are the same in all responses."""
    given = {
        "instructions": fields.instructions,
        "metadata": fields.metadata,
        "text": {"format": {"type": "text"}, **fields.text.model_dump(by_alias=True, exclude_unset=True)},
        "tool_choice": fields.tool_choice,
        "tools": fields.tools,
    }
    for name, value in given.items():
        if problem := half_character(json.dumps(value, ensure_ascii=False)):
            raise wrong(name, problem)
    return {
        **given,
        "background": False,
        "max_output_tokens": fields.max_completion_tokens,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "store": False,
        "temperature": params.settings.temperature,
        "top_logprobs": fields.top_logprobs,
        "top_p": params.settings.top_p,
        "truncation": fields.truncation,
    }
