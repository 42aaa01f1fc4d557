"""The same prompts decoded in several ways, in turn, in one run: speed as ratios, text compared token by token.

The baseline is the fastest plain way: our own loop without a drafter, not padded. All times include reading the
prompt. A time box limits the tokens of an answer and the number of prompts.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from draftheads.bench.margins import Scorer
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.decode.step_timer import wait_for
from draftheads.models.model import TargetModel

BASELINE = "plain"
STOCK = "transformers"
_WARM_UP_TOKENS = 4  # of an answer that nothing is measured on
_PROBE_TOKENS = 16  # of an answer that shows the speed of a way
_LEAST_TOKENS = 32  # of an answer, however slow the machine is
_ENOUGH_PROMPTS = 3  # further prompts only where answers need not be shorter for them
_SAFETY = 0.9  # of the time that is spent by plan: later tokens of a text take longer than the first ones


@dataclass(frozen=True)
class Answer:
    """One prompt decoded in one way."""

    token_ids: tuple[int, ...]
    num_steps: int  # passes of the target after the prompt was read
    seconds: float  # wall time, the prompt included
    num_drafted: int = 0  # accepted draft tokens
    num_copied: int = 0  # those of them that only a copy from the text brought


@dataclass
class Way:
    """One way of decoding, and what it did with each prompt."""

    name: str
    decode: Callable[[Sequence[int], int], Answer]  # prompt ids, most new tokens -> answer
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Extent:
    """How much was compared."""

    num_prompts: int
    max_new_tokens: int  # of an answer
    seconds: float  # of all ways together, warming up included


@dataclass(frozen=True)
class Row:
    """What a way did over all prompts."""

    method: str
    tokens_per_second: float
    tokens_per_step: float
    speedup: float  # over our plain decoding: ratio of tokens per second
    speedup_quartiles: tuple[float, float]  # of the ratio prompt by prompt
    speedup_over_transformers: float | None
    identical: bool  # every answer has the reference's token ids
    num_different: int  # answers that have not
    worst_margin: float | None  # largest gap between the best logit and an emitted token's, re-scored in fp32
    num_drafted: int = 0  # accepted draft tokens
    num_copied: int = 0  # those of them that only a copy from the text brought


def stock_way(model: TargetModel) -> Way:
    """Transformers' own ``generate`` on the stock model."""

    def decode(prompt_ids: Sequence[int], max_new_tokens: int) -> Answer:
        ids = torch.tensor([list(prompt_ids)], device=model.device)
        output, seconds = _timed(
            lambda: model.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(model.eos_ids),
                pad_token_id=min(model.eos_ids, default=0),
            ),
            model.device,
        )
        token_ids = tuple(output[0, len(prompt_ids) :].tolist())
        return Answer(token_ids, len(token_ids) - 1, seconds)

    return Way(STOCK, decode)


def engine_way(name: str, engine: Engine) -> Way:
    """An engine of ours, one prompt at a time."""

    def decode(prompt_ids: Sequence[int], max_new_tokens: int) -> Answer:
        def work() -> tuple[GenerationResult, int]:
            sequences = engine.sequences([list(prompt_ids)], max_new_tokens=max_new_tokens)
            drafted = sum(event.num_drafted for event in engine.run(sequences))
            return sequences[0].result(), drafted

        (result, drafted), seconds = _timed(work, engine.model.device)
        return Answer(result.token_ids, result.num_steps, seconds, drafted, result.num_copied)

    return Way(name, decode)


def compare(
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    on_answer: Callable[[], None] = lambda: None,
) -> Extent:
    """Lets every way answer a prompt, then the next prompt; who goes first changes, so that drifts cancel.

    Args:
        ways: what is compared.
        prompts: token ids. At least one is answered.
        max_new_tokens: of an answer; fewer where three prompts would not be answered in time, but at least 32.
        seconds: for all ways together. No prompt is begun that would not be answered in time by all ways.
        clock: gives seconds.
        on_answer: is called after each answer.
    """
    start = clock()
    each = sum(_seconds_per_token(way, prompts[0], clock) for way in ways)
    left = seconds - (clock() - start)
    tokens = affordable_tokens(left, each, num_prompts=min(_ENOUGH_PROMPTS, len(prompts)), most=max_new_tokens)
    longest, done = 0.0, 0
    for prompt in prompts:
        begun = clock()
        if done and begun + longest - start > seconds:
            break
        turn = done % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            way.answers.append(way.decode(prompt, tokens))
            on_answer()
        done, longest = done + 1, max(longest, clock() - begun)
    return Extent(done, tokens, clock() - start)


def affordable_tokens(seconds: float, seconds_per_token: float, *, num_prompts: int, most: int) -> int:
    """How long answers to so many prompts may be, if a token takes all ways together ``seconds_per_token``.

    >>> affordable_tokens(100.0, 0.5, num_prompts=3, most=128)
    60
    """
    by_time = _SAFETY * seconds / (num_prompts * max(seconds_per_token, 1e-9))
    return int(min(most, max(by_time, _LEAST_TOKENS)))


def _seconds_per_token(way: Way, prompt: Sequence[int], clock: Callable[[], float]) -> float:
    """After warming up; reading the prompt included."""
    way.decode(prompt, _WARM_UP_TOKENS)
    start = clock()
    answer = way.decode(prompt, _PROBE_TOKENS)
    return (clock() - start) / len(answer.token_ids)


def rows(
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    scorer: Scorer | None,
    *,
    references: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
) -> list[Row]:
    """The table.

    Args:
        ways: with their answers.
        prompts: those that were answered.
        scorer: finds the worst margins; without it there are none.
        references: by way, the token ids to be identical to; plain's answers when left out.
    """
    margin = cache(scorer.worst_margin) if scorer else None  # ways with the same text need one pass
    by_name = {way.name: way for way in ways}
    plain = by_name[BASELINE]
    stock = by_name.get(STOCK)
    result = []
    for way in ways:
        expected = (references or {}).get(way.name) or [answer.token_ids for answer in plain.answers]
        pairs = list(zip(way.answers, expected, strict=True))
        different = sum(answer.token_ids != other for answer, other in pairs)
        ratios = [_speed([a]) / _speed([b]) for a, b in zip(way.answers, plain.answers, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        margins = [margin(tuple(p), a.token_ids) for p, a in zip(prompts, way.answers, strict=True)] if margin else []
        steps = sum(answer.num_steps for answer in way.answers)
        result.append(
            Row(
                method=way.name,
                tokens_per_second=_speed(way.answers),
                tokens_per_step=sum(len(a.token_ids) - 1 for a in way.answers) / steps if steps else 1.0,
                speedup=_speed(way.answers) / _speed(plain.answers),
                speedup_quartiles=(low, high),
                speedup_over_transformers=_speed(way.answers) / _speed(stock.answers) if stock else None,
                identical=different == 0,
                num_different=different,
                worst_margin=max(margins, default=None),
                num_drafted=sum(answer.num_drafted for answer in way.answers),
                num_copied=sum(answer.num_copied for answer in way.answers),
            )
        )
    return result


def _speed(answers: Sequence[Answer]) -> float:
    """Tokens per second over all of them."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    wait_for(device)
    start = time.perf_counter()
    result = work()
    wait_for(device)
    return result, time.perf_counter() - start
