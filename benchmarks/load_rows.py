"""What a load measurement comes to: percentiles of all requests, and ratios to plain decoding round by round."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from load_client import Sample, throughput

from draftheads.utils.estimates import quartiles

PERCENTILES = (50, 90, 99)


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
        return tokens / sum(counted) if len(counted) == len(steps) and sum(counted) else None

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
