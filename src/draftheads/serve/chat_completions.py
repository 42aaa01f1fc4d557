"""``/v1/chat/completions``: the request's fields, and answers as messages or chunks."""

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from draftheads.decode.request import Request, StreamEvent
from draftheads.serve.answers import Answers
from draftheads.serve.body import read_json
from draftheads.serve.chat_messages import Message, prompt_ids_of
from draftheads.serve.fields import read_fields, wrong
from draftheads.serve.logprobs import chat_logprobs
from draftheads.serve.request_params import CommonFields, RequestParams, read_params
from draftheads.serve.state import Service
from draftheads.serve.token_names import TokenNames
from draftheads.serve.tools import ToolCall, ToolCallText, ToolFields, ToolUse, call_of
from draftheads.serve.usage import DraftPieces, usage_of
from draftheads.settings import MOST_LOGPROBS


@dataclass(frozen=True)
class ChatCall:
    """A chat request that was read."""

    params: RequestParams
    requests: list[Request]
    tools: ToolUse | None
    messages: list[dict[str, Any]]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def names(self) -> TokenNames:
        """Of the model's tokens."""
        return TokenNames(self.params.engine.model.tokenizer)

    def response(self) -> dict[str, Any]:
        """The whole response, once all requests are finished."""
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, request) for index, request in enumerate(self.requests)],
            "usage": usage_of(self.requests, n=self.params.fields.n),
        }

    async def chunks(self, answers: Answers) -> AsyncGenerator[dict[str, Any]]:
        """The response as a stream; ``answers`` are submitted."""
        streams = [_ChoiceStream(self, index, request) for index, request in enumerate(self.requests)]
        for stream in streams:
            yield self._chunk([stream.choice({"role": "assistant", "content": ""})])
        async for index, event in answers.events():
            for choice in streams[index].choices(event):
                yield self._chunk([choice])
        if self.params.fields.stream_options.include_usage:
            yield {**self._chunk([]), "usage": usage_of(self.requests, n=self.params.fields.n)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.params.lane.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.params.fields.stream_options.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": choices, **usage}

    def _choice(self, index: int, request: Request) -> dict[str, Any]:
        content, calls = self._parsed(request.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.as_json() for call in calls]}
        logprobs = None
        if request.settings.logprobs is not None:
            count = num_shown(request)
            logprobs = chat_logprobs(
                self.names, request.token_ids[:count], request.logprobs[:count], request.top_logprobs[:count]
            )
        reason = "tool_calls" if calls else request.finish_reason
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _parsed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text of an answer outside of its calls, and these."""
        if self.tools is None:
            return text, []
        if self.tools.forced:
            call = call_of(text)
            return ("", [call]) if call else (text, [])
        parser = ToolCallText()
        (content, calls), (rest, last) = parser.push(text), parser.flush()
        return content + rest, self.allowed([*calls, *last])

    def allowed(self, calls: list[ToolCall]) -> list[ToolCall]:
        """One call only, where the request forbids parallel ones."""
        return calls if self.tools is None or self.tools.parallel else calls[:1]


class _ChoiceStream:
    """One answer of a stream."""

    def __init__(self, call: ChatCall, index: int, request: Request) -> None:
        self._call = call
        self._index = index
        self._request = request
        self._pieces = (
            DraftPieces(call.params.engine.model.tokenizer) if call.params.fields.stream_options.include_draft else None
        )
        self._calls = ToolCallText() if call.tools is not None and not call.tools.forced else None
        self._num_calls = 0

    def choice(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The choice of one chunk."""
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def choices(self, event: StreamEvent) -> list[dict[str, Any]]:
        """Those of the chunks that an event becomes: text, calls, the end."""
        content, calls = self._split(event)
        more: dict[str, Any] = {}
        if event.logprobs is not None:
            count = num_shown(self._request, event)
            more["logprobs"] = chat_logprobs(
                self._call.names, event.token_ids[:count], event.logprobs[:count], (event.top_logprobs or ())[:count]
            )
        if self._pieces is not None:
            more["pieces"] = self._pieces.push(event.token_ids, event.num_drafted, event.text)
        found = [self.choice({"content": content}, **more)] if content or more else []
        for call in calls:
            found.append(self.choice({"tool_calls": [call.as_json(self._num_calls)]}))
            self._num_calls += 1
        if event.finish_reason is not None:
            reason = "tool_calls" if self._num_calls else event.finish_reason
            found.append(self.choice({}, finish_reason=reason))
        return found

    def _split(self, event: StreamEvent) -> tuple[str, list[ToolCall]]:
        """The text of an event outside of calls, and the calls that end in it."""
        tools, ended = self._call.tools, event.finish_reason is not None
        if tools is None:
            return event.text, []
        if self._calls is None:  # the call is the whole answer
            call = call_of(self._request.text) if ended else None
            return ("", [call]) if call else (self._request.text if ended else "", [])
        content, calls = self._calls.push(event.text)
        if ended:
            rest, last = self._calls.flush()
            content, calls = content + rest, [*calls, *last]
        room = None if tools.parallel else max(0, 1 - self._num_calls)
        return content, calls[:room]


def num_shown(request: Request, event: StreamEvent | None = None) -> int:
    """How many tokens of an answer (or of an event of it) are text: all but one that ended it."""
    token_ids = request.token_ids if event is None else event.token_ids
    is_last = (request.finish_reason if event is None else event.finish_reason) == "stop"
    return len(token_ids) - (is_last and bool(token_ids) and request.is_stop_id(token_ids[-1]))


class ChatFields(ToolFields, CommonFields):
    """The fields of a chat request."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0


def read_chat(body: bytes, service: Service) -> ChatCall:
    """Reads a chat request. Runs on the thread that reads requests.

    Raises:
        ApiError: a field is wrong.
    """
    values = read_json(body, service.limits)
    fields = read_fields(ChatFields, values)
    if "top_logprobs" in fields.model_fields_set and not fields.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    tools = fields.tool_use(values.get("tools") or ())
    if tools is not None and fields.response_format.grammar is not None:
        raise wrong("response_format", "and tools exclude each other: leave one of them out")
    params = read_params(
        fields,
        service,
        default_tokens=service.limits.default_tokens,
        logprobs=fields.top_logprobs if fields.logprobs else None,
        grammar=fields.response_format.grammar if tools is None else tools.grammar(),
    )
    messages = [message.for_template(f"messages[{number}]") for number, message in enumerate(fields.messages)]
    ids = prompt_ids_of(params.engine, messages, tools)
    return ChatCall(params, params.requests(ids, param="messages"), tools, messages)
