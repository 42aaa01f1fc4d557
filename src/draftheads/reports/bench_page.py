"""The page of a comparison of drafters: sentences, an answer, plots, and tables of all rows.

The plots show few rows, so that they can be read: those of the first point (the smallest batch and the lowest
temperature), and of these the fastest row of each drafter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from draftheads.bench.table import (
    ALL,
    PARTS,
    TURN,
    Row,
    by_part,
    has_copies,
    heads_only,
    remarks,
    setting_in_words,
    table_of,
    verdict,
)
from draftheads.bench.timing import PLAIN, STOCK
from draftheads.reports.page import Page, Plot, Point, Style, Table
from draftheads.utils.counts import counted

_INTERVALS = "In brackets: 95 % bootstrap intervals over the prompts."
_HEADINGS = "× plain: speed over plain decoding. p90 s: 90 % of the answers took at most so many seconds."
_NUMBERS = f"{_INTERVALS} {_HEADINGS}"
_LINES = "Thin lines are 95 % intervals."
_MOST = 7  # drafters in a plot
_POINT = ("batch_size", "temperature", "prompt_tokens")  # what all ways have in common that are timed in turn

Record = dict[str, Any]


def bench_page(record: Record) -> Page:
    """The page of a record."""
    rows = [Row(**row) for row in record["rows"]]
    speeds = {_way(row): row.speedup for row in rows if row.part == ALL}
    rows.sort(key=lambda row: (_point(row), -speeds[_way(row)]))  # the fastest first; parts stay in their order
    drafters, styles = heads_only(rows), _styles(rows)
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
        note=" ".join([asked, *(remarks(rows) if drafters else [])]),
        numbers=[
            (f"{best.speedup:.2f}", f"× plain, {best.name}"),
            (f"{best.tokens_per_step:.2f}", f"tokens per step, {best.name}"),
            (f"{best.tokens_per_second:.1f}", f"tokens per second, {best.name}"),
            (f"{prompts:,}", "prompts"),
        ],
        texts=texts,
        plots=[replace(plot, styles=styles) for plot in _plots(rows, record["drafting"]) if plot.has_points],
        tables=list(_tables(rows, best, record["problems"])),
        facts=[
            ("Model, prompts and settings", made_with.items()),
            ("Command and machine", record["provenance"].items()),
        ],
    )


def _point(row: Row) -> tuple[Any, ...]:
    """What a row has in common with others; the first point is the smallest."""
    return tuple(row.settings.get(name) or 0 for name in _POINT)


def _way(row: Row) -> tuple[str, str]:
    """The same for all parts of a way's answers."""
    return row.name, str(row.settings)


def _at(row: Row) -> str:
    """The point of a row in words."""
    size, temperature, prompt_tokens = _point(row)
    cut = f", with prompts of {counted(prompt_tokens, 'token')}" if prompt_tokens else ""
    return f"at batch size {size or 1} and temperature\N{NO-BREAK SPACE}{temperature:g}{cut}"


def _tables(rows: Sequence[Row], best: Row, problems: Sequence[Record]) -> Iterator[Table]:
    overall = [row for row in rows if row.part == ALL]
    place = [row is best for row in overall].index(True)
    yield Table("Speed, tokens per step and times", *table_of(overall, "speed", "time"), _NUMBERS, place, is_wide=True)
    headings, lines = table_of(overall, "quality")
    if headings:
        yield Table("Quality of the answers", headings, lines, _INTERVALS, place, is_wide=True)
    first = [row for row in rows if _point(row) == _point(rows[0])]
    for title, headings, lines in by_part(first):
        yield Table(f"{title} by category and turn", headings, lines, f"Measured {_at(first[0])}.", is_wide=True)
    if problems:
        lines = [[problem["question"] or "all", problem["turn"] or "all", problem["problem"]] for problem in problems]
        yield Table("Problems", ["question", "turn", "problem"], lines, "What was not answered or measured.")


def _plots(rows: Sequence[Row], drafting: Mapping[str, Any]) -> Iterator[Plot]:
    """All plots, also those without values. ``rows`` are sorted: the first point first, there the fastest drafter."""
    if len({row.settings.get("tree") for row in rows} - {None}) > 1:
        rows = [replace(row, name=_with_tree(row)) for row in rows]
    overall = [row for row in rows if row.part == ALL]
    first = [row for row in overall if _point(row) == _point(overall[0])]
    where = f" Measured {_at(first[0])}." if len(first) < len(overall) else ""
    names = list(dict.fromkeys(row.name for row in heads_only(first)))
    few, few_note = _fastest(heads_only(first), names[:_MOST])
    every, every_note = _fastest(first, list(dict.fromkeys([*names, *(row.name for row in first)])))
    few_note, every_note, against = few_note + where, every_note + where, partial(_against, names=names[:_MOST])
    yield _speeds(rows, few, few_note)
    dots = {
        row.name: [Point(row.tokens_per_step, row.speedup, row.interval("speedup"), row.interval("tokens_per_step"))]
        for row in every
    }
    caption = f"Further right, drafts are better; a drafter far right but low takes too long to draft. {_LINES}"
    panels = {"× plain decoding": dots}
    yield Plot("speed-and-tokens", "Speed and tokens per step", "tokens per step", caption + every_note, panels)
    tokens = {row.name: _percent(row.steps_by_tokens, sum(row.steps_by_tokens)) for row in few if row.steps_by_tokens}
    caption = "The further right a drafter's steps are, the more tokens they give at once." + few_note
    yield Plot("lengths", "Tokens of a step", "tokens of a step", caption, {"steps, %": tokens})
    depths = {row.name: _percent(row.acceptance_by_depth, 1) for row in few if row.acceptance_by_depth}
    caption = "Steps that accept a draft token at that depth: where a curve is low, deeper drafts gain little."
    yield Plot("depths", "Acceptance by depth", "depth of the draft token", caption + few_note, {"steps, %": depths})
    parts = {part: {row.name: row.parts[part] for row in every if any(row.parts.values())} for part in PARTS}
    caption = "Drafting is what draft tokens cost; verification is the model's pass, as in plain decoding."
    yield _stacks("parts", "Parts of a step", caption + every_note, parts)
    costs = zip_longest(*([cost["prefix"], *cost["heads"]] for cost in drafting.values()), fillvalue=0.0)
    heads = {f"head {n}" if n else "prefix": dict(zip(drafting, each, strict=True)) for n, each in enumerate(costs)}
    caption = "Shorter bars cost less in every step; the prefix is the time of layers that read accepted tokens."
    yield _stacks("drafting", "Drafting one tree", caption, heads)
    caption = f"A drafter is worth it up to the batch size at which plain decoding reaches its tokens/s. {_LINES}"
    values = {"tokens/s": "tokens_per_second", "median answer, s": "p50_seconds"}
    same = [row for row in overall if _point(row)[1:] == _point(overall[0])[1:]]
    yield against("batch_size", "Batch size", caption, rows=same, values=values)
    caption = "The best size of a tree is where its curve is highest: more nodes take longer to verify. "
    values = {"× plain decoding": "speedup"}
    yield against("num_nodes", "Speed by tree size", caption + _LINES + where, rows=first, values=values)
    typical = [row for row in overall if row.settings.get("epsilon") is not None]
    typical = [row for row in typical if _point(row) == _point(typical[0])]
    measures = {measure: measure for row in typical for measure in row.quality}
    caption = "A smaller threshold accepts more draft tokens: choose the smallest with a good quality. "
    values = {"tokens/step": "tokens_per_step", **measures} if measures else {}
    yield against("epsilon", "Typical acceptance", caption + _LINES, rows=typical, values=values, log=False)


def _fastest(rows: Sequence[Row], names: Sequence[str], setting: str = "") -> tuple[list[Row], str]:
    """The fastest row of each of these drafters for each value of a setting, and a sentence if there are others."""
    fastest = {(row.name, row.settings.get(setting)): row for row in sorted(rows, key=lambda row: row.speedup)}
    shown = [row for name in names for row in fastest.values() if row.name == name]
    some = f"the {len(names)} fastest drafters" if {row.name for row in rows} > {row.name for row in shown} else ""
    if len(fastest) < len(rows):
        some = f"the fastest row of each {f'of {some}' if some else 'drafter'}"
    return shown, f" Shown: {some}." if some else ""


def _with_tree(row: Row) -> str:
    return ", ".join(filter(None, [row.name, setting_in_words(row.settings, "tree")]))


def _styles(rows: Iterable[Row]) -> dict[str, Style]:
    """The style of each drafter with each kind of tree: a colour for each head, dashed with copies."""
    heads: dict[str, int] = {}
    styles = {PLAIN: Style(-1), STOCK: Style(-1)}
    for row in heads_only(rows):
        style = Style(heads.setdefault(row.name, len(heads)), is_dashed=has_copies(row))
        styles |= {row.name: style, _with_tree(row): style}
    return styles


def _percent(shares: Sequence[float], total: float) -> list[Point]:
    """With one zero behind the last share: the axis ends there."""
    end = max((number for number, share in enumerate(shares, 1) if share), default=0)
    return [Point(number, 100 * share / max(1, total)) for number, share in enumerate(shares[: end + 1], 1)]


def _speeds(rows: Sequence[Row], chosen: Sequence[Row], note: str) -> Plot:
    """By category, if there are several, and by drafter."""
    parts = list(dict.fromkeys(row.part for row in rows if row.part != ALL and not row.part.startswith(TURN)))
    found = {(_way(row), row.part): row for row in rows}
    bars = {
        row.name: [
            Point(part, one.speedup, (one.speedup - one.speedup_error, one.speedup + one.speedup_error))
            for part in [*parts, ALL]
            if (one := found.get((_way(row), part)))
        ]
        for row in chosen
    }
    caption = "Bars beyond the line are faster than plain decoding"
    caption += "; where they are short, texts are harder to draft." if parts else "."
    title = "Speed over plain decoding" + (", by category" if parts else "")
    caption += f" Thin lines are ± one standard error.{note}"
    return Plot("speed", title, "× plain decoding", caption, {"": bars}, kind="bars")


def _stacks(name: str, title: str, caption: str, parts: Mapping[str, Mapping[str, float]]) -> Plot:
    """Bars of milliseconds by part and drafter, without parts that took no time."""
    bars = {
        part: [Point(drafter, value) for drafter, value in values.items()]
        for part, values in parts.items()
        if any(values.values())
    }
    return Plot(name, title, "milliseconds", caption, {"": bars}, kind="stacks")


def _against(
    setting: str,
    title: str,
    caption: str,
    *,
    rows: Sequence[Row],
    values: Mapping[str, str],
    names: Sequence[str],
    log: bool = True,
) -> Plot:
    """Curves of values (their labels and fields) against a setting that varies, for the fastest row of each drafter."""
    given = [row for row in rows if row.settings.get(setting) is not None]
    if len({row.settings[setting] for row in given}) < 2:
        values = {}
    shown, note = _fastest([row for row in given if row.name not in (PLAIN, STOCK)], names, setting)
    shown = sorted([*shown, *(row for row in given if row.name == PLAIN)], key=lambda row: row.settings[setting])
    panels: dict[str, dict[str, list[Point]]] = {label: {} for label in values}
    for label, value in values.items():
        for row in shown:
            if (number := row.number(value)) is not None:
                point = Point(row.settings[setting], number, row.interval(value))
                panels[label].setdefault(row.name, []).append(point)
    x_label = {"num_nodes": "nodes", "epsilon": "threshold ε"}.get(setting, setting.replace("_", " "))
    return Plot(setting, title, x_label, caption + note, panels, log=log)
