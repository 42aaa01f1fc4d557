"""The tables of a load measurement."""

from collections.abc import Sequence

from load_joining import Joining
from load_rows import LoadRow
from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftheads.utils.estimates import quartiles

CHUNK_TOKENS = 256  # of a prompt that our server reads between two steps


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
