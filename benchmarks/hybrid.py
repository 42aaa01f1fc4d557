"""Hybrid models with random weights on a CPU, beside llama.cpp: plain decoding, passes over trees, prompts.

Most layers of a hybrid model are recurrent. All programs have the same weights and take turns, round by round. A draft
head's speed is predicted: passes and drafting are measured, tokens per step are assumed. Tables are Markdown.
"""

import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import big
import torch
import tyro
from harness import Ids, machine, say, write_record
from random_model import CONFIGS

from draftheads.cli.show import quiet_transformers
from draftheads.decode.step_costs import StepTimer

_PROMPTS, _PROMPT_TOKENS = 16, 12  # whose next tokens are compared
_HEAD_NODES, _HEAD_LEVELS = (4, 8), (3, 4)  # of trees that a head drafts
_DRAFTS = 4  # how often drafting is timed in a round; the least counts, as in the step costs of the library


@dataclass(frozen=True)
class Options(big.Measured):
    """What is measured, of which model."""

    size: Literal["qwen3.5-0.8b", "lfm2-1.2b", "granite-4-h-1b", "qwen3.5-tiny", "lfm2-tiny", "granite-4-h-tiny"] = (
        "qwen3.5-0.8b"
    )
    """Sizes of Qwen3.5-0.8B, LFM2-1.2B or Granite-4.0-H-1B. Those with tiny are for tests."""
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8", "int4")
    """Of draftheads. All are in memory together."""
    kinds: tuple[str, ...] = ("Q8_0", "Q4_0")
    """Types of llama.cpp, as llama-quantize makes them; BF16 is exact. None leaves llama.cpp out."""
    nodes: tuple[int, ...] = (2, 4, 8, 16)
    """Nodes of trees, or tokens of llama.cpp's batch. Passes of one node are measured, too."""
    max_new_tokens: int = 32
    """Tokens of plain decoding."""
    rounds: int = 2
    """How often everything is measured. Two take about six minutes on two quiet cores, by an estimate."""
    repeats: int = 3
    """Passes of each kind in a round; their median counts."""
    prompt: int = 1000
    """Tokens of a long prompt, read once in each round."""

    @property
    def all_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({1, *_HEAD_NODES, *self.nodes}))

    @property
    def longest(self) -> int:
        return max(super().longest, self.prompt + 8)


@dataclass
class Row:
    """What is known of a program; each list has a number for each round."""

    name: str
    megabytes: float  # of weights
    next_tokens: Ids  # the best ones behind a few prompts
    nodes: tuple[int, ...]  # of each pass; the first is 1
    speeds: list[float] = field(default_factory=list)  # plain tokens per second
    prompts: list[float] = field(default_factory=list)  # tokens per second of a long prompt
    passes: list[list[float]] = field(default_factory=list)  # milliseconds, by number of nodes
    drafts: list[list[float]] = field(default_factory=list)  # milliseconds of drafting, by levels; of ours

    def pass_ms(self, nodes: int) -> float:
        place = self.nodes.index(nodes)
        return statistics.median(each[place] for each in self.passes)

    def draft_ms(self, nodes: int) -> float:
        place = _HEAD_NODES.index(nodes)
        return statistics.median(each[place] for each in self.drafts)

    @property
    def loop_ms(self) -> float:
        """Of a step of plain decoding, what is not its pass."""
        return max(0.0, 1e3 / statistics.median(self.speeds) - self.pass_ms(1))

    def predicted(self, nodes: int, tokens_per_step: float) -> float:
        """Tokens per second with a draft head of which so many tokens come out of a step.

        >>> row = Row("ours", 100.0, [], (1, 4), [10.0], [200.0], [[90.0, 120.0]], [[20.0, 25.0]])
        >>> row.predicted(4, 3.0)  # 120 ms of the pass, 20 of drafting and 10 of the loop
        20.0
        """
        return 1e3 * tokens_per_step / (self.pass_ms(nodes) + self.draft_ms(nodes) + self.loop_ms)


def measure(row: Row, program: big.Program, timer: StepTimer | None, options: Options) -> None:
    """One round. A pass of ours is over a tree, with accepting and committing; llama.cpp's a batch with all logits."""
    text, prompt = (
        torch.randint(CONFIGS[options.size].vocab_size, (n,)).tolist() for n in (options.length, options.prompt)
    )
    if timer is None:
        speed, passes = program.measure(text)
    else:
        assert isinstance(program, big.DraftHeads)
        speed = program.speed(text)
        repeats = [[timer.verify(1, count) for count in row.nodes] for _ in range(options.repeats + 1)]
        passes = [statistics.median(each) for each in zip(*repeats[1:], strict=True)]  # the first one warms up
        row.drafts.append([min(timer.levels(1, depth) for _ in range(_DRAFTS)) for depth in _HEAD_LEVELS])
    row.speeds.append(speed)
    row.passes.append(passes)
    start = time.perf_counter()
    program.next_tokens([prompt])
    row.prompts.append(options.prompt / (time.perf_counter() - start))


def measured(options: Options, programs: dict[str, big.Program]) -> list[Row]:
    """All rounds, each of which begins with another program."""
    torch.manual_seed(0)
    prompts = torch.randint(CONFIGS[options.size].vocab_size, (_PROMPTS, _PROMPT_TOKENS)).tolist()
    rows: dict[str, Row] = {}
    timers: dict[str, StepTimer] = {}
    for name, one in programs.items():
        rows[name] = Row(name, one.megabytes, one.next_tokens(prompts), options.all_nodes)
        if isinstance(one, big.DraftHeads):
            timers[name] = big.timer_of(one.target)
            timers[name].length = options.length
    names = list(programs)
    for turn in range(options.rounds):
        say(f"round {turn + 1} of {options.rounds}")
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(big.PAUSE_SECONDS)
            measure(rows[name], programs[name], timers.get(name), options)
    return list(rows.values())


def shown(values: Sequence[float]) -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of Markdown; the first row has the headings."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    yield from (lines[0], "| --- " * len(rows[0]) + "|", *lines[1:], "")


def report(rows: Sequence[Row], options: Options) -> Iterator[str]:
    """What was measured, and what a head would bring."""
    nodes = options.all_nodes
    headings = [
        "",
        "weights, MB",
        "plain tokens/s",
        "prompt tokens/s",
        "pass of 1, ms",
        *(f"of {n}" for n in nodes[1:]),
    ]
    cells = [[*headings, f"next tokens as {rows[0].name}"]]
    for row in rows:
        ones = [each[0] for each in row.passes]
        times = [f"{row.pass_ms(count) / row.pass_ms(1):.2f}×" for count in nodes[1:]]
        same = sum(a == b for a, b in zip(row.next_tokens, rows[0].next_tokens, strict=True))
        numbers = [f"{row.megabytes:.0f}", shown(row.speeds), shown(row.prompts), shown(ones)]
        cells.append([row.name, *numbers, *times, f"{same} of {_PROMPTS}"])
    yield from table(cells)
    others = [row for row in rows if not row.drafts]
    speeds = (f"{accepted:g} tokens/step" for accepted in options.tokens_per_step)
    cells = [["with a head: tokens/s (× plain, × each of llama.cpp)", "nodes", "drafting, ms", "loop, ms", *speeds]]
    for row in rows:
        for count in _HEAD_NODES if row.drafts else ():
            predicted = [row.predicted(count, accepted) for accepted in options.tokens_per_step]
            bases = [statistics.median(one.speeds) for one in (row, *others)]
            ratios = (", ".join(f"{speed / base:.2f}×" for base in bases) for speed in predicted)
            told = [f"{speed:.1f} ({ratio})" for speed, ratio in zip(predicted, ratios, strict=True)]
            cells.append([row.name, str(count), f"{row.draft_ms(count):.1f}", f"{row.loop_ms:.1f}", *told])
    yield from table(cells)


@torch.inference_mode()
def main(options: Options) -> None:
    """Measure, and print the tables."""
    quiet_transformers()
    torch.set_num_threads(options.threads)
    facts: dict[str, Any] = machine(options.threads)
    programs: dict[str, big.Program] = {}
    with big.folder_for_model(options, options.size) as folder:
        try:
            failed = big.start(options, options.size, folder, programs)
            if not programs:
                sys.exit("\n".join(f"error: {name}: {reason}" for name, reason in failed.items()))
            rows = measured(options, programs)
            for one in programs.values():
                facts |= one.versions
        finally:
            for one in programs.values():
                one.stop()
    names = ("size", "length", "prompt", "max_new_tokens", "rounds", "repeats")
    write_record(options.json, facts, options, names, rows=[vars(row) for row in rows])
    print(
        f"{facts['cpu']} ({' '.join(facts['cpu_flags'])}), {facts['threads']} threads; random {options.size}, a text of"
    )
    print(f"{options.length} tokens, {options.max_new_tokens} new ones, a prompt of {options.prompt};")
    print(f"{options.rounds} rounds, the median (least–most)\n")
    print("\n".join(report(rows, options)))
    for name, reason in failed.items():
        print(f"{name}: {reason}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the model is deleted then, too
    main(tyro.cli(Options, description=__doc__))
