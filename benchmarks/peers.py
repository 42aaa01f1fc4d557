"""Tokens per second of draftheads and of other programs: the same weights, prompts and machine, taking turns.

`benchmarks/environments.sh` makes an environment for each peer; this script measures those that are there. Answers are
greedy and end where each peer's model ends them; the time of the prompt counts. One peer works at a time.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from harness import (
    DTYPES,
    ENVIRONMENTS,
    TASKS,
    Ids,
    ProgramFailed,
    Reply,
    WorkerProcess,
    encoded,
    exact_precision,
    machine,
    print_setting,
    python_of,
    quartiles,
    real_model,
    say,
    shown,
    table_of,
    write_record,
)

from draftheads.bench.timing import spread
from draftheads.data.records import prompts_in
from draftheads.models.gguf_models import SMOLLM2_135M, find_gguf

_WARM_UP_TOKENS = 16
_PAUSE_SECONDS = 0.25  # threads of the peer before spin for up to 0.2 s after their work (OpenMP)


@dataclass(frozen=True)
class Measured:
    """On how much, and where."""

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
    """Threads of each program."""
    environments: Path = ENVIRONMENTS
    """Folder that environments.sh filled."""
    json: Path | None = None
    """Also write all numbers to this file, again after each round."""
    timeout: float = 900.0
    """Seconds that loading a program, or one request, may take."""


@dataclass(frozen=True)
class Options(Measured):
    """What is compared, and on how much."""

    peers: tuple[str, ...] = ("draftheads", "transformers", "llama-cpp", "openvino", "vllm")
    """Environments (draftheads, transformers, llama-cpp, openvino, vllm), or single rows of the table by name."""
    head: str = "hydra"
    """Draft head of draftheads."""
    precision: str = "auto"
    """bf16 or fp32 for all peers that compute with the exact weights; auto is bf16 on CPUs that have it."""


@dataclass(frozen=True)
class DecodingMethod:
    """A row of the table: a peer with its settings."""

    name: str
    environment: str
    settings: dict[str, Any]
    worker: str | None = None  # where it is not the environment's


@dataclass
class Row:
    """A peer at a batch size, round by round: its replies, and the seconds of first tokens."""

    name: str
    batch_size: int
    error: str | None = None
    rounds: list[list[Reply]] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)  # all prompts together, one by one

    def texts(self) -> list[tuple[int, ...]]:
        return [ids for reply in self.rounds[0] for ids in reply.token_ids]  # of the first round

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each round, the prompt's time included."""
        return [sum(one.num_tokens for one in each) / sum(one.seconds for one in each) for each in self.rounds]

    @property
    def first_token_milliseconds(self) -> list[float]:
        """Of each round, the mean over prompts; only at batch size 1."""
        return [1e3 * seconds / len(self.texts()) for seconds in self.first_token_seconds]

    @property
    def num_steps(self) -> int | None:
        """Passes behind the prompts'; None where the peer does not count them."""
        steps = [reply.num_steps for each in self.rounds for reply in each]
        return None if None in steps else sum(step or 0 for step in steps)

    @property
    def tokens_per_step(self) -> float | None:
        """New tokens per pass, first tokens left out."""
        tokens = sum(reply.num_tokens - len(reply.token_ids) for each in self.rounds for reply in each)
        return tokens / self.num_steps if self.num_steps else None

    @property
    def is_measured(self) -> bool:
        return self.error is None and bool(self.rounds)

    def ratios(self, other: "Row") -> list[float]:
        """Speed over another peer's in the same round."""
        return [own / others for own, others in zip(self.speeds, other.speeds, strict=False)]

    def summary(self, base: "Row | None") -> dict[str, Any]:
        """For the JSON file: medians with quartiles, and each round's numbers."""
        named = {"name": self.name, "batch_size": self.batch_size}
        if not self.is_measured:
            return {**named, "error": self.error}
        return {
            **named,
            "num_tokens": sum(map(len, self.texts())),
            "tokens_per_second": quartiles(self.speeds),
            "ratio": quartiles(self.ratios(base)) if base else None,
            "first_token_milliseconds": quartiles(self.first_token_milliseconds) if self.first_token_seconds else None,
            "tokens_per_step": self.tokens_per_step,
            "speeds": self.speeds,
        }


def blocks(prompts: Sequence[Ids], size: int) -> Iterator[list[Ids]]:
    return (list(prompts[start : start + size]) for start in range(0, len(prompts), size))


def all_ways(options: Options, longest_prompt: int) -> list[DecodingMethod]:
    """All rows that there can be, in the table's order."""
    precision = exact_precision(options.precision)
    folder, gguf = str(real_model()), str(find_gguf())
    exported = options.environments / "models"
    common = {
        "threads": options.threads,
        "max_length": longest_prompt + options.max_new_tokens + 16,  # room for draft tokens at the end
        "max_batch_size": max(options.batch_sizes),
    }
    ours = {"name": SMOLLM2_135M, **common}
    ways = [
        DecodingMethod(
            f"draftheads {kind}{f' {head}' if head else ''}", "draftheads", {**ours, "head": head, "precision": kind}
        )
        for kind in (precision, "int8")
        for head in (None, options.head)
    ]
    exact = {"model": folder, "dtype": DTYPES[precision]}
    others = {
        f"transformers {precision}": exact,
        "llama-cpp Q4_1": {"gguf": gguf},
        "openvino int8": {"model": str(exported / "openvino-int8")},
        "openvino int4": {"model": str(exported / "openvino-int4")},
        f"vllm {precision}": exact,
    }
    return ways + [
        DecodingMethod(name + " lookup" * lookup, name.split()[0], {**settings, "lookup": lookup, **common})
        for name, settings in others.items()
        for lookup in (False, True)
    ]


def chosen(ways: Sequence[DecodingMethod], names: Sequence[str]) -> list[DecodingMethod]:
    """The ways whose environment or name was asked for; exits where a name fits none."""
    for name in names:
        if not any(name in (way.environment, way.name) for way in ways):
            sys.exit(f"error: no peer {name!r}; choose among {', '.join(way.name for way in ways)}")
    return [way for way in ways if way.environment in names or way.name in names]


class Comparison:
    """Starts the peers, measures round by round, and keeps the rows.

    Within a round each block of prompts is answered by one peer after the other, so that a slow minute of the machine
    is slow for all.
    """

    def __init__(self, options: Measured, ways: Sequence[DecodingMethod], prompts: Sequence[Ids]) -> None:
        self.options, self.ways, self.prompts, self.facts = options, ways, prompts, machine(options.threads)
        self.rows = {(way.name, size): Row(way.name, size) for size in options.batch_sizes for way in ways}
        self.versions: dict[str, str] = {}
        self.peers: dict[str, Any] = {}  # WorkerProcess by name

    def run(self) -> None:
        """Everything; a peer that fails leaves its error in its rows."""
        try:
            for way in self.ways:
                say(f"starting {way.name}")
                self._start(way)
            for turn in range(self.options.rounds):
                say(f"round {turn + 1} of {self.options.rounds}")
                for size in sorted(self.options.batch_sizes):
                    self.round(size, turn)
                self.write()
        finally:
            for peer in self.peers.values():
                peer.stop()

    def _start(self, way: DecodingMethod) -> None:
        """Load a peer and let it answer once at each batch size, so that nothing is built or measured later."""
        options = self.options
        log = options.environments / "logs" / f"{way.name.replace(' ', '-')}.log"
        limits = {"threads": options.threads, "log": log, "timeout": options.timeout}
        script = f"{(way.worker or way.environment).replace('-', '_')}_worker.py"
        try:
            python = python_of(way.environment, options.environments)
            self.peers[way.name] = peer = WorkerProcess(python, script, way.settings, **limits)
            self.versions |= peer.versions()
        except ProgramFailed as error:
            for size in options.batch_sizes:
                self._failed(self.rows[way.name, size], error)
            return
        for size in options.batch_sizes:
            try:
                peer.ask(list(self.prompts[:size]), min(_WARM_UP_TOKENS, options.max_new_tokens))
            except ProgramFailed as error:
                self._failed(self.rows[way.name, size], error)

    def round(self, batch_size: int, turn: int) -> None:
        """One round for all rows of a batch size without an error; ``turn`` decides who begins."""
        for row in self._at_work(batch_size):
            row.rounds.append([])
            row.first_token_seconds += [0.0] * (batch_size == 1)
        for number, block in enumerate(blocks(self.prompts, max(self.options.batch_sizes))):
            at_work = self._at_work(batch_size)
            shift = (turn + number) % max(1, len(at_work))
            for row in at_work[shift:] + at_work[:shift]:
                time.sleep(_PAUSE_SECONDS)
                ask: Callable[[list[Ids], int], Reply] = self.peers[row.name].ask
                try:
                    row.rounds[-1] += (ask(one, self.options.max_new_tokens) for one in blocks(block, batch_size))
                    if batch_size == 1:
                        row.first_token_seconds[-1] += sum(ask([ids], 1).seconds for ids in block)
                except ProgramFailed as error:
                    self._failed(row, error)

    def _at_work(self, batch_size: int) -> list[Row]:
        return [row for row in self.of_size(batch_size) if row.error is None]

    def _failed(self, row: Row, error: ProgramFailed) -> None:
        row.error = str(error)
        say(f"{row.name}, batch size {row.batch_size}: {error}")

    def of_size(self, batch_size: int) -> list[Row]:
        return [row for row in self.rows.values() if row.batch_size == batch_size]

    def base(self, batch_size: int) -> Row | None:
        """What speeds are compared with: transformers, or else the first row."""
        rows = [row for row in self.of_size(batch_size) if row.is_measured]
        return next((row for row in rows if row.name.startswith("transformers")), rows[0] if rows else None)

    def write(self) -> None:
        """The JSON file, if there is to be one."""
        rows = [row.summary(self.base(row.batch_size)) for row in self.rows.values()]
        found = {"versions": self.versions, "prompts": self.options.prompts.name, "num_prompts": len(self.prompts)}
        names = ("max_new_tokens", "batch_sizes", "rounds")
        write_record(self.options.json, self.facts, self.options, names, **found, rows=rows)

    def show(self, headings: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> None:
        """A table for each batch size; ``cells`` are what stands behind a row's name."""
        options = self.options
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        asked = f"{len(self.prompts)} prompts of {options.prompts.name}, at most {options.max_new_tokens} new tokens"
        counts = f"{asked}, {options.rounds} rounds: median (quartiles)"
        console = print_setting(self.facts, versions, counts, width=140)
        for size in options.batch_sizes:
            table = table_of("", *headings, title=f"Batch size {size}")
            for row in self.of_size(size):
                table.add_row(row.name, *(cells(row) if row.is_measured else ["–"]))
            console.print(table)
            for row in self.of_size(size):
                if row.error is not None:
                    console.print(f"{row.name}: {row.error}", markup=False)


def main(options: Options) -> None:
    """Measure, and print the tables."""
    prompts = encoded(spread(prompts_in(options.prompts), options.limit), real_model())
    comparison = Comparison(options, chosen(all_ways(options, max(map(len, prompts))), options.peers), prompts)
    comparison.run()

    def cells(row: Row) -> list[str]:
        base, steps = comparison.base(row.batch_size), row.tokens_per_step
        assert base is not None
        first = shown(row.first_token_milliseconds, 0) if row.first_token_seconds else ""
        per_step = "" if steps is None else f"{steps:.2f}"
        return [shown(row.speeds), shown(row.ratios(base), 2), first, per_step, str(sum(map(len, row.texts())))]

    base = comparison.base(options.batch_sizes[0])
    against = f"× {base.name}" if base else "×"
    comparison.show(("tokens/s", against, "first token, ms", "tokens/step", "tokens"), cells)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
