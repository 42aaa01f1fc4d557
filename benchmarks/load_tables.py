"""What a load measurement comes to: percentiles of all requests, ratios to plain decoding by round, and tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from load_client import Joining, Sample, throughput
from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftheads.utils.estimates import quartiles

PERCENTILES = (50, 90, 99)
CHUNK_TOKENS = 256  # of a prompt that our server reads between two steps


@dataclass(frozen=True)
class Load:
    """Users in a closed loop, or requests per second with Poisson arrivals."""

    users: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.users is None else f"{self.users} user{'s' * (self.users > 1)}"


@dataclass
class LoadRow:
    """One way of answering under one load."""

    name: str
    load: Load
    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """Of all rounds."""
        return [sample for samples in self.rounds for sample in samples]

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of all users together, of each round."""
        return [throughput(samples, self.load.users) for samples in self.rounds]

    @property
    def medians(self) -> list[float]:
        """Median latency of each round, in seconds."""
        return [float(np.median([sample.latency for sample in samples])) for samples in self.rounds]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens after the first of each answer per pass of the model; None if the server does not count passes."""
        steps = [sample.num_steps for sample in self.samples]
        counted = [count for count in steps if count is not None]
        tokens = sum(max(0, sample.num_tokens - 1) for sample in self.samples)
        total = sum(counted)
        return tokens / total if total and len(counted) == len(steps) else None

    def latencies(self) -> list[float]:
        """Percentiles of the time until an answer ended, in seconds."""
        return _percentiles([sample.latency for sample in self.samples])

    def first_tokens(self) -> list[float]:
        """Percentiles of the time until the first text, in milliseconds."""
        return _percentiles([1e3 * sample.first_token for sample in self.samples])

    def between_tokens(self) -> list[float]:
        """Percentiles of the time for each token after the first, in milliseconds."""
        values = [sample.per_token for sample in self.samples]
        return _percentiles([1e3 * value for value in values if value is not None] or [0.0])

    def speed_ratios(self, other: "LoadRow") -> list[float]:
        """Tokens per second over another way's in the same round."""
        return [own / others for own, others in zip(self.speeds, other.speeds, strict=False)]

    def latency_ratios(self, other: "LoadRow") -> list[float]:
        """Median latency over another way's in the same round."""
        return [own / others for own, others in zip(self.medians, other.medians, strict=False)]

    def same_texts(self, other: "LoadRow") -> float:
        """Share of answers with the same text as another way's to the same prompt."""
        pairs = list(zip(self.samples, other.samples, strict=False))
        return sum(own.text == others.text for own, others in pairs) / len(pairs)


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, PERCENTILES)]


def summary(row: LoadRow, base: LoadRow | None) -> dict[str, Any]:
    """A row for the JSON file: its numbers, and every sample."""
    return {
        "name": row.name,
        "load": asdict(row.load),
        "percentiles": PERCENTILES,
        "latency_seconds": row.latencies(),
        "first_token_milliseconds": row.first_tokens(),
        "between_tokens_milliseconds": row.between_tokens(),
        "tokens_per_second": quartiles(row.speeds),
        "tokens_per_step": row.tokens_per_step,
        "speed_ratios": row.speed_ratios(base) if base else None,
        "latency_ratios": row.latency_ratios(base) if base else None,
        "same_texts": row.same_texts(base) if base else None,
        "rounds": [[asdict(sample) for sample in samples] for samples in row.rounds],
    }


def load_table(title: str, rows: Sequence[LoadRow], base: LoadRow | None) -> Table:
    """All ways under one load. Ratios are medians over rounds, with the lowest and highest in brackets."""
    table = _table(
        title,
        *("", "tokens/s", "× plain", "p50, s", "p90", "p99", "× plain", "first, ms", "p99"),
        *("ms/token", "per step", "same"),
    )
    for row in rows:
        compared = base is not None and base is not row
        first, steps = row.first_tokens(), row.tokens_per_step
        table.add_row(
            row.name,
            f"{quartiles(row.speeds)[1]:.1f}",
            _ratio(row.speed_ratios(base)) if compared and base else "",
            *(f"{value:.2f}" for value in row.latencies()),
            _ratio(row.latency_ratios(base)) if compared and base else "",
            f"{first[0]:.0f}",
            f"{first[2]:.0f}",
            f"{row.between_tokens()[0]:.1f}",
            "" if steps is None else f"{steps:.2f}",
            f"{row.same_texts(base):.0%}" if compared and base else "",
        )
    return table


def joining_table(joinings: Sequence[Joining]) -> Table:
    """How long running streams wait when a long prompt joins them."""
    tokens = joinings[0].prompt_tokens
    table = _table(
        f"A prompt of {tokens} tokens joins {len(joinings[0].longest)} streams",
        *("", "step, ms", "longest wait, ms", "in steps", "two steps and a chunk, ms"),
        *("first text of the prompt, s", "on an idle server, s"),
    )
    for one in joinings:
        table.add_row(
            one.name,
            f"{one.step:.0f}",
            f"{max(one.longest):.0f}",
            f"{one.steps:.1f}",
            f"{one.allowed(CHUNK_TOKENS):.0f}",
            f"{one.first_token / 1e3:.2f}",
            f"{one.alone / 1e3:.2f}",
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading else "left")
    return table


def _ratio(values: Sequence[float]) -> str:
    return f"{quartiles(values)[1]:.2f} ({min(values):.2f}–{max(values):.2f})"
