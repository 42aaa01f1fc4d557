"""Pages of records in a folder (training runs, what ``tune`` measured), of a training batch, and their writing."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, starmap
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from draftheads.bench.table import Row, speed_sentence
from draftheads.bench.tree_sizes import COLUMNS, fastest_tree
from draftheads.data.batches import padded_length
from draftheads.data.texts import EncodedChat
from draftheads.decode.text import TextStream
from draftheads.models.chat_template import special_ids
from draftheads.reports.bench_page import bench_page
from draftheads.reports.page import Page, Pieces, Plot, Point, Style, Table, render
from draftheads.train.report import verdict_of
from draftheads.utils.counts import counted, shares
from draftheads.utils.files import write_atomic
from draftheads.utils.provenance import as_json_values

_MOST_SMOOTHING = 20  # log lines in a moving mean
_SETTINGS = ("method", "model_id", "head", "dtype", "temperature", "num_texts", "num_tokens", "format_version")
_KINDS = {"static": "static tree", "dynamic": "growing tree", "none": "plain decoding"}
_MIN_COUNT = 30  # draft tokens; with fewer, the error of a share can be more than 9 points
_SHOWN = (1, 2, 4, 8, 10, 16, 32, 64)  # nodes, in a table
_NODES, _DOTTED = "nodes in the tree", "Dotted: plain decoding."

Record = dict[str, Any]


# --- a training run, of heads alone or of heads with their model ---


def training_page(metrics: dict[str, Any], folder: Path) -> Page:
    """The page of a run, from ``metrics.json`` and the other files in its folder."""
    options, changed = metrics["options"], metrics["changed_options"]
    held_out = counted(metrics["num_held_out_texts"], "held-out text")
    return Page(
        title=f"{metrics['method']} heads for {metrics['model_id']}",
        verdict=verdict_of(metrics),
        note=(
            f"Measured on {held_out} with a tree of {counted(len(metrics['tree']) + 1, 'node')}. The last run took "
            f"{metrics.get('reading_seconds', 0):,.0f} seconds for hidden states and "
            f"{metrics['training_seconds']:,.0f} for training, which read "
            f"{metrics['tokens_per_second']:,.0f} tokens per second."
            + (f" Scripts of the training text: {shares(scripts)}." if (scripts := metrics.get("scripts")) else "")
            + "".join(f" {line}." for line in metrics.get("left_out", ()))
        ),
        numbers=[
            (f"{metrics['num_training_texts']:,}", "training texts"),
            (f"{metrics['num_steps']:,}", "steps"),
            (f"{metrics['tokens_per_step_chain']:.2f}", "tokens per step, chain"),
            (f"{metrics['top1'][0]:.0%}", "top-1 accuracy of head 1"),
        ],
        plots=list(_training_plots(_lines(folder / "log.jsonl"), _lines(folder / "validation.jsonl"))),
        tables=list(_training_tables(metrics, f"Measured on {held_out}.")),
        settings=[(name, value) for name, value in options.items() if name in changed],
        facts=[
            ("Settings at their defaults", [(name, value) for name, value in options.items() if name not in changed]),
            ("Command and machine", metrics["provenance"].items()),
        ],
    )


def _training_plots(log: list[Record], validation: list[Record]) -> Iterator[Plot]:
    if not validation:  # nothing was measured during training
        yield _losses(log, validation)
        return
    kinds = {
        kind: [Point(line["step"], line[f"tokens_per_step_{kind}"]) for line in validation]
        for kind in ("tree", "chain")
    }
    caption = "Expected during training, on a part of the held-out texts. Dotted: plain decoding."
    guide = [(validation[0]["step"], 1), (validation[-1]["step"], 1)]
    yield Plot("tokens", "Tokens per step on held-out text", "step", caption, {"tokens per step": kinds}, guide=guide)
    yield _losses(log, validation)
    shares = zip(*(line["top1"] for line in validation), strict=True)  # of each head, line by line
    accuracy = {
        f"head {number}": [Point(line["step"], 100 * share) for line, share in zip(validation, own, strict=True)]
        for number, own in enumerate(shares, 1)
    }
    caption = "How often the best draft token of a head is the token that follows."
    top = max(10.0, *(1.05 * point.y for points in accuracy.values() for point in points))  # 1 % would magnify noise
    panels = {"top-1 accuracy, %": accuracy}
    yield Plot("accuracy", "Top-1 accuracy on held-out text", "step", caption, panels, top=top)


def _losses(log: list[Record], validation: list[Record]) -> Plot:
    """Of each head the moving mean of training, and that of held-out text."""
    window = max(1, min(_MOST_SMOOTHING, len(log) // 20))
    curves: dict[str, list[Point]] = {}
    styles: dict[str, Style] = {}
    for number, losses in enumerate(zip(*(line["head_losses"] for line in log), strict=True)):
        head, held_out = f"head {number + 1}", f"head {number + 1}, held-out"
        means = [fmean(losses[max(0, end - window) : end]) for end in range(1, len(log) + 1)]
        curves[head] = [Point(line["step"], mean) for line, mean in zip(log, means, strict=True)]
        styles |= {head: Style(number), held_out: Style(number, is_dashed=True)}
        if validation:
            curves[held_out] = [Point(entry["step"], entry["losses"][number]) for entry in validation]
    points = [point for curve in curves.values() for point in curve]
    caption = "Lower is better."
    if window > 1:
        caption += f" Training: the mean of the last {window} lines of the log."
    # an early spike is cut off, so that it does not flatten the rest
    last = max((point.x for point in points), default=0)
    limit = 2 * max((point.y for point in points if point.x > last / 10), default=0.0)
    top = limit if limit and max(point.y for point in points) > limit else None
    if top:
        caption += f" Early losses above {limit:.3g} are cut off."
    return Plot("losses", "Loss", "step", caption, {"loss": curves}, styles=styles, top=top)


def _training_tables(metrics: dict[str, Any], where: str) -> Iterator[Table]:
    shares = zip(*(metrics[name] for name in ("top1", "top3", "top10")), strict=True)
    rows = [
        [number, f"{loss:.3f}", *(f"{share:.1%}" for share in row)]
        for number, (loss, row) in enumerate(zip(metrics["losses"], shares, strict=True), 1)
    ]
    note = f"{where} Top-3: the true token is among the head's 3 best draft tokens."
    yield Table("Accuracy of the heads", ["head", "loss", "top-1", "top-3", "top-10"], rows, note)
    if moved := metrics.get("movement"):  # how far joint training moved the model
        rows = [
            ["perplexity", f"{moved['original_perplexity']:.3f}", f"{moved['tuned_perplexity']:.3f}"],
            ["KL(original || tuned) per token", "", f"{moved['kl']:.4f}"],
            ["same greedy token", "", f"{moved['agreement']:.1%}"],
        ]
        note = f"Measured on {counted(moved['num_tokens'], 'held-out token')}."
        yield Table("Change of the model", ["", "original", "tuned"], rows, note)


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# --- what was tuned ---


def tune_page(record: Record) -> Page:
    """The page of what ``draftheads tune`` measured."""
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
    timed = {int(size): [Row(**row) for row in rows] for size, rows in record.get("measured", {}).items()}
    sentences[-1:-1] = starmap(_measured, timed.items())
    temperatures = ", ".join(f"{value:.2f}" for value in record["confidence"]["temperatures"])
    settings = [*((name, record[name]) for name in _SETTINGS), ("confidence temperatures", temperatures)]
    return Page(
        title=f"Trees for {record['head']} on {record['model_id']}",
        verdict=sentences[0],
        note=" ".join(sentences[1:]),
        numbers=[*numbers, (f"{record['accuracy'][0][0]:.0%}", "top-1 accuracy of head 1")],
        plots=list(_tune_plots(record, winners)),
        tables=[*_tune_tables(record, winners), *starmap(_measured_table, timed.items())],
        facts=[("Model, data and settings", settings), ("Command and machine", record["provenance"].items())],
    )


def _verdict(first: Record) -> str:
    requests = _requests(first["batch_size"])
    if first["kind"] == "none":
        return f"With {requests}, plain decoding is fastest on this machine: no tree of this head is predicted to help."
    trees = f"{_KINDS[first['kind']]}s of {counted(first['num_nodes'], 'node')}"
    return f"With {requests}, {trees} are fastest on this machine: predicted {first['speedup']:.2f} × plain decoding."


def _requests(number: int) -> str:
    return "one request" if number == 1 else f"{number} requests at a time"


def _measured(size: int, rows: Sequence[Row]) -> str:
    """Which of the timed trees is fastest, and which one was predicted to be."""
    (nodes, best), (predicted, _) = fastest_tree(rows), fastest_tree(rows, "predicted_tokens_per_second")
    result = f"the static tree of {nodes} nodes is fastest: {best.decode_speedup:.2f} × plain decoding"
    result = "no static tree is faster than plain decoding" if nodes == 1 else result
    different, every = (sum(getattr(row, name) for row in rows[1:]) for name in ("num_different", "num_answers"))
    texts = f"{every - different} of {every} answers have the text of plain decoding"
    return f"Measured with {_requests(size)}, {result}. {counted(predicted, 'node')} had been predicted; {texts}."


def _measured_table(size: int, rows: Sequence[Row]) -> Table:
    # with intervals of all numbers the table would not fit a terminal
    cells = [[each.cell(row, intervals=each.name == "decode_tokens_per_second") for each in COLUMNS] for row in rows]
    note = "Without copies, and without the reading of prompts. In brackets: 95 % bootstrap intervals over the prompts."
    return Table(f"Static trees with {_requests(size)}", [column.heading for column in COLUMNS], cells, note)


def _tune_plots(record: Record, winners: list[Record]) -> Iterator[Plot]:
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


def _tune_tables(record: Record, winners: list[Record]) -> Iterator[Table]:
    rows = []
    for winner in winners:
        kind = _KINDS[winner["kind"]].partition(" ")[0]
        speeds = (f"{winner[name]:,.1f}" for name in ("tokens_per_second", "plain_tokens_per_second"))
        rows.append([winner["batch_size"], kind, winner["num_nodes"], f"{winner['speedup']:.2f}", *speeds])
    columns = ["requests", "fastest tree", "nodes", "× plain", "tokens/s", "plain tokens/s"]
    note = "A static tree is the same in every step. A growing tree has more nodes where the head is more confident."
    yield Table("Predicted speed", columns, rows, note)
    kinds = [record[kind]["expected"] for kind in ("static", "dynamic")]
    sizes = [size for size in _SHOWN if size <= max(map(len, kinds))]
    rows = [[size, *(f"{own[size - 1]:.2f}" if size <= len(own) else "" for own in kinds)] for size in sizes]
    yield Table("Tokens per step", ["nodes", "static tree", "growing tree"], rows)
    shown = [rank for rank in (1, 3, 10) if rank <= len(record["accuracy"][0])]
    sums = [list(accumulate(shares)) for shares in record["accuracy"]]
    rows = [[head, *(f"{row[rank - 1]:.1%}" for rank in shown)] for head, row in enumerate(sums, 1)]
    note = (
        f"Measured on {counted(record['num_tokens'], 'token')}. Top-3: the true token is among the 3 best draft tokens."
    )
    yield Table("Accuracy of the heads", ["head", *(f"top-{rank}" for rank in shown)], rows, note)


# --- a training batch: its texts in pieces, and counts ---

VISIBLE = str.maketrans(  # control characters, which a terminal would execute
    {
        **{chr(code): chr(0x2400 + code) for code in range(32)},
        "\x7f": "␡",
        **{chr(code): f"\\x{code:x}" for code in range(0x80, 0xA0)},
        "\n": "↵\n",
        "\t": "⇥   ",
    }
)
_LEGEND = [
    *[("learned", "learned"), ("  ", ""), ("special token", "special"), ("  ", "")],
    *[("learned special token", "learned special"), ("  only read  ↵ line break", "")],
]
Texts = Sequence[EncodedChat]


def pieces_of(tokenizer: Any, text: EncodedChat) -> Pieces:
    """A text in the smallest pieces that can be shown. Their classes are learned, special, or both.

    A character whose bytes are spread over several tokens is one piece. Only a character that ``max_length`` cut
    through is shown as U+FFFD.
    """
    special, stream = special_ids(tokenizer), TextStream(tokenizer, skip_special_tokens=False)
    shown: list[tuple[str, str]] = []
    tokens = zip(text.token_ids, text.loss_mask, strict=True)
    for (is_learned, is_special), run in groupby(tokens, lambda token: (token[1], token[0] in special)):
        waiting: list[int] = []  # tokens without a whole character
        found = []
        for token_id, _ in run:
            waiting.append(token_id)
            if (words := stream.push([token_id])) or is_special:
                found.append(_names(tokenizer, waiting) if is_special else words)
                waiting = []
        if waiting:  # a token that decodes to nothing is shown by its name
            found.append(stream.flush() or _names(tokenizer, waiting))
        classes = ("learned " * is_learned + "special" * is_special).rstrip()
        shown += [(words.translate(VISIBLE), classes) for words in found]
    return shown


def _names(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(token_ids))


def batch_page(
    tokenizer: Any,
    texts: Texts,
    batches: Sequence[Sequence[int]],
    numbers: Mapping[str, int],
    *,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Page:
    """The page of a batch.

    Args:
        tokenizer: that made the texts.
        texts: all texts with at least one learned token.
        batches: of the run; each holds indices of texts.
        numbers: of texts by what became of them.
        settings: the command's: ``model``, ``data`` (files), ``index`` (of the batch), ``max_length`` and others.
        provenance: as of :func:`draftheads.utils.provenance.provenance`.
    """
    index, cut = settings["index"], settings["max_length"]
    groups = [[texts[i] for i in indices] for indices in batches]
    shown, num_texts = groups[index], counted(len(groups[index]), "text")
    counts: dict[str, Callable[[Texts, Sequence[Texts]], str]] = {  # of some texts, and of batches
        "texts": lambda some, _: f"{len(some):,}",
        "tokens": lambda some, _: f"{_num_tokens(some):,}",
        "learned tokens": lambda some, _: f"{_num_learned(some):,} ({_num_learned(some) / _num_tokens(some):.1%})",
        "tokens per text": lambda some, _: _lengths(some),
        f"texts cut off at {cut:,} tokens": lambda some, _: f"{sum(text.is_cut for text in some):,}",
        "padding of whole texts": lambda _, of: f"{padding_share(of, lambda text: len(text.token_ids)):.1%}",
        "padding without prompts": lambda _, of: f"{padding_share(of, num_read):.1%}",
    }
    rows = [(name, count(shown, [shown]), count(texts, groups)) for name, count in counts.items()]
    rows += [(name, "", f"{number:,}") for name, number in {"batches": len(batches), **numbers}.items()]
    return Page(
        title=f"Training batch {index} of {', '.join(str(path) for path in settings['data'])}",
        verdict=(
            f"The heads learn {_num_learned(shown):,} of the {counted(_num_tokens(shown), 'token')} in this batch "
            f"({_num_learned(shown) / _num_tokens(shown):.1%})."
        ),
        note=(
            f"As {settings['model']} reads it: {num_texts}. Learned tokens must be the assistant's answers and the "
            "token that ends each; if not, the chat template is wrong."
        ),
        texts=[
            ("Legend", _LEGEND),
            *((_title(i, texts[i], cut), pieces_of(tokenizer, texts[i])) for i in batches[index]),
        ],
        tables=[Table("Counts", ("", f"batch {index}", "all the data"), rows)],
        facts=[
            ("Model, data and settings", as_json_values(settings).items()),
            ("Command and machine", provenance.items()),
        ],
    )


def _title(number: int, text: EncodedChat, cut: int) -> str:
    end = f", cut off at {cut}" if text.is_cut else ""
    return f"text {number}: {counted(len(text.token_ids), 'token')}, {sum(text.loss_mask)} learned{end}"


def padding_share(batches: Sequence[Texts], length: Callable[[EncodedChat], int]) -> float:
    """Share of padding tokens in batches, whose texts have such lengths."""
    lengths = [list(map(length, batch)) for batch in batches]
    return 1 - sum(map(sum, lengths)) / sum(len(each) * padded_length(max(each)) for each in lengths)


def num_read(text: EncodedChat) -> int:
    """Number of tokens of a text that heads read: all from the position that predicts the first learned token.

    >>> num_read(EncodedChat((7, 8, 9, 10), (False, False, True, True)))
    3
    """
    return len(text.token_ids) - max(0, text.loss_mask.index(True) - 1)


def _num_tokens(texts: Texts) -> int:
    return sum(len(text.token_ids) for text in texts)


def _num_learned(texts: Texts) -> int:
    return sum(sum(text.loss_mask) for text in texts)


def _lengths(texts: Texts) -> str:
    lengths = [len(text.token_ids) for text in texts]
    return f"{min(lengths):,} to {max(lengths):,}, mean {fmean(lengths):,.0f}"


# --- writing ---

_PAGES = {  # the record of finished work, its page, and what makes the page
    "training": ("metrics.json", "report.html", training_page),
    "tune": ("tune.json", "tune.html", lambda record, _: tune_page(record)),
    "bench": ("bench.json", "bench.html", lambda record, _: bench_page(record)),
}


Kind = Literal["training", "tune", "bench"]


def page_of(folder: Path, kind: Kind) -> Page:
    """The page of a training run, a tune result or a comparison."""
    record, _, make = _PAGES[kind]
    return make(json.loads((folder / record).read_text(encoding="utf-8")), folder)


def write_page(folder: Path, kind: Kind) -> Path:
    """Writes it, and returns its path.

    Raises:
        MissingDependency: the extra ``report`` is not installed.
    """
    path = folder / _PAGES[kind][1]
    write_atomic(path, render(page_of(folder, kind)).encode())
    return path
