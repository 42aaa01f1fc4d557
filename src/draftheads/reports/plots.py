"""All plots of the pages.

Each ``draw_*`` function draws on an empty matplotlib figure. :class:`Figure` makes files and parts of pages of them.
"""

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftheads.errors import MissingDependency

_FOREGROUND = "#010203"  # stands for the colour of the page's text, which depends on dark mode
COLOURS = ("#2f81d6", "#e0672c", "#2b955a", "#b05cc9", "#a87f0e", "#d1466b", "#15919a", "#a0694f", "#7f858e")
_GREY = COLOURS[-1]
_MARKERS = "osD^vPX*"
_MOST_SMOOTHING = 20  # log lines in a moving mean
_LEGEND_CHARACTERS = 57  # in a line of the legend; the sample and the gap of an entry take about 7
_NAME_CHARACTERS = 24  # at a bar
_MOST_TICKS = 12
_TITLE_CHARACTERS = 72  # in a line

Interval = Sequence[float]  # a lower and an upper bound
Curves = Mapping[str, Sequence[tuple[Any, ...]]]  # by label: points, and the interval of y behind them if it is known


@dataclass(frozen=True)
class Style:
    """How a curve, its dots or a bar look; one that is dashed has hatched bars."""

    colour: str
    marker: str = "o"
    is_dashed: bool = False

    @classmethod
    def of(cls, number: int, *, is_dashed: bool = False) -> "Style":
        """The style of the first, second … head."""
        return cls(COLOURS[number % (len(COLOURS) - 1)], _MARKERS[number % len(_MARKERS)], is_dashed)

    @property
    def hatch(self) -> str:
        return "////" if self.is_dashed else ""


Styles = Mapping[str, Style]  # by name; other names have a style by their place
PLAIN_STYLE = Style(_GREY, "X")
_NONE: Mapping[str, Any] = {}
_THIN: dict[str, Any] = {"lw": 0.9, "alpha": 0.6}  # intervals
_BAR: dict[str, Any] = {"edgecolor": "#ffffff80", "lw": 0, "ecolor": _FOREGROUND, "error_kw": {"lw": 0.8}}


@dataclass(frozen=True)
class Figure:
    """A plot with its title, a sentence on what to read from it, and the same facts for people who cannot see it."""

    title: str
    draw: Callable[[Any], None]  # puts the plot on an empty figure of matplotlib
    caption: str
    alt: str
    name: str  # of its files; ids in its SVG differ from those of other names
    height: float = 3.2  # inches; it is 5.2 inches wide

    @property
    def svg(self) -> str:
        """For use inside HTML: the letters have the colour of the text around it, and the background is transparent.

        The same plot gives the same text.
        """
        svg = self._saved("svg", transparent=True).decode()
        svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :], count=2)  # HTML needs no namespaces
        svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure, and nothing refers to them
        return svg.replace(_FOREGROUND, "currentColor")

    def files(self, where: str = "") -> dict[str, bytes]:
        """Files of the plot, black on white: an SVG that stands alone, and a PNG of 200 dpi.

        Both have the title, and below it ``where``: the model and the machine.
        """
        title = "\n".join(filter(None, [self.title, *textwrap.wrap(where, _TITLE_CHARACTERS)]))
        svg = self._saved("svg", title, facecolor="white").replace(_FOREGROUND.encode(), b"#000000")
        return {f"{self.name}.svg": svg, f"{self.name}.png": self._saved("png", title, facecolor="white", dpi=200)}

    def _saved(self, form: str, title: str = "", **options: Any) -> bytes:
        try:
            import matplotlib as mpl  # noqa: PLC0415 - an extra
            from matplotlib import figure as mpl_figure  # noqa: PLC0415
            from matplotlib.rcsetup import cycler  # noqa: PLC0415
        except ImportError as error:
            raise missing(error) from error
        style: Any = {  # a dictionary of names that only matplotlib knows
            "svg.hashsalt": self.name,
            "svg.fonttype": "none",
            "text.parse_math": False,  # names of heads can contain dollar signs
            "font.size": 11,
            "axes.prop_cycle": cycler("color", COLOURS),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.alpha": 0.15,
            "legend.frameon": False,
        }
        style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color"), _FOREGROUND)
        style |= dict.fromkeys(("xtick.color", "ytick.color"), _FOREGROUND)
        with mpl.rc_context(style):
            height = self.height + 0.2 * len(title.splitlines())
            figure = mpl_figure.Figure(figsize=(5.2, height), layout="constrained")
            if title:
                figure.suptitle(title, fontsize=9.5)
            self.draw(figure)
            file = io.BytesIO()
            names = ("Date", "Creator", "Format", "Type") if form == "svg" else ("Software",)
            figure.savefig(file, format=form, metadata=dict.fromkeys(names), **options)  # the same bytes each time
        return file.getvalue()


def missing(error: ImportError) -> MissingDependency:
    """The error that names the package to install."""
    return MissingDependency(f"the report needs {error.name}", pip_install="'draftheads[report]'")


def smoothing(num_lines: int) -> int:
    """Number of log lines in the moving mean of a plot.

    >>> smoothing(30), smoothing(100), smoothing(9000)
    (1, 5, 20)
    """
    return max(1, min(_MOST_SMOOTHING, num_lines // 20))


def loss_limit(log: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> float | None:
    """Where the axis of losses ends, so that an early spike does not flatten the rest; None if nothing is cut off.

    That is twice the largest loss after the first tenth of the steps, smoothed.
    """
    curves = [points for pair in _loss_curves(log, validation) for points in pair]
    last = max((step for points in curves for step, _ in points), default=0)
    late = [loss for points in curves for step, loss in points if step > last / 10]
    limit = 2 * max(late, default=0.0)
    is_cut = any(loss > limit for points in curves for _, loss in points)
    return limit if late and is_cut else None


def draw_losses(figure: Any, log: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> None:
    """Loss of each head over steps: a moving mean of training as a line, held-out text as dots."""
    ax = figure.add_subplot(xlabel="step", ylabel="loss")
    for head, (training, held_out) in enumerate(_loss_curves(log, validation), 1):
        (line,) = ax.plot(*_coordinates(training), linewidth=1.6, label=f"head {head}")
        ax.plot(*_coordinates(held_out), "o--", markersize=5, linewidth=0.8, color=line.get_color())
    if log:
        ax.plot([], [], color=_FOREGROUND, linewidth=1.6, label="training")
    if log and validation:
        ax.plot([], [], "o--", color=_FOREGROUND, markersize=5, linewidth=0.8, label="held-out")
    ax.set_ylim(0, loss_limit(log, validation))
    _count_on_x(ax)
    _add_legend(figure, ax)


def draw_acceptance(figure: Any, validation: Sequence[dict[str, Any]]) -> None:
    """Top-1 accuracy of each head on held-out text over steps, in percent."""
    ax = figure.add_subplot(xlabel="step", ylabel="top-1 accuracy, %")
    for head in range(len(validation[0]["top1"]) if validation else 0):
        shares = [100 * line["top1"][head] for line in validation]
        ax.plot([line["step"] for line in validation], shares, "o-", markersize=4, label=f"head {head + 1}")
    ax.set_ylim(0, max(10.0, ax.get_ylim()[1]))  # a range of 1 % would magnify noise
    _count_on_x(ax)
    _add_legend(figure, ax)


def draw_tokens_per_step(figure: Any, validation: Sequence[dict[str, Any]]) -> None:
    """Expected tokens per step on held-out text over steps, with a chain and with a tree."""
    ax = figure.add_subplot(xlabel="step", ylabel="tokens per step")
    for name, label in (("tokens_per_step_tree", "tree"), ("tokens_per_step_chain", "chain")):
        ax.plot([line["step"] for line in validation], [line[name] for line in validation], "o-", ms=4, label=label)
    _add_plain_decoding(ax)
    _add_legend(figure, ax)


def draw_speedups(
    figure: Any, curves: Sequence[tuple[str, Sequence[float]]], chosen: Sequence[tuple[int, float]]
) -> None:
    """Speed over plain decoding by the number of nodes, a curve for each number of requests.

    ``curves`` have a label, and the speed with 1, 2, … nodes. ``chosen`` has for each curve the nodes and the speed of
    the fastest tree, which gets a dot.
    """
    ax = figure.add_subplot(xlabel="nodes in the tree", ylabel="× plain decoding")
    for (label, speeds), (nodes, speed) in zip(curves, chosen, strict=True):
        (line,) = ax.plot(range(1, len(speeds) + 1), speeds, linewidth=1.6, label=label)
        ax.plot([nodes], [speed], "o", color=line.get_color())
    _add_plain_decoding(ax)
    _add_legend(figure, ax)


def draw_tree_sizes(figure: Any, trees: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> None:
    """Tokens per step over the number of nodes, with bands of one standard error.

    ``trees`` have a label, tokens per step with 1, 2, … nodes, and their standard errors.
    """
    ax = figure.add_subplot(xlabel="nodes in the tree", ylabel="tokens per step")
    for label, tokens, errors in trees:
        sizes = range(1, len(tokens) + 1)
        bounds = [(value - error, value + error) for value, error in zip(tokens, errors, strict=True)]
        (line,) = ax.plot(sizes, tokens, "-" if len(tokens) > 1 else "o", label=label)
        ax.fill_between(sizes, *zip(*bounds, strict=True), color=line.get_color(), alpha=0.2, linewidth=0)
    _add_plain_decoding(ax)
    _add_legend(figure, ax)


def draw_calibration(
    figure: Any, stages: Sequence[tuple[str, Sequence[tuple[float, float, float]]]], *, min_count: int
) -> None:
    """How often draft tokens are accepted over how confident the head is; below it, the number of draft tokens.

    ``stages`` have a label, and for each bin its mean confidence, the accepted share, and its number of draft tokens.
    Bins with fewer than ``min_count`` draft tokens have a grey bar and no dot.
    """
    ax, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    ax.plot([0, 100], [0, 100], color=_GREY, linewidth=1, linestyle="--")
    for number, (label, bins) in enumerate(stages):
        colour = COLOURS[-2 - number]
        used = [values for values in bins if values[2] >= min_count]
        confidence, accepted = ([100 * values[part] for values in used] for part in (0, 1))
        errors = [100 * (share * (1 - share) / count) ** 0.5 for _, share, count in used]
        ax.errorbar(confidence, accepted, errors, fmt="o-", color=colour, ms=4, lw=1.2, elinewidth=1, label=label)
        places = [100 * place + 2 * number - 1 for place, *_ in bins]
        colours = [colour if count >= min_count else _GREY for *_, count in bins]
        counts.bar(places, [count for *_, count in bins], width=2, color=colours)
    ax.set(ylabel="accepted, %", xlim=(-3, 103), ylim=(-3, 103))
    counts.set(xlabel="confidence, %", ylabel="draft tokens", yscale="log", ylim=(1, None))
    counts.yaxis.set_major_formatter("{x:,.0f}")
    counts.yaxis.get_major_locator().set_params(base=100, numticks=9)
    _add_legend(figure, ax)


def draw_bars(
    figure: Any,
    names: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float],
    *,
    label: str,
    styles: Styles = _NONE,
) -> None:
    """Horizontal bars with standard errors and their numbers, and a line at 1, the value of plain decoding.

    ``names`` are of the bars, from top to bottom.
    """
    ax = figure.add_subplot(xlabel=label)
    look = [styles.get(name, Style.of(0)) for name in names]
    colours, hatches = [style.colour for style in look], [style.hatch for style in look]
    ax.barh(range(len(names)), values, 0.7, xerr=errors, color=colours, hatch=hatches, **_BAR)
    for place, (value, error) in enumerate(zip(values, errors, strict=True)):
        _add_number(ax, f"{value:.2f} ± {error:.2f}", (1, place), ("axes fraction", "data"))
    ax.set_xlim(0, max([1, *map(sum, zip(values, errors, strict=True))]))
    ax.axvline(1.0, color=_FOREGROUND, lw=0.8)
    _name_bars(ax, names)


def draw_stacks(figure: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], *, label: str) -> None:
    """Horizontal bars, each of parts side by side with their sum at the end.

    ``names`` are of the bars, from top to bottom; ``parts`` have a value for each bar.
    """
    ax = figure.add_subplot(xlabel=label)
    ends = [0.0] * len(names)
    for number, (part, values) in enumerate(parts.items()):
        ax.barh(range(len(names)), values, 0.7, left=ends, label=part, color=COLOURS[number % len(COLOURS)])
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for place, end in enumerate(ends):
        _add_number(ax, f"{end:.1f}", (end, place), "data")
    ax.set_xlim(0, max(ends, default=0.0) or 1)
    _name_bars(ax, names)
    _add_legend(figure, ax)


def draw_groups(
    figure: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    errors: Mapping[str, Sequence[float | None]] = _NONE,
    styles: Styles = _NONE,
) -> None:
    """Vertical bars in groups with standard errors, and a line at 1, the value of plain decoding.

    ``series`` have a value for each group, or None: no bar.
    """
    ax = figure.add_subplot(ylabel=label)
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(groups))]
        style, sizes = styles.get(name, Style.of(number)), [error or 0.0 for error in errors.get(name, ())]
        look = {"label": _shortened(name), "color": style.colour, "hatch": style.hatch, **_BAR}
        ax.bar(places, [value or 0.0 for value in values], width, yerr=sizes or None, **look)
    ax.axhline(1.0, color=_FOREGROUND, lw=0.8)
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if max(map(len, groups), default=0) > 7 else {}
    ax.set_xticks(range(len(groups)), [_shortened(group) for group in groups], **turned)
    ax.set(xlim=(-0.5, max(1, len(groups)) - 0.5), ylim=(0, max(1.0, ax.dataLim.y1)))
    ax.grid(visible=False, axis="x")
    _add_legend(figure, ax)


def draw_curves(
    figure: Any, panels: Mapping[str, Curves], *, label: str, log: bool = False, styles: Styles = _NONE
) -> None:
    """Curves with a marker and an interval at each point, in panels one below the other.

    ``panels`` have the labels of their vertical axes, which begin at 0. ``label`` is of the horizontal axis, with a
    tick at each value; ``log`` for values that double from one to the next.
    """
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    ticks: set[float] = set()
    for ax, (y_label, curves) in zip(axes, panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            style = styles.get(name, Style.of(number))
            look = {"marker": style.marker, "linestyle": (0, (2, 1)) if style.is_dashed else "-"}
            ax.plot(*_coordinates(points), color=style.colour, ms=4.5, lw=1.4, label=_shortened(name), **look)
            for x, _, *bounds in points:
                for each in bounds:
                    ax.plot([x, x], each, color=style.colour, **_THIN)
                ticks.add(x)
        ax.set(ylabel=y_label, ylim=(0, 1.03 * max(ax.dataLim.y1, 1e-9)), xscale="log" if log else "linear")
    if len(ticks) <= _MOST_TICKS:
        axes[-1].set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        axes[-1].minorticks_off()
    axes[-1].margins(x=0.03)
    axes[-1].set_xlabel(label)
    _add_legend(figure, axes[0])


def draw_scatter(
    figure: Any, points: Mapping[str, tuple[Any, ...]], *, x_label: str, y_label: str, styles: Styles = _NONE
) -> None:
    """A dot for each name, hollow where it is dashed; points have x and y, and then their intervals, or None."""
    ax = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    for number, (name, (x, y, *bounds)) in enumerate(points.items()):
        style = styles.get(name, Style.of(number))
        face = "none" if style.is_dashed else style.colour
        look = {"color": style.colour, "markerfacecolor": face, "ms": 6, "linestyle": "none"}
        ax.plot([x], [y], style.marker, label=_shortened(name), **look)
        for bound, is_x in zip(bounds, (True, False), strict=False):
            if bound is not None:
                ax.plot(*((bound, [y, y]) if is_x else ([x, x], bound)), color=style.colour, **_THIN)
    ax.margins(0.04, 0.06)
    _add_legend(figure, ax)


def _name_bars(ax: Any, names: Sequence[str]) -> None:
    ax.locator_params(axis="x", nbins=6)
    ax.set_yticks(range(len(names)), [_shortened(name) for name in names])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")


def _loss_curves(
    log: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]
) -> list[tuple[list[tuple[int, float]], list[tuple[int, float]]]]:
    """For each head the points (step, loss) of smoothed training, and of held-out text."""
    heads = range(len(log[0]["head_losses"]) if log else 0)
    means = [_smoothed([line["head_losses"][head] for line in log], smoothing(len(log))) for head in heads]
    return [
        (
            [(line["step"], mean) for line, mean in zip(log, of_head, strict=True)],
            [(entry["step"], entry["losses"][head]) for entry in validation],
        )
        for head, of_head in enumerate(means)
    ]


def _add_number(ax: Any, words: str, place: tuple[float, float], coordinates: Any) -> None:
    """To the right of a place, also outside of the axes."""
    how = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    ax.annotate(words, place, (5, 0), xycoords=coordinates, **how)


def _coordinates(points: Sequence[tuple[Any, ...]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _count_on_x(ax: Any) -> None:
    ax.xaxis.get_major_locator().set_params(integer=True)


def _shortened(name: str) -> str:
    """The end of a long name: paths and dates differ there.

    >>> _shortened("hydra"), _shortened("/home/user/heads/hydra-2026-11-23")
    ('hydra', '…/heads/hydra-2026-11-23')
    """
    return name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"


def _add_plain_decoding(ax: Any) -> None:
    """A line at 1, and an axis from 0: a part of it would make small differences look large. Counts are below it."""
    _count_on_x(ax)
    ax.axhline(1.0, color=_FOREGROUND, linewidth=0.8, linestyle=":", label="plain decoding")
    ax.set_ylim(0, 1.05 * max(1.0, ax.dataLim.y1))


def _add_legend(figure: Any, ax: Any) -> None:
    """Below the axes, where it hides no data; none for a single label."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        size = 11 if len(labels) < 5 else 9.5
        fitting = int(_LEGEND_CHARACTERS * 11 / size) // (max(map(len, labels)) + 7)
        style = {"ncols": max(1, min(len(labels), 4, fitting)), "handlelength": 2.2, "columnspacing": 1.5}
        figure.legend(handles, labels, loc="outside lower center", fontsize=size, **style)


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """Moving mean over the last ``window`` values.

    >>> _smoothed([1.0, 2.0, 3.0], 2)
    [1.0, 1.5, 2.5]
    """
    windows = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in windows]
