"""What a plan is worth on other prompts: beside plain decoding and fixed trees, and under a load that changes."""

import hashlib
import json
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
from draftheads.search.tune import Display, TuneSettings
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
        return [replace(one, seed=(1 << 32) + number) for number in range(count)]

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
        self.head.shape = shape
        return Engine(self.target, self.head, max_batch_size=batch_size)

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
        """Every way answers one half of the prompts, then in the opposite order the other half."""
        count = max(2, self.num_speed_prompts, 2 * batch_size)
        prompts = self.prompts[:count]
        for build in ways.values():  # the first steps of a size are slower
            warm_up = replace(self._samplings(1)[0], max_new_tokens=_WARM_UP)
            timed_answers(build(batch_size), prompts[:batch_size], [warm_up] * len(prompts[:batch_size]))
        middle = (len(prompts) + 1) // 2
        sums = dict.fromkeys(ways, (0, 0, 0.0))
        for half, names in ((prompts[:middle], list(ways)), (prompts[middle:], list(reversed(ways)))):
            for name in names if half else ():
                done = timed_answers(ways[name](batch_size), half, self._of_all_lengths(len(half)))
                sums[name] = (sums[name][0] + done[0], sums[name][1] + done[1], sums[name][2] + done[2])
        plain = sums["plain"][0] / sums["plain"][2]
        return [
            asdict(
                Row(
                    batch_size,
                    name,
                    tokens / seconds,
                    (tokens - len(prompts)) / steps if steps else 1.0,
                    self._predicted(name)[0],
                    tokens / seconds / plain,
                )
            )
            for name, (tokens, steps, seconds) in sums.items()
        ]

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
        """One batch lives through all phases; every way does so twice, the second time in the opposite order."""
        ways = self._mixed_ways()
        sums: dict[tuple[int, str], tuple[int, float]] = {}
        for names in (list(ways), list(reversed(ways))):
            for name in names:
                batch = Batch(self.target, ways[name]())
                for phase, batch_size in enumerate(PHASES):
                    tokens, seconds = self._phase(batch, phase, batch_size)
                    before = sums.get((phase, name), (0, 0.0))
                    sums[phase, name] = (before[0] + tokens, before[1] + seconds)
        for (phase, name), (tokens, seconds) in sorted(sums.items()):
            yield asdict(Phase(phase, PHASES[phase], name, tokens / seconds))

    def _mixed_ways(self) -> dict[str, Callable[[], Drafter]]:
        """The adaptive plan, and every setting that was chosen for some number of rows, held fast; and two more."""

        def fixed(shape: Shape) -> Drafter:
            self.head.shape = shape
            return self.head

        chosen = {(choice.kind, choice.num_nodes) for choice in self.tuned.choices if choice.kind != "none"}
        chosen |= {("static", size) for size in (4, 8) if size <= len(self.tuned.static_tokens)}
        shapes = {
            f"{kind} {size}": self.tuned.tree(size) if kind == "static" else self.tuned.growing(size)
            for kind, size in sorted(chosen)
        }
        return {
            "plain": NoDraft,
            "plan": self._planned(1, adaptive=True).paced,
            **{name: partial(fixed, shape) for name, shape in shapes.items()},
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
