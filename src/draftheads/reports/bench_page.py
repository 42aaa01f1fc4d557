"""The page of a comparison of drafters: sentences, an answer, and tables of all rows."""

from collections.abc import Sequence
from typing import Any

from draftheads.bench.table import ALL, Column, Row, by_part, columns, heads_only
from draftheads.bench.verdict import remarks, verdict
from draftheads.reports.bench_figures import at, bench_figures, point, way
from draftheads.reports.page import Page, Piece, Table, Text, unbroken, unbroken_speed
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
    num_tokens = record["settings"]["max_new_tokens"]
    prompts, tokens = counted(record["num_prompts"], "prompt"), counted(num_tokens, "token")
    asked = f"Every way answers {prompts} in turn, with at most {tokens}."
    return Page(
        title=f"Draft heads for {record['model']}, compared",
        verdict=unbroken_speed(verdict(rows)),
        where=f"{record['model']} in {record['precision']}, {machine_in_words(record['provenance'])}",
        note=" ".join([asked, *(remarks(rows) if drafters else [])]),
        numbers=[
            (f"{best.speedup:.2f}", f"× plain, {best.name}"),
            (f"{best.tokens_per_step:.2f}", f"tokens per step, {best.name}"),
            (f"{best.tokens_per_second:.1f}", f"tokens per second, {best.name}"),
            (f"{record['num_prompts']:,}", "prompts"),
        ],
        texts=_example(record.get("example")),
        figures=bench_figures(rows, record.get("drafting") or {}),
        tables=_tables(rows, best, record["problems"]),
        facts=[
            ("Model, prompts and settings", made_with.items()),
            ("Command and machine", record["provenance"].items()),
        ],
    )


def _example(example: Record | None) -> list[Text]:
    """An answer with its draft tokens in colour."""
    if not example:
        return []
    answer = [Piece(text, "drafted" if is_drafted else "answer") for text, is_drafted in example["pieces"]]
    title = f"An answer of {example['way']}: its accepted draft tokens are green"
    return [Text(title, [Piece(f"{example['question']}\n\n"), *answer])]


def _tables(rows: Sequence[Row], best: Row, problems: Sequence[Record]) -> list[Table]:
    overall = [row for row in rows if row.part == ALL]
    name, *others = columns(overall)

    def table(title: str, shown: Sequence[Column], note: str) -> Table:
        cells = [[name.cell(row), *(unbroken(column.cell(row)) for column in shown)] for row in overall]
        chosen = next(number for number, row in enumerate(overall) if row is best)
        return Table(title, [name.heading, *(each.heading for each in shown)], cells, note, chosen, is_wide=True)

    speeds = [column for column in others if column.kind != "quality"]
    tables = [table("Speed, tokens per step and times", speeds, f"{_INTERVALS} {_HEADINGS}")]
    if quality := [column for column in others if column.kind == "quality"]:
        tables.append(table("Quality of the answers", quality, _INTERVALS))
    first = [row for row in rows if point(row) == point(rows[0])]
    for value, title in (("speedup", "× plain"), ("tokens_per_step", "Tokens per step")):
        headings, lines = by_part(first, value)
        if headings:
            note = f"Measured {at(first[0])}."
            tables.append(Table(f"{title} by category and turn", headings, lines, note, is_wide=True))
    if problems:
        lines = [[problem["question"] or "all", problem["turn"] or "all", problem["problem"]] for problem in problems]
        tables.append(Table("Problems", ["question", "turn", "problem"], lines, "What was not answered or measured."))
    return tables
