"""The page of a training run, of heads alone or of heads with their model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from draftheads.reports.page import Page, Plot, Point, Style, Table
from draftheads.train.report import verdict_of
from draftheads.utils.counts import counted

_MOST_SMOOTHING = 20  # log lines in a moving mean

Lines = list[dict[str, Any]]


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
        ),
        numbers=[
            (f"{metrics['num_training_texts']:,}", "training texts"),
            (f"{metrics['num_steps']:,}", "steps"),
            (f"{metrics['tokens_per_step_chain']:.2f}", "tokens per step, chain"),
            (f"{metrics['top1'][0]:.0%}", "top-1 accuracy of head 1"),
        ],
        plots=list(_plots(_lines(folder / "log.jsonl"), _lines(folder / "validation.jsonl"))),
        tables=list(_tables(metrics, f"Measured on {held_out}.")),
        settings=[(name, value) for name, value in options.items() if name in changed],
        facts=[
            ("Settings at their defaults", [(name, value) for name, value in options.items() if name not in changed]),
            ("Command and machine", metrics["provenance"].items()),
        ],
    )


def _plots(log: Lines, validation: Lines) -> Iterator[Plot]:
    if not validation:  # nothing was measured during training
        yield _losses(log, validation)
        return

    def curve(value: Callable[[dict[str, Any]], float]) -> list[Point]:
        return [Point(line["step"], value(line)) for line in validation]

    kinds = {kind: curve(lambda line, kind=kind: line[f"tokens_per_step_{kind}"]) for kind in ("tree", "chain")}  # type: ignore[misc]
    caption = "Expected during training, on a part of the held-out texts. Dotted: plain decoding."
    guide = [(validation[0]["step"], 1), (validation[-1]["step"], 1)]
    yield Plot("tokens", "Tokens per step on held-out text", "step", caption, {"tokens per step": kinds}, guide=guide)
    yield _losses(log, validation)
    heads = range(len(validation[0]["top1"]))
    accuracy = {f"head {head + 1}": curve(lambda line, head=head: 100 * line["top1"][head]) for head in heads}  # type: ignore[misc]
    caption = "How often the best draft token of a head is the token that follows."
    top = max(10.0, *(1.05 * point.y for points in accuracy.values() for point in points))  # 1 % would magnify noise
    panels = {"top-1 accuracy, %": accuracy}
    yield Plot("accuracy", "Top-1 accuracy on held-out text", "step", caption, panels, top=top)


def _losses(log: Lines, validation: Lines) -> Plot:
    """Of each head the moving mean of training, and that of held-out text."""
    window = max(1, min(_MOST_SMOOTHING, len(log) // 20))
    curves: dict[str, list[Point]] = {}
    styles = {}
    for number in range(len(log[0]["head_losses"]) if log else 0):
        head, held_out = f"head {number + 1}", f"head {number + 1}, held-out"
        losses = [line["head_losses"][number] for line in log]
        means = [fmean(losses[max(0, end - window) : end]) for end in range(1, len(log) + 1)]
        curves[head] = [Point(line["step"], mean) for line, mean in zip(log, means, strict=True)]
        styles[head] = Style(number)
        if validation:
            curves[held_out] = [Point(entry["step"], entry["losses"][number]) for entry in validation]
            styles[held_out] = Style(number, is_dashed=True)
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


def _tables(metrics: dict[str, Any], where: str) -> Iterator[Table]:
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


def _lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
