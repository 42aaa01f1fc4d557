"""How much memory an engine with a draft head takes, beside the bytes of its weights.

For each precision a process of its own loads the engine, answers one prompt, and tells by how much its resident memory
has grown since the libraries were imported. Prints a table, and with ``--json FILE`` everything.
"""

import gc
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import tyro
from harness import machine, table_of, write_record
from rich.console import Console

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


def measured(model: str, head: str, precision: Precision, max_new_tokens: int) -> dict[str, float]:
    """Megabytes of this process, which has done nothing else; without what the libraries take."""
    torch.randn(64, 64) @ torch.randn(64, 64)  # threads and kernels
    process = psutil.Process()
    before = process.memory_info().rss
    engine = load(model, head=head, precision=precision)
    engine.generate(["Why is the sky blue?"], max_new_tokens=max_new_tokens)
    gc.collect()
    after, most = process.memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with torch.device("meta"):
        count = type(engine.model.model)(engine.model.model.config).num_parameters()
    found = {"weights": count * BYTES[precision], "engine": after - before, "most": most - before}
    return {name: size / 1e6 for name, size in found.items()}


def main(options: Options) -> None:
    """Prints the table."""
    found = []
    for precision in options.precisions:
        given = json.dumps([options.model, options.head, precision, options.max_new_tokens])
        command = [sys.executable, __file__, "child", given]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this file
        found.append({"precision": precision, **json.loads(done.stdout.splitlines()[-1])})
    table = table_of("precision", "weights, MB", "engine, MB", "ratio", "while loading, MB", title="Resident memory")
    for row in found:
        sizes = (f"{row['weights']:.0f}", f"{row['engine']:.0f}", f"{row['engine'] / row['weights']:.2f}")
        table.add_row(row["precision"], *sizes, f"{row['most']:.0f}")
    Console().print(table)
    write_record(options.json, machine(torch.get_num_threads()), options, ("model", "head"), memory=found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(measured(*json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Options, prog="benchmarks/memory.py"))
