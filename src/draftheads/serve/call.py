"""A request that was read, and what the responses of all routes have in common: ids, counts, drafted text."""

import hashlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import repeat, zip_longest
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
        # said only where answers are not those of plain decoding
        rule = {"acceptance": "typical"} if self.params.settings.acceptance == "typical" else {}
        return {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}, "draft": draft, **rule}

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


TokenLogprob = tuple[int, float | None, TopLogprobs | None]  # a token, its log-probability, the most likely ones


def tokens_with_logprobs(request: Request, part: Request | StreamEvent) -> list[TokenLogprob] | None:
    """The tokens that are text (all but one that ended the answer), with the top log-probabilities that are asked for.

    ``part`` is an event of the request, or the whole request. None if no log-probabilities are asked for.
    """
    if request.settings.logprobs is None:
        return None
    ids = part.token_ids
    has_stop_id = part.finish_reason == "stop" and bool(ids) and request.is_stop_id(ids[-1])
    tops = (part.top_logprobs if request.settings.logprobs else None) or repeat(())
    return list(zip(ids[: len(ids) - has_stop_id], part.logprobs or (), tops, strict=False))


class TokenTexts:
    """Which tokens the parts of an answer's text are made of, event by event.

    Text of a token can come with a later event: a half character, or what may become a stop string or a tag.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream, self._end = stream, 0
        self._tokens = list[_Token]()
        self._reaches = list[int]()  # of the tokens
        self._num_counted = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob] = (), *, num_drafted: int = 0) -> list[int]:
        """Returns where the tokens begin."""
        first = len(self._tokens)
        for place, token in enumerate(token_ids):
            start, self._end = self._end, self._end + len(self._stream.push([token]))
            entry = entries[place] if place < len(entries) else None
            self._tokens.append(_Token(start, self._end, place < num_drafted, entry))
            self._reaches.append(max(self._end, start + 1))
        return [token.start for token in self._tokens[first:]]

    def num_in(self, ranges: Sequence[range], until: int | None) -> int:
        """How many of the tokens that end up to there, and were not counted before, end in these ranges."""
        count = len(self._tokens) if until is None else bisect_right(self._reaches, until)
        ends, self._num_counted = self._reaches[self._num_counted : count], max(count, self._num_counted)
        return sum(any(end - 1 in each for each in ranges) for end in ends)

    def take(self, start: int, text: str) -> tuple[list[list[Any]], list[TokenLogprob]]:
        """Pieces ``[text, is_drafted]`` of the text that begins there, and log-probabilities that were not taken."""
        pieces, entries = list[list[Any]](), list[TokenLogprob]()
        for place in range(bisect_right(self._reaches, start), len(self._tokens)):
            token = self._tokens[place]
            if token.start >= start + len(text):
                break
            piece = text[max(0, token.start - start) : max(0, token.end - start)]
            pieces += [[piece, token.is_drafted]] if piece else []
            entries += [token.entry] if token.entry else []
            token.entry = None
        rest = text[sum(len(piece) for piece, _ in pieces) :]  # half a character at the end of an answer
        return pieces + ([[rest, False]] if rest else []), entries


@dataclass
class _Token:
    """A token in the text of an answer. One without text belongs to the character behind it."""

    start: int
    end: int
    is_drafted: bool
    entry: TokenLogprob | None


_LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(names: TokenNames, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of the tokens of a chat's answer."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = names.of(token_id)
        return {"token": names.text_of(token_id), "logprob": _number(logprob), "bytes": list(raw)}

    content = [
        {**entry(token, own), "top_logprobs": [entry(*top) for top in tops or ()]} for token, own, tops in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    names: TokenNames, tokens: Sequence[TokenLogprob], offsets: Sequence[int], *, has_tops: bool
) -> dict[str, Any]:
    """Of the tokens of a completion, whose texts begin at the offsets. The first of a text has no log-probability."""
    # a token's own log-probability is among the top ones, too, as in OpenAI's API
    best = [
        None
        if own is None
        else {names.unique_text_of(top): _number(each) for top, each in (*(tops or ()), (token, own))}
        for token, own, tops in tokens
    ]
    return {
        "tokens": [names.unique_text_of(token) for token, _, _ in tokens],
        "token_logprobs": [_number(own) for _, own, _ in tokens],
        "top_logprobs": best if has_tops else None,
        "text_offset": list(offsets[: len(tokens)]),
    }


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)
