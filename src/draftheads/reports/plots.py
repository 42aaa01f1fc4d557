"""All plots of the pages.

Knows matplotlib; knows nothing of files and captions. Each ``draw_*`` function draws on an empty matplotlib figure.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

from draftheads.reports.page import missing

_FOREGROUND = "#010203"  # stands for the colour of the page's text, which depends on dark mode
_COLOURS = ("#2f81d6", "#e0672c", "#2f9e5c", "#b05cc9", "#c29a1c", "#d1466b", "#1fa3a8", "#8a8f98")
_SMOOTHING = 20  # log lines in a moving mean
_LEGEND_CHARACTERS = 66  # in a line of the legend; the sample and the gap of an entry take about 8


def as_svg(draw: Callable[[Any], None], *, height: float = 3.4) -> str:
    """The SVG of what ``draw`` puts on a figure 6 inches wide and ``height`` inches high.

    The same plot gives the same text. Letters and axes have the colour of the text around the figure.

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
        "svg.hashsalt": "draftheads",
        "svg.fonttype": "none",
        "font.size": 11,
        "axes.prop_cycle": cycler("color", _COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color"), _FOREGROUND)
    style |= dict.fromkeys(("xtick.color", "ytick.color"), _FOREGROUND)
    with mpl.rc_context(style):
        figure = Figure(figsize=(6, height), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_FOREGROUND, "currentColor")


def draw_losses(figure: Any, log: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> None:
    """Loss of each head over steps: a moving mean of training as a line, held-out text as dots."""
    ax = figure.add_subplot(xlabel="step", ylabel="loss")
    for head in range(len(log[0]["head_losses"]) if log else 0):
        means = _smoothed([line["head_losses"][head] for line in log])
        (line,) = ax.plot([line["step"] for line in log], means, linewidth=1.4, label=f"head {head + 1}")
        losses = [entry["losses"][head] for entry in validation]
        ax.plot([entry["step"] for entry in validation], losses, "o", markersize=4, color=line.get_color())
    _add_legend(figure, ax)


def draw_acceptance(figure: Any, validation: Sequence[dict[str, Any]]) -> None:
    """Top-1 accuracy of each head on held-out text over steps, in percent."""
    ax = figure.add_subplot(xlabel="step", ylabel="top-1 accuracy, %")
    for head in range(len(validation[0]["top1"]) if validation else 0):
        shares = [100 * line["top1"][head] for line in validation]
        ax.plot([line["step"] for line in validation], shares, "o-", markersize=4, label=f"head {head + 1}")
    ax.set_ylim(bottom=0)
    _add_legend(figure, ax)


def draw_tokens_per_step(figure: Any, validation: Sequence[dict[str, Any]]) -> None:
    """Expected tokens per step on held-out text over steps, with a chain and with a tree."""
    ax = figure.add_subplot(xlabel="step", ylabel="tokens per step")
    for name, label in (("tokens_per_step_tree", "tree"), ("tokens_per_step_chain", "chain")):
        ax.plot([line["step"] for line in validation], [line[name] for line in validation], "o-", ms=4, label=label)
    _add_legend(figure, ax)


def draw_tree_sizes(figure: Any, trees: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> None:
    """Tokens per step over the number of nodes, with bands of one standard error.

    Args:
        figure: to draw on.
        trees: label, tokens per step with 1, 2, … nodes, and their standard errors.
    """
    ax = figure.add_subplot(xlabel="nodes in the tree", ylabel="tokens per step")
    for label, tokens, errors in trees:
        sizes = range(1, len(tokens) + 1)
        bounds = [(value - error, value + error) for value, error in zip(tokens, errors, strict=True)]
        (line,) = ax.plot(sizes, tokens, "-" if len(tokens) > 1 else "o", label=label)
        ax.fill_between(sizes, *zip(*bounds, strict=True), color=line.get_color(), alpha=0.2, linewidth=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    _add_legend(figure, ax)


def draw_calibration(figure: Any, stages: Sequence[tuple[str, Sequence[tuple[float, float, float]]]]) -> None:
    """How often draft tokens are accepted over how confident the head is, one panel per stage.

    Args:
        figure: to draw on.
        stages: label, and for each bin its mean confidence, the accepted share, and its number of draft tokens.
    """
    axes = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    for ax, (label, bins) in zip(axes, stages, strict=True):
        total = sum(count for *_, count in bins)
        ax.plot([0, 100], [0, 100], color=_COLOURS[-1], linewidth=1, linestyle="--")
        confidence, accepted = ([100 * one[part] for one in bins] for part in (0, 1))
        ax.plot(confidence, accepted, linewidth=1)
        ax.scatter(confidence, accepted, s=[15 + 200 * count / total for *_, count in bins], alpha=0.7, linewidths=0)
        ax.set(title=label, xlabel="confidence, %", xlim=(-3, 103), ylim=(-3, 103), aspect="equal")
        ax.title.set_fontsize(11)
    axes[0].set_ylabel("accepted, %")


def draw_bars(
    figure: Any, names: Sequence[str], series: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, label: str
) -> None:
    """Horizontal bars with standard errors, and a line at 1, the value of plain decoding.

    Args:
        figure: to draw on.
        names: of the rows, from top to bottom.
        series: label, and for each row its value and its standard error.
        label: of the horizontal axis.
    """
    ax = figure.add_subplot(xlabel=label)
    width = 0.8 / len(series)
    for number, (of_series, values, errors) in enumerate(series):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        errors_of_bars = {"ecolor": _FOREGROUND, "error_kw": {"lw": 1}}
        ax.barh(places, values, width, xerr=errors, label=of_series, **errors_of_bars)
    ax.axvline(1.0, color=_FOREGROUND, lw=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    _add_legend(figure, ax)


def _add_legend(figure: Any, ax: Any) -> None:
    """Above the axes, where it hides no data; none for a single label."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        fitting = _LEGEND_CHARACTERS // (max(map(len, labels)) + 8)
        columns = max(1, min(len(labels), 4, fitting))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, handlelength=1.5)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Moving mean over the last lines.

    >>> _smoothed([1.0, 2.0, 3.0])
    [1.0, 1.5, 2.0]
    """
    windows = (values[max(0, end - _SMOOTHING) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
