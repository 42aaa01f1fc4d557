"""The page of what ``draftheads tune`` measured."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

from draftheads.bench.verdict import speed_sentence
from draftheads.reports.page import Page, Table, unbroken_speed
from draftheads.reports.plots import Figure, draw_calibration, draw_speedups, draw_tree_sizes
from draftheads.utils.counts import counted
from draftheads.utils.provenance import machine_in_words

_FORMAT_VERSION = 2
_SETTINGS = ("method", "model_id", "head", "dtype", "temperature", "num_texts", "num_tokens", "format_version")
_KINDS = {"static": "static tree", "dynamic": "growing tree", "none": "plain decoding"}
_STAGES = {"before": "before calibration", "after": "after calibration"}
_MIN_COUNT = 30  # draft tokens; with fewer, the error of a share can be more than 9 points

Record = dict[str, Any]


def tune_page(record: Record) -> Page:
    """The page of a record."""
    if record["format_version"] != _FORMAT_VERSION:
        raise ValueError(f"its format version is {record['format_version']}; this release reads {_FORMAT_VERSION}")
    winners = sorted(record["batches"], key=lambda winner: int(winner["batch_size"]))  # the fastest ways
    temperatures = ", ".join(f"{value:.2f}" for value in record["confidence"]["temperatures"])
    settings = [*((name, record[name]) for name in _SETTINGS), ("confidence temperatures", temperatures)]
    verdict, *others = _sentences(record, winners)
    return Page(
        title=f"Trees for {record['head']} on {record['model_id']}",
        verdict=verdict,
        where=f"{record['head']} on {record['model_id']}, {machine_in_words(record['provenance'])}",
        note=" ".join(others),
        numbers=_numbers(record, winners[0]),
        figures=[_speedups(record, winners), _tree_sizes(record), _calibration(record)],
        tables=[_speeds(winners), _accuracy(record)],
        facts=[("Model, data and settings", settings), ("Command and machine", record["provenance"].items())],
    )


def _sentences(record: Record, winners: list[Record]) -> Iterator[str]:
    """The result, the most important part first."""
    if measured := record.get("defaults"):  # `tune_head` does not time them
        yield unbroken_speed(speed_sentence(record["head"], measured["speedup"], measured["error"]))
    yield _verdict(winners[0])
    plain = [winner["batch_size"] for winner in winners if winner["kind"] == "none"]
    if plain and winners[0]["kind"] != "none":
        yield f"From {plain[0]} requests at a time, plain decoding is predicted to be fastest."
    yield (
        f"Predicted means: the tokens per step of the head on {counted(record['num_texts'], 'answer')}, divided by the "
        "time of a step on this machine; prompts, copies and other work of a step are not in it. `draftheads bench` "
        "compares heads."
    )


def _verdict(first: Record) -> str:
    number = first["batch_size"]
    requests = "one request" if number == 1 else f"{number} requests at a time"
    if first["kind"] == "none":
        return f"With {requests}, plain decoding is fastest on this machine: no tree of this head is predicted to help."
    trees = f"{_KINDS[first['kind']]}s of {counted(first['num_nodes'], 'node')}"
    return (
        f"With {requests}, {trees} are fastest on this machine: predicted "
        f"{first['speedup']:.2f}\N{NO-BREAK SPACE}× plain decoding."
    )


def _numbers(record: Record, first: Record) -> list[tuple[str, str]]:
    numbers = []
    if measured := record.get("defaults"):
        numbers.append((f"{measured['speedup']:.2f}", "× plain with the defaults, measured"))
    if first["kind"] != "none":
        tokens = record[first["kind"]]["expected"][first["num_nodes"] - 1]
        numbers.append((f"{tokens:.2f}", f"tokens per step, {counted(first['num_nodes'], 'node')}"))
        numbers.append((f"{first['tokens_per_second']:,.1f}", "tokens per second, predicted"))
    return [*numbers, (f"{record['accuracy'][0][0]:.0%}", "top-1 accuracy of head 1")]


def _speeds(winners: list[Record]) -> Table:
    rows = [
        [
            winner["batch_size"],
            _KINDS[winner["kind"]].removesuffix(" tree").removesuffix(" decoding"),
            winner["num_nodes"],
            f"{winner['speedup']:.2f}",
            f"{winner['tokens_per_second']:,.1f}",
            f"{winner['plain_tokens_per_second']:,.1f}",
        ]
        for winner in winners
    ]
    columns = ["requests", "fastest tree", "nodes", "× plain", "tokens/s", "plain tokens/s"]
    note = "A static tree is the same in every step. A growing tree has more nodes where the head is more confident."
    return Table("Predicted speed", columns, rows, note)


def _accuracy(record: Record) -> Table:
    """How often the true token is among the best draft tokens of each head."""
    shown = [rank for rank in (1, 3, 10) if rank <= len(record["accuracy"][0])]
    sums = [list(accumulate(shares)) for shares in record["accuracy"]]
    rows = [[head, *(f"{row[rank - 1]:.1%}" for rank in shown)] for head, row in enumerate(sums, 1)]
    note = (
        f"Measured on {counted(record['num_tokens'], 'token')}. Top-3: the true token is among the 3 best draft tokens."
    )
    return Table("Accuracy of the heads", ["head", *(f"top-{rank}" for rank in shown)], rows, note)


def _speedups(record: Record, winners: list[Record]) -> Figure:
    curves, chosen = [], []
    for winner in winners:
        best = {1: 1.0}  # by the number of nodes
        for rate in record["rates"]:
            if rate["batch_size"] == winner["batch_size"]:
                for nodes, speed in zip(rate["num_nodes"], rate["tokens_per_second"], strict=True):
                    best[nodes] = max(best.get(nodes, 0.0), speed / winner["plain_tokens_per_second"])
        number = winner["batch_size"]
        curves.append((counted(number, "request"), [best[nodes] for nodes in sorted(best)]))
        chosen.append((winner["num_nodes"], winner["speedup"]))
    fastest = ", ".join(
        f"{label} {speed:.2f} with {counted(n, 'node')}" for (label, _), (n, speed) in zip(curves, chosen, strict=True)
    )
    return Figure(
        "Predicted speed by tree size",
        partial(draw_speedups, curves=curves, chosen=chosen),
        "More nodes gain tokens, but verifying them takes time. Dots: the fastest tree.",
        alt=f"Curves of the speed over plain decoding. Fastest: {fastest}.",
        name="speedups",
    )


def _tree_sizes(record: Record) -> Figure:
    trees = [(_KINDS[kind], record[kind]["expected"], record[kind]["error"]) for kind in ("static", "dynamic")]
    largest = ", ".join(f"{label} {tokens[-1]:.2f} with {counted(len(tokens), 'node')}" for label, tokens, _ in trees)
    return Figure(
        "Tokens per step by tree size",
        partial(draw_tree_sizes, trees=trees),
        "Measured on the model's answers. Bands: one standard error.",
        alt=f"Curves of the tokens per step. Largest trees: {largest}.",
        name="sizes",
    )


def _calibration(record: Record) -> Figure:
    stages, gaps, num_small = [], [], 0
    for name, label in _STAGES.items():
        bins = [tuple(part) for part in record["confidence"][name] if part[2] > 0]
        total = sum(count for *_, count in bins)
        gap = sum(abs(confidence - accepted) * count for confidence, accepted, count in bins) / max(total, 1)
        stages.append((label, bins))
        gaps.append(f"{100 * gap:.1f} points {label}")
        num_small += sum(count < _MIN_COUNT for *_, count in bins)
    small = f" Grey bars: fewer than {_MIN_COUNT} draft tokens, too few for a dot." if num_small else ""
    return Figure(
        "Confidence against acceptance",
        partial(draw_calibration, stages=stages, min_count=_MIN_COUNT),
        f"On the dashed line, the head's confidence is right. Mean difference: {', '.join(gaps)}.{small}",
        alt=f"Dots of the accepted share by confidence. Mean difference: {', '.join(gaps)}.",
        name="calibration",
        height=3.8,
    )
