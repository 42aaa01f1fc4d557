"""``/v1/chat/completions``: the request's fields, and answers as messages or chunks."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from draftheads.decode.request import Request, StreamEvent
from draftheads.serve.body import read_json
from draftheads.serve.call import Call, DraftPieces, tokens_with_logprobs
from draftheads.serve.chat_messages import Message, TemplateFields, Thinking, chat_prompt
from draftheads.serve.fields import read_fields, wrong
from draftheads.serve.logprobs import chat_logprobs
from draftheads.serve.request_params import CommonFields, read_params
from draftheads.serve.state import Service
from draftheads.serve.tools import ToolCall, ToolCallText, ToolFields, ToolUse, call_of
from draftheads.settings import MOST_LOGPROBS, Effort


@dataclass(frozen=True)
class ChatCall(Call):
    """A chat request that was read."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    tools: ToolUse | None
    thinking: Thinking | None  # None: answers have no thoughts apart from their text

    def answer_text(self) -> "AnswerText":
        """Separates the parts of one answer."""
        return AnswerText(self.tools, self.thinking)

    def response(self) -> dict[str, Any]:
        return self.whole([self._choice(index, request) for index, request in enumerate(self.requests)])

    async def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """Roles, texts and calls, and the ends."""
        streams = [_ChoiceStream(self, index, request) for index, request in enumerate(self.requests)]
        for stream in streams:
            yield self.chunk([stream.choice({"role": "assistant", "content": ""})])
        num_sent = 0
        async for index, event in events:
            num_sent += len(event.token_ids)
            for choice in streams[index].choices(event):
                yield self.chunk([choice], num_sent)
        if self.params.fields.stream_options.include_usage:
            yield self.chunk([])

    def logprobs_of(self, request: Request, part: Request | StreamEvent) -> dict[str, Any] | None:
        """Of a request or one of its events, as :func:`tokens_with_logprobs`."""
        tokens = tokens_with_logprobs(request, part)
        return None if tokens is None else chat_logprobs(self.names, *tokens)

    def _choice(self, index: int, request: Request) -> dict[str, Any]:
        text = self.answer_text()
        content, calls = text.push(request.text, is_end=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if text.thought:
            message["reasoning_content"] = text.thought
        if calls:
            message |= {"content": content or None, "tool_calls": [call.as_json() for call in calls]}
        reason = "tool_calls" if calls else request.finish_reason
        logprobs = self.logprobs_of(request, request)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


class AnswerText:
    """Separates the text of an answer from its calls and its thoughts; ``thought`` is that of the last piece."""

    def __init__(self, tools: ToolUse | None, thinking: Thinking | None = None) -> None:
        self._tools = tools
        self._parts = None
        if thinking or (tools is not None and not tools.forced):
            tags, in_thought = (thinking.tags, thinking.has_begun) if thinking else (None, False)
            self._parts = ToolCallText(tags, in_thought=in_thought, has_tools=tools is not None)
        self._forced = ""  # the text of a forced call, which is the whole answer
        self.num_calls = 0
        self.thought = ""

    def push(self, text: str, *, is_end: bool) -> tuple[str, list[ToolCall]]:
        """Adds text; returns the new text outside of calls and thoughts, and the calls that end in it."""
        if self._parts is not None:
            content, calls = self._parts.push(text, is_end=is_end)
            self.thought = self._parts.thought
        elif self._tools is None:
            return text, []
        else:
            self._forced += text
            call = call_of(self._forced) if is_end else None
            content, calls = ("" if call or not is_end else self._forced), [call] if call else []
        if self._tools is not None and not self._tools.parallel:
            calls = calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(calls)
        return content, calls


class _ChoiceStream:
    """One answer of a stream."""

    def __init__(self, call: ChatCall, index: int, request: Request) -> None:
        self._call = call
        self._index = index
        self._request = request
        self._pieces = DraftPieces(request.new_stream())
        self._text = call.answer_text()

    def choice(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def choices(self, event: StreamEvent) -> list[dict[str, Any]]:
        """Those of the chunks that an event becomes: text, calls, the end."""
        num_calls = self._text.num_calls
        content, calls = self._text.push(event.text, is_end=event.finish_reason is not None)
        parts = {"reasoning_content": self._text.thought, "content": content}
        parts = {name: text for name, text in parts.items() if text}
        more: dict[str, Any] = {}
        if logprobs := self._call.logprobs_of(self._request, event):
            more["logprobs"] = logprobs
        if has_pieces := self._call.params.fields.stream_options.include_draft:
            self._pieces.add(event)
        choices = []
        for name, text in parts.items() or ([("content", "")] if more or has_pieces else []):
            pieces = {"pieces": self._pieces.take(text)} if has_pieces else {}
            choices.append(self.choice({name: text}, **more, **pieces))
            more = {}
        choices += [self.choice({"tool_calls": [call.as_json(number)]}) for number, call in enumerate(calls, num_calls)]
        if event.finish_reason is not None:
            reason = "tool_calls" if self._text.num_calls else event.finish_reason
            choices.append(self.choice({}, finish_reason=reason))
        return choices


class ChatFields(ToolFields, TemplateFields, CommonFields):
    """The fields of a chat request."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    reasoning_effort: Effort | None = None


def read_chat(body: bytes, service: Service) -> ChatCall:
    """Reads a chat request. Runs on the thread that reads requests."""
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
    use = fields.template_use(params, tools, fields.reasoning_effort, "reasoning_effort")
    ids, thinking = chat_prompt(params.engine, messages, use, param="messages")
    requests = params.requests(ids, param="messages")
    params.check_logprobs(service.limits.logprobs, requests[0].most_new_tokens)
    return ChatCall(params, len(ids), requests, messages, tools, thinking)
