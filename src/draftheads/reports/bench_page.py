"""The page of a comparison of drafters. Knows the names in ``bench.json``; knows nothing of models."""

from functools import partial
from typing import Any

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import SAMPLED_FIELDS, Row, columns, prompts_in_words
from draftheads.reports.page import Figure, Page, Table
from draftheads.reports.plots import as_svg, draw_bars

_NO_BREAK = "\N{NO-BREAK SPACE}"


def bench_page(record: dict[str, Any]) -> Page:
    """The page of a record."""
    settings = BenchSettings(**record["settings"])
    rows = [Row(**row) for row in record["rows"]]
    shown = columns(settings, first=rows[0].name)
    table = [[column.cell(row).replace(" ± ", f"{_NO_BREAK}±{_NO_BREAK}") for column in shown] for row in rows]
    made_with = {
        "model": f"{record['model']}, {record['precision']}, {record['threads']} threads",
        "prompts": f"{record['num_prompts']} of {record['prompts'] or 'our own'}",
        "answers": f"up to {settings.max_new_tokens} tokens",
        "trees": f"{settings.num_nodes} nodes",
        **record["provenance"],
    }
    return Page(
        title=f"Drafters for {record['model']}",
        answer=_answer(rows),
        note=prompts_in_words(record["num_prompts"], settings),
        tables=[Table("Comparison", [column.heading for column in shown], table, "± is one standard error.")],
        figures=[_speed(rows), _tokens_per_step(rows, settings)],
        facts=[("Provenance", made_with.items())],
    )


def _answer(rows: list[Row]) -> str:
    best = max(rows, key=lambda row: row.speedup)
    if best.speedup <= 1:
        return "No drafter is faster than plain decoding."
    return (
        f"{best.name} is fastest: {best.speedup:.2f} ± {best.speedup_error:.2f} times as fast as plain decoding, with "
        f"{best.tokens_per_step:.2f} tokens per step."
    )


def _speed(rows: list[Row]) -> Figure:
    series = [("speed", [row.speedup for row in rows], [row.speedup_error for row in rows])]
    return _bars(
        rows,
        series,
        "times the speed of plain decoding",
        "Speed with one prompt at a time, with one standard error. The line is plain decoding.",
    )


def _tokens_per_step(rows: list[Row], settings: BenchSettings) -> Figure:
    ways = {"greedy": ("tokens_per_step", "tokens_per_step_error")}
    if settings.temperature:
        ways |= {f"{rule}, T={settings.temperature:g}": fields for rule, fields in SAMPLED_FIELDS.items()}
    series = [
        (label, *([getattr(row, name) or 0.0 for row in rows] for name in names)) for label, names in ways.items()
    ]
    return _bars(rows, series, "tokens per step", "Tokens per step, with one standard error. Plain decoding has 1.")


def _bars(rows: list[Row], series: list[Any], label: str, caption: str) -> Figure:
    names = [row.name for row in rows]
    draw = partial(draw_bars, names=names, series=series, label=label)
    return Figure(as_svg(draw, height=1.0 + (0.3 + 0.12 * len(series)) * len(rows)), caption)
