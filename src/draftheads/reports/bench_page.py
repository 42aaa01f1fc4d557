"""``bench.html``: a comparison of drafters as pictures and a table, from ``bench.json`` alone."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from draftheads.bench.drafters import BenchRow, BenchSettings, cells, headings, told
from draftheads.errors import DataError
from draftheads.files import write_atomic
from draftheads.reports.plots import finish, page, picture

RECORD, TABLE, PAGE = "bench.json", "bench.md", "bench.html"
_BODY = """{% for picture in pictures %}<figure>{{ picture.svg | safe }}<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endfor %}
<h2>Table</h2>
<table class="numbers"><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<h2>Made with</h2>
<table>{% for name, value in facts.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
"""


def write_page(folder: Path) -> Path:
    """Writes ``bench.html`` into the folder that ``bench --out`` left.

    Raises:
        DataError: there is no ``bench.json`` in the folder, or it is damaged.
        MissingDependency: matplotlib or jinja2 is not installed.
    """
    path = folder / RECORD
    if not path.is_file():
        raise DataError(f"{folder} holds no finished comparison: there is no {RECORD} in it")
    try:
        html = _render(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"not a comparison that can be read: {error!r}", path=path) from error
    write_atomic(folder / PAGE, html.encode())
    return folder / PAGE


def _render(record: dict[str, Any]) -> str:
    settings = BenchSettings(**record["settings"])
    rows = [BenchRow(**row) for row in record["rows"]]
    height = 1.0 + 0.42 * len(rows)
    pictures = [
        {
            "svg": picture(partial(_draw_tokens, rows=rows, settings=settings), height=height),
            "caption": "Tokens per step, with one standard error: how many tokens a pass of the model brings on "
            f"average. Plain decoding has 1. {told(record['num_prompts'], settings)}",
        },
        {
            "svg": picture(partial(_draw_time, rows=rows), height=height),
            "caption": "Milliseconds that a step takes with one prompt at a time, the drafter's part in dark; beside "
            "the bar how much faster than plain decoding that makes whole answers, with one standard error.",
        },
    ]
    facts = {
        "model": f"{record['model']}, {record['precision']}, {record['threads']} threads",
        "prompts": f"{record['num_prompts']} of {record['prompts'] or 'our own'}",
        **record["provenance"],
    }
    return page(
        _BODY,
        title=f"Drafters for {record['model']}",
        summary=f"{record['num_prompts']} prompts, answers of up to {settings.max_new_tokens} tokens, "
        f"heads on trees of {settings.num_nodes} nodes.",
        pictures=pictures,
        columns=headings(rows, settings),
        rows=[
            [cell.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}") for cell in cells(row, settings)]
            for row in rows
        ],
        facts=facts,
    )


def _draw_tokens(figure: Any, rows: list[BenchRow], settings: BenchSettings) -> None:
    ax = figure.add_subplot()
    ways = [("greedy", "tokens_per_step", "tokens_per_step_error")]
    if settings.temperature:
        ways += [
            (f"exact, temperature {settings.temperature:g}", "sampled_tokens_per_step", "sampled_error"),
            (f"typical, temperature {settings.temperature:g}", "typical_tokens_per_step", "typical_error"),
        ]
    width = 0.8 / len(ways)
    for number, (label, value, error) in enumerate(ways):
        places = [place + (number - (len(ways) - 1) / 2) * width for place in range(len(rows))]
        values, errors = ([getattr(row, name) or 0.0 for row in rows] for name in (value, error))
        colour = ("#20639b", "#8fb8d9", "#d6c184")[number]
        ax.barh(places, values, width, xerr=errors, color=colour, label=label, error_kw={"lw": 0.8})
    _name_rows(ax, rows)
    ax.axvline(1.0, color="#55606e", lw=0.8)
    figure.legend(loc="outside upper center", ncols=len(ways), frameon=False)
    finish(ax, "tokens per step", "")
    ax.legend().set_visible(False)  # it stands above


def _draw_time(figure: Any, rows: list[BenchRow]) -> None:
    ax = figure.add_subplot()
    places = range(len(rows))
    drafting = [row.draft_milliseconds for row in rows]
    checking = [row.step_milliseconds - row.draft_milliseconds for row in rows]
    ax.barh(places, drafting, 0.6, color="#20639b")
    ax.barh(places, checking, 0.6, left=drafting, color="#cddbe8")
    for place, row in zip(places, rows, strict=True):
        told = f"{row.speedup:.2f} ± {row.speedup_error:.2f} ×"
        ax.annotate(told, (row.step_milliseconds, place), xytext=(4, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, 1.25 * max(row.step_milliseconds for row in rows))
    _name_rows(ax, rows)
    finish(ax, "milliseconds per step", "")


def _name_rows(ax: Any, rows: list[BenchRow]) -> None:
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.invert_yaxis()
    ax.set_axisbelow(True)
