"""One request: its text so far, its settings, its stop rules and its counts."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cached_property, partial
from html import escape
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from draftheads.decode.grammar import GrammarState
from draftheads.decode.prefix_cache import BLOCK_TOKENS
from draftheads.decode.text import StopText, TextStream, pieces_of
from draftheads.models.generation import GenerationRules
from draftheads.runners.runner import Row
from draftheads.settings import SamplingSettings
from draftheads.utils.counts import counted

if TYPE_CHECKING:
    from draftheads.decode.engine import Engine

FinishReason = Literal["stop", "length"]
TopLogprobs = tuple[tuple[int, float], ...]  # (id, log-probability) of the most likely tokens, best first
_DRAFTED_STYLE = "background: rgba(46, 160, 67, 0.25)"  # readable on light and dark pages
# of random numbers: what is added to the seed; far from each other
_STREAMS = {"tokens": 0, "rejection": 0x9E3779B97F4A7C15, "drafts": 0xBF58476D1CE4E5B9}


TREE_SIZES = (0, 8, 16, 32, 64, 128)  # few, as each one that is asked for takes a pass of the model in every step


@dataclass(frozen=True)
class Lane:
    """Requests that are decoded in one batch: they have the same drafter, adapter and rule for trees."""

    model: str = ""
    """The name of the engine."""
    draft_nodes: int | None = None
    """0 decodes plainly; n drafts on growing trees of n nodes; None leaves it to the engine."""

    def rounded(self) -> "Lane":
        """With the nearest of ``TREE_SIZES``, the larger one of two.

        >>> [Lane("m", nodes).rounded().draft_nodes for nodes in (3, 4, 11, 12, 90, None)]
        [0, 8, 8, 16, 64, None]
        """
        nodes = self.draft_nodes
        if nodes is None:
            return self
        return replace(self, draft_nodes=min(TREE_SIZES, key=lambda size: (abs(size - nodes), -size)))


@dataclass(frozen=True)
class StreamEvent:
    """What one step added to one answer."""

    index: int  # which of the prompts
    text: str  # new text, whole characters only; may be empty
    token_ids: tuple[int, ...]  # new tokens
    num_drafted: int  # how many of them, counted from the left, are accepted draft tokens
    finish_reason: FinishReason | None = None  # set on the last event of an answer
    num_copied: int = 0  # how many of the drafted ones, the last of them, only a copy from the text so far brought
    logprobs: tuple[float, ...] | None = None  # of the new tokens, as in GenerationResult
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    drafted_by_depth: tuple[int, ...] = ()  # draft tokens of this step at depth 1, 2, …, accepted or not


@dataclass(frozen=True)
class GenerationResult:
    """A finished answer. In a notebook it is shown with its accepted draft tokens in colour."""

    text: str
    token_ids: tuple[int, ...]  # of the answer, the token that ended it included
    num_prompt_tokens: int
    num_steps: int  # passes of the target after the prompt was read
    finish_reason: FinishReason
    num_copied: int = 0  # accepted draft tokens that only a copy from the text so far brought
    drafted: tuple[bool, ...] = ()  # whether each token is an accepted draft token
    logprobs: tuple[float, ...] | None = None  # of each token; None unless settings.logprobs asks for it
    top_logprobs: tuple[TopLogprobs, ...] | None = None  # at each place; None unless settings.logprobs is above 0
    drafted_by_depth: tuple[int, ...] = ()  # draft tokens of all steps at depth 1, 2, …
    accepted_by_depth: tuple[int, ...] = ()  # how many of them were accepted
    new_stream: InitVar[Callable[[], TextStream] | None] = None  # for pieces; no field: neither compared nor pickled

    def __post_init__(self, new_stream: Callable[[], TextStream] | None) -> None:
        object.__setattr__(self, "new_stream", new_stream)

    @property
    def tokens_per_step(self) -> float:
        """New tokens per pass of the target, 1 for plain decoding, without the first token, from the prompt's pass."""
        return (len(self.token_ids) - 1) / self.num_steps if self.num_steps else 1.0

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The part of the text that each token added, whole characters only; together they are the text.

        A token adds nothing if it ends the answer, or if its character ends in a later token.
        """
        new_stream = vars(self)["new_stream"]
        if new_stream is None:  # made by hand
            return (self.text, *[""] * (len(self.token_ids) - 1))
        return pieces_of(self.text, self.token_ids, new_stream())

    def record(self) -> dict[str, Any]:
        """What ``draftheads generate`` writes: the text, its counts, and log-probabilities if they were asked for."""
        names = ["text", "token_ids", "num_steps", "tokens_per_step", "num_copied", "finish_reason"]
        names += [] if self.logprobs is None else ["logprobs", "top_logprobs"]
        return {name: getattr(self, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pieces": self.pieces, "new_stream": None}

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}…"
        return f"GenerationResult({text!r}, {self._counts()})"

    def _counts(self) -> str:
        tokens, steps = counted(len(self.token_ids), "token"), counted(self.num_steps, "step")
        return f"{tokens}, {self.tokens_per_step:.2f} tokens/step, {steps}, ended by {self.finish_reason}"

    def _repr_html_(self) -> str:
        """The text with its accepted draft tokens in colour, and the counts."""
        drafted = self.drafted or (False,) * len(self.pieces)
        runs = groupby(zip(drafted, self.pieces, strict=True), lambda pair: pair[0])
        text = "".join(_coloured("".join(piece for _, piece in run), drafted=flag) for flag, run in runs)
        num_drafted = sum(self.drafted)
        legend = f" ({_coloured(counted(num_drafted, 'accepted draft token'), drafted=True)})" if num_drafted else ""
        # dollar signs are no formulas
        return (
            f'<div class="tex2jax_ignore mathjax_ignore"><div style="white-space: pre-wrap">{text}</div>'
            f'<div style="opacity: 0.7; margin-top: 0.5em">{escape(self._counts())}{legend}</div></div>'
        )


class Request:
    """A request while it waits, is read and is decoded."""

    place: "tuple[Engine, Lane]"  # of the batch that reads or decodes it; the core sets it and what follows
    lane = Lane()
    client = ""
    cache_salt = ""
    num_overtaken = 0  # requests that were admitted before it, out of turn, because it did not fit
    admission = 0  # its number in the order of admissions
    # while its prompt is read:
    row: Row | None  # from its first chunk on: another prompt may have left a common beginning
    read_ids: list[int]  # of a request that was interrupted, with its answer so far
    digests: list[Hashable]
    hidden: list[Tensor]  # parts (t, D or n·D)
    token_seconds = 0.0  # that each token of its last chunk took; 0: none was read
    stop: int  # where a chunk ends, so that states of recurrent layers are kept there; 0: nowhere

    def __init__(
        self,
        prompt_ids: Sequence[int],
        settings: SamplingSettings,
        *,
        tokenizer: Any,
        eos_ids: frozenset[int],
        max_length: int | None,
        index: int = 0,
        grammar_state: GrammarState | None = None,
        generation: GenerationRules | None = None,
    ) -> None:
        self.index = index
        self.grammar_state = grammar_state  # after the tokens so far; None without a grammar
        self.prompt_ids = list(prompt_ids)
        self.settings = settings = generation.settings(settings, len(prompt_ids)) if generation else settings
        self.token_ids: list[int] = []
        self.text = ""
        self.num_steps = 0
        self.num_cached = 0  # prompt tokens whose keys and values came from a cached prefix
        self.num_copied = 0
        self.drafted: list[bool] = []  # for each token
        self.drafted_by_depth: list[int] = []  # draft tokens of all steps at depth 1, 2, …
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None  # of this request alone, see Batch
        self.stop_ids = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else eos_ids)
        room = settings.max_new_tokens if max_length is None else max_length - len(self.prompt_ids)
        self.most_new_tokens = min(settings.max_new_tokens, room)  # tokens of the longest possible answer
        self.min_new_tokens = settings.min_new_tokens or 0
        self.bias = {**(generation.bias if generation else {}), **dict(settings.logit_bias)}
        # of the model's generation configuration; the repetition penalty is then among them
        most = self.most_tokens
        self.processors = None if generation is None else generation.processors(self.prompt_ids, most, settings)
        self.row_settings = replace(settings, repetition_penalty=1.0) if self.processors else settings
        self.new_stream = partial(TextStream, tokenizer, skip_special_tokens=settings.skip_special_tokens)
        self._stream = self.new_stream()
        keep = settings.include_stop_str_in_output
        may_end = None if grammar_state is None else grammar_state.is_whole
        self._stop_text = StopText(settings.stop, keep=keep, hidden=self._stream.hidden, may_end=may_end)
        self._seed = torch.Generator().seed() if settings.seed is None else settings.seed
        self._uniforms: list[float] = []
        self._streams: dict[str, torch.Generator] = {}
        self.end_reading()

    @property
    def tokens_left(self) -> int:
        """Tokens that may still follow."""
        return self.most_new_tokens - len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def accepted_by_depth(self) -> list[int]:
        """Accepted draft tokens of all steps at depth 1, 2, …: a run of them is a step's."""
        runs = [len(list(run)) for is_drafted, run in groupby(self.drafted) if is_drafted]
        return [sum(length >= depth for length in runs) for depth in range(1, len(self.drafted_by_depth) + 1)]

    @property
    def ids_to_read(self) -> list[int]:
        """What is read before the next step: the prompt, and all tokens of the answer so far but the next root."""
        return [*self.prompt_ids, *self.token_ids[:-1]]

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt and of the longest possible answer."""
        return len(self.prompt_ids) + self.most_new_tokens

    def end_reading(self) -> None:
        """Its prompt is not read, or not any more: a finished request that is kept holds no memory of the model."""
        self.row, self.read_ids, self.digests, self.hidden, self.stop = None, [], [], [], 0

    @property
    def begun_row(self) -> Row:
        """Its row, once reading has begun."""
        assert self.row is not None
        return self.row

    @property
    def findable(self) -> list[Hashable]:
        """The digests of what need not be read: the last token is read in any case, for its logits."""
        return self.digests[: (len(self.read_ids) - 1) // BLOCK_TOKENS]

    def expected_tokens(self, headroom: int) -> int:
        """Of its text, after so many further tokens of its answer."""
        return min(self.most_tokens, self.num_tokens + headroom)

    def is_stop_id(self, token_id: int) -> bool:
        """Does this token end the answer, without being part of its text?"""
        return token_id in self.stop_ids and not self.settings.include_stop_str_in_output

    def uniforms(self, count: int) -> list[float]:
        """Random numbers in [0, 1) for the next ``count`` tokens; a place in the answer always gets the same one."""
        start = len(self.token_ids)
        while len(self._uniforms) < start + count:
            self._uniforms += self.draws(64, "tokens")
        return self._uniforms[start : start + count]

    def draws(self, count: int, stream: Literal["tokens", "rejection", "drafts"]) -> list[float]:
        """New uniform numbers in [0, 1) from a stream of the seed; all but "tokens" choose no token of the answer."""
        if stream not in self._streams:
            self._streams[stream] = torch.Generator().manual_seed((self._seed + _STREAMS[stream]) % 2**64)
        numbers: list[float] = torch.rand(count, generator=self._streams[stream], dtype=torch.float64).tolist()
        return numbers

    def append(
        self,
        token_ids: Sequence[int],
        *,
        num_drafted: int,
        num_copied: int = 0,
        logprobs: Sequence[float] = (),
        top_logprobs: Sequence[TopLogprobs] = (),
        drafted_by_depth: Sequence[int] = (),
    ) -> StreamEvent:
        """Adds a step's tokens up to the first stop; what comes after it in the accepted run is dropped.

        The log-probabilities are those of the tokens, and more of them are ignored; empty if the settings ask for none.
        ``drafted_by_depth`` counts the step's draft tokens at depth 1, 2, …
        """
        kept: list[int] = []
        text = ""
        # a stop string can end inside a run, so with stop strings tokens are looked at one by one
        end = next((n for n, token in enumerate(token_ids, 1) if token in self.stop_ids), len(token_ids))
        run = list(token_ids[: min(end, self.tokens_left)])
        pieces = [[token] for token in token_ids] if self.settings.stop else [run]
        for piece in pieces:
            kept += piece
            self.token_ids += piece
            is_early = len(self.token_ids) <= self.min_new_tokens
            last = piece[-1] if piece else None
            new = self._stream.push(piece[:-1] if last is not None and self.is_stop_id(last) else piece)
            text += self._stop_text.push(new, token=last, is_early=is_early)
            if last in self.stop_ids or self._stop_text.found:
                self.finish_reason = "stop"
            elif self.tokens_left <= 0:
                self.finish_reason = "length"
            if self.finish_reason:
                text += self._stop_text.push(self._stream.flush(), is_early=is_early) + self._stop_text.flush()
                break
        self.text += text
        if self.grammar_state is not None and self.finish_reason is None:
            self.grammar_state.read(kept)
        kept_drafted = min(num_drafted, len(kept))
        kept_copied = max(0, num_copied - (num_drafted - kept_drafted))  # copied ones are the last of those drafted
        self.num_copied += kept_copied
        self.drafted += [place < kept_drafted for place in range(len(kept))]
        self.logprobs += logprobs[: len(kept)]
        self.top_logprobs += top_logprobs[: len(kept)]
        self.drafted_by_depth = list(map(sum, zip_longest(self.drafted_by_depth, drafted_by_depth, fillvalue=0)))
        return StreamEvent(
            index=self.index,
            text=text,
            token_ids=tuple(kept),
            num_drafted=kept_drafted,
            finish_reason=self.finish_reason,
            num_copied=kept_copied,
            drafted_by_depth=tuple(drafted_by_depth),
            **self._asked(logprobs[: len(kept)], top_logprobs[: len(kept)]),
        )

    def result(self) -> GenerationResult:
        """The finished answer."""
        assert self.finish_reason is not None, "the answer is not finished"
        return GenerationResult(
            text=self.text,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=len(self.prompt_ids),
            num_steps=self.num_steps,
            finish_reason=self.finish_reason,
            num_copied=self.num_copied,
            drafted=tuple(self.drafted),
            drafted_by_depth=tuple(self.drafted_by_depth),
            accepted_by_depth=tuple(self.accepted_by_depth),
            new_stream=self.new_stream,
            **self._asked(self.logprobs, self.top_logprobs),
        )

    def _asked(self, logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs]) -> dict[str, Any]:
        """What the settings ask for."""
        asked = self.settings.logprobs
        return {
            "logprobs": None if asked is None else tuple(logprobs),
            "top_logprobs": tuple(top_logprobs) if asked else None,
        }


def _coloured(text: str, *, drafted: bool) -> str:
    text = escape(text)
    return f'<span style="{_DRAFTED_STYLE}">{text}</span>' if drafted and text else text
