"""Draft heads against plain decoding and transformers, in turns: tokens per second and per step, by batch size or task.

Nothing is tuned: heads decode by the profiles that ``draftheads.load`` finds or measures. Prints a table, and with
``--json FILE`` everything. Examples::

    python benchmarks/speed.py --prompts question.jsonl --batch-sizes 1 8
    python benchmarks/speed.py --by-task --heads hydra --fixed-nodes 10
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import tyro
from machine import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from draftheads.bench.compare import stock_way
from draftheads.cli.show import quiet_transformers
from draftheads.data.records import prompts_in
from draftheads.decode.engine import Engine, Prompt
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.loading import Precision, head_engine, load_drafter, load_target
from draftheads.models.model import TargetModel
from draftheads.shapes import BestFirst

_QUEUE = 4  # prompts in a group for each one that is at work
TASKS = Path(__file__).parent / "tasks.jsonl"


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


@dataclass
class Tally:
    """What a way did in one cell of the table."""

    tokens: int = 0
    steps: int = 0
    copied: int = 0
    answers: int = 0
    seconds: list[float] = field(default_factory=list)  # of each group of prompts
    group_tokens: list[int] = field(default_factory=list)


class Way:
    """A way to decode."""

    def __init__(self, name: str, engine: Engine | None, stock: TargetModel | None = None) -> None:
        self.name, self.engine = name, engine
        self.stock = stock

    def decode(self, prompts: Sequence[list[int]], options: Options) -> tuple[int, int, int]:
        """Tokens, steps of single rows, and copied tokens."""
        if self.engine is None:
            assert self.stock is not None
            answers = [stock_way(self.stock).decode(prompt, options.max_new_tokens) for prompt in prompts]
            return sum(len(a.token_ids) for a in answers), sum(a.num_steps for a in answers), 0
        found = self.engine.generate(list(prompts), max_new_tokens=options.max_new_tokens)
        return sum(len(r.token_ids) for r in found), sum(r.num_steps for r in found), sum(r.num_copied for r in found)


def ways(options: Options) -> list[Way]:
    """All ways, with one model for those of ours."""
    target = load_target(options.model, precision=options.precision)
    found = [Way("plain", Engine(target))]
    for head in options.heads:
        drafter = load_drafter(head, options.model, target)
        found.append(Way(head, head_engine(target, drafter, head=head, model=options.model)))
        if options.fixed_nodes:
            shape = BestFirst(options.fixed_nodes)
            for name, copy in ((f"{head}, {options.fixed_nodes} nodes", False), (f"{head} + copies", True)):
                other = load_drafter(head, options.model, target)
                engine = head_engine(target, other, head=head, model=options.model, tree=shape, copy=copy)
                found.append(Way(name, engine))
    if options.fixed_nodes:
        found.append(Way("prompt lookup", Engine(target, PromptLookup(num_tokens=options.fixed_nodes - 1))))
    if options.transformers:
        exact = "auto" if options.precision == "int8" else options.precision
        found.append(Way("transformers", None, load_target(options.model, precision=exact, fast=False)))
    return found


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


def measure(options: Options) -> dict[str, dict[str, Tally]]:
    """By cell and way; who goes first changes from group to group."""
    every = ways(options)
    first = every[0].engine
    assert first is not None
    table = list(cells(options, first))
    found = {cell: {way.name: Tally() for way in every} for cell, _, _ in table}
    for way in every:
        way.decode(table[0][2][0][:1], options)  # warms up
    groups = [(cell, size, group) for cell, size, all_groups in table for group in all_groups] * options.rounds
    for number, (cell, size, group) in enumerate(track(groups, console=Console(stderr=True))):
        turn = number % len(every)
        for way in [*every[turn:], *every[:turn]]:
            if way.engine is None and len(group) > 1:
                continue
            if way.engine is not None:
                way.engine.max_batch_size = size
            start = time.perf_counter()
            tokens, steps, copied = way.decode(group, options)
            seconds = time.perf_counter() - start
            tally = found[cell][way.name]
            tally.tokens, tally.steps, tally.copied = tally.tokens + tokens, tally.steps + steps, tally.copied + copied
            tally.answers += len(group)
            tally.seconds.append(seconds)
            tally.group_tokens.append(tokens)
    return found


def ratio(one: Tally, other: Tally) -> tuple[float, float, float]:
    """Tokens per second of one way over another's: of all groups together, and quartiles over groups."""
    if not one.seconds or not other.seconds:
        return (float("nan"),) * 3
    whole = one.tokens / sum(one.seconds) * sum(other.seconds) / other.tokens
    pairs = zip(one.group_tokens, one.seconds, other.group_tokens, other.seconds, strict=True)
    each = [a / s * t / b for a, s, b, t in pairs]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return whole, low, high


def main(options: Options) -> None:
    """Measures and prints."""
    quiet_transformers()
    found = measure(options)
    facts = machine(torch.get_num_threads())
    title = f"{options.model}, {options.precision}, {facts['cpu']}"
    shown = Table("", "way", "tokens/s", "tokens/step", "copied", "× plain (quartiles)", "× transformers", title=title)
    rows = []
    for cell, tallies in found.items():
        for name, tally in tallies.items():
            if not tally.seconds:
                continue
            whole, low, high = ratio(tally, tallies["plain"])
            stock = ratio(tally, tallies["transformers"])[0] if "transformers" in tallies else float("nan")
            speed = tally.tokens / sum(tally.seconds)
            # an answer's first token comes with its prompt
            per_step = (tally.tokens - tally.answers) / max(1, tally.steps)
            share = f"{tally.copied / max(1, tally.tokens):.0%}"
            shown.add_row(
                cell,
                name,
                f"{speed:.1f}",
                f"{per_step:.3f}",
                share,
                f"{whole:.2f} ({low:.2f}-{high:.2f})",
                f"{stock:.2f}",
            )
            rows.append({"cell": cell, "way": name, "tokens_per_step": per_step, "speedup": whole, **asdict(tally)})
    Console(width=130).print(shown)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
