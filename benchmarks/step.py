"""What a step of verification costs: by nodes, rows and length of the text, beside two lower bounds.

A step must read all weights (bytes / bandwidth), and multiply by them (operations / rate); both rates are measured
here.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro
from harness import machine, median_ms, table_of, write_record
from rich.console import Console

from draftheads.cli.show import quiet_transformers
from draftheads.cpu.kernels import Native, PackedLinear
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.reports.page import Plot, Point, Style
from draftheads.runners import mixers, runner_for
from draftheads.settings import Precision
from draftheads.speculation.draft import Draft
from draftheads.speculation.tree import Tree

_PROMPT_ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    precisions: tuple[Precision, ...] = ("auto", "int8", "int4")
    """What the model computes in."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32)
    """Nodes of the tree."""
    rows: tuple[int, ...] = (1, 4, 8)
    """Texts that are decoded together."""
    lengths: tuple[int, ...] = (200, 1000)
    """Tokens of each text."""
    prompts: tuple[int, ...] = ()
    """Also read prompts of so many tokens, beside transformers with torch's products. Both take turns."""
    repeats: int = 15
    """Steps of each kind; their median counts."""
    plot: Path | None = None
    """Draw step time against nodes into this file."""
    json: Path | None = None
    """Write everything there."""


def text_of(model: TargetModel, length: int) -> list[int]:
    """So many token ids."""
    return [token % model.vocab_size for token in range(100, 100 + length)]


def step_ms(model: TargetModel, rows: int, nodes: int, length: int, options: Options) -> float:
    """Milliseconds of a step."""
    runner = runner_for(model)
    texts, _, _ = runner.prefill([text_of(model, length)] * rows)
    draft = Draft.on_tree(Tree.chain(nodes - 1), torch.randint(model.vocab_size, (rows, nodes)))
    with model.computing():
        return median_ms(lambda: runner.verify(texts, draft), options.repeats)


def recurrences_ms(model: TargetModel, rows: int, nodes: int, length: int, options: Options) -> float:
    """Milliseconds that the recurrences of a hybrid model take of a step; a chain has as many levels as nodes."""
    spent: list[float] = []

    def timing(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **named)
        spent.append(time.perf_counter() - start)
        return result

    with patch.dict(mixers.FUNCTIONS, {name: partial(timing, one) for name, one in mixers.FUNCTIONS.items()}):
        step_ms(model, rows, nodes, length, options)
    return 1e3 * sum(spent) / (options.repeats + 3)


def show_prompts(model: TargetModel, stock: TargetModel, options: Options, console: Console) -> list[dict[str, object]]:
    """Milliseconds of reading a prompt, with the products of each."""
    found: list[dict[str, object]] = []
    table = table_of("tokens of a prompt", "ours, ms", "transformers, ms", "× transformers", title="Prompts")
    for length in options.prompts:
        times: list[list[float]] = [[], []]
        for _ in range(_PROMPT_ROUNDS):
            for one, own in zip((model, stock), times, strict=True):
                with one.computing():
                    own.append(median_ms(partial(runner_for(one).prefill, [text_of(one, length)]), 1))
        ours, theirs = map(statistics.median, times)
        ratios = [b / a for a, b in zip(*times, strict=True)]
        table.add_row(str(length), f"{ours:.0f}", f"{theirs:.0f}", f"{min(ratios):.2f} to {max(ratios):.2f}")
        found.append({"precision": model.precision, "length": length, "ours_ms": ours, "transformers_ms": theirs})
    console.print(table)
    return found


def bytes_per_second() -> float:
    """That are read from memory."""
    block = torch.zeros(32 << 20)  # 128 MiB: beyond any cache
    return block.nbytes / (median_ms(block.sum, 7) / 1e3)


def layers_of(model: TargetModel) -> list[PackedLinear]:
    return [layer for layer in model.model.modules() if isinstance(layer, PackedLinear)]


def operations_per_second(model: TargetModel) -> float:
    """Of the model's own largest layer but the lm_head, with more rows than any step has."""
    layer = max(layers_of(model)[:-1], key=lambda layer: layer.in_features * layer.out_features)
    rows = torch.randn(1024, layer.in_features).to(model.dtype)
    return 2 * len(rows) * layer.in_features * layer.out_features / (median_ms(lambda: layer.rows(rows), 15) / 1e3)


def weight_bytes(model: TargetModel) -> int:
    """Of all linear layers in the form that they are held in."""
    products = [layer.product for layer in layers_of(model)]
    return sum(one.nbytes if isinstance(one, Native) else one.weight.nbytes for one in products)


def num_weights(model: TargetModel) -> int:
    """Of all linear layers."""
    return sum(layer.in_features * layer.out_features for layer in layers_of(model))


@torch.inference_mode()
def main(options: Options) -> None:
    """Measures and prints."""
    quiet_transformers()
    bandwidth = bytes_per_second()
    facts = machine(torch.get_num_threads())
    console = Console(width=120)
    console.print(f"{facts['cpu']}: {bandwidth / 1e9:.0f} GB/s")
    found, prompts = [], []
    stock = load_target(options.model, precision="fp32", fast=False) if options.prompts else None
    for precision in options.precisions:
        model = load_target(options.model, precision=precision)
        rate, numbers = operations_per_second(model), num_weights(model)
        read_ms = 1e3 * weight_bytes(model) / bandwidth
        columns = ["rows", "text", "nodes", "step, ms", "reading, ms", "computing, ms", "× the larger bound"]
        title = f"{options.model} in {model.precision}, {rate / 1e9:.0f} billion operations/s"
        by_modules = model.is_recurrent and model.native is None  # in a native pass they are not alone
        table = table_of(*columns, *(["recurrences, ms"] if by_modules else []), title=title)
        for length, rows, nodes in product(options.lengths, options.rows, options.nodes):
            if rows * nodes > 128:
                continue
            sums = 2e3 * numbers * rows * nodes / rate
            times = {"step_ms": step_ms(model, rows, nodes, length, options), "read_ms": read_ms, "sums_ms": sums}
            cells = [*(f"{value:.1f}" for value in times.values()), f"{times['step_ms'] / max(read_ms, sums):.2f}"]
            if by_modules:
                cells.append(f"{recurrences_ms(model, rows, nodes, length, options):.1f}")
            table.add_row(str(rows), str(length), str(nodes), *cells)
            found.append({"precision": model.precision, "rows": rows, "length": length, "nodes": nodes, **times})
        console.print(table)
        if stock is not None:
            prompts += show_prompts(model, stock, options, console)
    write_record(options.json, facts, options, ("model", "repeats"), steps=found, prompts=prompts)
    if options.plot:
        draw(found, f"{options.model}, {facts['cpu']}", options.plot)


def draw(found: list[dict[str, Any]], title: str, path: Path) -> None:
    """Step time against nodes for one row and the shortest text, with the bounds dashed."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    shortest, curves, styles = min(one["length"] for one in found), dict[str, list[Point]](), dict[str, Style]()
    for number, precision in enumerate(dict.fromkeys(one["precision"] for one in found)):
        own = [one for one in found if (one["precision"], one["rows"], one["length"]) == (precision, 1, shortest)]
        names = (f"{precision}: step", f"{precision}: bound")
        styles |= dict(zip(names, (Style(number), Style(number, is_dashed=True)), strict=True))
        curves[names[0]] = [Point(one["nodes"], one["step_ms"]) for one in own]
        curves[names[1]] = [Point(one["nodes"], max(one["read_ms"], one["sums_ms"])) for one in own]
    figure = Figure(figsize=(7, 1), layout="constrained")
    figure.suptitle(title)
    Plot("steps", title, "nodes of the tree", "", {"milliseconds": curves}, styles=styles).draw(figure)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
