"""What a pass over a tree costs a hybrid model on a CPU, how much of it its recurrences take, and plain transformers.

The model has Qwen3.5-0.8B's sizes and random weights, is made on disk and deleted. Three of four layers are recurrent.
A tree is computed level by level, so a chain is the slowest tree of its size.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from harness import machine
from random_model import CONFIGS, write_model
from rich.console import Console
from rich.table import Table

from draftheads.cli.show import quiet_transformers
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.runners import mixers, runner_for
from draftheads.speculation.accept import AcceptResult, accept_greedy
from draftheads.speculation.draft import Draft
from draftheads.speculation.tree import Tree


@dataclass(frozen=True)
class Options:
    """What is measured."""

    size: Literal["qwen3.5-0.8b"] = "qwen3.5-0.8b"
    """Sizes of the model."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the model computes in."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Nodes of the tree."""
    length: int = 200
    """Tokens of the text before."""
    rounds: int = 3
    """How often everything is measured, in turn."""
    repeats: int = 5
    """Passes of each kind in a round; their median counts."""
    json: Path | None = None
    """Write everything there."""


def tree_of(nodes: int) -> Tree:
    """Two children of each node, root included: few levels, as trees of draft heads have."""
    paths: list[tuple[int, ...]] = [()]
    paths += ((*paths[(node - 1) // 2], (node - 1) % 2) for node in range(1, nodes))
    return Tree.from_paths(paths[1:])


@contextmanager
def timed(functions: dict[str, Callable[..., Any]], spent: list[float]) -> Iterator[None]:
    """Adds up the seconds of calls of these functions."""

    def timing(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **options)
        spent.append(time.perf_counter() - start)
        return result

    before = dict(functions)
    functions.update({name: partial(timing, function) for name, function in before.items()})
    try:
        yield
    finally:
        functions.update(before)


def accepted(draft: Draft, most: int = 3) -> AcceptResult:
    """The first child of each node is what the model says, ``most`` nodes deep, root included."""
    tokens, parents, depths = draft.token_ids[0].tolist(), draft.parents[0].tolist(), draft.depths[0].tolist()
    best = torch.full_like(draft.token_ids, -1)
    for node in range(len(tokens) - 1, 0, -1):
        if depths[node] < most:
            best[0, parents[node]] = tokens[node]
    return accept_greedy(draft, best)


@torch.inference_mode()
def measure(target: TargetModel, tree: Tree, options: Options) -> dict[str, float]:
    """Milliseconds of a pass over a tree, of its recurrences, and of moving states to accepted nodes: medians."""
    runner = runner_for(target)
    rows, _, _ = runner.prefill([list(range(100, 100 + options.length))])
    draft = Draft.on_tree(tree, torch.arange(100, 100 + tree.num_nodes)[None])
    result = accepted(draft)
    found: dict[str, list[float]] = {"pass": [], "recurrences": [], "commit": []}
    for _ in range(options.repeats + 1):
        spent: list[float] = []
        with target.computing(), timed(mixers.FUNCTIONS, spent):
            start = time.perf_counter()
            runner.verify(rows, draft)
            middle = time.perf_counter()
            runner.commit(rows, result, result.num_accepted.tolist())
            end = time.perf_counter()
        for name, seconds in (("pass", middle - start), ("recurrences", sum(spent)), ("commit", end - middle)):
            found[name].append(1e3 * seconds)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


@torch.inference_mode()
def stock_ms(model: Any, length: int, repeats: int) -> float:
    """Milliseconds of a token of transformers, with its own cache behind a text."""
    cache = model(input_ids=torch.arange(100, 100 + length)[None], use_cache=True).past_key_values
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        model(input_ids=torch.tensor([[100]]), past_key_values=cache, use_cache=True)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def shown(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def main(options: Options) -> None:
    """Measures and prints."""
    quiet_transformers()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        write_model(CONFIGS[options.size], Path(folder))
        stock = load_target(folder, precision=options.precision, fast=False).model
        target = load_target(folder, precision=options.precision)
    kinds = [(kind, n) for kind in SHAPES for n in options.nodes if kind == "chain" or n > 2]
    found: dict[tuple[str, int], list[dict[str, float]]] = {one: [] for one in kinds}
    plain: list[float] = []
    for _ in range(options.rounds):
        plain.append(stock_ms(stock, options.length, options.repeats))
        for (kind, nodes), parts in found.items():
            parts.append(measure(target, SHAPES[kind](nodes), options))
    facts = machine(torch.get_num_threads())
    console.print(f"{facts['cpu']}: {options.size} in {options.precision}, a text of {options.length} tokens")
    console.print(f"transformers, one token: {shown(plain)} ms")
    table = Table("shape", "nodes", "pass, ms", "recurrences, ms", "of the pass", "commit of three, ms", "× one node")
    one = statistics.median(part["pass"] for part in found["chain", 1])
    for (kind, nodes), parts in found.items():
        columns = {name: [part[name] for part in parts] for name in parts[0]}
        share = statistics.median(part["recurrences"] / part["pass"] for part in parts)
        times = statistics.median(columns["pass"]) / one
        cells = (shown(columns["pass"]), shown(columns["recurrences"]), f"{share:.0%}", shown(columns["commit"]))
        table.add_row(kind, str(nodes), *cells, f"{times:.2f}")
    console.print(table)
    if options.json:
        steps = [{"shape": kind, "nodes": nodes, "rounds": parts} for (kind, nodes), parts in found.items()]
        options.json.write_text(json.dumps({"machine": facts, "plain": plain, "steps": steps}), encoding="utf-8")


SHAPES: dict[str, Callable[[int], Tree]] = {"chain": lambda nodes: Tree.chain(nodes - 1), "tree": tree_of}

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
