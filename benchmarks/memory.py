"""How much memory an engine with a draft head takes, beside the bytes of its weights.

For each precision a process of its own loads the engine, answers one prompt, and tells by how much its resident memory
has grown since the libraries were imported. Prints a table, and with ``--json FILE`` everything.
"""

import gc
import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from harness import machine
from rich.console import Console
from rich.table import Table

from draftheads import load
from draftheads.settings import Precision

BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 5 / 8}  # of one weight; lm_head and embedding of int4 have 1


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    head: str = "hydra"
    """A draft head."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "int8")
    """What the model computes in."""
    max_new_tokens: int = 128
    """Tokens of the answer."""
    json: Path | None = None
    """Write everything there."""


@dataclass(frozen=True)
class Memory:
    """Megabytes of one process."""

    precision: str
    weights: float
    """Of the model, in its precision."""
    engine: float
    """Resident after an answer, less what the libraries took."""
    most: float
    """The same at its highest, while the model was loaded."""


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def measured(model: str, head: str, precision: Precision, max_new_tokens: int) -> Memory:
    """Of this process, which has done nothing else."""
    torch.randn(64, 64) @ torch.randn(64, 64)  # threads and kernels
    before = resident_mb()
    engine = load(model, head=head, precision=precision)
    engine.generate(["Why is the sky blue?"], max_new_tokens=max_new_tokens)
    gc.collect()
    after = resident_mb()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    with torch.device("meta"):
        parameters = type(engine.model.model)(engine.model.model.config).num_parameters()
    return Memory(precision, parameters * BYTES[precision] / 1e6, after - before, most - before)


def main(options: Options) -> None:
    """Prints the table."""
    found = []
    for precision in options.precisions:
        given = json.dumps([options.model, options.head, precision, options.max_new_tokens])
        done = subprocess.run(  # noqa: S603 - this file
            [sys.executable, __file__, "child", given], check=True, stdout=subprocess.PIPE, text=True
        )
        found.append(Memory(**json.loads(done.stdout.splitlines()[-1])))
    table = Table("precision", "weights, MB", "engine, MB", "ratio", "while loading, MB", title="Resident memory")
    for row in found:
        table.add_row(
            row.precision,
            f"{row.weights:.0f}",
            f"{row.engine:.0f}",
            f"{row.engine / row.weights:.2f}",
            f"{row.most:.0f}",
        )
    Console().print(table)
    if options.json is not None:
        content = {"machine": machine(torch.get_num_threads()), "memory": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(asdict(measured(*json.loads(sys.argv[2])))))
    else:
        main(tyro.cli(Options, prog="benchmarks/memory.py"))
