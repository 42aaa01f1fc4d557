"""The page of a comparison of drafters."""

from functools import partial
from typing import Any

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import (
    DEFAULTS,
    SAMPLED_FIELDS,
    Column,
    Row,
    columns,
    defaults_sentence,
    fastest_with_defaults,
    prompts_in_words,
    remarks,
    verdict,
)
from draftheads.reports.page import Figure, Page, Table, unbroken, unbroken_speed
from draftheads.reports.plots import as_svg, draw_bars

_LEADING = (DEFAULTS, "× plain", "tokens/s", "tokens/step")  # columns that a narrow screen shows without scrolling
_ERROR = "±\N{NO-BREAK SPACE}is one standard error."


def bench_page(record: dict[str, Any]) -> Page:
    """The page of a record; the fastest drafter comes first."""
    settings = BenchSettings(**record["settings"])
    first = record["rows"][0]["name"]
    rows = sorted((Row(**row) for row in record["rows"]), key=lambda row: -row.speedup)
    best = fastest_with_defaults(rows)
    first_sentence, *others = filter(None, (defaults_sentence(rows), verdict(rows, settings, record["num_prompts"])))
    made_with = {
        "model": record["model"],
        "precision": record["precision"],
        "threads": record["threads"],
        "prompts": f"{record['num_prompts']} of {record['prompts'] or 'the built-in ones'}",
        **record["settings"],
    }
    return Page(
        title=f"Draft heads for {record['model']}, compared",
        verdict=unbroken_speed(first_sentence),
        note=" ".join(
            [*map(unbroken_speed, others), prompts_in_words(record["num_prompts"], settings), *remarks(rows, settings)]
        ),
        numbers=[
            *([] if best is None else [(f"{best.default_speedup:.2f}", f"× plain with the defaults, {best.name}")]),
            (f"{rows[0].tokens_per_step:.2f}", f"tokens per step, {rows[0].name}"),
            (f"{rows[0].tokens_per_second:.1f}", f"tokens per second, {rows[0].name}"),
            (f"{record['num_prompts']:,}", "prompts"),
        ],
        figures=[_speed(rows), _tokens_per_step(rows, settings)],
        tables=_tables(rows, settings, first, record["num_prompts"]),
        facts=[
            ("Model, prompts and settings", made_with.items()),
            ("Command and machine", record["provenance"].items()),
        ],
    )


def _tables(rows: list[Row], settings: BenchSettings, first: str, num_prompts: int) -> list[Table]:
    """Greedy answers and speeds; and in a second table what is measured at a temperature."""
    name, *others = columns(settings, first=first)
    same_text = Column("same text", lambda row: f"{num_prompts - row.num_different} of {num_prompts}")

    def table(title: str, shown: list[Column], note: str) -> Table:
        cells = [[name.cell(row), *(unbroken(column.cell(row)) for column in shown)] for row in rows]
        return Table(title, [name.heading, *(column.heading for column in shown)], cells, note, best=0, is_wide=True)

    greedy = [column for column in others if column.kind != "sampled" and any(map(column.cell, rows))]
    greedy.sort(key=lambda column: (*_LEADING, column.heading).index(column.heading))
    sampled = [column for column in others if column.kind == "sampled"]
    tables = [
        table(
            "Speed, and tokens per step of greedy answers",
            [*greedy[: len(_LEADING)], same_text, *greedy[len(_LEADING) :]],
            f"{_ERROR} Same text: as plain decoding, token by token.",
        )
    ]
    if sampled:
        title = f"Tokens per step at temperature {settings.temperature:g}, by acceptance rule"
        tables.append(table(title, sampled, _ERROR))
    return tables


def _speed(rows: list[Row]) -> Figure:
    return _bars(
        rows,
        {"speed": ("speedup", "speedup_error")},
        name="speed",
        label="× plain decoding",
        title="Speed over plain decoding",
        caption=f"One prompt at a time. The line is plain decoding; grey is slower. {_ERROR}",
    )


def _tokens_per_step(rows: list[Row], settings: BenchSettings) -> Figure:
    ways = {"greedy": ("tokens_per_step", "tokens_per_step_error")}
    if settings.temperature:
        ways |= {f"{rule}, T={settings.temperature:g}": fields for rule, fields in SAMPLED_FIELDS.items()}
    return _bars(
        rows,
        ways,
        name="tokens",
        label="tokens per step",
        title="Tokens per step",
        caption="Plain decoding has 1 (the line). Unlike speed, this does not depend on the machine.",
    )


def _bars(
    rows: list[Row], fields: dict[str, tuple[str, str]], *, name: str, label: str, title: str, caption: str
) -> Figure:
    """Bars of the fields with values and with errors, by the label of each series."""
    names = [row.name for row in rows]
    series: list[Any] = [
        (label, *([getattr(row, field) or 0.0 for row in rows] for field in pair)) for label, pair in fields.items()
    ]
    draw = partial(draw_bars, names=names, series=series, label=label)
    greedy = zip(names, series[0][1], strict=True)
    return Figure(
        title,
        as_svg(draw, name=name, height=1.0 + (0.3 + 0.12 * len(series)) * len(rows)),
        caption,
        alt=f"Bars, {series[0][0]}: {', '.join(f'{name} {value:.2f}' for name, value in greedy)}.",
    )
