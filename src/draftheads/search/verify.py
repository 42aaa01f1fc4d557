"""What a plan is worth on other prompts: beside plain decoding and fixed trees, and under a load that changes."""

import hashlib
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine, Prompt
from draftheads.decode.plain import NoDraft
from draftheads.decode.sequence import Sequence as Request
from draftheads.draft import Drafter
from draftheads.growth import Shape
from draftheads.heads.base import DraftHead
from draftheads.plan import Plan
from draftheads.sampling import SamplingSettings
from draftheads.search.cost import timed_answers
from draftheads.search.rehearsal import Display
from draftheads.search.tune import TuneSettings
from draftheads.search.workbook import Workbook
from draftheads.target.model import TargetModel
from draftheads.tree import Tree

FIXED_SIZES = (4, 8, 16, 32, 64)
# rank paths of the 63 guesses that Medusa's code comes with, found for Vicuna-7B and used untuned by others, too
PAPER_TREE = Tree.from_paths(
    [
        *((rank,) for rank in range(10)),
        *((0, rank) for rank in range(10)),
        *((1, rank) for rank in range(7)),
        *((2, rank) for rank in range(3)),
        *((3, rank) for rank in range(2)),
        *((rank, 0) for rank in range(4, 10)),
        *((0, 0, rank) for rank in range(10)),
        *((0, 1, rank) for rank in range(3)),
        *((0, 2, rank) for rank in range(2)),
        *((0, rank, 0) for rank in range(3, 8)),
        *((1, 0, rank) for rank in range(2)),
        (2, 0, 0),
        *((0, 0, 0, rank) for rank in range(2)),
    ]
)
PHASES = (1, 4, 16, 4, 1)  # requests that are answered together, one load after the other
_LEAST_TURNS = 4  # in which each way answers some prompts
_WARM_UP = 8  # tokens of answers that are not timed
_PHASE_PROMPTS = 8  # at least, in each phase

Build = Callable[[int], Engine]  # an engine for a batch size


@dataclass(frozen=True)
class Row:
    """How one way did with so many requests at a time."""

    batch_size: int
    way: str
    tokens_per_second: float
    tokens_per_step: float
    predicted_tokens_per_step: float | None
    speedup: float  # over plain decoding
    error: float  # one standard error of that, from turn to turn


@dataclass(frozen=True)
class Prediction:
    """Tokens per step of one tree on all the prompts."""

    way: str
    predicted: float
    error: float  # one standard error of the prediction
    measured: float


@dataclass(frozen=True)
class Phase:
    """How one way did in one phase of a load that changes."""

    phase: int
    batch_size: int
    way: str
    tokens_per_second: float


@dataclass(frozen=True)
class Verified:
    """Everything that was compared."""

    num_prompts: int
    rows: list[Row]
    predictions: list[Prediction]
    mixed_load: list[Phase]


class Verifier:
    """Compares ways of decoding.

    Args:
        target: the model.
        head: the head that the plan is for.
        plan: tuned.
        record: what the plan was made from.
        prompts: others than those that the plan was made from.
        num_speed_prompts: how many of them are timed, at least.
        settings: those of the search.
        book: for findings on the way.
        display: who shows how far it is.
    """

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead,
        plan: Plan,
        record: dict[str, Any],
        prompts: Sequence[Prompt],
        *,
        num_speed_prompts: int,
        settings: TuneSettings,
        book: Workbook,
        display: Display,
    ) -> None:
        assert plan.tuned is not None
        self.target, self.head, self.tuned, self.record = target, head, plan.tuned, record
        self.settings, self.book, self.display = settings, book, display
        self.num_speed_prompts = num_speed_prompts
        engine = Engine(target)
        self.prompts = [engine.encode(prompt) for prompt in prompts]
        paper = [path for path in PAPER_TREE.paths if path and len(path) <= head.config.num_heads]
        self.digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:8]  # other prompts, other findings
        self.paper = Tree.from_paths(path for path in paper if max(path) < head.config.num_draft_tokens)

    def run(self) -> Verified:
        """All comparisons."""
        rows = []
        for batch_size in self.settings.batch_sizes:
            ways = self._ways(batch_size)
            self.display.stage(f"comparing {len(ways)} ways on other prompts, {batch_size} at a time", 1)
            rows += self.book.get(
                f"compared-{self.digest}-{self.num_speed_prompts}-{batch_size}",
                partial(self._compared, ways, batch_size),
            )
        self.display.stage(f"tokens per step on {len(self.prompts)} other prompts", 1)
        predictions = self.book.get(f"predictions-{self.digest}", lambda: list(self._predictions()))
        self.display.stage("comparing under a load that changes", 1)
        phases = self.book.get(f"mixed-load-{self.digest}", lambda: list(self._mixed_load()))
        return Verified(
            len(self.prompts),
            [Row(**row) for row in rows],
            [Prediction(**row) for row in predictions],
            [Phase(**row) for row in phases],
        )

    def _samplings(self, count: int) -> list[SamplingSettings]:
        """Every answer draws numbers of its own, others than the search drew."""
        one = SamplingSettings(max_new_tokens=self.settings.max_new_tokens, temperature=self.settings.temperature)
        return [replace(one, seed=(1 << 31) + number) for number in range(count)]  # 32 bits of a seed count

    def _of_all_lengths(self, count: int) -> list[SamplingSettings]:
        """Answers of a quarter to three quarters of the usual length.

        If all ended in the same step, plain decoding would read the next prompts together and leave no row idle, which
        is not what happens where requests come and go.
        """
        usual = self.settings.max_new_tokens
        lengths = [usual // 4 + usual * ((7 * number) % 16) // 30 for number in range(count)]
        samplings = self._samplings(count)
        return [replace(one, max_new_tokens=max(2, length)) for one, length in zip(samplings, lengths, strict=True)]

    def _fixed(self, shape: Shape, batch_size: int) -> Engine:
        return Engine(self.target, self._shaped(shape), max_batch_size=batch_size)

    def _shaped(self, shape: Shape) -> DraftHead:
        """The head, always drafting in that shape."""
        head = self.head.fresh()
        head.shape = shape
        return head

    def _planned(self, batch_size: int, *, adaptive: bool) -> Engine:
        return Engine(self.target, self.head, max_batch_size=batch_size, tuned=self.tuned, adaptive=adaptive)

    def _ways(self, batch_size: int) -> dict[str, Build]:
        """By name; growing trees at the first batch size only, where tokens per step are compared."""
        tuned = self.tuned
        first = batch_size == self.settings.batch_sizes[0]
        static = [size for size in FIXED_SIZES if size <= len(tuned.static_tokens)]
        growing = [size for size in FIXED_SIZES[:3] if size <= len(tuned.dynamic_tokens)] if first else []
        return {
            "plain": lambda size: Engine(self.target, max_batch_size=size),
            "plan": partial(self._planned, adaptive=True),
            "plan, not adaptive": partial(self._planned, adaptive=False),
            **{f"static {size}": partial(self._fixed, tuned.tree(size)) for size in static},
            **{f"dynamic {size}": partial(self._fixed, tuned.growing(size)) for size in growing},
            f"paper {self.paper.num_nodes}": partial(self._fixed, self.paper),
        }

    def _compared(self, ways: dict[str, Build], batch_size: int) -> list[dict[str, Any]]:
        """All ways answer the same few prompts in turn, then the next ones in the opposite order, and so on.

        What else a machine does comes and goes by the minute: ways are compared within one.
        """
        count = max(2, self.num_speed_prompts, _LEAST_TURNS * batch_size)
        prompts = self.prompts[:count]
        size = min(batch_size, -(-len(prompts) // 2))  # two turns at least
        turns = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        lengths = self._of_all_lengths(len(prompts))
        for build in ways.values():  # the first steps of a size are slower
            warm_up = replace(self._samplings(1)[0], max_new_tokens=_WARM_UP)
            timed_answers(build(batch_size), prompts[:batch_size], [warm_up] * len(prompts[:batch_size]))
        engines = {name: build(batch_size) for name, build in ways.items()}
        done: dict[str, list[tuple[int, int, float]]] = {name: [] for name in ways}
        for number, turn in enumerate(turns):
            own = lengths[number * size :][: len(turn)]
            for name in reversed(ways) if number % 2 else ways:
                done[name].append(timed_answers(engines[name], turn, own))
        rows = []
        for name, timed in done.items():
            tokens, steps, seconds = (math.fsum(column) for column in zip(*timed, strict=True))
            ratios = [
                (own[0] / own[2]) / (other[0] / other[2]) for own, other in zip(timed, done["plain"], strict=True)
            ]
            plain = sum(one[0] for one in done["plain"]) / sum(one[2] for one in done["plain"])
            rows.append(
                Row(
                    batch_size,
                    name,
                    tokens_per_second=tokens / seconds,
                    tokens_per_step=(tokens - len(prompts)) / steps if steps else 1.0,
                    predicted_tokens_per_step=self._predicted(name)[0],
                    speedup=tokens / seconds / plain,
                    error=statistics.stdev(ratios) / len(ratios) ** 0.5,
                )
            )
        return [asdict(row) for row in rows]

    def _predicted(self, name: str) -> tuple[float | None, float]:
        """Tokens per step that calibration promised, and one standard error."""
        kind, _, size = name.partition(" ")
        if kind not in ("static", "dynamic"):
            return (1.0 if name == "plain" else None), 0.0
        found = self.record[kind]
        return found["expected"][int(size) - 1], found["error"][int(size) - 1]

    def _predictions(self) -> Iterator[dict[str, Any]]:
        """Trees of the sizes that were chosen, and some others, on all prompts and whole answers."""
        chosen = {(choice.kind, choice.num_nodes) for choice in self.tuned.choices if choice.kind != "none"}
        chosen |= {(kind, size) for kind in ("static", "dynamic") for size in FIXED_SIZES[:3]}
        for kind, size in sorted(chosen):
            if size > len(self.tuned.tokens(kind)):
                continue
            shape = self.tuned.tree(size) if kind == "static" else self.tuned.growing(size)
            engine = self._fixed(shape, min(8, self.settings.batch_sizes[-1]))
            tokens, steps, _ = timed_answers(engine, self.prompts, self._samplings(len(self.prompts)))
            predicted, error = self._predicted(f"{kind} {size}")
            assert predicted is not None
            measured = (tokens - len(self.prompts)) / steps if steps else 1.0
            yield asdict(Prediction(f"{kind} {size}", predicted, error, measured))

    def _mixed_load(self) -> Iterator[dict[str, Any]]:
        """Each way has one batch, which lives through all phases, twice; the ways take turns in each phase."""
        batches = {name: Batch(self.target, build()) for name, build in self._mixed_ways().items()}
        sums: dict[tuple[int, str], tuple[int, float]] = {}
        for turn in (1, -1):
            for phase, batch_size in enumerate(PHASES):
                for name in list(batches)[::turn]:
                    tokens, seconds = self._phase(batches[name], phase, batch_size)
                    before = sums.get((phase, name), (0, 0.0))
                    sums[phase, name] = (before[0] + tokens, before[1] + seconds)
        for (phase, name), (tokens, seconds) in sorted(sums.items()):
            yield asdict(Phase(phase, PHASES[phase], name, tokens / seconds))

    def _mixed_ways(self) -> dict[str, Callable[[], Drafter]]:
        """The adaptive plan, and every setting that was chosen for some number of rows, held fast; and two more."""
        chosen = {(choice.kind, choice.num_nodes) for choice in self.tuned.choices if choice.kind != "none"}
        chosen |= {("static", size) for size in (4, 8) if size <= len(self.tuned.static_tokens)}
        shapes = {
            f"{kind} {size}": self.tuned.tree(size) if kind == "static" else self.tuned.growing(size)
            for kind, size in sorted(chosen)
        }
        return {
            "plain": NoDraft,
            "plan": self._planned(1, adaptive=True).paced,
            **{name: partial(self._shaped, shape) for name, shape in shapes.items()},
        }

    def _phase(self, batch: Batch, phase: int, batch_size: int) -> tuple[int, float]:
        """Answers some prompts, so many at a time; tokens and seconds."""
        count = max(_PHASE_PROMPTS, batch_size)
        prompts = [self.prompts[(phase * count + i) % len(self.prompts)] for i in range(count)]
        lengths = self._of_all_lengths(len(prompts))
        requests = Engine(self.target).sequences([list(prompt) for prompt in prompts], lengths)
        line: deque[Request] = deque(requests)
        tokens, start = 0, time.perf_counter()
        while line or batch.sequences:
            joining = [line.popleft() for _ in range(min(batch_size - len(batch.sequences), len(line)))]
            events = batch.join(joining) if joining else []
            events += batch.step() if batch.sequences else []
            tokens += sum(len(event.token_ids) for event in events)
        return tokens, time.perf_counter() - start
