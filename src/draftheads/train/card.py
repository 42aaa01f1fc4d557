"""The model card of a trained head: what it is, what it was made from and how good it is, as Markdown."""

import json
from collections.abc import Sequence
from typing import Any

from draftheads.train.report import Report


def model_card(report: Report, options: dict[str, Any], provenance: dict[str, Any]) -> str:
    """The text of a head's ``README.md``.

    Args:
        report: what the training run found.
        options: its settings, as JSON values.
        provenance: command, versions, machine.
    """
    rows = zip(
        range(1, len(report.losses) + 1), report.losses, report.top1, report.top3, report.top10, strict=True
    )
    return "\n".join(
        [
            f"# {report.method} head for {report.model_id}",
            "",
            f"Drafts the next {len(report.losses)} tokens of {report.model_id}, which checks them: made with draftheads.",
            "",
            f"Trained on {report.num_training_texts} texts in {report.num_steps} steps "
            f"({report.training_seconds:.0f} s); measured on {report.num_held_out_texts} texts kept apart:",
            "",
            *_markdown_table(
                ("head", "loss", "top-1", "top-3", "top-10"),
                [
                    (str(head), f"{loss:.3f}", f"{a:.1%}", f"{b:.1%}", f"{c:.1%}")
                    for head, loss, a, b, c in rows
                ],
            ),
            "",
            f"Expected tokens per step: {report.tokens_per_step_chain:.2f} on a chain, "
            f"{report.tokens_per_step_tree:.2f} on the tree of {len(report.tree) + 1} nodes saved here.",
            "",
            "## How it was made",
            "",
            *_json_block(options),
            "",
            *_json_block(provenance),
        ]
    )


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _json_block(value: dict[str, Any]) -> list[str]:
    return ["```json", json.dumps(value, indent=2), "```"]
