"""The acceptance profile of a head for the user's own prompts: the model answers them, and the head drafts along."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.acceptance_profile import KINDS, AcceptanceProfile
from draftheads.decode.cost_profile import CostProfile
from draftheads.decode.engine import Prompt
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.progress import Progress
from draftheads.search.profile import measured_profile
from draftheads.search.replay import RehearsalSettings, encoded, own_answers
from draftheads.search.workbook import Workbook

BATCH_SIZES = (1, 2, 4, 8, 16)  # that speeds are predicted for
_SHOWN_NODES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)  # of trees whose cost is shown


@dataclass(frozen=True)
class Outcome:
    """What was found for a head."""

    profile: AcceptanceProfile
    record: dict[str, Any]  # everything behind it, as ``tune.json`` holds it


def tune(
    target: TargetModel,
    head: DraftHead,
    prompts: Sequence[Prompt],
    settings: RehearsalSettings,
    *,
    folder: Path,
    progress: Progress,
) -> Outcome:
    """Measures how many tokens a step gains with trees of all sizes.

    Args:
        target: the model.
        head: bound to it; its confidence is set to what was fitted.
        prompts: to answer; the first ``num_prompts`` are used.
        settings: of answers and trees.
        folder: the model's answers are kept here, for a search that was stopped and for other heads.
        progress: is told how far the work is.

    Raises:
        DataError: there are hardly any prompts, or hardly any answers.
    """
    ids = encoded(target, prompts, settings)
    identity = {
        "model": [target.model_id, target.weights_print, str(target.dtype)],
        "prompts": ids,
        "answers": [settings.max_new_tokens, settings.temperature],
    }
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    book = Workbook(folder / digest, identity)
    answers = own_answers(target, ids, settings, book=book, progress=progress)
    profile, found = measured_profile(target, head, answers, settings, progress=progress)
    record = {
        "format_version": 2,
        "method": head.config.method,
        "model_id": target.model_id,
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": settings.temperature,
        "num_texts": len(answers),
        **found,
    }
    return Outcome(profile, record)


def predicted(profile: AcceptanceProfile, cost: CostProfile) -> dict[str, Any]:
    """Tokens per second on this machine, for the record: of each kind and size of tree, and of the fastest."""
    rates, batches = [], []
    for rows in BATCH_SIZES:
        plain = 1e3 * rows / (cost.verify(rows, 1) + cost.follow(rows))
        ways = [("none", 1, plain)]
        for kind in KINDS:
            sizes = range(2, len(profile.tokens(kind)) + 1)
            speeds = [
                1e3 * rows * profile.tokens(kind)[n - 1] / (cost.verify(rows, n) + cost.draft(kind, rows, n))
                for n in sizes
            ]
            ways += [(kind, n, speed) for n, speed in zip(sizes, speeds, strict=True)]
            rates.append({"batch_size": rows, "kind": kind, "num_nodes": list(sizes), "tokens_per_second": speeds})
        kind_found, nodes, speed = max(ways, key=lambda way: way[2])
        batches.append(
            {
                "batch_size": rows,
                "kind": kind_found,
                "num_nodes": nodes,
                "tokens_per_second": speed,
                "plain_tokens_per_second": plain,
                "speedup": speed / plain,
            }
        )
    return {"rates": rates, "batches": batches, "cost": list(_costs(profile, cost))}


def _costs(profile: AcceptanceProfile, cost: CostProfile) -> Any:
    """Milliseconds of the parts of steps, by rows, kind and nodes."""
    for rows in BATCH_SIZES:
        yield {
            "batch_size": rows,
            "kind": "none",
            "num_nodes": 1,
            "draft": cost.follow(rows),
            "verify": cost.verify(rows, 1),
        }
        for kind in KINDS:
            for nodes in _SHOWN_NODES[1:]:
                if nodes <= len(profile.tokens(kind)):
                    parts = {"draft": cost.draft(kind, rows, nodes), "verify": cost.verify(rows, nodes)}
                    yield {"batch_size": rows, "kind": kind, "num_nodes": nodes, **parts}
