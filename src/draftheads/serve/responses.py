"""``/v1/responses``: requests as chats, and their answers as output items or as events. Nothing is stored."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftheads.decode.request import StreamEvent
from draftheads.serve.chat_completions import AnswerPart, AnswerStream, ChatCall, read_chat
from draftheads.serve.fields import ApiError, wrong
from draftheads.serve.request_params import RequestParams
from draftheads.serve.response_input import ResponseFields
from draftheads.serve.state import Service
from draftheads.serve.tools import ToolCall
from draftheads.utils.messages import half_character


class ResponseEvents:
    """The events of one response, in their order. The last one has the whole response.

    An answer is a message, if it has text or calls nothing, and then its calls.

    Args:
        head: the fields of the response that do not change.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._message_id: str | None = None  # None: no message has begun
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: dict[str, list[Any]] = {}  # what belongs to text that comes with a later event

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def add_text(
        self, text: str, logprobs: Sequence[dict[str, Any]], pieces: list[Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """New text of the message, which may be empty; ``pieces`` are texts, each with whether it was drafted."""
        self._waiting.setdefault("logprobs", []).extend(logprobs)
        if pieces is not None:
            self._waiting.setdefault("pieces", []).extend(pieces)
        if text:
            yield from self._begun()
            yield self._delta(text)

    def end(self, calls: Sequence[ToolCall], usage: dict[str, Any], *, is_cut: bool) -> Iterator[dict[str, Any]]:
        """The answer is finished; ``is_cut`` if it reached its limit of tokens."""
        status = "incomplete" if is_cut else "completed"
        if not calls:
            yield from self._begun()
        if self._message_id is not None:
            yield from self._message_done(status)
        for call in calls:
            yield from self._called(call)
        more: dict[str, Any] = {"output": self._output, "usage": usage}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self._response(status, **more))

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield self._event("error", code=error.code, message=error.detail, param=error.param)
        problem = {"code": "server_error", "message": error.detail}
        yield self._event("response.failed", response=self._response("failed", error=problem))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

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

    def _called(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item_id, place = f"fc_{uuid.uuid4().hex}", len(self._output)
        item = {"id": item_id, "type": "function_call", "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": call.name}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        event = "response.function_call_arguments"
        yield self._event(f"{event}.delta", item_id=item_id, output_index=place, delta=call.arguments)
        # newer clients also read the name
        whole = {"name": call.name, "arguments": call.arguments}
        yield self._event(f"{event}.done", item_id=item_id, output_index=place, **whole)
        yield self._item_done({**item, "arguments": call.arguments, "status": "completed"})

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
        [request] = self.requests
        *_, last = self._sent(self._events(), AnswerStream(self, request).add(request), [])
        response: dict[str, Any] = last["response"]
        return response

    async def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """Events; an answer that fails ends with an event of it."""
        [request] = self.requests
        sent, stream, calls = self._events(), AnswerStream(self, request), list[ToolCall]()
        for item in sent.begin():
            yield item
        try:
            async for _, event in events:
                for item in self._sent(sent, stream.add(event), calls):
                    yield item
        except ApiError as error:
            for item in sent.fail(error):
                yield item

    def _events(self) -> ResponseEvents:
        model = {"model": self.params.lane.model, "system_fingerprint": self.system_fingerprint}
        return ResponseEvents({"id": self.id, "object": "response", "created_at": self.created, **model, **self.echo})

    def _sent(self, events: ResponseEvents, part: AnswerPart, calls: list[ToolCall]) -> Iterator[dict[str, Any]]:
        """The events that a part becomes. Calls are sent at the end, after those before them."""
        calls += part.calls
        entries = part.logprobs["content"] if part.logprobs else []
        pieces = None if part.pieces is None else part.pieces.get("content", [])
        yield from events.add_text(part.texts.get("content", ""), entries, pieces)
        if part.reason is not None:
            usage = self.usage()
            named = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
                "draft": usage["draft"],
            }
            yield from events.end(calls, named, is_cut=part.reason == "length")


def read_response(fields: ResponseFields, service: Service) -> ResponseCall:
    """Reads a request for a response. Runs on the thread that reads requests."""
    chat = read_chat(fields, service)
    parts = (chat.params, chat.num_prompt_tokens, chat.requests, chat.messages, chat.tools, chat.thinking)
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
