"""The page of a training run, of heads alone or of heads with their model.

Knows the names in ``metrics.json``, ``log.jsonl`` and ``validation.jsonl``; knows nothing of models.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from draftheads.reports.page import Figure, Page, Table
from draftheads.reports.plots import as_svg, draw_acceptance, draw_losses, draw_tokens_per_step


def training_page(metrics: dict[str, Any], folder: Path) -> Page:
    """The page of a run, from ``metrics.json`` and the other files in its folder."""
    log, validation = _lines(folder / "log.jsonl"), _lines(folder / "validation.jsonl")
    count = metrics["num_held_out_texts"]
    held_out = f"{count:,} held-out text" + "s" * (count != 1)
    dots = " and loss on held-out text (dots)" if validation else ""
    figures = {
        f"Training loss of each head (lines, moving mean){dots}. Lower is better.": as_svg(
            partial(draw_losses, log=log, validation=validation)
        )
    }
    if validation:  # --eval-steps 0 measures nothing during training
        figures |= {
            "How often the best draft token of each head is the token that follows, on held-out text.": as_svg(
                partial(draw_acceptance, validation=validation)
            ),
            "Expected tokens per step on held-out text. Plain decoding has 1.": as_svg(
                partial(draw_tokens_per_step, validation=validation)
            ),
        }
    return Page(
        title=f"{metrics['method']} heads for {metrics['model_id']}",
        answer=(
            f"A tree of {len(metrics['tree']) + 1} nodes gives {metrics['tokens_per_step_tree']:.2f} tokens per step "
            f"on {held_out}; plain decoding gives 1."
        ),
        note=(
            f"A chain gives {metrics['tokens_per_step_chain']:.2f} tokens per step. The heads were trained on "
            f"{metrics['num_training_texts']:,} texts in {metrics['num_steps']:,} steps. The last run took "
            f"{metrics['training_seconds']:,.0f} seconds at {metrics['tokens_per_second']:,.0f} tokens per second."
        ),
        tables=[_heads(metrics, held_out), *_movement(metrics)],
        figures=[Figure(svg, caption) for caption, svg in figures.items()],
        facts=[("Settings", metrics["options"].items()), ("Provenance", metrics["provenance"].items())],
    )


def _heads(metrics: dict[str, Any], held_out: str) -> Table:
    shares = zip(*(metrics[name] for name in ("top1", "top3", "top10")), strict=True)
    rows = [
        [number, f"{loss:.3f}", *(f"{share:.1%}" for share in row)]
        for number, (loss, row) in enumerate(zip(metrics["losses"], shares, strict=True), 1)
    ]
    note = f"Measured on {held_out}. Top-3: how often the true token is among the head's 3 best draft tokens."
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
    note = f"Measured on {moved['num_tokens']:,} held-out tokens."
    return [Table("Change of the model", ["", "original", "tuned"], rows, note)]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
