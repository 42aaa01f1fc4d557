"""The pictures of a search for trees: each function draws one on a matplotlib figure, from the record of ``tune``."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from draftheads.reports.plots import finish
from draftheads.tree import Path, Tree

Record = dict[str, Any]

MOST_DRAWN = 40  # nodes beyond which the picture of a tree cannot be read
_COLOURS = {"static": "#0b6bcb", "dynamic": "#d9480f", "marginal": "#2b8a3e", "dense": "#868e96", "none": "#1c2530"}
_PARTS = {"draft": "#d9480f", "verify": "#0b6bcb"}
_STYLES = {"static": "o-", "dynamic": "s--", "none": "D"}
_COLUMNS = 3  # of small multiples
_TICKS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of logarithmic scales of shares


def batch_sizes(record: Record) -> list[int]:
    """Those that a winner was sought for, smallest first."""
    return sorted(winner["batch_size"] for winner in record["batches"])


def winner_of(record: Record, batch_size: int) -> dict[str, Any]:
    """What was found to be fastest at that batch size."""
    return next(winner for winner in record["batches"] if winner["batch_size"] == batch_size)


def drawn_tree(record: Record) -> tuple[Tree, dict[Path, float]]:
    """The static tree of the first winner's size, as far as it can be read, and how often each node is right."""
    static = record["static"]
    winner = winner_of(record, batch_sizes(record)[0])
    num_nodes = len(static["shares"]) if winner["kind"] == "none" else winner["num_nodes"]
    paths = [(), *(tuple(path) for path in static["paths"])]
    shares = dict(list(zip(paths, static["shares"], strict=True))[: min(num_nodes, MOST_DRAWN)])
    return Tree.from_paths(shares), shares


def draw_accuracy(figure: Any, record: Record) -> None:
    """Lines over ranks, one a head; a guess that was never right has no place on the logarithmic scale."""
    ax = figure.add_subplot()
    for head, shares in enumerate(record["accuracy"], 1):
        percents = [100 * share if share > 0 else math.nan for share in shares]
        ax.plot(range(len(shares)), percents, "o-", markersize=4, linewidth=1.4, label=f"head {head}")
    ax.set_yscale("log")
    ax.set_yticks([100 * tick for tick in _TICKS], [f"{100 * tick:g} %" for tick in _TICKS])
    ax.minorticks_off()
    ax.set_ylim(*_decades(share for shares in record["accuracy"] for share in shares))
    _whole_ticks(ax)
    finish(ax, "rank of the guess (0: the head's best)", "is the true token")


def draw_tree(figure: Any, record: Record) -> None:
    """The root at the top, a level a head; every node has its rank in it and its path as the element's id."""
    from matplotlib import colormaps  # noqa: PLC0415 - an extra
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    ax = figure.add_subplot()
    tree, shares = drawn_tree(record)
    places = _places(tree)
    lowest = min(share for share in (0.1, *shares.values()) if share > 0)  # 0 has no place on the scale
    norm = LogNorm(lowest, 1.0, clip=True)
    colours = colormaps["YlGnBu"].resampled(24)
    for path, (x, y) in places.items():
        if path:
            parent = places[path[:-1]]
            ax.plot([parent[0], x], [parent[1], y], color="#b8c2cc", linewidth=1, zorder=1)
    points = ax.scatter(
        [x for x, _ in places.values()],
        [y for _, y in places.values()],
        c=[max(shares[path], lowest) for path in places],
        s=_node_area(_num_leaves(tree)),
        cmap=colours,
        norm=norm,
        edgecolors="#55606e",
        linewidths=0.6,
        zorder=2,
        gid="nodes",
    )
    for path, (x, y) in list(places.items())[1:]:
        is_dark = norm(shares[path]) > 0.55
        ax.text(
            x,
            y,
            str(path[-1]),
            color="white" if is_dark else "#1c2530",
            fontsize=8,
            ha="center",
            va="center_baseline",
            gid="-".join(["node", *map(str, path)]),
        )
    ax.set_yticks([-depth for depth in range(tree.max_depth + 1)], _levels(tree))
    ax.set_xticks([])
    ax.set_ylim(-tree.max_depth - 0.5, 0.5)
    ax.set_xlim(-0.7, _num_leaves(tree) - 0.3)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)
    bar = figure.colorbar(points, ax=ax, pad=0.02)
    ticks = [tick for tick in _TICKS if tick >= lowest]
    bar.set_ticks(ticks, labels=[f"{100 * tick:g} %" for tick in ticks])
    bar.minorticks_off()
    bar.set_label("right, with all above it")


def draw_expected(figure: Any, record: Record) -> None:
    """Lines with bands of one standard error; dense trees as points."""
    ax = figure.add_subplot()
    for kind, label in (
        ("static", "static, from joint paths"),
        ("marginal", "static, heads taken as independent"),
        ("dynamic", "dynamic"),
    ):
        if record[kind] is None:
            continue
        expected, error = record[kind]["expected"], record[kind]["error"]
        sizes = range(1, len(expected) + 1)
        pairs = list(zip(expected, error, strict=True))
        ax.fill_between(
            sizes, [e - s for e, s in pairs], [e + s for e, s in pairs], color=_COLOURS[kind], alpha=0.15, linewidth=0
        )
        ax.plot(sizes, expected, _line(len(sizes)), markersize=4, color=_COLOURS[kind], linewidth=1.5, label=label)
    if record["dense"]:
        ax.plot(
            [tree["num_nodes"] for tree in record["dense"]],
            [tree["expected"] for tree in record["dense"]],
            "o",
            markersize=4,
            color=_COLOURS["dense"],
            label="dense",
        )
    _whole_ticks(ax)
    finish(ax, "nodes in the tree", "expected tokens per step")


def draw_speed(figure: Any, record: Record) -> None:
    """Tokens a second against the tree's size at the smallest batch size."""
    batch_size = batch_sizes(record)[0]
    ax = figure.add_subplot()
    _draw_rates(ax, record, batch_size, unit=1.0)
    finish(ax, "nodes in the tree", f"tokens a second at batch size {batch_size}")
    _legend_below(figure, [ax])


def draw_speedups(figure: Any, record: Record) -> None:
    """The same at the other batch sizes, side by side, as multiples of plain decoding's speed."""
    others = batch_sizes(record)[1:]
    columns = math.ceil(len(others) / speedup_rows(len(others)))
    axes = figure.subplots(speedup_rows(len(others)), columns, squeeze=False, sharey=True).flatten()
    for ax, batch_size in zip(axes, others, strict=False):
        _draw_rates(ax, record, batch_size, unit=winner_of(record, batch_size)["plain_tokens_per_second"])
        ax.set_title(f"batch size {batch_size}", fontsize=10)
        finish(ax, "nodes in the tree", "times plain speed" if ax in axes[::columns] else "")
    for ax in axes[len(others) :]:
        ax.set_visible(False)
    _legend_below(figure, axes[: len(others)])


def speedup_rows(num_batch_sizes: int) -> int:
    """Rows of small multiples in :func:`draw_speedups`."""
    return math.ceil(num_batch_sizes / _COLUMNS)


def draw_cost(figure: Any, record: Record) -> None:
    """Parts of a step at the smallest batch size; beside them, where there are more, whole steps of each."""
    sizes = sorted({cost["batch_size"] for cost in record["cost"]})
    axes = figure.subplots(1, 2 if len(sizes) > 1 else 1, squeeze=False)[0]
    for part, colour in _PARTS.items():
        _draw_costs(axes[0], record, sizes[0], (part,), colour=colour, label=part)
    axes[0].set_title(f"parts of a step, batch size {sizes[0]}", fontsize=10)
    for ax in axes[1:]:
        from matplotlib import colormaps  # noqa: PLC0415 - an extra

        for number, size in enumerate(sizes):
            shade = colormaps["viridis"](0.9 * number / (len(sizes) - 1))
            _draw_costs(ax, record, size, tuple(_PARTS), colour=shade, label=f"batch size {size}")
        ax.set_title("whole steps", fontsize=10)
    for ax in axes:
        ax.set_ylim(bottom=0)
        _whole_ticks(ax)
        finish(ax, "nodes in the tree", "milliseconds")


def draw_confidence(figure: Any, record: Record) -> None:
    """How sure the heads were against how often they were right; a dot's area is its share of the guesses."""
    axes = figure.subplots(1, 2, sharey=True)
    for ax, name in zip(axes, ("before", "after"), strict=True):
        bins = [(sure, right, count) for sure, right, count in record["confidence"][name] if count > 0]
        total = sum(count for *_, count in bins)
        ax.plot([0, 100], [0, 100], color=_COLOURS["dense"], linewidth=1, linestyle="--")
        ax.plot(
            [100 * sure for sure, *_ in bins],
            [100 * right for _, right, _ in bins],
            color=_COLOURS["static"],
            linewidth=1,
        )
        ax.scatter(
            [100 * sure for sure, *_ in bins],
            [100 * right for _, right, _ in bins],
            s=[15 + 250 * count / total for *_, count in bins],
            color=_COLOURS["static"],
            alpha=0.7,
            linewidths=0,
        )
        gap = sum(abs(sure - right) * count for sure, right, count in bins) / max(total, 1)
        ax.set_title(f"{name} scaling: {100 * gap:.1f} points off on average", fontsize=10)
        ax.set_xlim(-3, 103)
        ax.set_ylim(-3, 103)
        ax.set_aspect("equal")
        finish(ax, "the head's confidence, %", "right, %" if name == "before" else "")


def _draw_rates(ax: Any, record: Record, batch_size: int, *, unit: float) -> None:
    winner = winner_of(record, batch_size)
    plain = winner["plain_tokens_per_second"] / unit
    ax.axhline(plain, color=_COLOURS["none"], linewidth=1, linestyle="--", label="plain decoding")
    for rates in _at(record["rates"], batch_size):
        kind = rates["kind"]
        is_line = kind != "dense" and len(rates["num_nodes"]) > 1
        ax.plot(
            rates["num_nodes"],
            [speed / unit for speed in rates["tokens_per_second"]],
            "-" if is_line else "o",
            markersize=3.5,
            linewidth=1.5,
            color=_COLOURS[kind],
            alpha=1 if is_line else 0.6,
            label=kind,
        )
    ax.plot(
        [winner["num_nodes"]],
        [winner["tokens_per_second"] / unit],
        "*",
        markersize=15,
        markerfacecolor="#ffd43b",
        markeredgecolor=_COLOURS[winner["kind"]],
        linestyle="",
        zorder=5,
        label="fastest",
    )
    ax.set_ylim(bottom=0)
    _whole_ticks(ax)


def _legend_below(figure: Any, axes: Iterable[Any]) -> None:
    """One legend for all axes in place of theirs, where it hides nothing."""
    handles = {}
    for ax in axes:
        ax.get_legend().remove()
        handles.update({label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)})
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)


def _draw_costs(ax: Any, record: Record, batch_size: int, parts: Sequence[str], *, colour: Any, label: str) -> None:
    """One line a kind of tree; only the first is in the legend, for the colour says what it is."""
    by_kind: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for cost in _at(record["cost"], batch_size):
        by_kind[cost["kind"]].append((cost["num_nodes"], sum(cost[part] for part in parts)))
    for number, (kind, points) in enumerate(sorted(by_kind.items(), key=lambda item: list(_STYLES).index(item[0]))):
        ax.plot(
            *zip(*sorted(points), strict=True),
            _STYLES[kind],
            markersize=4,
            linewidth=1.4,
            color=colour,
            clip_on=False,
            label="" if number else label,
        )


def _at(rows: Iterable[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["batch_size"] == batch_size]


def _line(num_points: int) -> str:
    return "-" if num_points > 1 else "o"


def _decades(shares: Iterable[float]) -> tuple[float, float]:
    """Limits in percent, a little below the least share that is not 0.

    >>> _decades([0.5, 0.25, 0.0])
    (20.0, 120.0)
    """
    return 80 * min((share for share in shares if share > 0), default=0.01), 120.0


def _whole_ticks(ax: Any) -> None:
    """Nodes and ranks are whole numbers, however few there are."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an extra

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _levels(tree: Tree) -> list[str]:
    return ["root", *(f"head {depth}" for depth in range(1, tree.max_depth + 1))]


def _num_leaves(tree: Tree) -> int:
    return tree.num_nodes - len({path[:-1] for path in tree.paths if path})


def _node_area(num_leaves: int) -> float:
    """In points squared: as large as a row of ``num_leaves`` allows."""
    return min(16.0, 430 / num_leaves) ** 2


def _places(tree: Tree) -> dict[Path, tuple[float, float]]:
    """Where each node is drawn: leaves side by side, the best guess leftmost, parents above their children's middle.

    >>> _places(Tree.from_paths([(0,), (1,), (0, 0)]))
    {(): (0.5, 0), (0,): (0.0, -1), (1,): (1.0, -1), (0, 0): (0.0, -2)}
    """
    x_of: dict[Path, float] = {}
    children: dict[Path, list[Path]] = defaultdict(list)
    for path in tree.paths[1:]:
        children[path[:-1]].append(path)
    leaves = iter(range(tree.num_nodes))
    for path in _depth_last(children):
        below = [x_of[child] for child in children.get(path, ())]
        x_of[path] = (below[0] + below[-1]) / 2 if below else float(next(leaves))
    return {path: (x_of[path], -len(path)) for path in tree.paths}


def _depth_last(children: dict[Path, list[Path]], path: Path = ()) -> list[Path]:
    """Every node after all that is below it."""
    return [*(node for child in children.get(path, ()) for node in _depth_last(children, child)), path]
