"""Static trees of a head by size, decoded and timed in turn; the fastest is kept (Hydra, section 4, figures 7 to 9)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from draftheads.bench.contenders import Contender
from draftheads.bench.rounds import Bench
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Column, Row
from draftheads.bench.timing import spread
from draftheads.decode.engine import Engine
from draftheads.decode.planner import rates
from draftheads.decode.step_costs import Floats, machine_of
from draftheads.drafters.mixed import Mixed
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import identity_digest

_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # nodes of the trees that are timed before the largest of the profile
_FEWEST, _PER_ROW = 16, 12  # prompts, so three groups of four prompts for each row
_NEW_TOKENS = 64  # of an answer
# of the table of a batch size; speeds are without the reading of prompts
COLUMNS = (
    Column("num_nodes", "nodes", ".0f"),
    Column("predicted_tokens_per_step", "tokens/step, predicted"),
    Column("tokens_per_step", "tokens/step, measured"),
    Column("predicted_tokens_per_second", "tokens/s, predicted", ".1f"),
    Column("decode_tokens_per_second", "tokens/s, measured", ".1f"),
    Column("predicted_speedup", "× plain, predicted"),
    Column("decode_speedup", "× plain, measured"),
)


def time_trees(
    engine: Engine, batch_sizes: Sequence[int], prompts: Sequence[list[int]], *, folder: Path, progress: Progress
) -> tuple[dict[int, list[Row]], list[dict[str, Any]]]:
    """The head decodes with nested trees of up to 11 sizes, without copies, in turn with plain decoding.

    Args:
        engine: the model with the head, its profile and costs, as :func:`draftheads.search.tune.tune_head` returns it.
        batch_sizes: prompts that are decoded together; each is measured, and given once.
        prompts: token ids. 16 of them are answered, or 12 for each prompt of the largest batch; spread over all.
        folder: finished answers are saved there until all are, so that a run that was stopped continues.
        progress: receives what is done.

    Returns:
        By batch size a row for each tree, that of one node (plain decoding) first; its numbers have the predicted
        ones, too. Then what was not measured, and why; nothing is, where no draft token was accepted.
    """
    planner, target = engine.planner, engine.model
    assert planner is not None
    profile, drafter = planner.profile, engine.drafter.drafter if isinstance(engine.drafter, Mixed) else engine.drafter
    if len(profile.static_tokens) == 1:
        problem = "no tree is timed: no draft token of the head was accepted, so it has no static tree"
        return {}, [{"question": None, "turn": 0, "problem": f"{problem}; train it on text like these prompts"}]
    sizes = (*(size for size in _SIZES if size < len(profile.static_tokens)), len(profile.static_tokens))
    settings = BenchSettings(("static",), sizes, tuple(batch_sizes), (profile.temperature,), max_new_tokens=_NEW_TOKENS)
    model = [target.model_id, target.weights_fingerprint, machine_of(target)]
    identity = identity_digest([*model, drafter.name, profile.to_json()])
    head, asked = Contender("head", drafter, identity), spread(prompts, max(_FEWEST, _PER_ROW * max(batch_sizes)))
    bench = Bench(target, [head], asked, [], settings, folder=folder / identity, progress=progress)
    bench.trees.profile = profile
    way = max((way for way in planner.ways if way.kind == "static"), key=lambda way: way.depth)
    batches = {}
    for size, rows in groupby(bench.run(), key=lambda row: int(row.settings["batch_size"])):
        (by_nodes,) = rates([way], size, *planner.costs_now(size, follows=False))
        batches[size] = [_with_predicted(row, profile.static_tokens, 1e3 * by_nodes) for row in rows]
    for path in bench.saved:
        path.unlink(missing_ok=True)
    return batches, bench.problems


def _with_predicted(row: Row, tokens: Sequence[float], speeds: Floats) -> Row:
    """The row of a tree, with what is predicted; ``tokens`` and ``speeds`` are those of 1, 2, … nodes."""
    nodes = row.settings.get("num_nodes") or 1
    speed = float(speeds[nodes - 1])
    added = {"num_nodes": nodes, "predicted_tokens_per_second": speed, "predicted_speedup": speed / float(speeds[0])}
    return replace(row, predicted_tokens_per_step=tokens[nodes - 1], numbers={**row.numbers, **added})


def fastest_tree(rows: Sequence[Row], number: str = "decode_tokens_per_second") -> tuple[int, Row]:
    """Of one batch size the tree with the most tokens per second: its nodes and its row."""
    best = max(rows, key=lambda row: float(row.number(number)))
    return int(best.numbers["num_nodes"]), best
