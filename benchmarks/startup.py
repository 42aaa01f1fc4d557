"""How long commands take until they show something: each ``--help``, a wrong option, ``info``, the first token.

Every command is a process of its own. It is run once before it is timed, so that files and measurements are cached.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 5 --head medusa
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from harness import machine
from rich.console import Console
from rich.table import Table

from draftheads.cli.main import COMMANDS


@dataclass(frozen=True)
class Options:
    """What is timed."""

    rounds: int = 3
    """Timed runs of each command."""
    model: str = "smollm2-135m"
    """The model that answers."""
    head: str = "hydra"
    """Its draft head."""


def seconds_to_output(arguments: Sequence[str]) -> float:
    """Until the first byte on standard output; where there is none, until the command ends."""
    command = [sys.executable, "-m", "draftheads", *arguments]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:  # noqa: S603 - ours
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds


def main(options: Options) -> None:
    """Times all commands in turns and prints a table."""
    words = "Why is the sky blue?"
    timed = {
        **{f"{name} --help": [name, "--help"] for name in COMMANDS},
        "a wrong option of train": ["train", "--no-such-option"],
        "info": ["info"],
        f"info {options.head}": ["info", options.head],
        "doctor": ["doctor"],
        "generate, first token": ["generate", words, "--model", options.model, "--max-new-tokens", "8"],
        f"generate --head {options.head}, first token": [
            *("generate", words, "--model", options.model, "--head", options.head, "--max-new-tokens", "8")
        ],
    }
    found: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(options.rounds + 1):  # the first turn is not counted
        for name, arguments in timed.items():
            seconds = seconds_to_output(arguments)
            if turn:
                found[name].append(seconds)
    table = Table("command", "seconds, median", "highest")
    for name, values in found.items():
        table.add_row(name, f"{statistics.median(values):.2f}", f"{max(values):.2f}")
    console = Console()
    console.print(table)
    facts = machine(os.cpu_count() or 1)
    console.print(f"{facts['cpu']}, {facts['threads']} cores, {' '.join(facts['cpu_flags'])}")


if __name__ == "__main__":
    main(tyro.cli(Options))
