"""``/v1/chat/completions``: the request's fields, and answers as messages or chunks."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from draftheads.decode.request import Request, StreamEvent
from draftheads.serve.call import Call, DraftPieces, chat_logprobs, tokens_with_logprobs
from draftheads.serve.chat_messages import ChatBody, Message, Thinking
from draftheads.serve.fields import wrong
from draftheads.serve.request_params import ChoiceFields, read_params
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
            calls = [call.as_json() for call in part.calls]
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
        numbered = enumerate(part.calls, part.num_calls - len(part.calls))
        choices += [_delta(index, {"tool_calls": [call.as_json(number)]}) for number, call in numbered]
        if part.reason is not None:
            choices.append(_delta(index, {}, finish_reason=part.reason))
        return choices


def _delta(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


@dataclass(frozen=True)
class AnswerPart:
    """What one event adds to an answer."""

    texts: dict[str, str]  # reasoning_content and content, if they have new text
    calls: list[ToolCall]
    num_calls: int  # so far
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
        return AnswerPart(texts, calls, self._num_calls, logprobs, pieces, reason)

    def _separated(self, text: str, *, is_end: bool) -> tuple[str, list[ToolCall]]:
        """The new text outside of calls and thoughts, and the calls that end in it."""
        tools = self._call.tools
        if self._parts is not None:
            content, calls = self._parts.push(text, is_end=is_end)
        elif tools is None:
            return text, []
        else:
            self._forced += text
            call = call_of(self._forced) if is_end else None
            content, calls = ("" if call or not is_end else self._forced), [call] if call else []
        if tools is not None and not tools.parallel:
            calls = calls[: max(0, 1 - self._num_calls)]
        self._num_calls += len(calls)
        return content, calls


class ChatFields(ToolFields, ChoiceFields, ChatBody):
    """The fields of a chat request."""

    names: ClassVar = {
        "messages": "messages",
        "form": "response_format",
        "effort": "reasoning_effort",
        "max_tokens": "max_tokens",
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    reasoning_effort: Effort | None = None

    @property
    def num_logprobs(self) -> int | None:
        if "top_logprobs" in self.model_fields_set and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        return self.top_logprobs if self.logprobs else None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template(f"messages[{number}]") for number, message in enumerate(self.messages)]


def read_chat(fields: ChatBody, service: Service) -> ChatCall:
    """Reads a request of a chat. Runs on the thread that reads requests."""
    tools, names = fields.tool_use(), fields.names
    if tools is not None and fields.grammar is not None:
        raise wrong(names["form"], "and tools exclude each other: leave one of them out")
    params = read_params(fields, service, fields.grammar if tools is None else tools.grammar())
    messages = fields.template_messages()
    ids, thinking = fields.read_prompt(params, messages, tools)
    requests = params.requests(ids, param=names["messages"])
    params.check_logprobs(service.limits.logprobs, requests[0].most_new_tokens, tokens=names["max_tokens"])
    return ChatCall(params, len(ids), requests, messages, tools, thinking)
