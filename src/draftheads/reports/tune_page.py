"""The page of what ``draftheads tune`` measured. Knows the names in ``tune.json``; knows nothing of models."""

from functools import partial
from itertools import accumulate
from typing import Any

from draftheads.reports.page import Figure, Page, Table
from draftheads.reports.plots import as_svg, draw_calibration, draw_tree_sizes

_FORMAT_VERSION = 2
_SETTINGS = ("method", "model_id", "head", "dtype", "temperature", "num_texts", "num_tokens", "format_version")
_KINDS = {"static": "static tree", "dynamic": "growing tree", "none": "plain decoding"}
_STAGES = {"before": "before calibration", "after": "after calibration"}

Record = dict[str, Any]


def tune_page(record: Record) -> Page:
    """The page of a record.

    Raises:
        ValueError: the record has another format version.
    """
    if record["format_version"] != _FORMAT_VERSION:
        raise ValueError(f"its format version is {record['format_version']}; this release reads {_FORMAT_VERSION}")
    temperatures = ", ".join(f"{value:.2f}" for value in record["confidence"]["temperatures"])
    settings = [*((name, record[name]) for name in _SETTINGS), ("confidence temperatures", temperatures)]
    return Page(
        title=f"Trees for {record['head']} ({record['method']}) on {record['model_id']}",
        answer=_answer(record),
        note=(
            "Each level of a tree holds the draft tokens of one head, and the model verifies all nodes in one pass. "
            "A static tree has the same shape in every step. A growing tree is chosen anew in every step, where the "
            "heads are most confident."
        ),
        tables=[_speeds(record), _accuracy(record)],
        figures=[_tree_sizes(record), _calibration(record)],
        facts=[("Settings", settings), ("Provenance", record["provenance"].items())],
    )


def _winners(record: Record) -> list[Record]:
    """The fastest way for each batch size, smallest batch first."""
    return sorted(record["batches"], key=lambda winner: int(winner["batch_size"]))


def _answer(record: Record) -> str:
    first = _winners(record)[0]
    requests = "one request" if first["batch_size"] == 1 else f"{first['batch_size']} requests together"
    if first["kind"] == "none":
        return f"No tree is predicted to be faster than plain decoding on this machine, for {requests}."
    return (
        f"On this machine, a {_KINDS[first['kind']]} of {first['num_nodes']} nodes is predicted to be fastest for "
        f"{requests}: {first['speedup']:.2f} times as fast as plain decoding."
    )


def _speeds(record: Record) -> Table:
    rows = [
        [
            winner["batch_size"],
            _KINDS[winner["kind"]].removesuffix(" tree").removesuffix(" decoding"),
            winner["num_nodes"],
            f"{winner['tokens_per_second']:,.1f}",
            f"{winner['plain_tokens_per_second']:,.1f}",
            f"{winner['speedup']:.2f}×",
        ]
        for winner in _winners(record)
    ]
    columns = ["batch size", "tree", "nodes", "tokens/s", "plain tokens/s", "speed-up"]
    note = "Predicted from the tokens per step below and the measured time of a step on this machine."
    return Table("Predicted speed", columns, rows, note)


def _accuracy(record: Record) -> Table:
    """How often the true token is among the best draft tokens of each head."""
    shown = [rank for rank in (1, 3, 10) if rank <= len(record["accuracy"][0])]
    sums = [list(accumulate(shares)) for shares in record["accuracy"]]
    rows = [[head, *(f"{row[rank - 1]:.1%}" for rank in shown)] for head, row in enumerate(sums, 1)]
    note = f"Measured on {record['num_tokens']:,} tokens of {record['num_texts']:,} answers."
    return Table("Accuracy of the heads", ["head", *(f"top-{rank}" for rank in shown)], rows, note)


def _tree_sizes(record: Record) -> Figure:
    trees = [
        (_KINDS[kind], record[kind]["expected"], record[kind]["error"])
        for kind in ("static", "dynamic")
        if record[kind] is not None
    ]
    caption = (
        "Expected tokens per step by the number of nodes in the tree, with bands of one standard error. Each further "
        "node gains less than the one before, and verifying it takes time."
    )
    return Figure(as_svg(partial(draw_tree_sizes, trees=trees)), caption)


def _calibration(record: Record) -> Figure:
    stages = []
    gaps = []
    for name, label in _STAGES.items():
        bins = [tuple(one) for one in record["confidence"][name] if one[2] > 0]
        total = sum(count for *_, count in bins)
        gap = sum(abs(confidence - accepted) * count for confidence, accepted, count in bins) / max(total, 1)
        stages.append((label, bins))
        gaps.append(f"{100 * gap:.1f} points {label}")
    caption = (
        "How often draft tokens are accepted, by the head's confidence. Larger dots stand for more draft tokens. On "
        f"the dashed line, confidence equals the accepted share. The mean difference is {' and '.join(gaps)}."
    )
    return Figure(as_svg(partial(draw_calibration, stages=stages)), caption)
