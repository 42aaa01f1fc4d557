"""One page of HTML: its parts, and the template that all kinds of pages share.

The page is one file that asks no server for anything. Its only script sorts tables; browsers run no other, as the
page's policy has its digest. Plots are drawn by matplotlib as SVG inside of it, and have the colours of the page. The
same content gives the same bytes.
"""

import base64
import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from draftheads.errors import MissingDependency

COLOURS = ("#2f81d6", "#e0672c", "#2b955a", "#b05cc9", "#a87f0e", "#d1466b", "#15919a", "#a0694f", "#7f858e")
_TEMPLATE, _SCRIPT = (Path(__file__).with_name(name) for name in ("page.html.j2", "sort.js"))
_INK = "#010203"  # of letters and axes in a drawing, for which the page's colour is put in
_MARKERS = "osD^vPX*"
_WIDTH = 5.2  # inches
_LEGEND_CHARACTERS = 66  # in a line of the legend; the sample and the gap of an entry take about 7
_NAME_CHARACTERS = 24
_MOST_MARKERS = 30  # on a curve
_MOST_ROWS = 100  # of a curve in its table

Pieces = Sequence[tuple[str, str]]  # parts of a text with the names of their CSS classes
Facts = Iterable[tuple[str, Any]]  # names and values
Bounds = Sequence[float] | None


class Table(NamedTuple):
    """Numbers under column names; the first column holds the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    best: int | None = None  # index of the row in bold
    is_wide: bool = False  # whether it needs the whole width of a large screen


class Point(NamedTuple):
    """A point of a curve, or a bar."""

    x: Any  # the name of a group of bars
    y: float
    bounds: Bounds = None  # of y
    x_bounds: Bounds = None


class Style(NamedTuple):
    """How a curve or a bar looks; bars of dashed ones are hatched."""

    number: int  # of its colour and marker; -1 is grey
    is_dashed: bool = False

    @property
    def colour(self) -> str:
        return COLOURS[self.number % (len(COLOURS) - 1)] if self.number >= 0 else COLOURS[-1]


@dataclass(frozen=True)
class Plot:
    """Curves in panels one below the other, or horizontal bars in groups, with sentences on what to read from them.

    Bars are side by side with a line at 1, or stacked with their sums.
    """

    name: str  # tells it apart from others of the page
    title: str
    x_label: str  # of bars, what is along them
    caption: str
    panels: Mapping[str, Mapping[str, Sequence[Point]]]  # by label of the vertical axis and by name of the curve
    _: KW_ONLY
    kind: Literal["curves", "bars", "stacks"] = "curves"
    styles: Mapping[str, Style] = field(default_factory=dict)  # by name; others have a style by their place
    guide: Sequence[tuple[float, float]] = ()  # a dotted line in the first panel, to compare with
    log: bool = False  # for x that double from one to the next: a tick at each
    top: float | None = None  # where the vertical axis ends

    @property
    def has_points(self) -> bool:
        return any(points for curves in self.panels.values() for points in curves.values())

    def table(self) -> Table:
        """A row for each point; of a long curve, some points."""
        rows: dict[tuple[str, Any], list[str]] = {}
        for number, curves in enumerate(self.panels.values()):
            for name, points in curves.items():
                for x, y, bounds, x_bounds in points[:: -1 - len(points) // (_MOST_ROWS + 1)][::-1]:
                    words = x if isinstance(x, str) else _cell(x, x_bounds, form=".3g")
                    row = rows.setdefault((name, x), [name, words, *("" for _ in self.panels)])
                    row[2 + number] = _cell(y, bounds)
        x_name = self.x_label if self.kind == "curves" else ""
        return Table(self.title, ["", x_name, *self.panels], list(rows.values()))

    def svg(self) -> str:
        """The drawing, to stand in a page."""
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415

        inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
        style: Any = {  # a dictionary of names that only matplotlib knows
            **dict.fromkeys(inked, _INK),
            **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
            **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
            "svg.hashsalt": self.name,  # with the metadata below: the same bytes each time
            "svg.fonttype": "none",
            "text.parse_math": False,  # names of heads can contain dollar signs
            "font.size": 11,
            "grid.alpha": 0.15,
        }
        file = io.StringIO()
        with mpl.rc_context(style):
            figure = Figure(figsize=(_WIDTH, 1), layout="constrained")
            self.draw(figure)
            metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(file, format="svg", metadata=metadata, transparent=True)
        svg = file.getvalue().partition("<svg")[2]
        # no other drawing has the ids of markers and clips, which are digests; others are left out
        svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="(?![a-z][0-9a-f]{10}")[^"]*"', "", svg)
        return f"<svg{svg}".replace(_INK, "currentColor")

    def draw(self, figure: Any) -> None:
        """Puts the plot on an empty figure of matplotlib, and gives it a height."""
        axes = figure.subplots(len(self.panels), sharex=True, squeeze=False)[:, 0]
        height = 0.7
        for ax, (label, curves) in zip(axes, self.panels.items(), strict=True):
            height += self._curves(ax, label, curves) if self.kind == "curves" else self._bars(ax, curves)
        if self.guide:
            axes[0].plot(*zip(*self.guide, strict=True), color=_INK, lw=0.9, linestyle=":")
        axes[-1].set_xlabel(self.x_label)
        handles, labels = axes[0].get_legend_handles_labels()
        if len(labels) > 1:  # below the axes, where it hides no data
            columns = max(1, min(4, _LEGEND_CHARACTERS // (max(map(len, labels)) + 7)))
            figure.legend(handles, labels, loc="outside lower center", fontsize=9.5, ncols=columns, columnspacing=1.5)
            height += 0.1 + 0.19 * -(-len(labels) // columns)
        figure.set_figheight(height)

    def _curves(self, ax: Any, label: str, curves: Mapping[str, Sequence[Point]]) -> float:
        for number, (name, points) in enumerate(curves.items()):
            style = self.styles.get(name, Style(number))
            ax.errorbar(
                [point.x for point in points],
                [point.y for point in points],
                xerr=_spread([(point.x, point.x_bounds) for point in points]),
                yerr=_spread([(point.y, point.bounds) for point in points]),
                label=_shortened(name),
                color=style.colour,
                marker=_MARKERS[style.number % len(_MARKERS)] if len(points) <= _MOST_MARKERS else "",
                markerfacecolor="none" if style.is_dashed else style.colour,
                linestyle=(0, (2, 1)) if style.is_dashed else "-",
                markersize=4.5,
                linewidth=1.4,
                elinewidth=0.9,
            )
        values = sorted({point.x for points in curves.values() for point in points})
        if self.log and values:
            ax.set_xscale("log")
            ax.set_xticks(values, [f"{value:g}" for value in values])
            ax.minorticks_off()
        elif all(isinstance(value, int) for value in values):
            ax.xaxis.get_major_locator().set_params(integer=True)
        ax.margins(x=0.04)
        ax.set(ylabel=label, ylim=(0, self.top or 1.05 * max(ax.dataLim.y1, 1e-9)))
        return 2.0

    def _bars(self, ax: Any, series: Mapping[str, Sequence[Point]]) -> float:
        groups = list(dict.fromkeys(point.x for points in series.values() for point in points))
        is_stacked = self.kind == "stacks"
        is_single = len(groups) == 1 and not is_stacked  # then names are beside the bars, and there is no legend
        size = 0.8 if is_stacked else 0.8 / max(1, len(series))
        ends = dict.fromkeys(groups, 0.0)
        ticks: dict[float, str] = {} if is_single else dict(enumerate(groups))
        for number, (name, points) in enumerate(series.items()):
            style, shift = self.styles.get(name, Style(number)), 0 if is_stacked else size * (number + 0.5) - 0.4
            bars = ax.barh(
                [groups.index(point.x) + shift for point in points],
                [point.y for point in points],
                size,
                left=[ends[point.x] for point in points],
                xerr=_spread([(point.y, point.bounds) for point in points]),
                label="" if is_single else _shortened(name),
                color=style.colour,
                hatch="////" if style.is_dashed else "",
                edgecolor="#ffffff80",
                linewidth=0,
                error_kw={"lw": 0.8, "ecolor": _INK},
            )
            if is_single:
                ticks[shift] = name
                ax.bar_label(bars, [_cell(points[0].y, points[0].bounds)], padding=4)
            if is_stacked:
                ends.update({point.x: ends[point.x] + point.y for point in points})
        if is_stacked and series:
            ax.bar_label(bars, [f"{end:.1f}" for end in ends.values()], padding=4)
        else:
            ax.axvline(1.0, color=_INK, lw=0.8)
        ax.set_yticks(list(ticks), [_shortened(name) for name in ticks.values()])
        ax.set_xlim(0, max(1e-9 if is_stacked else 1.0, ax.dataLim.x1))
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        return min(5.5, 0.35 * len(groups) * (1 if is_stacked else 0.5 + len(series) / 2))


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom. In sentences, `backquotes` mark commands."""

    title: str
    verdict: str  # the result in one sentence with numbers
    note: str = ""  # a paragraph below it
    numbers: Sequence[tuple[str, str]] = ()  # the most important ones in large type: values and names
    texts: Sequence[tuple[str, Pieces]] = ()  # titles, and texts that are shown as they are
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    settings: Sequence[tuple[str, Any]] = ()  # that differ from the defaults
    facts: Sequence[tuple[str, Facts]] = ()  # titles, each with names and values; shown folded


def render(page: Page) -> str:
    """The page as HTML. MissingDependency: an extra is not installed."""
    script = _SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - an extra

        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {"plain": _plain, "unbroken": _unbroken}
        template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
        return template.render(page=page, script=script, script_hash=f"sha256-{digest}") + "\n"
    except ImportError as error:
        raise MissingDependency(f"the page needs {error.name}", extra="report") from error


def _plain(value: Any) -> str:
    """A value from a record as text.

    >>> _plain(["a.jsonl", "b.jsonl"]), _plain(None), _plain(True), _plain(0.001)
    ('a.jsonl, b.jsonl', 'none', 'yes', '0.001')
    """
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ", ".join(map(_plain, value))
    return str(value)


def _unbroken(sentence: str) -> str:
    """Without a line break inside its speed."""
    return re.sub(r"[\d.]+ (± [\d.]+ )?×", lambda speed: speed[0].replace(" ", "\N{NO-BREAK SPACE}"), sentence)


def _cell(value: float, bounds: Bounds = None, *, form: str = ",.2f") -> str:
    """A number with its interval.

    >>> _cell(2000), _cell(1.5, [1.25, 1.75])
    ('2,000', '1.50 (1.25-1.75)')
    """
    words = f"{value:,}" if isinstance(value, int) else format(value, form)
    return f"{words} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else words


def _spread(values: Sequence[tuple[float, Bounds]]) -> Any:
    """How far the bounds lie below and above their values; None without bounds."""
    if not any(bounds for _, bounds in values):
        return None
    known = [(value, *(bounds or (value, value))) for value, bounds in values]
    return list(zip(*((max(0, value - low), max(0, high - value)) for value, low, high in known), strict=True))


def _shortened(name: str) -> str:
    """The end of a long name: paths and dates differ there.

    >>> _shortened("hydra"), _shortened("/home/user/heads/hydra-2026-11-23")
    ('hydra', '…/heads/hydra-2026-11-23')
    """
    return name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"
