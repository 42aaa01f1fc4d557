"""Log-probabilities of a prompt's own tokens. The model thread reads it in chunks, between the steps of streams."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftheads.decode.engine import Engine
from draftheads.decode.request import TopLogprobs
from draftheads.models.kv_target import Target
from draftheads.serve.scheduler import Scheduler
from draftheads.speculation.sampling import token_logprobs


@dataclass(frozen=True)
class PromptScores:
    """Of one prompt; the first token follows nothing, so it has none."""

    logprobs: list[float | None]
    tops: list[TopLogprobs | None]  # empty if none are asked for


async def score(scheduler: Scheduler, engine: Engine, token_ids: Sequence[int], num_top: int) -> PromptScores:
    """Scores a prompt.

    Args:
        scheduler: whose thread reads it.
        engine: of the model.
        token_ids: the prompt.
        num_top: how many of the most likely tokens at each place.
    """
    scorer = _Scorer(engine, token_ids, num_top)
    while scorer.num_left:
        await asyncio.wrap_future(scheduler.call(lambda: scorer.read(scheduler.limits.chunk_tokens)))
    return scorer.scores()


class _Scorer:
    """Reads a prompt in chunks; used on the model thread only."""

    def __init__(self, engine: Engine, token_ids: Sequence[int], num_top: int) -> None:
        self._engine = engine
        self._ids = list(token_ids)
        self._num_top = num_top
        self._target = Target(engine.model)
        self._target.lengths = [0]
        self._done = 0
        self._found: list[tuple[list[float], Any, Any]] = []

    @property
    def num_left(self) -> int:
        """Tokens that are not read yet; the last one predicts nothing that was asked for."""
        return max(0, len(self._ids) - 1 - self._done)

    @torch.inference_mode()
    def read(self, most: int) -> None:
        """Reads the next tokens, at most so many."""
        count = min(most, self.num_left)
        [(hidden, _)] = self._target.read([self._ids[self._done : self._done + count]])  # (t, D)
        following = torch.tensor(self._ids[self._done + 1 : self._done + 1 + count], device=hidden.device)
        parts = token_logprobs(self._engine.model.logits(hidden), following, self._num_top)
        self._found.append(tuple(part.tolist() for part in parts))  # type: ignore[arg-type]
        self._done += count

    def scores(self) -> PromptScores:
        """Of the whole prompt."""
        logprobs: list[float | None] = [None]
        tops: list[TopLogprobs | None] = [None]
        for own, top, top_ids in self._found:
            logprobs += own
            tops += [tuple(zip(ids, values, strict=True)) for ids, values in zip(top_ids, top, strict=True)]
        return PromptScores(logprobs, tops if self._num_top else [])
