"""What a step costs on this machine, by kind and size of tree and by rows, and how fast whole answers come.

Everything is measured in the decoding loop itself, on rows in the midst of recorded answers. Knows engines and heads;
knows nothing of what a tree is worth.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.plain import NoDraft
from draftheads.decode.sequence import Sequence as Request
from draftheads.draft import Context, Draft
from draftheads.growth import Shape
from draftheads.heads.base import DraftHead
from draftheads.plan import Cost, Kind
from draftheads.sampling import SamplingSettings
from draftheads.search.calibrate import Answer
from draftheads.target.model import TargetModel

_PARTS = ("draft", "verify", "rest")


@dataclass(frozen=True)
class Way:
    """Something to decode with: a kind of tree and its size."""

    kind: Kind
    num_nodes: int
    shape: Shape | None  # None for plain decoding


class Stopwatch:
    """Seconds of each part of a step; on an accelerator it waits for the work to be done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self._last = self.now

    def lap(self, part: str) -> None:
        """A part of it has ended."""
        now = self.now
        self.seconds[part], self._last = now - self._last, now

    @property
    def now(self) -> float:
        """Seconds of a clock, when all that was asked for is done."""
        wait_for(self.device)
        return time.perf_counter()


class StepBench:
    """Rows in the midst of answers, stepped with one way after the other.

    Args:
        target: the model.
        head: what drafts.
        answers: recorded ones; rows stand in the middle of them.
        batch_size: rows.
    """

    def __init__(self, target: TargetModel, head: DraftHead, answers: Sequence[Answer], batch_size: int) -> None:
        self.target = target
        self.head = head
        self.batch_size = batch_size
        self.watch = Stopwatch(target.device)
        texts = [answers[row % len(answers)] for row in range(batch_size)]
        self.halves = [[*text.prompt_ids, *text.token_ids[: len(text.token_ids) // 2]] for text in texts]
        self._begin()

    def _begin(self) -> None:
        self.batch = Batch(self.target, _Switch(self.head.fresh()), lap=self.watch.lap)
        self.batch.join(Engine(self.target).sequences(self.halves, max_new_tokens=1 << 20, ignore_eos=True))

    def measure(self, way: Way, *, repeats: int) -> Cost:
        """Median seconds of the parts of a step, after one that warms up."""
        seen: dict[str, list[float]] = {part: [] for part in _PARTS}
        for number in range(repeats + 1):
            if len(self.batch.sequences) < self.batch_size:  # some have come to the last position that the model knows
                self._begin()
            switch = self.batch.drafter
            assert isinstance(switch, _Switch)
            switch.guesses = way.shape is not None
            if way.shape is not None:
                switch.drafter.shape = way.shape
            self.watch.start()
            self.batch.step()
            if number:
                for part, seconds in self.watch.seconds.items():
                    seen[part].append(seconds)
        medians = {part: statistics.median(seconds) for part, seconds in seen.items()}
        return Cost(self.batch_size, way.kind, way.num_nodes, **medians)


class _Switch:
    """A drafter that can be switched off."""

    def __init__(self, drafter: DraftHead) -> None:
        self.drafter = drafter
        self.plain = NoDraft()
        self.guesses = True

    def fresh(self) -> Self:
        return type(self)(self.drafter.fresh())

    @property
    def needs_history(self) -> bool:
        return self.drafter.needs_history

    def propose(self, context: Context) -> Draft:
        if self.guesses:
            return self.drafter.propose(context)
        self.drafter.follow(context)
        return self.plain.propose(context)

    def follow(self, context: Context) -> None:
        self.drafter.follow(context)

    def keep(self, rows: Tensor) -> None:
        self.drafter.keep(rows)


def mean_costs(costs: Iterable[Cost]) -> list[Cost]:
    """Several measurements of the same steps as one each, in ascending order."""
    groups: dict[tuple[int, Kind, int], list[Cost]] = {}
    for cost in costs:
        groups.setdefault((cost.batch_size, cost.kind, cost.num_nodes), []).append(cost)
    means: list[Cost] = []
    for (batch_size, kind, num_nodes), group in sorted(groups.items()):
        draft, verify, rest = (statistics.fmean(getattr(cost, part) for cost in group) for part in _PARTS)
        means.append(Cost(batch_size, kind, num_nodes, draft, verify, rest))
    return means


@dataclass
class Speed:
    """How a way did on whole answers."""

    batch_size: int
    kind: Kind
    num_nodes: int
    tokens_per_second: list[float]  # of each round
    tokens_per_step: float


def measure_speeds(
    target: TargetModel,
    head: DraftHead,
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    num_tokens: int,
    settings: Sequence[SamplingSettings],
    rounds: int,
) -> list[Speed]:
    """All ways decode the same prompts, in turn, in several rounds; order and first prompt change from round to round.

    Args:
        target: the model.
        head: what drafts.
        ways: to compare.
        prompts: token ids; begun again when there are no more.
        batch_size: so many are always at work: what a server under load does. Their first reading is not timed.
        num_tokens: of all rows together, in a round.
        settings: of each answer.
        rounds: repetitions.
    """
    speeds = [Speed(batch_size, way.kind, way.num_nodes, [], 1.0) for way in ways]
    totals = [[0, 0] for _ in ways]  # tokens and steps of single rows
    for number in range(rounds):
        first = number * len(prompts) // rounds
        turns = list(zip(ways, speeds, totals, strict=True))
        for way, speed, total in reversed(turns) if number % 2 else turns:
            if way.shape is not None:
                head.shape = way.shape
            drafter = NoDraft() if way.shape is None else head.fresh()
            times = 1 + batch_size  # enough that no row is ever left alone
            turned = [list(prompt) for prompt in [*prompts[first:], *prompts[:first]]] * times
            line = Engine(target).sequences(turned, [*settings[first:], *settings[:first]] * times)
            tokens, steps, seconds = _busy(Batch(target, drafter), line, batch_size=batch_size, num_tokens=num_tokens)
            speed.tokens_per_second.append(tokens / seconds)
            total[0] += tokens
            total[1] += steps
            speed.tokens_per_step = total[0] / total[1]
    return speeds


def _busy(batch: Batch, line: Sequence[Request], *, batch_size: int, num_tokens: int) -> tuple[int, int, float]:
    """Tokens, steps of single rows, and seconds of decoding with all rows at work."""
    waiting = deque(line)
    first = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
    batch.join(first)
    wait_for(batch.target.model.device)
    tokens = steps = 0
    start = time.perf_counter()
    while tokens < num_tokens and batch.sequences:
        steps += len(batch.sequences)
        tokens += sum(len(event.token_ids) for event in batch.step())
        joining = [waiting.popleft() for _ in range(min(batch_size - len(batch.sequences), len(waiting)))]
        if joining:
            batch.join(joining)
    wait_for(batch.target.model.device)
    seconds = time.perf_counter() - start
    return tokens, max(steps, 1), seconds


def timed_answers(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingSettings]
) -> tuple[int, int, float]:
    """Answers all prompts, each by its settings; tokens, steps of single rows, and seconds, prompts included."""
    wait_for(engine.model.device)
    start = time.perf_counter()
    results = engine.generate([list(prompt) for prompt in prompts], settings)
    seconds = time.perf_counter() - start
    return sum(len(result.token_ids) for result in results), sum(result.num_steps for result in results), seconds


def wait_for(device: torch.device) -> None:
    """Until an accelerator has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
