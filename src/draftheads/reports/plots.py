"""Plots: curves or bars, drawn for light pages, dark pages and papers; and the same numbers as a table."""

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from draftheads.errors import MissingDependency

COLOURS = ("#2f81d6", "#e0672c", "#2b955a", "#b05cc9", "#a87f0e", "#d1466b", "#15919a", "#a0694f", "#7f858e")
INKS = {"light": "#1a2330", "dark": "#e4e9ef"}  # letters and axes
_MARKERS = "osD^vPX*"
_WIDTH = 5.2  # inches
_LEGEND_CHARACTERS = 66  # in a line of the legend; the sample and the gap of an entry take about 7
_NAME_CHARACTERS = 24
_TITLE_CHARACTERS = 72  # in a line
_MOST_TICKS = 12
_MOST_MARKERS = 30  # on a curve
_MOST_ROWS = 100  # of a curve in its table


class Table(NamedTuple):
    """Numbers under column names; the first column holds the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    best: int | None = None  # index of the row in bold
    is_wide: bool = False  # whether it needs the whole width of a large screen


Points = Sequence[tuple[Any, ...]]  # x, y and, where they are known, two bounds of y and two of x
Panels = Mapping[str, Mapping[str, Points]]  # by label of the vertical axis and by name of the curve


@dataclass(frozen=True)
class Style:
    """How a curve or a bar looks; bars of dashed ones are hatched."""

    colour: str
    marker: str = "o"
    is_dashed: bool = False

    @classmethod
    def of(cls, number: int, *, is_dashed: bool = False) -> "Style":
        """The style of the first, second … head."""
        return cls(COLOURS[number % (len(COLOURS) - 1)], _MARKERS[number % len(_MARKERS)], is_dashed)


PLAIN_STYLE = Style(COLOURS[-1], "X")


@dataclass(frozen=True)
class Plot:
    """A plot with its title and sentences on what to read from it."""

    name: str  # of its files
    title: str
    x_label: str
    caption: str
    _: KW_ONLY
    styles: Mapping[str, Style] = field(default_factory=dict)  # by name; others have a style by their place

    def draw(self, figure: Any) -> None:
        """Puts the plot on an empty figure of matplotlib, and gives it a height."""
        raise NotImplementedError

    def table(self) -> Table:
        """The numbers of the plot."""
        raise NotImplementedError

    def uri(self, scheme: str) -> str:
        """The plot as an SVG inside a URI, for a page that is light or dark."""
        return "data:image/svg+xml;base64," + base64.b64encode(self._image("svg", INKS[scheme])).decode()

    def files(self, where: str = "") -> dict[str, bytes]:
        """Files of the plot, black on white: an SVG and a PNG of 200 dpi.

        Both have the title, and below it ``where``: the model and the machine.
        """
        title = "\n".join([self.title, *textwrap.wrap(where, _TITLE_CHARACTERS)])
        return {f"{self.name}.{form}": self._image(form, "black", title, facecolor="white") for form in ("svg", "png")}

    def style(self, name: str, number: int) -> Style:
        return self.styles.get(name, Style.of(number))

    def _image(self, form: str, ink: str, title: str = "", facecolor: str = "none") -> bytes:
        try:
            import matplotlib as mpl  # noqa: PLC0415 - an extra
            from matplotlib import figure as mpl_figure  # noqa: PLC0415
        except ImportError as error:
            raise missing(error) from error
        inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
        style: Any = {  # a dictionary of names that only matplotlib knows
            **dict.fromkeys(inked, ink),
            "svg.hashsalt": self.name,  # with the metadata below: the same bytes each time
            "svg.fonttype": "none",
            "text.parse_math": False,  # names of heads can contain dollar signs
            "font.size": 11,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.alpha": 0.15,
            "legend.frameon": False,
        }
        with mpl.rc_context(style):
            figure = mpl_figure.Figure(figsize=(_WIDTH, 1), layout="constrained")
            self.draw(figure)
            if title:
                figure.suptitle(title, fontsize=9.5)
                figure.set_figheight(figure.get_figheight() + 0.2 * len(title.splitlines()))
            file = io.BytesIO()
            names = ("Date", "Creator", "Format", "Type") if form == "svg" else ("Software",)
            figure.savefig(file, format=form, metadata=dict.fromkeys(names), facecolor=facecolor, dpi=200)
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Curves(Plot):
    """Curves in panels one below the other, from 0 upwards; a curve of one point is a dot."""

    panels: Panels
    guide: Points = ()  # a dotted line in the first panel, to compare with
    log: bool = False  # for x that double from one to the next: a tick at each
    top: float | None = None  # where the vertical axis ends

    def draw(self, figure: Any) -> None:
        axes = figure.subplots(len(self.panels), sharex=True, squeeze=False)[:, 0]
        if self.guide:
            axes[0].plot(*zip(*self.guide, strict=True), color=axes[0].title.get_color(), lw=0.9, linestyle=":")
        for ax, (label, curves) in zip(axes, self.panels.items(), strict=True):
            for number, (name, points) in enumerate(curves.items()):
                style = self.style(name, number)
                ax.plot(
                    [point[0] for point in points],
                    [point[1] for point in points],
                    label=_shortened(name),
                    color=style.colour,
                    marker=style.marker if len(points) <= _MOST_MARKERS else "",
                    markerfacecolor="none" if style.is_dashed else style.colour,
                    linestyle=(0, (2, 1)) if style.is_dashed else "-",
                    markersize=4.5,
                    linewidth=1.4,
                )
                for i, add_lines in enumerate((ax.vlines, ax.hlines)):
                    known = [(point[i], *point[i + 2]) for point in points if len(point) > i + 2 and point[i + 2]]
                    if known:
                        add_lines(*zip(*known, strict=True), color=style.colour, lw=0.9, alpha=0.6)
            ax.set(ylabel=label, ylim=(0, self.top or 1.05 * max(ax.dataLim.y1, 1e-9)))
        values = {point[0] for curves in self.panels.values() for points in curves.values() for point in points}
        if self.log:
            axes[-1].set_xscale("log")
        if self.log and len(values) <= _MOST_TICKS:
            axes[-1].set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)])
            axes[-1].minorticks_off()
        elif not self.log and all(isinstance(value, int) for value in values):
            axes[-1].xaxis.get_major_locator().set_params(integer=True)
        axes[-1].margins(x=0.04)
        axes[-1].set_xlabel(self.x_label)
        figure.set_figheight(0.9 + 2.0 * len(self.panels) + _add_legend(figure, axes[0]))

    def table(self) -> Table:
        """A row for each point; of a long curve, some points."""
        rows: dict[tuple[str, Any], dict[str, Any]] = {}
        for label, curves in self.panels.items():
            for name, points in curves.items():
                for x, y, *bounds in points[:: -1 - len(points) // (_MOST_ROWS + 1)][::-1]:
                    row = rows.setdefault((name, x), {"": name, self.x_label: _cell(x, *bounds[1:2], form=".3g")})
                    row[label] = _cell(y, *bounds[:1])
        columns = ["", self.x_label, *self.panels]
        is_long = any(len(points) > _MOST_ROWS for curves in self.panels.values() for points in curves.values())
        note = "Of long curves, the table has some points." if is_long else ""
        return Table(self.title, columns, [[row.get(name, "") for name in columns] for row in rows.values()], note)


@dataclass(frozen=True, kw_only=True)
class Bars(Plot):
    """Horizontal bars in groups, side by side with a line at 1, or stacked with their sums."""

    groups: Sequence[str]  # from top to bottom
    series: Mapping[str, Sequence[float | None]]  # by name, a value for each group; None: no bar
    errors: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    is_stacked: bool = False

    def draw(self, figure: Any) -> None:
        ax = figure.add_subplot(xlabel=self.x_label)
        ink = ax.title.get_color()
        is_single = len(self.groups) == 1 and not self.is_stacked  # then names are beside the bars
        size = 0.8 if self.is_stacked else 0.8 / max(1, len(self.series))
        ends = [0.0] * len(self.groups)
        ticks: dict[float, str] = {} if is_single else dict(enumerate(self.groups))
        for number, (name, values) in enumerate(self.series.items()):
            style, shift = self.style(name, number), 0 if self.is_stacked else size * (number + 0.5) - 0.4
            widths, errors = [value or 0.0 for value in values], [error or 0.0 for error in self.errors.get(name, ())]
            places = [group + shift for group in range(len(self.groups))]
            bars = ax.barh(
                places,
                widths,
                size,
                left=ends,
                xerr=errors or None,
                label=_shortened(name),
                color=style.colour,
                hatch="////" if style.is_dashed else "",
                edgecolor="#ffffff80",
                linewidth=0,
                ecolor=ink,
                error_kw={"lw": 0.8},
            )
            ends = [end + width if self.is_stacked else 0.0 for end, width in zip(ends, widths, strict=True)]
            if is_single:
                ticks[places[0]] = name
                ax.bar_label(bars, [_cell(values[0], errors[0] if errors else None)], padding=4)
        if self.is_stacked and self.series:
            ax.bar_label(bars, [f"{end:.1f}" for end in ends], padding=4)
        else:
            ax.axvline(1.0, color=ink, lw=0.8)
        ax.set_yticks(list(ticks), [_shortened(name) for name in ticks.values()])
        ax.set_xlim(0, max(1e-9 if self.is_stacked else 1.0, ax.dataLim.x1))
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.locator_params(axis="x", nbins=6)
        num_rows = len(self.groups) * (1 if self.is_stacked else 0.5 + len(self.series) / 2)
        figure.set_figheight(0.7 + min(5.5, 0.35 * num_rows) + (0 if is_single else _add_legend(figure, ax)))

    def table(self) -> Table:
        blank = [None] * len(self.groups)
        rows = [[name, *map(_cell, values, self.errors.get(name, blank))] for name, values in self.series.items()]
        return Table(self.title, ["", *self.groups], rows)


def missing(error: ImportError) -> MissingDependency:
    """The error that names the package to install."""
    return MissingDependency(f"the report needs {error.name}", pip_install="'draftheads[report]'")


def _cell(value: float | None, spread: float | Sequence[float] | None = None, *, form: str = ",.2f") -> str:
    """A number with its standard error or its interval.

    >>> _cell(2000), _cell(1.5, 0.25), _cell(1.5, [1.25, 1.75])
    ('2,000', '1.50 ± 0.25', '1.50 (1.25-1.75)')
    """
    if value is None:
        return ""
    words = f"{value:,}" if isinstance(value, int) else format(value, form)
    if isinstance(spread, int | float):
        return f"{words} ± {spread:.2f}"
    return f"{words} ({spread[0]:.2f}-{spread[1]:.2f})" if spread else words


def _shortened(name: str) -> str:
    """The end of a long name: paths and dates differ there.

    >>> _shortened("hydra"), _shortened("/home/user/heads/hydra-2026-11-23")
    ('hydra', '…/heads/hydra-2026-11-23')
    """
    return name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"


def _add_legend(figure: Any, ax: Any) -> float:
    """Below the axes, where it hides no data; none for a single label. Returns its height in inches."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) < 2:
        return 0.0
    num_columns = max(1, min(4, len(labels), _LEGEND_CHARACTERS // (max(map(len, labels)) + 7)))
    figure.legend(handles, labels, loc="outside lower center", fontsize=9.5, ncols=num_columns, columnspacing=1.5)
    return 0.1 + 0.19 * -(-len(labels) // num_columns)
