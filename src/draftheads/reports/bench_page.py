"""The page of a comparison of drafters: sentences, an answer, plots, and tables of all rows."""

from collections.abc import Iterator, Sequence
from typing import Any

from draftheads.bench.table import ALL, Row, by_part, columns, heads_only
from draftheads.bench.verdict import remarks, verdict
from draftheads.reports.bench_plots import at, bench_plots, point, way
from draftheads.reports.page import Page
from draftheads.reports.plots import Table
from draftheads.utils.counts import counted
from draftheads.utils.provenance import machine_in_words

_FORMAT_VERSION = 3
_INTERVALS = "In brackets: 95 % bootstrap intervals over the prompts."
_HEADINGS = "× plain: speed over plain decoding. p90 s: 90 % of the answers took at most so many seconds."

Record = dict[str, Any]


def bench_page(record: Record) -> Page:
    """The page of a record."""
    if record["format_version"] != _FORMAT_VERSION:
        raise ValueError(f"its format version is {record['format_version']}; this release reads {_FORMAT_VERSION}")
    rows = [Row(**row) for row in record["rows"]]
    speeds = {way(row): row.speedup for row in rows if row.part == ALL}
    rows.sort(key=lambda row: (point(row), -speeds[way(row)]))  # the fastest first; parts stay in their order
    drafters = heads_only(rows)
    best = max(drafters or rows, key=lambda row: row.speedup)
    made_with = {
        **{name: record[name] for name in ("model", "precision", "threads")},
        "prompts": f"{record['num_prompts']} of {record['prompts'] or 'the built-in ones'}",
        **record["settings"],
    }
    prompts, tokens = record["num_prompts"], record["settings"]["max_new_tokens"]
    asked = f"Every way answers {counted(prompts, 'prompt')} in turn, with at most {counted(tokens, 'token')}."
    texts = []
    if example := record.get("example"):
        pieces = [(text, "drafted" if is_drafted else "answer") for text, is_drafted in example["pieces"]]
        title = f"An answer of {example['way']}: its accepted draft tokens are green"
        texts = [(title, [(f"{example['question']}\n\n", ""), *pieces])]
    return Page(
        title=f"Draft heads for {record['model']}, compared",
        verdict=verdict(rows),
        where=f"{record['model']} in {record['precision']}, {machine_in_words(record['provenance'])}",
        note=" ".join([asked, *(remarks(rows) if drafters else [])]),
        numbers=[
            (f"{best.speedup:.2f}", f"× plain, {best.name}"),
            (f"{best.tokens_per_step:.2f}", f"tokens per step, {best.name}"),
            (f"{best.tokens_per_second:.1f}", f"tokens per second, {best.name}"),
            (f"{prompts:,}", "prompts"),
        ],
        texts=texts,
        plots=list(bench_plots(rows, record.get("drafting") or {})),
        tables=list(_tables(rows, best, record["problems"])),
        facts=[
            ("Model, prompts and settings", made_with.items()),
            ("Command and machine", record["provenance"].items()),
        ],
    )


def _tables(rows: Sequence[Row], best: Row, problems: Sequence[Record]) -> Iterator[Table]:
    overall = [row for row in rows if row.part == ALL]
    name, *others = columns(overall)
    speeds = [column for column in others if column.kind != "quality"]
    quality = [column for column in others if column.kind == "quality"]
    for title, shown, note in (
        ("Speed, tokens per step and times", speeds, f"{_INTERVALS} {_HEADINGS}"),
        ("Quality of the answers", quality, _INTERVALS),
    ):
        cells = [[column.cell(row) for column in (name, *shown)] for row in overall]
        headings = [column.heading for column in (name, *shown)]
        if shown:
            yield Table(title, headings, cells, note, best=[row is best for row in overall].index(True), is_wide=True)
    first = [row for row in rows if point(row) == point(rows[0])]
    for value, title in (("speedup", "× plain"), ("tokens_per_step", "Tokens per step")):
        headings, lines = by_part(first, value)
        if headings:
            yield Table(f"{title} by category and turn", headings, lines, f"Measured {at(first[0])}.", is_wide=True)
    if problems:
        lines = [[problem["question"] or "all", problem["turn"] or "all", problem["problem"]] for problem in problems]
        yield Table("Problems", ["question", "turn", "problem"], lines, "What was not answered or measured.")
