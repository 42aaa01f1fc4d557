"""From a head to the plan that makes it fast on this machine: calibrate, grow, measure, choose.

The steps are apart and each leaves what it found in a :class:`Workbook`, so a search that was stopped goes on.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from draftheads.decode.engine import Prompt
from draftheads.errors import InvalidSettings
from draftheads.growth import BestFirst
from draftheads.heads.base import DraftHead
from draftheads.plan import Choice, Conditions, Cost, Kind, Plan, Tuned
from draftheads.search.calibrate import Answer
from draftheads.search.cost import StepBench, Way, mean_costs, measure_speeds
from draftheads.search.rehearsal import Display, Rehearsal, RehearsalSettings, encoded, own_answers, samplings
from draftheads.search.workbook import Workbook
from draftheads.target.model import TargetModel
from draftheads.tree import Tree

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 100)  # where costs are measured to begin with
_SEARCH = 3  # a search that finds otherwise gets another number: what an older one found is then found anew
_HOPELESS = 0.65  # of the best speed so far: larger trees are not measured
_WORTHWHILE = 1.03  # times plain decoding's speed, or there is no speculation
_BUSY_ROWS = 6  # at least so many answers are timed in all


@dataclass(frozen=True)
class TuneSettings(RehearsalSettings):
    """What is searched for, and how carefully."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of requests decoded together, each with its plan."""
    rounds: int = 4
    """How often the best ways are timed on whole answers, in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 1:
            raise InvalidSettings(f"rounds is {self.rounds}; it must be at least 1")
        sizes = list(self.batch_sizes)
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise InvalidSettings(f"batch_sizes are {sizes}; they must be at least 1 and ascend")


@dataclass(frozen=True)
class Outcome:
    """What a search found."""

    plan: Plan
    record: dict[str, Any]  # everything behind it, as ``tune.json`` holds it


class Tuner:
    """A search for one head on one machine.

    Args:
        target: the model.
        head: bound to it.
        prompts: to calibrate on; the first ``num_prompts`` are used.
        settings: of the search.
        conditions: what it will hold for.
        command: that does it again.
        folder: for findings on the way.
        anew: whether a search that is finished is made once more; else what it found is used.
        display: who shows how far it is.
    """

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead,
        prompts: Sequence[Prompt],
        settings: TuneSettings,
        *,
        conditions: Conditions,
        command: str,
        folder: Path,
        display: Display,
        anew: bool = True,
    ) -> None:
        self.target, self.head, self.settings = target, head, settings
        self.conditions, self.command, self.display = conditions, command, display
        self.prompts = encoded(target, prompts, settings)
        self.rehearsal = Rehearsal(target, head, settings, display=display)
        self.num_ranks = self.rehearsal.num_ranks
        self.book = Workbook(
            folder,
            {
                "search": _SEARCH,
                "settings": asdict(settings),
                "conditions": asdict(conditions),
                "model": target.model_id,
                "prompts": self.prompts,
            },
            anew=anew,
        )

    def run(self) -> Outcome:
        """Everything, from the first answer to the plan."""
        answers = self.answers()
        found = self.book.get("calibration", lambda: self.rehearsal.run(answers))
        self.head.confidence = tuple(found["confidence"]["temperatures"])
        costs = [Cost(**cost) for size in self.settings.batch_sizes for cost in self._costs(size, answers, found)]
        runs = [speed for size in self.settings.batch_sizes for speed in self._speeds(size, found, costs)]
        return self._outcome(found, costs, runs)

    def answers(self) -> list[Answer]:
        """What the model says to the prompts; the head is calibrated on it.

        Raises:
            DataError: it says hardly anything.
        """
        return own_answers(self.target, self.prompts, self.settings, book=self.book, display=self.display)

    def _way(self, kind: Kind, num_nodes: int, paths: Sequence[Sequence[int]]) -> Way:
        if kind == "none":
            return Way(kind, 1, None)
        if kind == "static":
            return Way(kind, num_nodes, Tree.from_paths(paths[: num_nodes - 1]))
        return Way(kind, num_nodes, BestFirst(num_nodes, num_ranks=self.num_ranks, beam=self.settings.beam))

    def _costs(self, batch_size: int, answers: Sequence[Answer], found: dict[str, Any]) -> list[dict[str, Any]]:
        """Of steps with trees of more and more nodes, until they are hopeless; then of the same ones backwards."""
        self.display.stage(f"timing steps of {batch_size} rows", 2)

        def find() -> list[dict[str, Any]]:
            tokens = expected(found)
            repeats = 6 if batch_size <= 2 else 4
            bench = StepBench(self.target, self.head, answers, batch_size)
            costs = [bench.measure(self._way("none", 1, []), repeats=repeats)]
            best = 0.0
            for size in SIZES:
                new = list(self._measured(bench, size, found, repeats))
                costs += new
                speeds = [batch_size * tokens[cost.kind][cost.num_nodes - 1] / cost.total for cost in new]
                best = max([best, *speeds])
                if not new or (size >= 8 and max(speeds) < _HOPELESS * best):
                    break
            self.display.advance()
            measured = sorted({cost.num_nodes for cost in costs if cost.num_nodes > 1})
            costs += self._between(bench, costs, found, batch_size, repeats)
            bench = StepBench(self.target, self.head, answers, batch_size)
            for size in reversed(measured):
                costs += self._measured(bench, size, found, repeats)
            costs.append(bench.measure(self._way("none", 1, []), repeats=repeats))
            return [asdict(cost) for cost in mean_costs(costs)]

        costs: list[dict[str, Any]] = self.book.get(f"costs-{batch_size}", find)
        self.display.advance()
        return costs

    def _measured(self, bench: StepBench, size: int, found: dict[str, Any], repeats: int) -> Iterator[Cost]:
        """Steps with the static and the growing tree of that size, where there are such."""
        for kind in ("static", "dynamic"):
            if size <= len(found[kind]["expected"]):
                yield bench.measure(self._way(kind, size, found["static"]["paths"]), repeats=repeats)

    def _between(
        self, bench: StepBench, costs: Sequence[Cost], found: dict[str, Any], batch_size: int, repeats: int
    ) -> list[Cost]:
        """Sizes next to the best one, so that it is not missed where costs rise by stairs."""
        tokens = expected(found)
        rows = [cost for cost in costs if cost.num_nodes > 1]
        if not rows:
            return []
        best = max(rows, key=lambda cost: tokens[cost.kind][cost.num_nodes - 1] / cost.total).num_nodes
        sizes = sorted({1, *(cost.num_nodes for cost in rows)})
        place = sizes.index(best)
        neighbours = [sizes[place - 1], *sizes[place + 1 : place + 2]]
        middles = {(best + other) // 2 for other in neighbours} - set(sizes)
        return [cost for size in sorted(middles) for cost in self._measured(bench, size, found, repeats)]

    def _speeds(self, batch_size: int, found: dict[str, Any], costs: Sequence[Cost]) -> list[dict[str, Any]]:
        """Whole answers with the ways that promise most, and without guesses."""
        tokens = expected(found)
        here = [cost for cost in costs if cost.batch_size == batch_size and cost.kind != "none"]
        promising = sorted(here, key=lambda cost: -tokens[cost.kind][cost.num_nodes - 1] / cost.total)
        picked = promising[:2]
        picked += [cost for cost in promising[2:] if cost.kind not in {one.kind for one in picked}][:1]
        ways = [self._way("none", 1, []), *(self._way(c.kind, c.num_nodes, found["static"]["paths"]) for c in picked)]
        rounds = self.settings.rounds
        self.display.stage(f"timing answers, {batch_size} at a time, in {len(ways)} ways", 1)
        speeds: list[dict[str, Any]] = self.book.get(
            f"speeds-{batch_size}",
            lambda: [
                asdict(speed)
                for speed in measure_speeds(
                    self.target,
                    self.head,
                    ways,
                    self.prompts,
                    batch_size=batch_size,
                    num_tokens=self.settings.max_new_tokens * max(_BUSY_ROWS, batch_size) // rounds,
                    settings=samplings(self.settings, len(self.prompts)),
                    rounds=rounds,
                )
            ],
        )
        self.display.advance()
        return speeds

    def _outcome(self, found: dict[str, Any], costs: list[Cost], runs: list[dict[str, Any]]) -> Outcome:
        static, dynamic = found["static"], found["dynamic"]
        batches = [choose(size, runs) for size in self.settings.batch_sizes]
        tuned = Tuned(
            command=self.command,
            conditions=self.conditions,
            temperature=self.settings.temperature,
            confidence=found["confidence"]["temperatures"],
            paths=static["paths"],
            static_tokens=list(accumulate(static["expected"], max)),
            dynamic_tokens=list(accumulate(dynamic["expected"], max)),
            num_ranks=self.num_ranks,
            beam=self.settings.beam,
            costs=costs,
            choices=[Choice(**{name: batch[name] for name in Choice.__dataclass_fields__}) for batch in batches],
        )
        first = self.settings.batch_sizes[0]
        sizes = [c for c in costs if c.batch_size == first and c.kind == "static"]
        best = max(sizes, key=lambda c: static["expected"][c.num_nodes - 1] / c.total, default=None)
        tree = tuned.tree(best.num_nodes if best else 1)
        measured = {
            "tokens_per_step": static["expected"][tree.num_nodes - 1],
            "num_texts": len(self.prompts),
            "temperature": self.settings.temperature,
        }
        record = {
            "format_version": 1,
            "method": self.head.config.method,
            "model_id": self.target.model_id,
            "dtype": self.conditions.dtype,
            "temperature": self.settings.temperature,
            "num_texts": len(self.prompts),
            **found,
            "cost": [asdict(cost) for cost in costs],
            "rates": list(self._rates(found, tuned)),
            "runs": runs,
            "batches": batches,
            "verified": None,
        }
        return Outcome(Plan(tree, measured, tuned), record)

    def _rates(self, found: dict[str, Any], tuned: Tuned) -> Iterator[dict[str, Any]]:
        """Tokens per second that are predicted, of every kind and size that was measured."""
        tokens = expected(found)
        for batch_size in self.settings.batch_sizes:
            for kind in ("static", "dynamic"):
                here = [cost for cost in tuned.costs if (cost.batch_size, cost.kind) == (batch_size, kind)]
                yield {
                    "batch_size": batch_size,
                    "kind": kind,
                    "num_nodes": [cost.num_nodes for cost in here],
                    "tokens_per_second": [batch_size * tokens[kind][cost.num_nodes - 1] / cost.total for cost in here],
                }
            largest = max((c.num_nodes for c in tuned.costs if c.batch_size == batch_size), default=1)
            dense = [tree for tree in found["dense"] if tree["num_nodes"] <= largest]
            yield {
                "batch_size": batch_size,
                "kind": "dense",
                "num_nodes": [tree["num_nodes"] for tree in dense],
                "tokens_per_second": [
                    batch_size * tree["expected"] / tuned.seconds("static", batch_size, tree["num_nodes"])
                    for tree in dense
                ],
            }


def expected(found: dict[str, Any]) -> dict[str, list[float]]:
    """Tokens per step by kind and size."""
    return {"none": [1.0], "static": found["static"]["expected"], "dynamic": found["dynamic"]["expected"]}


def choose(batch_size: int, runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The way that answered fastest with that many rows; plain decoding unless something is clearly faster."""
    here = [run for run in runs if run["batch_size"] == batch_size]
    speed = {id(run): math.fsum(run["tokens_per_second"]) / len(run["tokens_per_second"]) for run in here}
    plain = next(run for run in here if run["kind"] == "none")
    best = max(here, key=lambda run: speed[id(run)])
    # in each round, whose ways are timed within a minute
    is_clear = all(a > b for a, b in zip(best["tokens_per_second"], plain["tokens_per_second"], strict=True))
    if not is_clear or speed[id(best)] < _WORTHWHILE * speed[id(plain)]:
        best = plain
    return {
        "batch_size": batch_size,
        "kind": best["kind"],
        "num_nodes": best["num_nodes"],
        "tokens_per_second": speed[id(best)],
        "plain_tokens_per_second": speed[id(plain)],
        "speedup": speed[id(best)] / speed[id(plain)],
    }
