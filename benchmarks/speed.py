"""Draft heads, plain decoding and transformers in turn: tokens per second and per step, by batch size or task.

Nothing is tuned: heads decode by the profiles that ``draftheads.load`` finds or measures. Prints a table, and writes
all numbers with ``--json FILE``. Examples::

    python benchmarks/speed.py --prompts question.jsonl --batch-sizes 1 8
    python benchmarks/speed.py --by-task --heads hydra --fixed-nodes 10
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from machine import machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftheads.bench.table import SPEED_COLUMNS, Column, Row, timed_row
from draftheads.bench.timing import PLAIN, STOCK, engine_way, stock_way, take_turns
from draftheads.cli.show import quiet_transformers
from draftheads.data.records import own_prompts, prompts_in
from draftheads.decode.engine import Engine, Prompt
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.loading import head_engine, load_drafter, load_target
from draftheads.settings import Precision
from draftheads.speculation.shapes import BestFirst

_QUEUE = 4  # prompts in a group for each one that is at work
TASKS = own_prompts("tasks")


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ("hydra",)
    """Draft heads."""
    precision: Precision = "auto"
    """What the model computes in."""
    prompts: Path = TASKS
    """A JSONL file of prompts; ours by default."""
    by_task: bool = False
    """A row for each category of the prompts, one prompt at a time, instead of for each batch size."""
    batch_sizes: tuple[int, ...] = (1,)
    """Prompts that are decoded together."""
    limit: int | None = None
    """The first so many prompts, of each category with --by-task."""
    max_new_tokens: int = 128
    """Tokens of an answer."""
    rounds: int = 1
    """How often each way answers all prompts."""
    fixed_nodes: int | None = None
    """Also decode with growing trees of so many nodes, with copies, without, and with prompt lookup alone."""
    transformers: bool = True
    """Also time transformers' own generate, one prompt at a time."""
    json: Path | None = None
    """Write everything there."""


def load_engines(options: Options) -> dict[str, Engine]:
    """All our engines, which share one model."""
    target = load_target(options.model, precision=options.precision)
    engines = {PLAIN: Engine(target)}
    for head in options.heads:
        drafter = load_drafter(head, options.model, target)
        engines[head] = head_engine(target, drafter, head=head, model=options.model)
        if options.fixed_nodes:
            shape = BestFirst(options.fixed_nodes)
            for name, copy in ((f"{head}, {options.fixed_nodes} nodes", False), (f"{head} + copies", True)):
                other = load_drafter(head, options.model, target)
                engines[name] = head_engine(target, other, head=head, model=options.model, tree=shape, copy=copy)
    if options.fixed_nodes:
        engines["prompt lookup"] = Engine(target, PromptLookup(num_tokens=options.fixed_nodes - 1))
    return engines


def cells(options: Options, engine: Engine) -> Iterator[tuple[str, int, list[list[list[int]]]]]:
    """Rows of the table: a name, how many prompts are at work at a time, and groups of prompts.

    A group has more prompts than are at work at a time: the next one takes the place of one that is answered, as on a
    server under load. Else the last rows of a group would decode alone, the longer the more rows differ in speed.
    """
    lines = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts: list[Prompt] = list(prompts_in(options.prompts))
    ids = [engine.encode(prompt) for prompt in prompts]
    if options.by_task:
        for task in dict.fromkeys(line["category"] for line in lines):
            own = [[one] for one, line in zip(ids, lines, strict=True) if line["category"] == task]
            yield task, 1, own[: options.limit]
        return
    ids = ids[: options.limit]
    for size in options.batch_sizes:
        many = 1 if size == 1 else min(len(ids), _QUEUE * size)
        groups = [ids[start : start + many] for start in range(0, len(ids) - many + 1, many)]
        yield f"{size} at a time", size, groups


def measure(options: Options) -> list[tuple[str, Row]]:
    """The table: rows with the name of their cell."""
    engines = load_engines(options)
    exact = "auto" if options.precision == "int8" else options.precision
    stock = load_target(options.model, precision=exact, fast=False) if options.transformers else None
    found = []
    for cell, size, groups in cells(options, engines[PLAIN]):
        for engine in engines.values():
            engine.max_batch_size = size
        ways = {name: engine_way(engine) for name, engine in engines.items()}
        if stock is not None and size == 1:
            ways[STOCK] = stock_way(stock)
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(cell, total=options.rounds * len(groups) * len(ways))
            timings = take_turns(
                ways,
                groups * options.rounds,
                max_new_tokens=options.max_new_tokens,
                on_answer=partial(progress.advance, task),
            )
        answers = timings.answers
        found += [(cell, timed_row(name, answers[name], answers[PLAIN], answers.get(STOCK))) for name in ways]
    return found


def main(options: Options) -> None:
    """Measures and prints."""
    quiet_transformers()
    found = measure(options)
    facts = machine(torch.get_num_threads())
    title = f"{options.model}, {options.precision}, {facts['cpu']}"
    columns = [*SPEED_COLUMNS[1:5], Column("copied", lambda row: f"{row.num_copied / max(1, row.num_tokens):.0%}")]
    shown = Table("", "way", *(column.heading for column in columns), title=title)
    for cell, row in found:
        shown.add_row(cell, row.name, *(column.cell(row) for column in columns))
    Console(width=130).print(shown)
    if options.json:
        rows = [{"cell": cell, "way": row.name, **asdict(row)} for cell, row in found]
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
