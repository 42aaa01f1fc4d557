"""The model card of a trained head: what it is, what it was made from and how good it is, as Markdown."""

import json
from collections.abc import Mapping
from typing import Any

from draftheads.train.report import Report


def model_card(report: Report, options: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """The text of a head's ``README.md``.

    Args:
        report: what the training run found.
        options: its settings, as JSON values.
        provenance: command, versions, machine.
    """
    rows = zip(report.losses, report.top1, report.top3, report.top10, strict=True)
    table = "\n".join(
        f"| {i + 1} | {loss:.3f} | {top1:.1%} | {top3:.1%} | {top10:.1%} |"
        for i, (loss, top1, top3, top10) in enumerate(rows)
    )
    return f"""# {report.method} head for {report.model_id}

Guesses {len(report.losses)} tokens beyond the next one, for `draftheads` to check with {report.model_id}
itself.

Trained on {report.num_training_texts:,} texts in {report.num_steps:,} steps, {report.training_seconds:,.0f}
seconds. On {report.num_held_out_texts:,} texts kept apart, how often the true token is among a head's best
guesses:

| head | loss | top-1 | top-3 | top-10 |
| --- | --- | --- | --- | --- |
{table}

Expected tokens per step: {report.tokens_per_step_chain:.2f} with a chain of best guesses,
{report.tokens_per_step_tree:.2f} with the best tree of {len(report.tree) + 1} nodes.

## How it was made

```json
{json.dumps({"options": dict(options), "provenance": dict(provenance)}, indent=2)}
```
"""
