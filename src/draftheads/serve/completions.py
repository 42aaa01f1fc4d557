"""``/v1/completions``: the request's fields, and answers as texts or chunks."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftheads.decode.engine import Engine
from draftheads.decode.request import Request, StreamEvent, TopLogprobs
from draftheads.errors import DraftHeadsError
from draftheads.serve.answers import Answers
from draftheads.serve.api_error import api_error_of
from draftheads.serve.body import read_json
from draftheads.serve.chat_completions import num_shown
from draftheads.serve.fields import Fields
from draftheads.serve.logprobs import completion_logprobs
from draftheads.serve.request_params import RequestParams, read_asked
from draftheads.serve.scoring import PromptScores
from draftheads.serve.state import Service
from draftheads.serve.structured import read_response_format
from draftheads.serve.token_names import TokenNames
from draftheads.serve.usage import DraftPieces, usage_of
from draftheads.settings import MOST_LOGPROBS
from draftheads.utils.counts import counted
from draftheads.utils.messages import half_character

_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Prompt:
    """One prompt of a completion."""

    token_ids: list[int]
    text: str  # for echo


@dataclass(frozen=True)
class CompletionCall:
    """A completion request that was read."""

    asked: RequestParams
    prompts: list[Prompt]
    requests: list[Request]  # n for each prompt; none if prompts are only scored
    echo: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def names(self) -> TokenNames:
        """Of the model's tokens."""
        return TokenNames(self.asked.engine.model.tokenizer)

    @property
    def num_scored(self) -> int | None:
        """How many top log-probabilities of prompt tokens are asked for; None: not even their own."""
        return self.asked.settings.logprobs if self.echo else None

    def response(self, scores: Sequence[PromptScores] = ()) -> dict[str, Any]:
        """The whole response, once all requests are finished; ``scores`` of the prompts, if they are asked for."""
        choices = []
        for index in range(len(self.prompts) * self.asked.n):
            number = index // self.asked.n
            request = self.requests[index] if self.requests else None
            score = scores[number] if scores else None
            choices.append(self._choice(index, self.prompts[number], request, score))
        return {**self._head(), "choices": choices, "usage": self._usage()}

    async def chunks(self, answers: Answers) -> AsyncGenerator[dict[str, Any]]:
        """The response as a stream; ``answers`` are submitted."""
        offsets = [len(self.prompts[i // self.asked.n].text) if self.echo else 0 for i in range(len(self.requests))]
        pieces = [DraftPieces(self.asked.engine.model.tokenizer) for _ in self.requests]
        if self.echo:
            for index in range(len(self.requests)):
                yield self._chunk([_choice_of(index, self.prompts[index // self.asked.n].text)])
        async for index, event in answers.events():
            choice = self._streamed(index, event, offsets[index])
            offsets[index] += len(event.text)
            if self.asked.include_draft:
                choice["pieces"] = pieces[index].push(event.token_ids, event.num_drafted, event.text)
            if choice["text"] or choice["logprobs"] or choice["finish_reason"] or "pieces" in choice:
                yield self._chunk([choice])
        if self.asked.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def _streamed(self, index: int, event: StreamEvent, offset: int) -> dict[str, Any]:
        logprobs = None
        if event.logprobs is not None:
            count = num_shown(self.requests[index], event)
            logprobs = completion_logprobs(
                self.names,
                event.token_ids[:count],
                event.logprobs[:count],
                (event.top_logprobs or ())[:count],
                offset=offset,
            )
        return _choice_of(index, event.text, logprobs, event.finish_reason)

    def _choice(
        self, index: int, prompt: Prompt, request: Request | None, score: PromptScores | None
    ) -> dict[str, Any]:
        text = (prompt.text if self.echo else "") + (request.text if request else "")
        ids: list[int] = []
        logprobs: list[float | None] = []
        tops: list[TopLogprobs | None] = []
        if score is not None:
            ids, logprobs, tops = [*prompt.token_ids], [*score.logprobs], [*score.tops]
        if request is not None and request.settings.logprobs is not None:
            count = num_shown(request)
            ids += request.token_ids[:count]
            logprobs += request.logprobs[:count]
            tops += request.top_logprobs[:count]
        form = None
        if self.asked.settings.logprobs is not None:
            form = completion_logprobs(self.names, ids, logprobs, tops)
        return _choice_of(index, text, form, "length" if request is None else request.finish_reason)

    def _usage(self) -> dict[str, Any]:
        read = sum(len(prompt.token_ids) for prompt in self.prompts)
        return usage_of(self.requests, n=self.asked.n, prompt_tokens=read)

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.asked.lane.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.asked.include_usage else {}
        return {**self._head(), "choices": choices, **usage}


def _choice_of(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def read_completion(body: bytes, service: Service) -> CompletionCall:
    """Reads a completion request. Runs on the thread that reads requests.

    Raises:
        ApiError: a field is wrong.
    """
    fields = Fields(read_json(body, service.limits))
    echo = fields.flag("echo")
    only_score = echo and fields.any("max_tokens") == 0  # no new token
    logprobs = fields.integer("logprobs", least=0, most=MOST_LOGPROBS)
    grammar = read_response_format(fields, service.limits)
    if only_score:
        fields = fields.without("max_tokens")
    asked = read_asked(fields, service, default_tokens=_DEFAULT_TOKENS, logprobs=logprobs, grammar=grammar)
    values = _prompt_list(fields, service.limits.choices)
    fields.finish()
    if len(values) * asked.n > service.limits.choices:
        most = service.limits.choices
        raise fields.wrong("n", f"times prompts is {len(values) * asked.n}; it must be at most {most}")
    if echo and logprobs is not None and asked.stream:
        raise fields.wrong("echo", "with logprobs is not for streams; leave stream out")
    prompts = [_prompt(fields, asked.engine, value) for value in values]
    requests = [request for prompt in prompts for request in asked.requests(prompt.token_ids, param="prompt")]
    return CompletionCall(asked, prompts, [] if only_score else requests, echo)


def _prompt_list(fields: Fields, most: int) -> list[Any]:
    """The prompts of a field that can be one text, one list of token ids, or a list of either."""
    value = fields.any("prompt")
    match value:
        case str():
            return [value]
        case [int(), *_]:
            return [value]
        case [str() | list(), *_] if len(value) <= most:
            return list(value)
        case [str() | list(), *_]:
            raise fields.wrong("prompt", f"has {counted(len(value), 'prompt')}; it must have at most {most}")
    raise fields.wrong("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists")


def _prompt(fields: Fields, engine: Engine, value: Any) -> Prompt:
    """Token ids of a prompt, which is read as it is, without chat template."""
    tokenizer = engine.model.tokenizer
    if isinstance(value, str):
        if problem := half_character(value):
            raise fields.wrong("prompt", problem)
        ids = list(tokenizer(value)["input_ids"])
    elif isinstance(value, list) and all(type(token) is int for token in value):
        ids = value
    else:
        raise fields.wrong("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists")
    try:
        ids = engine.encode(ids)  # checks them
    except DraftHeadsError as error:
        raise api_error_of(error, param="prompt") from None
    return Prompt(ids, value if isinstance(value, str) else tokenizer.decode(ids, skip_special_tokens=False))
