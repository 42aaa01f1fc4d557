"""Options of ``draftheads bench diff``."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class DiffOptions:
    """Compare two results of `draftheads bench`: tokens per step, speed over plain decoding, and tokens per second.

    Where both have the same questions in answers.jsonl, the ratio has a 95 % bootstrap interval, question by question.
    """

    a: tyro.conf.Positional[Path]
    """The first result: an output folder of `bench`, or its bench.json."""
    b: tyro.conf.Positional[Path]
    """The second result."""
    json: str | None = None
    """Write all numbers as JSON to this file. - writes them to standard output."""
