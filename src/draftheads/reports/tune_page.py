"""The page of what ``draftheads tune`` measured."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from draftheads.bench.verdict import speed_sentence
from draftheads.reports.page import Page, Plot, Point, Table
from draftheads.utils.counts import counted

_SETTINGS = ("method", "model_id", "head", "dtype", "temperature", "num_texts", "num_tokens", "format_version")
_KINDS = {"static": "static tree", "dynamic": "growing tree", "none": "plain decoding"}
_MIN_COUNT = 30  # draft tokens; with fewer, the error of a share can be more than 9 points
_NODES, _DOTTED = "nodes in the tree", "Dotted: plain decoding."

Record = dict[str, Any]


def tune_page(record: Record) -> Page:
    """The page of a record."""
    winners = sorted(record["batches"], key=lambda winner: int(winner["batch_size"]))  # the fastest ways
    first, measured = winners[0], record.get("defaults")  # `tune_head` does not time the defaults
    plain = [winner["batch_size"] for winner in winners if winner["kind"] == "none"]
    sentences = [_verdict(first)]
    numbers = []
    if measured:
        sentences.insert(0, speed_sentence(record["head"], measured["speedup"], measured["error"]))
        numbers.append((f"{measured['speedup']:.2f}", "× plain with the defaults, measured"))
    if first["kind"] != "none":
        if plain:
            sentences.append(f"From {plain[0]} requests at a time, plain decoding is predicted to be fastest.")
        tokens = record[first["kind"]]["expected"][first["num_nodes"] - 1]
        numbers.append((f"{tokens:.2f}", f"tokens per step, {counted(first['num_nodes'], 'node')}"))
        numbers.append((f"{first['tokens_per_second']:,.1f}", "tokens per second, predicted"))
    sentences.append(
        f"Predicted means: the tokens per step of the head on {counted(record['num_texts'], 'answer')}, divided by the "
        "time of a step on this machine; prompts, copies and other work of a step are not in it. `draftheads bench` "
        "compares heads."
    )
    temperatures = ", ".join(f"{value:.2f}" for value in record["confidence"]["temperatures"])
    settings = [*((name, record[name]) for name in _SETTINGS), ("confidence temperatures", temperatures)]
    return Page(
        title=f"Trees for {record['head']} on {record['model_id']}",
        verdict=sentences[0],
        note=" ".join(sentences[1:]),
        numbers=[*numbers, (f"{record['accuracy'][0][0]:.0%}", "top-1 accuracy of head 1")],
        plots=list(_plots(record, winners)),
        tables=list(_tables(record, winners)),
        facts=[("Model, data and settings", settings), ("Command and machine", record["provenance"].items())],
    )


def _verdict(first: Record) -> str:
    number = first["batch_size"]
    requests = "one request" if number == 1 else f"{number} requests at a time"
    if first["kind"] == "none":
        return f"With {requests}, plain decoding is fastest on this machine: no tree of this head is predicted to help."
    trees = f"{_KINDS[first['kind']]}s of {counted(first['num_nodes'], 'node')}"
    return f"With {requests}, {trees} are fastest on this machine: predicted {first['speedup']:.2f} × plain decoding."


def _plots(record: Record, winners: list[Record]) -> Iterator[Plot]:
    speeds: dict[str, list[Point]] = {}
    fastest = []
    for winner in winners:
        best = {1: 1.0}  # by the number of nodes
        for rate in record["rates"]:
            if rate["batch_size"] == winner["batch_size"]:
                for nodes, speed in zip(rate["num_nodes"], rate["tokens_per_second"], strict=True):
                    best[nodes] = max(best.get(nodes, 0.0), speed / winner["plain_tokens_per_second"])
        name = counted(winner["batch_size"], "request")
        speeds[name] = [Point(*each) for each in sorted(best.items())]
        fastest.append(f"{name} {winner['speedup']:.2f} with {counted(winner['num_nodes'], 'node')}")
    caption = f"More nodes gain tokens, but verifying them takes time. {_DOTTED} Fastest: {', '.join(fastest)}."
    guide = [(1, 1), (max(points[-1].x for points in speeds.values()), 1)]
    panels = {"× plain decoding": speeds}
    yield Plot("speedups", "Predicted speed by tree size", _NODES, caption, panels, guide=guide)
    trees = {}
    for kind in ("static", "dynamic"):
        tokens = enumerate(zip(record[kind]["expected"], record[kind]["error"], strict=True), 1)
        trees[_KINDS[kind]] = [Point(nodes, value, (value - error, value + error)) for nodes, (value, error) in tokens]
    caption = f"Measured on the model's answers. Thin lines: one standard error. {_DOTTED}"
    guide = [(1, 1), (max(map(len, trees.values())), 1)]
    yield Plot("sizes", "Tokens per step by tree size", _NODES, caption, {"tokens per step": trees}, guide=guide)
    shares, counts, gaps = {}, {}, []
    for label, bins in ((f"{name} calibration", record["confidence"][name]) for name in ("before", "after")):
        counts[label] = [Point(100 * confidence, int(count)) for confidence, _, count in bins if count]
        shares[label] = [_share(*values) for values in bins if values[2] >= _MIN_COUNT]
        gap = sum(abs(confidence - accepted) * count for confidence, accepted, count in bins)
        gaps.append(f"{100 * gap / max(1, sum(count for *_, count in bins)):.1f} points {label}")
    caption = "On the dotted line, the head's confidence is right. Thin lines: one standard error. Mean difference: "
    caption += f"{', '.join(gaps)}."
    if any(len(counts[label]) > len(shares[label]) for label in counts):
        caption += f" Shares of fewer than {_MIN_COUNT} draft tokens have no dot."
    panels = {"accepted, %": shares, "draft tokens": counts}
    title, guide = "Confidence against acceptance", [(0, 0), (100, 100)]
    yield Plot("calibration", title, "confidence, %", caption, panels, guide=guide)


def _share(confidence: float, accepted: float, count: float) -> Point:
    """In percent: the confidence, the accepted share, and one standard error around it."""
    error = (accepted * (1 - accepted) / count) ** 0.5
    return Point(100 * confidence, 100 * accepted, (100 * (accepted - error), 100 * (accepted + error)))


def _tables(record: Record, winners: list[Record]) -> Iterator[Table]:
    rows = [
        [
            winner["batch_size"],
            _KINDS[winner["kind"]].partition(" ")[0],
            winner["num_nodes"],
            f"{winner['speedup']:.2f}",
            f"{winner['tokens_per_second']:,.1f}",
            f"{winner['plain_tokens_per_second']:,.1f}",
        ]
        for winner in winners
    ]
    columns = ["requests", "fastest tree", "nodes", "× plain", "tokens/s", "plain tokens/s"]
    note = "A static tree is the same in every step. A growing tree has more nodes where the head is more confident."
    yield Table("Predicted speed", columns, rows, note)
    shown = [rank for rank in (1, 3, 10) if rank <= len(record["accuracy"][0])]
    sums = [list(accumulate(shares)) for shares in record["accuracy"]]
    rows = [[head, *(f"{row[rank - 1]:.1%}" for rank in shown)] for head, row in enumerate(sums, 1)]
    note = (
        f"Measured on {counted(record['num_tokens'], 'token')}. Top-3: the true token is among the 3 best draft tokens."
    )
    yield Table("Accuracy of the heads", ["head", *(f"top-{rank}" for rank in shown)], rows, note)
