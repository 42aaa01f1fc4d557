"""The page of a training run, of heads alone or of heads with their model."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from draftheads.reports.page import Page, Table
from draftheads.reports.plots import Figure, draw_acceptance, draw_losses, draw_tokens_per_step, loss_limit, smoothing
from draftheads.train.summary import verdict_of
from draftheads.utils.counts import counted
from draftheads.utils.provenance import machine_in_words

Lines = list[dict[str, Any]]


def training_page(metrics: dict[str, Any], folder: Path) -> Page:
    """The page of a run, from ``metrics.json`` and the other files in its folder."""
    log, validation = _lines(folder / "log.jsonl"), _lines(folder / "validation.jsonl")
    held_out = counted(metrics["num_held_out_texts"], "held-out text")
    figures = [_losses(log, validation)]
    if validation:  # --eval-steps 0 measures nothing during training
        figures = [_tokens_per_step(validation), *figures, _acceptance(validation)]
    options = metrics["options"]
    changed = metrics["changed_options"]
    others = [(name, value) for name, value in options.items() if name not in changed]
    return Page(
        title=f"{metrics['method']} heads for {metrics['model_id']}",
        verdict=verdict_of(metrics),
        where=f"{metrics['method']} for {metrics['model_id']}, {machine_in_words(metrics['provenance'])}",
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
        figures=figures,
        tables=[_heads(metrics, held_out), *_movement(metrics)],
        settings=[(name, value) for name, value in options.items() if name in changed],
        facts=[("Settings at their defaults", others), ("Command and machine", metrics["provenance"].items())],
    )


def _losses(log: Lines, validation: Lines) -> Figure:
    window = smoothing(len(log))
    parts = ["Lower is better."]
    if window > 1:
        parts.append(f"Training: the mean of the last {window} lines of the log.")
    if limit := loss_limit(log, validation):
        parts.append(f"Early losses above {limit:.3g} are cut off.")
    ends = ", ".join(f"head {head} {loss:.2f}" for head, loss in enumerate(log[-1]["head_losses"] if log else [], 1))
    return Figure(
        "Loss",
        partial(draw_losses, log=log, validation=validation),
        " ".join(parts),
        alt=f"Curves of the loss by step. Training loss at the end: {ends or 'none'}.",
        name="losses",
    )


def _acceptance(validation: Lines) -> Figure:
    ends = ", ".join(f"head {head} {share:.1%}" for head, share in enumerate(validation[-1]["top1"], 1))
    return Figure(
        "Top-1 accuracy on held-out text",
        partial(draw_acceptance, validation=validation),
        "How often the best draft token of a head is the token that follows.",
        alt=f"Curves by step. At the end: {ends}.",
        name="accuracy",
    )


def _tokens_per_step(validation: Lines) -> Figure:
    last = validation[-1]
    return Figure(
        "Tokens per step on held-out text",
        partial(draw_tokens_per_step, validation=validation),
        "Expected during training, on a part of the held-out texts.",
        alt=(
            f"Curves by step. At the end: tree {last['tokens_per_step_tree']:.2f}, "
            f"chain {last['tokens_per_step_chain']:.2f}."
        ),
        name="tokens",
    )


def _heads(metrics: dict[str, Any], held_out: str) -> Table:
    shares = zip(*(metrics[name] for name in ("top1", "top3", "top10")), strict=True)
    rows = [
        [number, f"{loss:.3f}", *(f"{share:.1%}" for share in row)]
        for number, (loss, row) in enumerate(zip(metrics["losses"], shares, strict=True), 1)
    ]
    note = f"Measured on {held_out}. Top-3: the true token is among the head's 3 best draft tokens."
    return Table("Accuracy of the heads", ["head", "loss", "top-1", "top-3", "top-10"], rows, note)


def _movement(metrics: dict[str, Any]) -> list[Table]:
    """How far joint training moved the model; nothing where the model stayed as it was."""
    if "movement" not in metrics:
        return []
    moved = metrics["movement"]
    rows = [
        ["perplexity", f"{moved['original_perplexity']:.3f}", f"{moved['tuned_perplexity']:.3f}"],
        ["KL(original || tuned) per token", "", f"{moved['kl']:.4f}"],
        ["same greedy token", "", f"{moved['agreement']:.1%}"],
    ]
    note = f"Measured on {counted(moved['num_tokens'], 'held-out token')}."
    return [Table("Change of the model", ["", "original", "tuned"], rows, note)]


def _lines(path: Path) -> Lines:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
