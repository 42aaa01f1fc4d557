"""Records of finished work, as the commands leave them in a folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftheads.bench.compare import FORMAT_VERSION
from draftheads.bench.table import Row
from draftheads.reports.page import Plot, Point

METRICS: dict[str, Any] = {
    "method": "hydra", "model_id": "a <b> & c", "num_steps": 9015,
    "num_training_texts": 7070, "num_held_out_texts": 200, "num_held_out_tokens": 25_000,
    "training_seconds": 61.4, "tokens_per_second": 3210.0,
    "losses": [2.5, 3.25],
    "accuracy_by_rank": [[0.5, 0.6, 0.7], [0.25, 0.3, 0.4]],
    "top1": [0.5, 0.25],
    "top3": [0.7, 0.4],
    "top10": [0.875, 0.5],
    "tokens_per_step_chain": 1.625,
    "tokens_per_step_tree": 1.75,
    "tree": [[0], [1]],
    "options": {"learning_rate": 0.0005, "data": ["chats.jsonl"]},
    "changed_options": ["data"],
    "provenance": {"command": "draftheads train", "torch": "2.13.0"},
}  # fmt: skip
MOVEMENT = {"num_tokens": 4321, "original_perplexity": 3.5, "tuned_perplexity": 3.75, "kl": 0.0125, "agreement": 0.975}
LOG = [{"step": step, "loss": 5.0, "head_losses": [5 - step / 10, 6 - step / 10]} for step in (10, 20, 30)]
VALIDATION = [
    {
        "step": step,
        "losses": [4.0 - step / 10, 5.0],
        "top1": [0.125 + step / 100, 0.0625],
        "tokens_per_step_chain": 1.5,
        "tokens_per_step_tree": 1.75 + step,
    }
    for step in (0, 30)
]


def tuned_batch(size: int, kind: str, num_nodes: int, speed: float, plain: float) -> dict[str, Any]:
    speeds = {"tokens_per_second": speed, "plain_tokens_per_second": plain, "speedup": speed / plain}
    return {"batch_size": size, "kind": kind, "num_nodes": num_nodes, **speeds}


TUNE: dict[str, Any] = {
    "format_version": 2,
    "method": "hydra",
    "model_id": "smollm2-135m",
    "head": "hydra",
    "dtype": "bfloat16",
    "temperature": 0.0,
    "num_texts": 64,
    "num_tokens": 7800,
    "accuracy": [[0.5, 0.125, 0.0625, 0.03125], [0.25, 0.0, 0.0, 0.0]],
    "confidence": {
        "temperatures": [1.3125, 1.5],
        "before": [[0.25, 0.125, 300.0], [0.75, 0.5, 100.0], [0.9, 0.0, 0.0]],
        "after": [[0.25, 0.25, 300.0], [0.75, 0.625, 100.0]],
    },
    "static": {"paths": [[0], [0, 0]], "expected": [1.0, 1.5, 1.75], "error": [0.0, 0.125, 0.25]},
    "dynamic": {"expected": [1.0, 1.5, 1.875], "error": [0.0, 0.125, 0.5]},
    "rates": [{"batch_size": 1, "kind": "dynamic", "num_nodes": [2, 3], "tokens_per_second": [70.0, 80.0]}],
    # the largest first: pages sort them
    "batches": [tuned_batch(8, "none", 1, 1234.5, 1234.5), tuned_batch(1, "dynamic", 3, 80.0, 50.0)],
    "provenance": {"command": "draftheads tune", "torch": "2.13.0"},
}


POINT = {"batch_size": 1, "temperature": 0.0, "prompt_tokens": None}
GROWING = {**POINT, "tree": "growing", "num_nodes": 24, "acceptance": "exact", "epsilon": None}


def bench_row(name: str, *, speedup: float, settings: Mapping[str, Any] = GROWING, **changes: Any) -> Row:
    """A drafter with 12.3 million parameters and 2.5 tokens per step; plain decoding makes 40 tokens per second."""
    milliseconds = {"draft": 3.0, "verify": 27.0, "rest": 1.0, "step": 31.0, "first_token": 50.0}
    times = {f"{part}_milliseconds": value for part, value in milliseconds.items()}
    times |= {"p50_seconds": 1.5, "p90_seconds": 2.0, "p99_seconds": 2.5}
    numbers: dict[str, Any] = {"num_answers": 6, "num_parameters": 12_300_000, "tree": "growing, 24", "numbers": times}
    numbers |= {"tokens_per_step": 2.5, "tokens_per_step_interval": [2.25, 2.75]}
    numbers |= {"acceptance_by_depth": [0.75, 0.5], "steps_by_tokens": [1, 2, 5], "tokens_per_second": 40 * speedup}
    numbers |= {"speedup": speedup, "speedup_interval": [speedup - 0.25, speedup + 0.25], "speedup_error": 0.125}
    return Row(name=name, settings=settings, **{**numbers, **changes})


def plain_row(*, settings: Mapping[str, Any] = POINT, **changes: Any) -> Row:
    """Plain decoding, without numbers of a drafter."""
    numbers: dict[str, Any] = {"tokens_per_step": 1.0, "tokens_per_second": 40.0, "speedup": 1.0, **changes}
    return Row(name="plain", settings=settings, **numbers)


def bench_record(*rows: Row, **changes: Any) -> dict[str, Any]:
    """As in ``bench.json``."""
    return {**BENCH, "rows": json.loads(json.dumps([asdict(row) for row in rows])), **changes}


BENCH: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "model": "tiny",
    "precision": "fp32",
    "threads": 1,
    "num_prompts": 6,
    "prompts": "some/questions.jsonl",
    "settings": {"trees": ["growing"], "num_nodes": [24], "max_new_tokens": 128},
    "drafters": {"medusa": "1234", "hydra": "5678"},
    "drafting": {"medusa": {"prefix": 0.0, "heads": [1.0]}, "hydra": {"prefix": 0.5, "heads": [1.0, 0.25]}},
    "peak_bytes": 1_000_000,
    "disturbed": False,
    "unmeasured": False,
    "problems": [],
    "provenance": {"command": "draftheads bench <tiny>", "device": "cpu"},
}
BENCH = bench_record(plain_row(), bench_row("medusa", speedup=1.5), bench_row("hydra", speedup=1.75))


def write_training_run(folder: Path) -> Path:
    """The folder, with the files of a training run in it."""
    (folder / "metrics.json").write_text(json.dumps(METRICS))
    for name, records in (("log.jsonl", LOG), ("validation.jsonl", VALIDATION)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def curves_of(plot: Plot) -> dict[str, dict[str, list[tuple[Any, ...]]]]:
    """The points of a plot by panel and curve, without bounds that are unknown."""

    def known(point: Point) -> tuple[Any, ...]:
        return tuple(point[: 2 if point.bounds is None else 3 if point.x_bounds is None else 4])

    return {
        panel: {name: [*map(known, points)] for name, points in each.items()} for panel, each in plot.panels.items()
    }
