"""Plots of a load measurement, as figures 3 and 4 of the MLP speculator's paper: latency by users and by throughput."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_rows import LoadRow

_COLOURS = ("#7f858e", "#2f81d6", "#e0672c", "#2b955a", "#b05cc9", "#a87f0e", "#d1466b", "#15919a")
_DOTS_PER_INCH = 130


def draw_users(rows: Sequence[LoadRow], title: str, path: Path) -> None:
    """Latency against concurrent users: the median as a line, and an area from there to the 90th percentile."""
    figure, axes = _figure(title)
    ticks = sorted({row.load.users for row in rows if row.load.users})
    for name, colour, own in _by_name(rows):
        users = [row.load.users for row in own]
        middle, high, _ = zip(*(row.latencies() for row in own), strict=True)
        axes.plot(users, middle, "o-", color=colour, label=name)
        axes.fill_between(users, middle, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(one) for one in ticks])
    axes.set(xlabel="concurrent users", ylabel="seconds for an answer: median to 90th percentile", ylim=(0, None))
    _save(figure, axes, path)


def draw_throughput(rows: Sequence[LoadRow], title: str, path: Path) -> None:
    """Milliseconds per token against throughput, by percentile; the numbers at the points are concurrent users."""
    figure, axes = _figure(title)
    for name, colour, own in _by_name(rows):
        speeds = [sum(row.speeds) / len(row.speeds) for row in own]
        curves = list(zip(*(row.whole_per_token() for row in own), strict=True))
        for values, line in zip(curves, ("o-", "--", ":"), strict=True):
            axes.plot(speeds, values, line, color=colour, label=name if line == "o-" else None)
        for row, speed, height in zip(own, speeds, curves[0], strict=True):
            axes.annotate(str(row.load.users), (speed, height), (0, 5), textcoords="offset points", color=colour)
    axes.plot([], [], "--", color="black", alpha=0.5, label="90th percentile")
    axes.plot([], [], ":", color="black", alpha=0.5, label="99th percentile")
    axes.set(xlabel="tokens per second, all users together", ylabel="milliseconds per token: latency / tokens")
    axes.set(xlim=(0, None), ylim=(0, None))
    _save(figure, axes, path)


def _by_name(rows: Sequence[LoadRow]) -> list[tuple[str, str, list[LoadRow]]]:
    """Name, colour and rows in order of users, of each way that was measured in a closed loop."""
    closed = [row for row in rows if row.is_measured and row.load.users]
    names = list(dict.fromkeys(row.name for row in closed))
    return [
        (name, colour, sorted((row for row in closed if row.name == name), key=lambda row: row.load.users or 0))
        for name, colour in zip(names, _COLOURS, strict=False)
    ]


def _figure(title: str) -> tuple[Any, Any]:
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    plt.close(figure)
