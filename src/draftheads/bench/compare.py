"""The same prompts decoded in several ways, in turn, in one run: speed as ratios, text compared token by token.

The baseline is the fastest plain way: our own loop without a drafter, not padded. All times include reading the
prompt.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftheads.bench.margins import Scorer
from draftheads.decode.engine import Engine
from draftheads.target.model import TargetModel

BASELINE = "plain"


@dataclass(frozen=True)
class Answer:
    """One prompt decoded in one way."""

    token_ids: tuple[int, ...]
    num_steps: int  # passes of the target after the prompt was read
    seconds: float  # wall time, the prompt included


@dataclass
class Way:
    """One way of decoding, and what it did with each prompt."""

    name: str
    decode: Callable[[Sequence[int]], Answer]  # prompt ids -> answer
    answers: list[Answer] = field(default_factory=list)


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
    worst_margin: float  # largest gap between the best logit and an emitted token's, re-scored in fp32


def stock_way(model: TargetModel, max_new_tokens: int) -> Way:
    """Transformers' own ``generate`` on the stock model."""

    def decode(prompt_ids: Sequence[int]) -> Answer:
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

    return Way("transformers", decode)


def engine_way(name: str, engine: Engine, max_new_tokens: int) -> Way:
    """An engine of ours, one prompt at a time."""

    def decode(prompt_ids: Sequence[int]) -> Answer:
        results, seconds = _timed(
            lambda: engine.generate([list(prompt_ids)], max_new_tokens=max_new_tokens), engine.model.device
        )
        return Answer(results[0].token_ids, results[0].num_steps, seconds)

    return Way(name, decode)


def compare(
    ways: Sequence[Way], prompts: Sequence[Sequence[int]], *, on_answer: Callable[[], None] = lambda: None
) -> None:
    """Lets every way answer every prompt; who goes first changes from prompt to prompt, so that drifts cancel."""
    for way in ways:  # warm up: kernels are chosen and weights packed at the first steps
        way.decode(prompts[0])
    for number, prompt in enumerate(prompts):
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            way.answers.append(way.decode(prompt))
            on_answer()


def rows(
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    scorer: Scorer,
    *,
    references: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
) -> list[Row]:
    """The table. ``references`` gives, by way, the token ids to be identical to; plain's answers when left out."""
    by_name = {way.name: way for way in ways}
    plain = by_name[BASELINE]
    stock = by_name.get("transformers")
    result = []
    for way in ways:
        expected = (references or {}).get(way.name) or [answer.token_ids for answer in plain.answers]
        pairs = list(zip(way.answers, expected, strict=True))
        different = sum(answer.token_ids != other for answer, other in pairs)
        ratios = [_speed([a]) / _speed([b]) for a, b in zip(way.answers, plain.answers, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        margins = [scorer.worst_margin(p, a.token_ids) for p, a in zip(prompts, way.answers, strict=True)]
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
                worst_margin=max(margins),
            )
        )
    return result


def _speed(answers: Sequence[Answer]) -> float:
    """Tokens per second over all of them."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    _synchronise(device)
    start = time.perf_counter()
    result = work()
    _synchronise(device)
    return result, time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
