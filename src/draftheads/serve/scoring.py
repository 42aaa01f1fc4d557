"""Log-probabilities of a prompt's own tokens. The model thread reads it in chunks, between the steps of streams."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from draftheads.decode.engine import Engine
from draftheads.decode.request import TopLogprobs
from draftheads.runners import runner_for
from draftheads.serve.scheduler import Scheduler
from draftheads.speculation.sampling import token_logprobs


@dataclass(frozen=True)
class PromptScores:
    """Of one prompt; the first token follows nothing, so it has none."""

    logprobs: list[float | None]
    tops: list[TopLogprobs | None]  # empty if none are asked for


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
    return PromptScores(logprobs, tops if num_top else [])
