"""Big models with random weights on a CPU, beside llama.cpp: plain tokens per second, and what a pass of 1 … 16 costs.

The model is made on disk, loaded by draftheads in each precision and by llama.cpp in each type, and deleted. All take
turns, round by round. A draft head's speed is predicted: nobody trains a head for random weights. Its drafting is
measured with an untrained Hydra head, and its acceptance is assumed.
"""

import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import step
import torch
import tyro
from harness import (
    ENVIRONMENTS,
    Ids,
    ProgramFailed,
    WorkerProcess,
    machine,
    median_ms,
    print_setting,
    python_of,
    say,
    shown,
    table_of,
    write_record,
)
from random_model import CONFIGS, write_gguf, write_model
from rich.table import Table

from draftheads.cli.show import quiet_transformers
from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import StepTimer
from draftheads.errors import DraftHeadsError
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.speculation.draft import Draft
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree

_DEPTH, _DRAFT_VOCABULARY = 4, 8192  # of the untrained head: the defaults of `draftheads train`
_PROMPTS, _PROMPT_TOKENS = 16, 12  # whose next tokens are compared
PAUSE_SECONDS = 0.25  # threads of the one before spin for up to 0.2 s after their work (OpenMP)


@dataclass(frozen=True)
class Measured:
    """What is measured, in which turns, and where."""

    precisions: tuple[str, ...] = ("int8", "int4")
    """Of draftheads. All are in memory together."""
    kinds: tuple[str, ...] = ("Q4_0", "Q8_0")
    """Types of llama.cpp, as llama-quantize makes them; BF16 is exact. None leaves llama.cpp out."""
    nodes: tuple[int, ...] = (4, 8, 16)
    """Tokens of a pass: nodes of the tree, or llama.cpp's batch. Passes of one token are measured, too."""
    length: int = 200
    """Tokens of the text before."""
    max_new_tokens: int = 48
    """Tokens of plain decoding."""
    rounds: int = 3
    """How often everything is measured."""
    repeats: int = 7
    """Passes of each kind in a round; their median counts."""
    tokens_per_step: tuple[float, ...] = (2.0, 2.5, 3.0)
    """Acceptance that is assumed of a draft head."""
    threads: int = torch.get_num_threads()
    """Threads of each program."""
    environments: Path = ENVIRONMENTS
    """Folder that environments.sh filled."""
    folder: Path = Path(tempfile.gettempdir())
    """Where the model is written: 8 GB for 1.1b, 20 GB for 3b."""
    keep: bool = False
    """Do not delete the model."""
    json: Path | None = None
    """Write everything there."""
    timeout: float = 1800.0
    """Seconds that quantising and loading a file, or one round of llama.cpp, may take."""

    @property
    def all_nodes(self) -> tuple[int, ...]:
        return (1, *(count for count in self.nodes if count > 1))

    @property
    def longest(self) -> int:
        """Tokens of a text with all that is decoded behind it; a recurrent state cannot go back to the text's end."""
        return self.length + self.max_new_tokens + self.repeats * sum(self.all_nodes) + 8


@dataclass(frozen=True)
class Options(Measured):
    """What is measured, of which model."""

    size: Literal["1.1b", "3b", "gemma-270m", "tiny"] = "1.1b"
    """Sizes of TinyLlama, of Llama-3.2-3B with TinyLlama's vocabulary, or of Gemma-3-270m. tiny is for tests."""
    draft_ms: float | None = None
    """Milliseconds of drafting a tree; measured with an untrained Hydra head where left out."""
    plot: Path | None = None
    """Draw the time of a pass of draftheads against nodes into this file."""


@dataclass(frozen=True)
class Bounds:
    """Of our engine: the least milliseconds of a pass, and what a step with a head has besides its pass."""

    reading: float  # all weights once
    computing: float  # of one node
    drafting: tuple[float, ...]  # of a tree of each number of nodes


@dataclass
class Row:
    """What is known of a program."""

    name: str
    megabytes: float  # of weights
    next_tokens: list[int]  # the best ones behind a few prompts
    nodes: tuple[int, ...]  # of each pass; the first is 1
    speeds: list[float] = field(default_factory=list)  # plain tokens per second of each round
    passes: list[list[float]] = field(default_factory=list)  # milliseconds of each round, by number of nodes
    bounds: Bounds | None = None  # of ours

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def pass_ms(self, place: int) -> float:
        return statistics.median(passes[place] for passes in self.passes)

    @property
    def loop_ms(self) -> float:
        """Of a step of plain decoding, what is not its pass."""
        return max(0.0, 1e3 / self.speed - self.pass_ms(0))

    def predicted(self, place: int, tokens_per_step: float) -> float:
        """Tokens per second with a draft head of which so many tokens come out of a step.

        >>> row = Row("ours", 100.0, [], (1, 8), [10.0], [[90.0, 120.0]], Bounds(80.0, 5.0, (0.0, 20.0)))
        >>> row.loop_ms, row.predicted(1, 3.0)  # 120 ms of the pass, 20 of drafting and 10 of the loop
        (10.0, 20.0)
        """
        assert self.bounds is not None
        return 1e3 * tokens_per_step / (self.pass_ms(place) + self.bounds.drafting[place] + self.loop_ms)


class DraftHeads:
    """Our engine, in this process."""

    versions: ClassVar[dict[str, str]] = {}

    def __init__(self, options: Measured, model: Path, precision: str) -> None:
        self.options = options
        self.target = load_target(str(model), precision=precision)  # type: ignore[arg-type]
        self.engine = Engine(self.target, max_batch_size=1)
        self.megabytes = step.weight_bytes(self.target) / 1e6

    def stop(self) -> None:
        """It ends with this process."""

    def speed(self, text: Ids) -> float:
        """Tokens per second of plain decoding behind a text."""
        stream = self.engine.stream(text, max_new_tokens=self.options.max_new_tokens, ignore_eos=True)
        times = [time.perf_counter() for _ in stream]  # the first one is behind the prompt
        return (len(times) - 1) / (times[-1] - times[0])

    @torch.inference_mode()
    def measure(self, text: Ids) -> tuple[float, list[float]]:
        """Tokens per second of plain decoding behind a text, and milliseconds of a pass of each number of nodes.

        Chains have as many nodes as trees, and take as long.
        """
        speed, nodes = self.speed(text), self.options.all_nodes
        drafts = [Draft.on_tree(Tree.chain(count - 1), torch.tensor([text[:count]])) for count in nodes]
        runner = runner_for(self.target)
        rows, _, _ = runner.prefill([text])
        with self.target.computing():
            return speed, [median_ms(partial(runner.verify, rows, draft), self.options.repeats) for draft in drafts]

    def next_tokens(self, prompts: Sequence[Ids]) -> Ids:
        """The best next token of each prompt."""
        return [result.token_ids[0] for result in self.engine.generate(prompts, max_new_tokens=1)]


class LlamaCpp:
    """llama.cpp, in a process of its own. Its Python interface has no part in what is timed."""

    def __init__(self, options: Measured, source: Path, kind: str) -> None:
        self.options, path = options, source.with_name(f"{kind}.gguf")
        given = {"source": str(source), "gguf": str(path), "kind": kind, "threads": options.threads, "lookup": False}
        given |= {"max_length": options.longest, "max_batch_size": 1}
        given |= {"nodes": options.all_nodes, "repeats": options.repeats}
        log = options.environments / "logs" / f"big-{kind}.log"
        python = python_of("llama-cpp", options.environments)
        limits = {"threads": options.threads, "log": log, "timeout": options.timeout}
        self.process = WorkerProcess(python, "llama_cpp_worker.py", given, **limits)
        self.stop = self.process.stop
        try:
            self.versions = self.process.versions()
        except BaseException:
            self.stop()
            raise
        self.megabytes = path.stat().st_size / 1e6

    def measure(self, text: Ids) -> tuple[float, list[float]]:
        """As :meth:`DraftHeads.measure`."""
        reply = self.process.ask([text], self.options.max_new_tokens)
        assert reply.decode_seconds is not None
        return (reply.num_tokens - 1) / reply.decode_seconds, [1e3 * seconds for seconds in reply.batch_seconds]

    def next_tokens(self, prompts: Sequence[Ids]) -> Ids:
        """The best next token of each prompt."""
        return [self.process.ask([prompt], 1).token_ids[0][0] for prompt in prompts]


Program = DraftHeads | LlamaCpp


@contextmanager
def folder_for_model(options: Measured, size: str) -> Iterator[Path]:
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"random-{size}-", dir=options.folder))
    try:
        yield folder
    finally:
        if options.keep:
            say(f"the model is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def start(options: Measured, size: str, folder: Path, programs: dict[str, Program]) -> dict[str, str]:
    """Write the model and load all programs into ``programs``. Returns why some cannot be measured, by name."""
    failed: dict[str, str] = {}
    config, source = CONFIGS[size], folder / "source.gguf"
    say("writing the model")
    write_model(config, folder)
    if options.kinds:
        write_gguf(config, folder, source)
    makers: dict[str, Callable[[], Program]] = {
        **{f"draftheads {one}": partial(DraftHeads, options, folder, one) for one in options.precisions},
        **{f"llama.cpp {one}": partial(LlamaCpp, options, source, one) for one in options.kinds},
    }
    for name, make in makers.items():
        say(f"loading {name}")
        try:
            programs[name] = make()
        except (DraftHeadsError, ProgramFailed) as error:
            failed[name] = str(error)
    return failed


def measured(options: Options, programs: dict[str, Program]) -> tuple[list[Row], list[float]]:
    """All rounds, each of which begins with another program; and bytes per second that were read between them."""
    vocab_size = CONFIGS[options.size].vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab_size, (_PROMPTS, _PROMPT_TOKENS), generator=generator).tolist()
    text = torch.randint(vocab_size, (options.length,), generator=generator).tolist()
    rows = {
        name: Row(name, one.megabytes, one.next_tokens(prompts), options.all_nodes) for name, one in programs.items()
    }
    names, bandwidths = list(programs), []
    for turn in range(options.rounds):
        say(f"round {turn + 1} of {options.rounds}")
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            bandwidths.append(step.bytes_per_second())
            time.sleep(PAUSE_SECONDS)
            speed, passes = programs[name].measure(text)
            rows[name].speeds.append(speed)
            rows[name].passes.append(passes)
    return list(rows.values()), bandwidths


def timer_of(target: TargetModel) -> StepTimer:
    """Times steps with an untrained Hydra head of `draftheads train`'s default size."""
    sizes: dict[str, Any] = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    small = min(_DRAFT_VOCABULARY, target.vocab_size)
    head = HydraHead(HydraConfig(**sizes, num_heads=_DEPTH, draft_vocab_size=small))
    head.requires_grad_(requires_grad=False).bind(target.weights)
    head.speed_up()
    return StepTimer(target, head)


@torch.inference_mode()
def bounds_of(target: TargetModel, options: Options, bandwidth: float) -> Bounds:
    """Lower bounds as in step.py, and the time of drafting trees with a head of `draftheads train`'s default size."""
    computing = 2e3 * step.num_weights(target) / step.operations_per_second(target)
    drafting = [options.draft_ms or 0.0] * len(options.all_nodes)
    if options.draft_ms is None:
        timer = timer_of(target)
        for place, count in enumerate(options.all_nodes[1:], 1):
            tree = BestFirst(count, max_depth=min(_DEPTH, count - 1), min_level_probability=None)
            drafting[place] = min(timer.draft(1, tree) for _ in range(4))
    return Bounds(1e3 * step.weight_bytes(target) / bandwidth, computing, tuple(drafting))


def tables(rows: Sequence[Row], tokens_per_step: Sequence[float]) -> Iterator[Table]:
    """Plain decoding, passes, and what a head would bring; medians of the rounds, quartiles in brackets."""
    plain = table_of("", "weights, MB", "plain tokens/s", f"next tokens as {rows[0].name}")
    passes = table_of("", "nodes", "pass, ms", "reading, ms", "computing, ms", "× the larger bound")
    speeds = (f"{one:g} tokens/step" for one in tokens_per_step)
    heads = table_of("with a head", "nodes", "drafting, ms", "loop, ms", *speeds)
    fastest = max((row.speed for row in rows if row.bounds is None), default=None)
    for row in rows:
        same = [a == b for a, b in zip(row.next_tokens, rows[0].next_tokens, strict=True)]
        plain.add_row(row.name, f"{row.megabytes:.0f}", shown(row.speeds), f"{sum(same)} of {len(same)}")
        for place, count in enumerate(row.nodes):
            bounds = [row.bounds.reading, row.bounds.computing * count] if row.bounds else []
            cells = [f"{one:.1f}" for one in bounds] + [f"{row.pass_ms(place) / max(bounds):.2f}" for _ in bounds[:1]]
            passes.add_row(row.name, str(count), shown([each[place] for each in row.passes]), *cells)
            if row.bounds is None or count == 1:
                continue
            cells = [f"{row.bounds.drafting[place]:.1f}", f"{row.loop_ms:.1f}"]
            for accepted in tokens_per_step:
                speed = row.predicted(place, accepted)
                ratios = [speed / base for base in (row.speed, fastest) if base is not None]
                cells.append(f"{speed:.1f} ({', '.join(f'{ratio:.2f}×' for ratio in ratios)})")
            heads.add_row(row.name, str(count), *cells)
    yield from (plain, passes, heads)


def write(options: Options, facts: dict[str, Any], rows: list[Row]) -> None:
    """The files that are asked for."""
    names = ("size", "length", "max_new_tokens", "rounds", "repeats", "draft_ms")
    found = [vars(row) | {"bounds": row.bounds and vars(row.bounds)} for row in rows]
    write_record(options.json, facts, options, names, rows=found)
    if options.plot is not None:
        points: list[dict[str, object]] = [
            {"precision": row.name, "rows": 1, "length": options.length, "nodes": count}
            | {"step_ms": row.pass_ms(place), "read_ms": row.bounds.reading, "sums_ms": row.bounds.computing * count}
            for row in rows
            if row.bounds is not None
            for place, count in enumerate(row.nodes)
        ]
        step.draw(points, f"random {options.size}, {facts['cpu']}", options.plot)


def main(options: Options) -> None:
    """Measure, and print the tables."""
    quiet_transformers()
    torch.set_num_threads(options.threads)
    facts = machine(options.threads)
    programs: dict[str, Program] = {}
    with folder_for_model(options, options.size) as folder:
        try:
            failed = start(options, options.size, folder, programs)
            if not programs:
                sys.exit("\n".join(f"error: {name}: {reason}" for name, reason in failed.items()))
            rows, bandwidths = measured(options, programs)
            bandwidth = statistics.median(bandwidths)
            for row, one in zip(rows, programs.values(), strict=True):
                facts |= one.versions
                if isinstance(one, DraftHeads):
                    row.bounds = bounds_of(one.target, options, bandwidth)
        finally:
            for one in programs.values():
                one.stop()
    write(options, facts, rows)
    shown = " to ".join(f"{one / 1e9:.1f}" for one in (min(bandwidths), bandwidth, max(bandwidths)))
    console = print_setting(
        facts,
        f"{shown} GB/s; random {options.size}, a text of {options.length} tokens, {options.rounds} rounds",
        "median (quartiles); with a head: predicted tokens/s (× plain, × the fastest type of llama.cpp)",
    )
    for table in tables(rows, options.tokens_per_step):
        console.print()
        console.print(table)
    for name, reason in failed.items():
        console.print(f"{name}: {reason}", markup=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the model is deleted then, too
    main(tyro.cli(Options, description=__doc__))
