"""The plots of a comparison of drafters.

They show few rows, so that they can be read: those of the first point (the smallest batch and the lowest temperature),
and of these the fastest row of each drafter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from draftheads.bench.table import ALL, PARTS, TURN, Row, has_copies, heads_only, setting_in_words
from draftheads.bench.timing import PLAIN, STOCK
from draftheads.reports.plots import PLAIN_STYLE, Bars, Curves, Panels, Plot, Style
from draftheads.utils.counts import counted

_MOST = 7  # drafters in a plot
_INTERVALS = "Thin lines are 95 % intervals."
_POINT = ("batch_size", "temperature", "prompt_tokens")  # what all ways have in common that are timed in turn


def point(row: Row) -> tuple[Any, ...]:
    """What a row has in common with others; the first point is the smallest."""
    return tuple(row.settings.get(name) or 0 for name in _POINT)


def way(row: Row) -> tuple[str, str]:
    """The same for all parts of a way's answers."""
    return row.name, str(row.settings)


def at(row: Row) -> str:
    """The point of a row in words."""
    size, temperature, prompt_tokens = point(row)
    cut = f", with prompts of {counted(prompt_tokens, 'token')}" if prompt_tokens else ""
    return f"at batch size {size or 1} and temperature\N{NO-BREAK SPACE}{temperature:g}{cut}"


def bench_plots(rows: Sequence[Row], drafting: Mapping[str, Any]) -> Iterator[Plot]:
    """The plots for which there are values.

    ``rows`` are sorted: the first point first, and there the fastest drafter. ``drafting`` has the milliseconds of each
    drafter's ``prefix`` and ``heads``.
    """
    styles = _styles(rows)
    if len({row.settings.get("tree") for row in rows} - {None}) > 1:
        rows = [replace(row, name=_with_tree(row)) for row in rows]
    overall = [row for row in rows if row.part == ALL]
    first = [row for row in overall if point(row) == point(overall[0])]
    where = f" Measured {at(first[0])}." if len(first) < len(overall) else ""
    names = list(dict.fromkeys(row.name for row in heads_only(first)))
    shown = names[:_MOST]
    few, few_note = _fastest(heads_only(first), shown)
    every, every_note = _fastest(first, list(dict.fromkeys([*names, *(row.name for row in first)])))
    few_note, every_note = few_note + where, every_note + where
    curves = partial(Curves, styles=styles)
    against = partial(_against, names=shown, styles=styles)
    if names:
        yield _speeds(rows, few, few_note, styles)
    dots = {
        row.name: [(row.tokens_per_step, row.speedup, row.interval("speedup"), row.interval("tokens_per_step"))]
        for row in every
    }
    caption = "Further right, drafts are better; a drafter far right but low takes too long to draft. "
    caption += _INTERVALS + every_note
    panels: Panels = {"× plain decoding": dots}
    yield curves("speed-and-tokens", "Speed and tokens per step", "tokens per step", caption, panels=panels)
    lengths = {row.name: _percent(row.steps_by_tokens, sum(row.steps_by_tokens)) for row in few if row.steps_by_tokens}
    if lengths:
        caption = f"The further right a drafter's steps are, the more tokens they give at once.{few_note}"
        yield curves("lengths", "Tokens of a step", "tokens of a step", caption, panels={"steps, %": lengths})
    if depths := {row.name: _percent(row.acceptance_by_depth, 1) for row in few if row.acceptance_by_depth}:
        caption = "Steps that accept a draft token at that depth: where a curve is low, deeper drafts gain little."
        panels = {"steps, %": depths}
        yield curves("depths", "Acceptance by depth", "depth of the draft token", caption + few_note, panels=panels)
    if timed := [row for row in every if any(row.parts.values())]:
        caption = "Drafting is what draft tokens cost; verification is the model's pass, as in plain decoding."
        parts = {part: [row.parts[part] for row in timed] for part in PARTS}
        yield _stacks("parts", "Parts of a step", caption + every_note, [row.name for row in timed], parts)
    if drafting:
        caption = (
            "Shorter bars cost less in every step; the prefix is the time of layers that read the accepted tokens."
        )
        costs = zip_longest(*((cost["prefix"], *cost["heads"]) for cost in drafting.values()), fillvalue=0.0)
        parts = {f"head {i}" if i else "prefix": list(part) for i, part in enumerate(costs)}
        yield _stacks("drafting", "Drafting one chain", caption, list(drafting), parts)
    yield from against(
        "batch_size",
        "Batch size",
        "batch size",
        f"A drafter is worth it up to the batch size at which plain decoding reaches its tokens/s. {_INTERVALS}",
        rows=[row for row in overall if point(row)[1:] == point(overall[0])[1:]],
        values={"tokens/s": "tokens_per_second", "median answer, s": "p50_seconds"},
        log=True,
    )
    caption = "The best size of a tree is where its curve is highest: more nodes take longer to verify. "
    caption += _INTERVALS + where
    values = {"× plain decoding": "speedup"}
    yield from against("num_nodes", "Speed by tree size", "nodes", caption, rows=first, values=values, log=True)
    typical = [row for row in overall if row.settings.get("epsilon") is not None]
    typical = [row for row in typical if point(row) == point(typical[0])]
    if measures := dict.fromkeys(measure for row in typical for measure in row.quality):
        caption = (
            "A smaller threshold accepts more draft tokens; choose the smallest one whose quality is good enough. "
        )
        values = {"tokens/step": "tokens_per_step", **{measure: measure for measure in measures}}
        caption += _INTERVALS
        yield from against("epsilon", "Typical acceptance", "threshold ε", caption, rows=typical, values=values)


def _fastest(
    rows: Sequence[Row], names: Sequence[str], key: Callable[[Row], Any] = lambda _: None
) -> tuple[list[Row], str]:
    """The fastest row of each of these drafters for each key, and a sentence that says so if there are others."""
    fastest = {(row.name, key(row)): row for row in sorted(rows, key=lambda row: row.speedup)}
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
    styles = {PLAIN: PLAIN_STYLE, STOCK: PLAIN_STYLE}
    for row in heads_only(rows):
        style = Style.of(heads.setdefault(row.name, len(heads)), is_dashed=has_copies(row))
        styles |= {row.name: style, _with_tree(row): style}
    return styles


def _percent(shares: Sequence[float], total: float) -> list[tuple[int, float]]:
    """With one zero behind the last share: the axis ends there."""
    end = max((number for number, share in enumerate(shares, 1) if share), default=0)
    return [(number, 100 * share / max(1, total)) for number, share in enumerate(shares[: end + 1], 1)]


def _speeds(rows: Sequence[Row], chosen: Sequence[Row], note: str, styles: Mapping[str, Style]) -> Plot:
    """By category, if there are several, and by drafter."""
    parts = list(dict.fromkeys(row.part for row in rows if row.part != ALL and not row.part.startswith(TURN)))
    found = {(way(row), row.part): row for row in rows}
    groups = [*parts, ALL]
    of_groups = {row.name: [found.get((way(row), part)) for part in groups] for row in chosen}
    caption = "Bars beyond the line are faster than plain decoding"
    caption += "; where they are short, texts are harder to draft." if parts else "."
    return Bars(
        "speed",
        "Speed over plain decoding" + (", by category" if parts else ""),
        "× plain decoding",
        f"{caption} Thin lines are ± one standard error.{note}",
        styles=styles,
        groups=groups,
        series={name: [row.speedup if row else None for row in own] for name, own in of_groups.items()},
        errors={name: [row.speedup_error if row else None for row in own] for name, own in of_groups.items()},
    )


def _stacks(name: str, title: str, caption: str, groups: Sequence[str], parts: Mapping[str, Sequence[float]]) -> Plot:
    """Bars of milliseconds, without parts that took no time."""
    series = {part: values for part, values in parts.items() if any(values)}
    return Bars(name, title, "milliseconds", caption, groups=groups, series=series, is_stacked=True)


def _against(
    setting: str,
    title: str,
    x_label: str,
    caption: str,
    *,
    rows: Sequence[Row],
    values: Mapping[str, str],
    names: Sequence[str],
    **how: Any,
) -> Iterator[Plot]:
    """Curves of values (their labels and fields) against a setting that varies, for the fastest row of each drafter."""
    given = [row for row in rows if row.settings.get(setting) is not None]
    if len({row.settings[setting] for row in given}) < 2:
        return
    drafters = [row for row in given if row.name not in (PLAIN, STOCK)]
    shown, note = _fastest(drafters, names, lambda row: row.settings[setting])
    shown = sorted([*shown, *(row for row in given if row.name == PLAIN)], key=lambda row: row.settings[setting])
    panels = {
        label: {
            name: points
            for name in (*names, PLAIN)
            if (
                points := [
                    (row.settings[setting], number, row.interval(value))
                    for row in shown
                    if row.name == name and (number := row.number(value)) is not None
                ]
            )
        }
        for label, value in values.items()
    }
    yield Curves(setting, title, x_label, caption + note, panels=panels, **how)
