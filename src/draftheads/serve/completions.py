"""``/v1/completions``: the request's fields, answers as texts or chunks, and log-probabilities of prompts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, Field, TypeAdapter, WithJsonSchema

from draftheads.decode.engine import Engine
from draftheads.decode.request import StreamEvent, TopLogprobs
from draftheads.decode.text import TextStream
from draftheads.errors import DraftHeadsError
from draftheads.models.chat_template import token_ids_of
from draftheads.runners import runner_for
from draftheads.serve.call import Call, TokenLogprob, TokenTexts, completion_logprobs, tokens_with_logprobs
from draftheads.serve.fields import NoEffect, api_error_of, wrong
from draftheads.serve.request_params import ChoiceFields, CommonFields, Unlimited, read_params
from draftheads.serve.scheduler import Scheduler
from draftheads.serve.state import Service
from draftheads.settings import MOST_LOGPROBS
from draftheads.speculation.sampling import token_logprobs
from draftheads.utils.counts import counted
from draftheads.utils.messages import half_character


@dataclass(frozen=True)
class PromptScores:
    """Of one prompt; the first token follows nothing, so it has none."""

    logprobs: list[float | None]
    tops: list[TopLogprobs | None]


async def score(scheduler: Scheduler, engine: Engine, token_ids: Sequence[int], num_top: int) -> PromptScores:
    """Scores a prompt, with the ``num_top`` most likely tokens at each place."""
    runner = runner_for(engine.model)
    row = runner.open(len(token_ids))
    logprobs: list[float | None] = [None]
    tops: list[TopLogprobs | None] = [None]

    @torch.inference_mode()
    def read(start: int, end: int) -> None:
        [(hidden, _)] = runner.read([row], [token_ids[start:end]])  # (t, D)
        following = torch.tensor(token_ids[start + 1 : end + 1], device=hidden.device)
        scores = token_logprobs(engine.model.logits(hidden), following, num_top)
        new_logprobs, top_logprobs, top_ids = (part.tolist() for part in scores)
        logprobs.extend(new_logprobs)
        tops.extend(tuple(zip(ids, top, strict=True)) for ids, top in zip(top_ids, top_logprobs, strict=True))

    num_read = len(token_ids) - 1  # what follows the last token was not asked for
    chunk, core = scheduler.limits.chunk_tokens, scheduler.core
    await asyncio.wrap_future(scheduler.call(partial(core.hold, num_read, engine)))
    try:
        for start in range(0, num_read, chunk):
            await asyncio.wrap_future(scheduler.call(partial(read, start, min(start + chunk, num_read))))
    finally:
        scheduler.call(partial(core.hold, -num_read, engine))
    return PromptScores(logprobs, tops)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a completion."""

    token_ids: list[int]
    text: str  # for echo
    offsets: list[int]  # in it, of the tokens


@dataclass(frozen=True)
class CompletionCall(Call):
    """A completion request that was read."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    prompts: list[Prompt]
    echo: bool
    scores: list[PromptScores] = field(default_factory=list)  # of the prompts; added if they are asked for

    @property
    def num_scored(self) -> int | None:
        """How many top log-probabilities of prompt tokens are asked for; None: not even their own."""
        return self.params.settings.logprobs if self.echo else None

    def response(self) -> dict[str, Any]:
        return self.whole([self._choice(index) for index in range(len(self.prompts) * self.params.fields.n)])

    async def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """Texts; the prompts first, if they are echoed."""
        options = self.params.fields.stream_options
        offsets = [0] * len(self.requests)
        texts = [TokenTexts(request.new_stream()) for request in self.requests]
        for index in range(len(self.requests)) if self.echo else ():
            text = self._prompt(index).text
            yield self.chunk([_choice_of(index, text)])
        num_sent = 0
        async for index, event in events:
            num_sent += len(event.token_ids)
            starts = texts[index].add(event.token_ids, num_drafted=event.num_drafted)
            tokens = tokens_with_logprobs(self.requests[index], event)
            logprobs = None if tokens is None else self._logprobs(tokens, starts)
            choice = _choice_of(index, event.text, logprobs, event.finish_reason)
            if options.include_draft:
                choice["pieces"], _ = texts[index].take(offsets[index], event.text)
            offsets[index] += len(event.text)
            if event.text or logprobs or event.finish_reason or options.include_draft:
                yield self.chunk([choice], num_sent)
        if options.include_usage:
            yield self.chunk([])

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.params.fields.n]

    def _choice(self, index: int) -> dict[str, Any]:
        prompt = self._prompt(index)
        request = self.requests[index] if self.requests else None
        tokens, offsets = list[TokenLogprob](), list[int]()
        if self.scores:
            score = self.scores[index // self.params.fields.n]
            tokens, offsets = list(zip(prompt.token_ids, score.logprobs, score.tops, strict=True)), prompt.offsets
        text = prompt.text if self.echo else ""
        if request is not None and (of_answer := tokens_with_logprobs(request, request)):
            starts = TokenTexts(request.new_stream()).add(request.token_ids)
            tokens, offsets = tokens + of_answer, [*offsets, *(len(text) + start for start in starts)]
        text += request.text if request else ""
        form = None if self.params.settings.logprobs is None else self._logprobs(tokens, offsets)
        return _choice_of(index, text, form, "length" if request is None else request.finish_reason)

    def _logprobs(self, tokens: list[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
        return completion_logprobs(self.names, tokens, offsets, has_tops=bool(self.params.settings.logprobs))


def _choice_of(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _prompts_of(value: Any) -> list[str | list[int]]:
    match value:
        case str() | [int(), *_]:
            prompts = [value]
        case [_, *_]:
            prompts = value
        case _:
            prompts = [None]
    for prompt in prompts:
        if isinstance(prompt, str):
            problem = half_character(prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            problem = None
        else:
            problem = "must be a text, a list of texts, a list of token ids, or a list of such lists"
        if problem:
            raise ValueError(problem)
    return prompts


_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
_Several = Annotated[list[_Ids], Field(min_length=1)]
_PROMPT_SCHEMA = TypeAdapter(Annotated[str, Field(min_length=1)] | _Texts | _Ids | _Several).json_schema()


class CompletionFields(ChoiceFields, CommonFields):
    """The fields of a completion request."""

    default_tokens: ClassVar = 16  # OpenAI's

    prompt: Annotated[Any, AfterValidator(_prompts_of), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, Unlimited] = None  # 0, with echo: prompts are only scored
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    parallel_tool_calls: NoEffect = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def read_completion(fields: CompletionFields, service: Service) -> CompletionCall:
    """Reads a completion request. Runs on a thread that reads requests."""
    only_score = fields.max_tokens == 0
    if only_score and not fields.echo:
        raise wrong("max_tokens", "is 0; it must be at least 1")
    if fields.echo and fields.logprobs is not None and fields.stream:
        raise wrong("echo", "with logprobs is not for streams; leave stream out")
    params = read_params(fields, service, fields.grammar)
    num_prompts, most = len(fields.prompt), service.limits.choices
    if num_prompts > most:
        raise wrong("prompt", f"has {counted(num_prompts, 'prompt')}; it must have at most {most}")
    if num_prompts * fields.n > most:
        raise wrong("n", f"times prompts is {num_prompts * fields.n}; it must be at most {most}")
    prompts = [_read_prompt(params.engine, prompt) for prompt in fields.prompt]
    requests = [request for prompt in prompts for request in params.requests(prompt.token_ids, param="prompt")]
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    requests = [] if only_score else requests
    num_scored = sum(request.most_new_tokens for request in requests[:: fields.n]) + fields.echo * num_tokens
    factor = "tokens of prompts and answers" if fields.echo or num_prompts > 1 else "max_tokens"
    params.check_logprobs(service.limits.logprobs, num_scored, tokens=factor, field="logprobs")
    return CompletionCall(params, num_tokens, requests, None, prompts, fields.echo)


def _read_prompt(engine: Engine, prompt: str | list[int]) -> Prompt:
    """Its token ids; a text is read as it is, without chat template."""
    try:
        ids = engine.encode(token_ids_of(engine.model, prompt) if isinstance(prompt, str) else prompt)  # checks them
    except DraftHeadsError as error:
        raise api_error_of(error, param="prompt") from None
    text, stream = (
        engine.model.tokenizer.decode(ids, skip_special_tokens=False),
        TextStream(engine.model.tokenizer, skip_special_tokens=False),
    )
    before = len(text) - len(prompt) if isinstance(prompt, str) else 0  # a BOS has no text
    offsets = [max(0, start - before) for start in TokenTexts(stream).add(ids)]
    return Prompt(ids, prompt if isinstance(prompt, str) else text, offsets)
