"""What big.py found, as tables and as JSON. Knows no program."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftheads.utils.estimates import quartiles


@dataclass(frozen=True)
class Bounds:
    """Of our engine: the least milliseconds of a pass, and what a step with a head has besides its pass."""

    reading: float  # all weights once
    computing: float  # of one node
    drafting: tuple[float, ...]  # of a tree of each number of nodes


@dataclass
class Row:
    """What is known of a program."""

    name: str
    megabytes: float  # of weights
    next_tokens: list[int]  # the best ones behind a few prompts
    nodes: tuple[int, ...]  # of each pass; the first is 1
    speeds: list[float] = field(default_factory=list)  # plain tokens per second of each round
    passes: list[list[float]] = field(default_factory=list)  # milliseconds of each round, by number of nodes
    bounds: Bounds | None = None  # of ours

    @property
    def speed(self) -> float:
        """The median of the rounds."""
        return quartiles(self.speeds)[1]

    def pass_ms(self, place: int) -> tuple[float, float, float]:
        """Quartiles of the rounds, for one number of nodes."""
        return quartiles([passes[place] for passes in self.passes])

    @property
    def loop_ms(self) -> float:
        """Of a step of plain decoding, what is not its pass."""
        return max(0.0, 1e3 / self.speed - self.pass_ms(0)[1])

    def predicted(self, place: int, tokens_per_step: float) -> float:
        """Tokens per second with a draft head of which so many tokens come out of a step.

        >>> row = Row("ours", 100.0, [], (1, 8), [10.0], [[90.0, 120.0]], Bounds(80.0, 5.0, (0.0, 20.0)))
        >>> row.loop_ms, row.predicted(1, 3.0)  # 120 ms of the pass, 20 of drafting and 10 of the loop
        (10.0, 20.0)
        """
        assert self.bounds is not None
        return 1e3 * tokens_per_step / (self.pass_ms(place)[1] + self.bounds.drafting[place] + self.loop_ms)

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return vars(self) | {"bounds": None if self.bounds is None else vars(self.bounds)}


def tables(rows: Sequence[Row], tokens_per_step: Sequence[float]) -> Iterator[Table]:
    """Plain decoding, passes, and what a head would bring; medians of the rounds, quartiles in brackets."""
    plain = _table("", "weights, MB", "plain tokens/s", f"next tokens as {rows[0].name}")
    passes = _table("", "nodes", "pass, ms", "reading, ms", "computing, ms", "× the larger bound")
    heads = _table(
        "with a head", "nodes", "drafting, ms", "loop, ms", *(f"{one:g} tokens/step" for one in tokens_per_step)
    )
    fastest = max((row.speed for row in rows if row.bounds is None), default=None)
    for row in rows:
        same = [a == b for a, b in zip(row.next_tokens, rows[0].next_tokens, strict=True)]
        plain.add_row(row.name, f"{row.megabytes:.0f}", _spread(quartiles(row.speeds)), f"{sum(same)} of {len(same)}")
        for place, count in enumerate(row.nodes):
            spread = row.pass_ms(place)
            passes.add_row(row.name, str(count), _spread(spread), *_beside_bounds(row.bounds, count, spread[1]))
            if row.bounds is None or count == 1:
                continue
            cells = [f"{row.bounds.drafting[place]:.1f}", f"{row.loop_ms:.1f}"]
            for accepted in tokens_per_step:
                speed = row.predicted(place, accepted)
                ratios = [speed / base for base in (row.speed, fastest) if base is not None]
                cells.append(f"{speed:.1f} ({', '.join(f'{ratio:.2f}×' for ratio in ratios)})")
            heads.add_row(row.name, str(count), *cells)
    yield from (plain, passes, heads)


def _beside_bounds(bounds: Bounds | None, nodes: int, milliseconds: float) -> list[str]:
    if bounds is None:
        return []
    both = (bounds.reading, bounds.computing * nodes)
    return [*(f"{one:.1f}" for one in both), f"{milliseconds / max(both):.2f}"]


def _spread(values: tuple[float, float, float]) -> str:
    lower, middle, upper = values
    return f"{middle:.1f} ({lower:.1f}–{upper:.1f})"


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE_HEAD, show_edge=False)
