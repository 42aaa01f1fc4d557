"""``/v1/responses``: requests as chats, and their answers as output items or as events. Nothing is stored."""

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from draftheads.decode.request import StreamEvent
from draftheads.serve.api_error import ApiError
from draftheads.serve.chat_completions import AnswerPart, AnswerStream, ChatCall
from draftheads.serve.chat_messages import chat_prompt
from draftheads.serve.fields import wrong
from draftheads.serve.request_params import RequestParams, read_params
from draftheads.serve.response_input import ResponseFields
from draftheads.serve.response_output import ResponseEvents
from draftheads.serve.state import Service
from draftheads.serve.tools import ToolCall
from draftheads.utils.messages import half_character


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
    tools = fields.tool_use()
    if tools is not None and fields.grammar is not None:
        raise wrong("text.format", "and tools exclude each other: leave one of them out")
    params = read_params(
        fields,
        service,
        default_tokens=service.limits.default_tokens,
        logprobs=fields.logprobs,
        grammar=fields.grammar if tools is None else tools.grammar(),
    )
    messages = fields.messages()
    use = fields.template_use(params, tools, fields.reasoning.effort, "reasoning.effort")
    ids, thinking = chat_prompt(params.engine, messages, use, param="input")
    requests = params.requests(ids, param="input")
    params.check_logprobs(service.limits.logprobs, requests[0].most_new_tokens, tokens="max_output_tokens")
    return ResponseCall(params, len(ids), requests, messages, tools, thinking, _echo(fields, params))


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
