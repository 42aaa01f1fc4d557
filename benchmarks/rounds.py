"""The measurement: rounds over prompts in which the peers take turns, and what they come to.

Within a round each block of prompts is answered by one peer after the other, so that a slow minute of the machine is
slow for all. Only one peer works at a time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from worker_process import Ids, Reply, WorkerFailed

from draftheads.utils.estimates import quartiles

_PAUSE_SECONDS = 0.25  # threads of the peer before spin for up to 0.2 s after their work (OpenMP)


class Asked(Protocol):
    """What a peer can do; :class:`~worker_process.WorkerProcess` does it."""

    def ask(self, prompts: list[Ids], max_new_tokens: int) -> Reply:
        """Answers to all prompts together."""
        ...


@dataclass
class Tally:
    """Sums over one round."""

    num_answers: int = 0
    num_tokens: int = 0
    num_steps: int | None = 0
    seconds: float = 0.0
    first_token_seconds: float = 0.0  # all answers together, each asked for one token by itself

    def add(self, reply: Reply) -> None:
        """Count some answers."""
        self.num_answers += len(reply.num_tokens)
        self.num_tokens += sum(reply.num_tokens)
        self.seconds += reply.seconds
        counts = self.num_steps is not None and reply.num_steps is not None
        self.num_steps = self.num_steps + reply.num_steps if counts else None  # type: ignore[operator]


@dataclass
class Row:
    """A peer at a batch size, round by round."""

    name: str
    batch_size: int
    error: str | None = None
    rounds: list[Tally] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each round, the prompt's time included."""
        return [tally.num_tokens / tally.seconds for tally in self.rounds]

    @property
    def first_token_milliseconds(self) -> list[float]:
        """Of each round, the mean over prompts; empty where it was not measured."""
        return [1e3 * one.first_token_seconds / one.num_answers for one in self.rounds if one.first_token_seconds]

    @property
    def tokens_per_step(self) -> float | None:
        """New tokens per pass, first tokens left out; None where the peer does not count passes."""
        steps = [tally.num_steps for tally in self.rounds]
        tokens = sum(tally.num_tokens - tally.num_answers for tally in self.rounds)
        counted = [count for count in steps if count is not None]
        return tokens / sum(counted) if len(counted) == len(steps) and sum(counted) else None

    def ratios(self, other: "Row") -> list[float]:
        """Speed over another peer's in the same round."""
        return [own / others for own, others in zip(self.speeds, other.speeds, strict=False)]


def blocks(prompts: Sequence[Ids], size: int) -> Iterator[list[Ids]]:
    """Consecutive prompts; the last block may be smaller."""
    for start in range(0, len(prompts), size):
        yield list(prompts[start : start + size])


def run_round(
    peers: dict[str, Asked],
    rows: dict[tuple[str, int], Row],
    prompts: Sequence[Ids],
    max_new_tokens: int,
    *,
    turn: int,
    failed: Callable[[Row, WorkerFailed], None],
) -> None:
    """One round for all rows without an error; ``turn`` decides who begins."""
    batch_sizes = sorted({size for _, size in rows})
    for batch_size in batch_sizes:
        for row in _without_error(rows, batch_size):
            row.rounds.append(Tally())
        for number, block in enumerate(blocks(prompts, max(batch_sizes))):
            at_work = _without_error(rows, batch_size)
            shift = (turn + number) % max(1, len(at_work))
            for row in at_work[shift:] + at_work[:shift]:
                time.sleep(_PAUSE_SECONDS)
                try:
                    _answer(peers[row.name], row.rounds[-1], block, batch_size, max_new_tokens)
                except WorkerFailed as error:
                    failed(row, error)


def _answer(peer: Asked, tally: Tally, block: list[Ids], batch_size: int, max_new_tokens: int) -> None:
    for together in blocks(block, batch_size):
        tally.add(peer.ask(together, max_new_tokens))
    if batch_size == 1:
        for ids in block:
            tally.first_token_seconds += peer.ask([ids], 1).seconds


def _without_error(rows: dict[tuple[str, int], Row], batch_size: int) -> list[Row]:
    return [row for (_, size), row in rows.items() if size == batch_size and row.error is None]


def summary(row: Row, base: Row | None) -> dict[str, Any]:
    """A row for the JSON file: medians with quartiles, and each round's numbers."""
    if row.error is not None:
        return {"name": row.name, "batch_size": row.batch_size, "error": row.error}
    ratios = row.ratios(base) if base is not None and base.error is None else []
    return {
        "name": row.name,
        "batch_size": row.batch_size,
        "num_tokens": row.rounds[0].num_tokens,
        "tokens_per_second": quartiles(row.speeds),
        "ratio": quartiles(ratios) if ratios else None,
        "first_token_milliseconds": quartiles(row.first_token_milliseconds) if row.batch_size == 1 else None,
        "tokens_per_step": row.tokens_per_step,
        "rounds": [vars(tally) for tally in row.rounds],
    }
