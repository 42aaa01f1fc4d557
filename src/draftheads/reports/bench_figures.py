"""The plots of a comparison of drafters.

They show few rows, so that they can be read: those of the first point (the smallest batch and the lowest temperature),
and of these the fastest row of each drafter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftheads.bench.table import ALL, PARTS, TURN, Row, has_copies, heads_only, setting_in_words
from draftheads.bench.timing import PLAIN, STOCK
from draftheads.reports.plots import (
    PLAIN_STYLE,
    Curves,
    Figure,
    Style,
    Styles,
    draw_bars,
    draw_curves,
    draw_groups,
    draw_scatter,
    draw_stacks,
)
from draftheads.utils.counts import counted

_MOST = 7  # rows in a plot
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


@dataclass(frozen=True)
class _Chosen:
    """Rows for a plot, one of each drafter and key, and a sentence that says which these are, if there are others."""

    rows: Sequence[Row]
    note: str

    @classmethod
    def of(cls, rows: Sequence[Row], names: Sequence[str], key: Callable[[Row], Any] = lambda _: None) -> "_Chosen":
        """The fastest row of each of these drafters for each key."""
        fastest = {(row.name, key(row)): row for row in sorted(rows, key=lambda row: row.speedup)}
        shown = [row for name in names for row in fastest.values() if row.name == name]
        some = f"the {len(names)} fastest drafters" if {row.name for row in rows} > {row.name for row in shown} else ""
        if len(fastest) < len(rows):
            some = f"the fastest row of each {f'of {some}' if some else 'drafter'}"
        return cls(shown, f" Shown: {some}." if some else "")


def bench_figures(rows: Sequence[Row], drafting: Mapping[str, Any]) -> list[Figure]:
    """The plots for which there are values.

    ``rows`` are sorted: the first point first, and there the fastest drafter. ``drafting`` has the milliseconds of each
    drafter's ``prefix`` and ``heads``.
    """
    styles = _styles(rows)
    several = len({row.settings.get("tree") for row in rows} - {None}) > 1
    rows = [replace(row, name=_with_tree(row)) if several else row for row in rows]
    overall = [row for row in rows if row.part == ALL]
    first = [row for row in overall if point(row) == point(overall[0])]
    where = f" Measured {at(first[0])}." if len(first) < len(overall) else ""
    names = list(dict.fromkeys(row.name for row in heads_only(first)))
    shown = names[:_MOST]
    few = _Chosen.of(heads_only(first), shown)
    every = _Chosen.of(first, list(dict.fromkeys([*names, *(row.name for row in first)])))
    few_note, every_note = few.note + where, every.note + where
    dots = {
        row.name: (row.tokens_per_step, row.speedup, row.interval("tokens_per_step"), row.interval("speedup"))
        for row in every.rows
    }
    lengths = {row.name: _shares(row.steps_by_tokens) for row in few.rows if row.steps_by_tokens}
    depths = {row.name: _percent(row.acceptance_by_depth) for row in few.rows if row.acceptance_by_depth}
    typical = [row for row in overall if row.settings.get("epsilon") is not None]
    typical = [row for row in typical if point(row) == point(typical[0])]
    measures = dict.fromkeys(measure for row in typical for measure in row.quality)
    deepest = max((len(cost["heads"]) for cost in drafting.values()), default=0)
    figures = [
        _speedups(rows, few, few_note, styles) if names else None,
        Figure(
            "Speed and tokens per step",
            partial(
                draw_scatter,
                points=dots,
                x_label="tokens per step",
                y_label="× plain decoding",
                styles=styles,
            ),
            f"Further right, drafts are better; a drafter far right but low takes too long to draft. {_INTERVALS}"
            + every_note,
            alt=_spoken({name: [(f"{x:.2f} tokens/step", y)] for name, (x, y, *_) in dots.items()}),
            name="speed-and-tokens",
            height=2.9 + 0.1 * len(dots),  # with two names in a line of the legend
        ),
        _curves(
            {"steps, %": lengths},
            "The further right a drafter's steps are, the more tokens they give at once." + few_note,
            title="Tokens of a step",
            label="tokens of a step",
            name="lengths",
            styles=styles,
        ),
        _curves(
            {"steps, %": depths},
            "Steps that accept a draft token at that depth: where a curve is low, deeper drafts gain little."
            + few_note,
            title="Acceptance by depth",
            label="depth of the draft token",
            name="depths",
            styles=styles,
        ),
        _stacks(
            "Parts of a step",
            [row.name for row in every.rows if any(row.parts.values())],
            {part: [row.parts[part] for row in every.rows if any(row.parts.values())] for part in PARTS},
            "Drafting is what draft tokens cost; verification is the model's pass, as in plain decoding." + every_note,
            name="parts",
        ),
        _stacks(
            "Drafting one chain",
            list(drafting),
            {
                "prefix": [cost["prefix"] for cost in drafting.values()],
                **{
                    f"head {head + 1}": [(*cost["heads"], *[0.0] * deepest)[head] for cost in drafting.values()]
                    for head in range(deepest)
                },
            },
            "Shorter bars cost less in every step; the prefix is the time of layers that read the accepted tokens.",
            name="drafting",
        ),
        _against(
            [row for row in overall if point(row)[1:] == point(overall[0])[1:]],
            shown,
            "batch_size",
            {"tokens/s": "tokens_per_second", "median answer, s": "p50_seconds"},
            f"A drafter is worth it up to the batch size at which plain decoding reaches its tokens/s. {_INTERVALS}",
            styles=styles,
            title="Batch size",
            label="batch size",
            log=True,
        ),
        _against(
            first,
            shown,
            "num_nodes",
            {"× plain decoding": "speedup"},
            "The best size of a tree is where its curve is highest: more nodes take longer to verify. "
            f"{_INTERVALS}{where}",
            styles=styles,
            title="Speed by tree size",
            label="nodes",
            log=True,
        ),
        _against(
            typical,
            shown,
            "epsilon",
            {"tokens/step": "tokens_per_step", **{measure: measure for measure in measures}},
            "A smaller threshold accepts more draft tokens; choose the smallest one whose quality is good enough. "
            f"{_INTERVALS}",
            styles=styles,
            title="Typical acceptance",
            label="threshold ε",
        )
        if measures
        else None,
    ]
    return [figure for figure in figures if figure is not None]


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


def _percent(shares: Sequence[float]) -> list[tuple[float, float]]:
    """With one zero behind the last share: the axis ends there."""
    end = max((number for number, share in enumerate(shares, 1) if share), default=0)
    return [(number, 100 * share) for number, share in enumerate(shares[: end + 1], 1)]


def _shares(counts: Sequence[int]) -> list[tuple[float, float]]:
    return _percent([count / max(1, sum(counts)) for count in counts])


def _speedups(rows: Sequence[Row], chosen: _Chosen, note: str, styles: Styles) -> Figure:
    """By category and drafter; where there is one category, a bar for each drafter."""
    parts = list(dict.fromkeys(row.part for row in rows if row.part != ALL and not row.part.startswith(TURN)))
    names = [row.name for row in chosen.rows]
    if not parts:
        values, errors = [row.speedup for row in chosen.rows], [row.speedup_error for row in chosen.rows]
        return Figure(
            "Speed over plain decoding",
            partial(draw_bars, names=names, values=values, errors=errors, label="× plain decoding", styles=styles),
            "Bars beyond the line are faster than plain decoding; ± is one standard error." + note,
            alt=_spoken({"Bars:": zip(names, values, strict=True)}),
            name="speed",
            height=1.0 + 0.42 * len(names),
        )
    groups = [*parts, ALL]
    found = {(way(row), row.part): row for row in rows}
    of_groups = {row.name: [found.get((way(row), part)) for part in groups] for row in chosen.rows}
    series = {name: [row.speedup if row else None for row in own] for name, own in of_groups.items()}
    sizes = {name: [row.speedup_error if row else None for row in own] for name, own in of_groups.items()}
    return Figure(
        "Speed over plain decoding, by category",
        partial(draw_groups, groups=groups, series=series, label="× plain decoding", errors=sizes, styles=styles),
        "Bars above the line are faster than plain decoding; where they are low, texts are harder to draft. Thin lines "
        f"are ± one standard error.{note}",
        alt=_spoken({name: zip(groups, values, strict=True) for name, values in series.items()}),
        name="speed",
        height=3.8,
    )


def _against(
    rows: Sequence[Row],
    names: Sequence[str],
    setting: str,
    values: Mapping[str, str],
    caption: str,
    **labels: Any,
) -> Figure | None:
    """Curves of values (their labels and fields) against a setting, for the fastest row of each drafter.

    None if the setting has one value.
    """
    given = [row for row in rows if row.settings.get(setting) is not None]
    if len({row.settings[setting] for row in given}) < 2:
        return None
    chosen = _Chosen.of(
        [row for row in given if row.name not in (PLAIN, STOCK)], names, lambda row: row.settings[setting]
    )
    shown = sorted([*chosen.rows, *(row for row in given if row.name == PLAIN)], key=lambda row: row.settings[setting])
    panels: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
    for label, value in values.items():
        curves: dict[str, list[tuple[Any, ...]]] = {name: [] for name in (*names, PLAIN)}
        for row in shown:
            if (number := row.number(value)) is not None:
                bounds = row.interval(value)
                curves[row.name].append((row.settings[setting], number, *([] if bounds is None else [bounds])))
        panels[label] = {name: points for name, points in curves.items() if points}
    return _curves(panels, caption + chosen.note, name=setting, **labels)


def _curves(panels: Mapping[str, Curves], caption: str, *, title: str, name: str, **how: Any) -> Figure | None:
    """None where there is no curve."""
    if not any(panels.values()):
        return None
    alt = " ".join(f"{y_label}: {_spoken(curves)}" for y_label, curves in panels.items())
    draw = partial(draw_curves, panels=panels, **how)
    return Figure(title, draw, caption, alt=f"Curves. {alt}", name=name, height=1.3 + 2.1 * len(panels))


def _stacks(
    title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], caption: str, *, name: str
) -> Figure | None:
    """Bars of milliseconds; None where there is none."""
    if not names:
        return None
    shown = {part: values for part, values in parts.items() if any(values)}
    alt = _spoken({part: zip(names, values, strict=True) for part, values in shown.items()})
    draw = partial(draw_stacks, names=names, parts=shown, label="milliseconds")
    return Figure(title, draw, caption, alt=f"Bars. {alt}", name=name, height=1.3 + 0.3 * len(names))


def _spoken(curves: Mapping[str, Iterable[tuple[Any, ...]]]) -> str:
    """The points of curves for people who cannot see them."""
    words = (
        f"{name} {', '.join(f'{x} {y:.2f}' for x, y, *_ in points if y is not None)}" for name, points in curves.items()
    )
    return f"{'; '.join(words)}."
