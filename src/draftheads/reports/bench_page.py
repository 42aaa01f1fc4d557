"""The page of a comparison of drafters. Knows the names in ``bench.json``; knows nothing of models."""

from functools import partial
from typing import Any

from draftheads.bench.drafters import BenchRow, BenchSettings, cells, headings, told
from draftheads.reports.page import Figure, Page, Table
from draftheads.reports.plots import as_svg, draw_bars

_NO_BREAK = "\N{NO-BREAK SPACE}"


def bench_page(record: dict[str, Any]) -> Page:
    """The page of a record."""
    settings = BenchSettings(**record["settings"])
    rows = [BenchRow(**row) for row in record["rows"]]
    table = [[cell.replace(" ± ", f"{_NO_BREAK}±{_NO_BREAK}") for cell in cells(row, settings)] for row in rows]
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
        note=told(record["num_prompts"], settings),
        tables=[Table("Comparison", headings(rows, settings), table, "± is one standard error.")],
        figures=[_speed(rows), _tokens_per_step(rows, settings)],
        facts=[("Provenance", made_with.items())],
    )


def _answer(rows: list[BenchRow]) -> str:
    best = max(rows, key=lambda row: row.speedup)
    if best.speedup <= 1:
        return "No drafter is faster than plain decoding."
    return (
        f"{best.name} is fastest: {best.speedup:.2f} ± {best.speedup_error:.2f} times as fast as plain decoding, with "
        f"{best.tokens_per_step:.2f} tokens per step."
    )


def _speed(rows: list[BenchRow]) -> Figure:
    series = [("speed", [row.speedup for row in rows], [row.speedup_error for row in rows])]
    return _bars(
        rows,
        series,
        "times the speed of plain decoding",
        "Speed with one prompt at a time, with one standard error. The line is plain decoding.",
    )


def _tokens_per_step(rows: list[BenchRow], settings: BenchSettings) -> Figure:
    ways = {"greedy": ("tokens_per_step", "tokens_per_step_error")}
    if settings.temperature:
        ways[f"exact, T={settings.temperature:g}"] = ("sampled_tokens_per_step", "sampled_error")
        ways[f"typical, T={settings.temperature:g}"] = ("typical_tokens_per_step", "typical_error")
    series = [
        (label, *([getattr(row, name) or 0.0 for row in rows] for name in names)) for label, names in ways.items()
    ]
    return _bars(rows, series, "tokens per step", "Tokens per step, with one standard error. Plain decoding has 1.")


def _bars(rows: list[BenchRow], series: list[Any], label: str, caption: str) -> Figure:
    names = [row.name for row in rows]
    draw = partial(draw_bars, names=names, series=series, label=label)
    return Figure(as_svg(draw, height=1.0 + (0.3 + 0.12 * len(series)) * len(rows)), caption)
