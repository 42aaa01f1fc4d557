"""A request that was read, and what the responses of all routes have in common: ids, counts, drafted text."""

import hashlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any, ClassVar

from draftheads.decode.request import Request, StreamEvent, TopLogprobs
from draftheads.decode.text import TextStream
from draftheads.models.chat_template import TokenBytes, template_of
from draftheads.serve.request_params import RequestParams
from draftheads.utils.provenance import installed_version


class TokenNames(TokenBytes):
    """The bytes and texts of a tokenizer's tokens."""

    def text_of(self, token_id: int) -> str:
        """Its text; half characters are shown as �."""
        return self.of(token_id).decode(errors="replace")

    def unique_text_of(self, token_id: int) -> str:
        r"""Its text, or ``bytes:\xe2\x80`` for half a character, as the key of an object must be unique."""
        raw = self.of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True)
class Call(ABC):
    """A request that was read."""

    id_prefix: ClassVar[str]
    has_named_events: ClassVar[bool] = False  # of streams; streams of other chunks end with [DONE]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    params: RequestParams
    num_prompt_tokens: int  # each prompt counts once, also with n answers
    requests: list[Request]  # n for each prompt; none if prompts are only scored
    messages: list[dict[str, Any]] | None  # the prompt, of a chat
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """The whole response, once all requests are finished."""

    @abstractmethod
    def chunks(self, events: AsyncGenerator[tuple[int, StreamEvent]]) -> AsyncGenerator[dict[str, Any]]:
        """The response as a stream, from the events of the requests with their numbers."""

    @cached_property
    def id(self) -> str:
        """The same in all chunks of a stream."""
        return f"{self.id_prefix}{uuid.uuid4().hex}"

    @cached_property
    def names(self) -> TokenNames:
        return TokenNames(self.params.engine.model.tokenizer)

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.object_name), "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]], num_sent: int = 0) -> dict[str, Any]:
        """A chunk of a stream. If the request asks for the usage, a last chunk without choices has it.

        ``num_sent`` are the tokens of the answers up to this chunk; the model may have more already.
        """
        options = self.params.fields.stream_options
        usage = self._counts(num_sent) if options.continuous_usage_stats else None
        usage = usage if choices else self.usage()
        chunk = {**self._head(self.chunk_name), "choices": choices}
        return {**chunk, "usage": usage} if options.include_usage else chunk

    def usage(self) -> dict[str, Any]:
        """Tokens of all answers, finished or not, as OpenAI counts them, and what drafting did."""
        requests = self.requests
        steps = sum(request.num_steps for request in requests)
        # the first token of an answer comes from the prompt's pass
        of_steps = sum(max(0, len(request.token_ids) - 1) for request in requests)
        counts = self._counts(sum(len(request.token_ids) for request in requests))
        num_cached = sum(request.num_cached for request in requests[:: self.params.fields.n])
        draft = {
            "steps": steps,
            "tokens_per_step": round(of_steps / steps, 4) if steps else 1.0,
            "drafted_by_depth": _sums([request.drafted_by_depth for request in requests]),
            "accepted_by_depth": _sums([request.accepted_by_depth for request in requests]),
        }
        return {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}, "draft": draft}

    @cached_property
    def system_fingerprint(self) -> str:
        """Of what decides on answers besides the request: weights, their precision, chat template and our version.

        The same after a restart, and for all draft heads.
        """
        model = self.params.engine.model
        parts = [model.weights_fingerprint, model.precision, str(template_of(model)), _version("draftheads")]
        return f"fp_{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"

    def _head(self, name: str) -> dict[str, Any]:
        usual = {"id": self.id, "object": name, "created": self.created, "model": self.params.lane.model}
        return {**usual, "system_fingerprint": self.system_fingerprint}

    def _counts(self, num_answered: int) -> dict[str, int]:
        total = self.num_prompt_tokens + num_answered
        return {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": num_answered, "total_tokens": total}


_version = cache(installed_version)


def _sums(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def tokens_with_logprobs(
    request: Request, part: Request | StreamEvent
) -> tuple[Sequence[int], Sequence[float], Sequence[TopLogprobs]] | None:
    """The tokens that are text (all but one that ended the answer), their log-probabilities and the top ones.

    ``part`` is an event of the request, or the whole request. None if no log-probabilities are asked for; no top ones
    if zero of them are.
    """
    if request.settings.logprobs is None:
        return None
    ids = part.token_ids
    has_stop_id = part.finish_reason == "stop" and bool(ids) and request.is_stop_id(ids[-1])
    count = len(ids) - has_stop_id
    tops = part.top_logprobs if request.settings.logprobs else None
    return ids[:count], (part.logprobs or ())[:count], (tops or ())[:count]


class DraftPieces:
    """Which parts of an answer's text were drafted, event by event.

    Text of a token can come with a later event: a half character, or what may become a stop string.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._waiting: list[tuple[str, bool]] = []

    def add(self, event: StreamEvent) -> None:
        for place, token in enumerate(event.token_ids):
            self._waiting.append((self._stream.push([token]), place < event.num_drafted))

    def take(self, text: str) -> list[list[Any]]:
        """The pieces ``[text, is_drafted]`` of the next text. What was left out before it, such as tags, is skipped."""
        skipped = max(0, "".join(piece for piece, _ in self._waiting).find(text))
        pieces: list[list[Any]] = []
        while text and self._waiting:
            piece, drafted = self._waiting.pop(0)
            piece, skipped = piece[skipped:], max(0, skipped - len(piece))
            part = piece[: len(text)]
            if len(piece) > len(text):
                self._waiting.insert(0, (piece[len(text) :], drafted))
            if part:
                pieces.append([text[: len(part)], drafted])
            text = text[len(part) :]
        if text:  # half a character at the end of an answer
            pieces.append([text, False])
        return pieces


_LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Of the tokens of a chat's answer; ``tops`` are empty if none were asked for."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.of(token_id)
        return {"token": names.text_of(token_id), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    content = [
        {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in (tops[i] if tops else ())]}
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[TopLogprobs | None],
    *,
    offset: int = 0,
) -> dict[str, Any]:
    """Of the tokens of a completion, before which are ``offset`` characters of text.

    The first token of a text has no log-probability. ``tops`` are empty if none were asked for.
    """
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(names.text_of(token_id))
    # a token's own log-probability is in the object, too, as in OpenAI's API
    best = [
        None
        if logprob is None
        else {names.unique_text_of(top): max(value, _LOWEST) for top, value in (*(tops[i] or ()), (token_id, logprob))}
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True) if tops else ())
    ]
    return {
        "tokens": [names.unique_text_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if logprob is None else max(logprob, _LOWEST) for logprob in logprobs],
        "top_logprobs": best if tops else None,
        "text_offset": offsets,
    }
