"""All plots of the pages.

Each ``draw_*`` function draws on an empty matplotlib figure.
"""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from draftheads.reports.page import missing

_FOREGROUND = "#010203"  # stands for the colour of the page's text, which depends on dark mode
COLOURS = ("#2f81d6", "#e0672c", "#2b955a", "#b05cc9", "#a87f0e", "#d1466b", "#15919a", "#7f858e")
_GREY = COLOURS[-1]
_MOST_SMOOTHING = 20  # log lines in a moving mean
_LEGEND_CHARACTERS = 52  # in a line of the legend; the sample and the gap of an entry take about 8
_NAME_CHARACTERS = 18  # at a bar
_ROOM_FOR_NUMBERS = 1.5  # length of the axis over that of the longest bar


def as_svg(draw: Callable[[Any], None], *, name: str, height: float = 3.2) -> str:
    """The SVG of what ``draw`` puts on a figure 5.2 inches wide and ``height`` inches high, for use inside HTML.

    The same plot gives the same text. Letters and axes have the colour of the text around the figure, and the
    background is transparent. Ids in it differ from those of figures with another ``name``.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.rcsetup import cycler  # noqa: PLC0415
    except ImportError as error:
        raise missing(error) from error
    style: Any = {  # a dictionary of names that only matplotlib knows
        "svg.hashsalt": name,
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
        figure = Figure(figsize=(5.2, height), layout="constrained")
        draw(figure)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata, transparent=True)
    svg = file.getvalue()
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :], count=2)  # HTML needs no namespaces
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure, and nothing refers to them
    return svg.replace(_FOREGROUND, "currentColor")


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
    figure: Any, names: Sequence[str], series: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, label: str
) -> None:
    """Horizontal bars with standard errors, and a line at 1, the value of plain decoding.

    ``names`` are of the rows, from top to bottom. ``series`` have a label, and for each row its value and its standard
    error. A single series has its numbers at the bars, and bars below 1 are grey.
    """
    ax = figure.add_subplot(xlabel=label)
    width = 0.8 / len(series)
    for number, (of_series, values, errors) in enumerate(series):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        colours = [_GREY if len(series) == 1 and value < 1 else COLOURS[number] for value in values]
        errors_of_bars = {"ecolor": _FOREGROUND, "error_kw": {"lw": 1}}
        ax.barh(places, values, width, xerr=errors, label=of_series, color=colours, **errors_of_bars)
        if len(series) == 1:
            end = _ROOM_FOR_NUMBERS * max([1, *map(sum, zip(values, errors, strict=True))])
            ax.set_xlim(0, end)
            for place, value, error in zip(places, values, errors, strict=True):
                ax.text(end, place, f"{value:.2f} ± {error:.2f}", ha="right", va="center")
    ax.axvline(1.0, color=_FOREGROUND, lw=0.8)
    ax.locator_params(axis="x", nbins=6)
    ax.set_yticks(range(len(names)), [_shortened(name) for name in names])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    _add_legend(figure, ax)


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


def _coordinates(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _count_on_x(ax: Any) -> None:
    ax.xaxis.get_major_locator().set_params(integer=True)


def _shortened(name: str) -> str:
    """The end of a long name: paths and dates differ there.

    >>> _shortened("hydra"), _shortened("/home/user/heads/hydra-2026-11-23")
    ('hydra', '…/hydra-2026-11-23')
    """
    return name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"


def _add_plain_decoding(ax: Any) -> None:
    """A line at 1, and an axis from 0: a part of it would make small differences look large. Counts are below it."""
    _count_on_x(ax)
    ax.axhline(1.0, color=_FOREGROUND, linewidth=0.8, linestyle=":", label="plain decoding")
    ax.set_ylim(0, 1.05 * max(1.0, ax.dataLim.y1))


def _add_legend(figure: Any, ax: Any) -> None:
    """Above the axes, where it hides no data; none for a single label."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        fitting = _LEGEND_CHARACTERS // (max(map(len, labels)) + 8)
        columns = max(1, min(len(labels), 4, fitting))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, handlelength=1.5)


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """Moving mean over the last ``window`` values.

    >>> _smoothed([1.0, 2.0, 3.0], 2)
    [1.0, 1.5, 2.5]
    """
    windows = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in windows]
