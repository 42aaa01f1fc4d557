"""From a head to the plan that makes it fast on this machine: calibrate, grow, measure, choose.

The steps are apart and each leaves what it found in a :class:`Workbook`, so a search that was stopped goes on.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftheads.decode.engine import Engine, Prompt
from draftheads.errors import DataError, InvalidSettings
from draftheads.growth import BestFirst
from draftheads.heads.base import DraftHead
from draftheads.plan import Choice, Conditions, Cost, Kind, Plan, Tuned
from draftheads.sampling import SamplingSettings
from draftheads.search.calibrate import Answer, Observation, fit_confidence, observe, reliability, replay
from draftheads.search.cost import StepBench, Way, mean_costs, measure_speeds
from draftheads.search.grow import entries, joint_order, marginal_order, path_counts, path_shares, simulate
from draftheads.search.workbook import Workbook
from draftheads.target.model import TargetModel
from draftheads.tree import Path as RankPath
from draftheads.tree import Tree

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 100)  # where costs are measured to begin with
_SEARCH = 3  # a search that finds otherwise gets another number: what an older one found is then found anew
_ANSWERS_AT_ONCE = 16
_ROWS_AT_ONCE = 64  # answers that growing trees are tried on side by side
_HOPELESS = 0.65  # of the best speed so far: larger trees are not measured
_WORTHWHILE = 1.03  # times plain decoding's speed, or there is no speculation
_MOST_DENSE = 100  # dense trees that are shown
_BUSY_ROWS = 6  # at least so many answers are timed in all


@dataclass(frozen=True)
class TuneSettings:
    """What is searched for, and how carefully."""

    num_prompts: int = 64
    """Prompts that the head is calibrated on."""
    max_new_tokens: int = 128
    """Tokens of each answer to them."""
    temperature: float = 0.0
    """The temperature that the plan is for; above 0 the model's probabilities count, not its single choice."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of requests decoded together, each with its plan."""
    max_nodes: int = 100
    """The largest tree that is looked at, root included."""
    num_ranks: int = 10
    """How many guesses of each head are looked at."""
    beam: int = 6
    """In growing trees: guesses of a depth that go on, for heads that read the guesses above them."""
    rounds: int = 4
    """How often the best ways are timed on whole answers, in turn."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "max_nodes", "num_ranks", "beam", "rounds"):
            least = 2 if name in ("num_prompts", "max_nodes", "max_new_tokens") else 1
            if getattr(self, name) < least:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be at least {least}")
        sizes = list(self.batch_sizes)
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise InvalidSettings(f"batch_sizes are {sizes}; they must be at least 1 and ascend")


class Display(Protocol):
    """Who shows how far a search is."""

    def stage(self, what: str, total: int) -> None:
        """Something new begins, in that many pieces."""

    def advance(self) -> None:
        """A piece is done."""


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
        engine = Engine(target)
        self.prompts = [engine.encode(prompt) for prompt in prompts[: settings.num_prompts]]
        if len(self.prompts) < 2:
            raise DataError(f"{len(self.prompts)} prompts to calibrate on: give at least 2, better 50")
        self.num_ranks = min(settings.num_ranks, head.config.num_draft_tokens)
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
        answers = self._answers()
        found = self.book.get("calibration", lambda: self._calibrate(answers))
        self.head.confidence = tuple(found["confidence"]["temperatures"])
        costs = [Cost(**cost) for size in self.settings.batch_sizes for cost in self._costs(size, answers, found)]
        runs = [speed for size in self.settings.batch_sizes for speed in self._speeds(size, found, costs)]
        return self._outcome(found, costs, runs)

    def _answers(self) -> list[Answer]:
        """The model's own, a few at a time."""
        engine = Engine(self.target, max_batch_size=_ANSWERS_AT_ONCE)
        chunks = [self.prompts[i : i + _ANSWERS_AT_ONCE] for i in range(0, len(self.prompts), _ANSWERS_AT_ONCE)]
        self.display.stage(f"answering {len(self.prompts)} prompts", len(chunks))
        answers = []
        for number, chunk in enumerate(chunks):
            first = number * _ANSWERS_AT_ONCE
            said = self.book.get(f"answers-{number:03}", partial(self._said, engine, chunk, first))
            answers += [Answer(tuple(prompt), tuple(ids)) for prompt, ids in zip(chunk, said, strict=True)]
            self.display.advance()
        answers = [answer for answer in answers if len(answer.token_ids) > 1]
        if len(answers) < 2:
            raise DataError(f"{self.target.model_id} ends its answers at once: there is nothing to calibrate on")
        return answers

    def _said(self, engine: Engine, prompts: Sequence[list[int]], first: int) -> list[tuple[int, ...]]:
        results = engine.generate(prompts, self._samplings(len(prompts), first))
        return [result.token_ids for result in results]

    def _samplings(self, count: int, first: int = 0) -> list[SamplingSettings]:
        """Every answer draws numbers of its own."""
        one = SamplingSettings(max_new_tokens=self.settings.max_new_tokens, temperature=self.settings.temperature)
        return [replace(one, seed=first + number) for number in range(count)]

    def _calibrate(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Ranks, trees and what they promise."""
        self.display.stage("asking the heads along the answers", 2 * len(answers))
        seen, hidden, prompts = [], [], []
        for answer in answers:
            observation, states = observe(
                self.head, self.target, answer, num_ranks=self.num_ranks, temperature=self.settings.temperature
            )
            seen.append(observation)
            hidden.append(states)
            prompts.append(self._history(answer))
            self.display.advance()
        confidence = fit_confidence(seen, self.num_ranks)
        found = self._grow(seen)
        ones = [1.0] * len(confidence)
        found["confidence"] = {
            "temperatures": confidence,
            "before": reliability(seen, ones, self.num_ranks),
            "after": reliability(seen, confidence, self.num_ranks),
        }
        self.head.confidence = tuple(confidence)
        found["dynamic"] = self._dynamic(answers, hidden, prompts)
        found["num_tokens"] = sum(len(answer.token_ids) for answer in answers)
        return found

    def _history(self, answer: Answer) -> Tensor:
        """Hidden states of the prompt, for heads that read them."""
        if not self.head.needs_history:
            return torch.empty(0)
        return self.target.hidden_states(torch.tensor([answer.prompt_ids], device=self.target.device))[0]

    def _grow(self, seen: Sequence[Observation]) -> dict[str, Any]:
        """Trees of all sizes from all answers; what they promise from growing on one half and judging by the other."""
        count = self.settings.max_nodes
        accuracy = marginal_accuracy(seen)
        values = self._values(seen)
        joint = joint_order(values, count)
        halves = [seen[0::2], seen[1::2]]
        orders = [
            (joint_order(self._values(half), count), marginal_order(marginal_accuracy(half), count)) for half in halves
        ]
        pairs = [(halves[0], orders[1]), (halves[1], orders[0])]  # each half with what grew on the other
        by_joint, by_marginal = (
            [entries(one.ranks, order[way]) for half, order in pairs for one in half] for way in (0, 1)
        )
        num_nodes = len(joint) + 1
        return {
            "accuracy": accuracy,
            "static": {
                "paths": [list(path) for path in joint],
                "shares": [1.0, *(values[path] for path in joint)],
                **_promises(by_joint, num_nodes),
            },
            "marginal": _promises(by_marginal, num_nodes),
            "dense": list(self._dense(seen)),
        }

    def _values(self, seen: Sequence[Observation]) -> dict[RankPath, float]:
        """Of each path, how often it is kept."""
        used = torch.cat([one.complete for one in seen])
        if not used.any():  # answers shorter than the heads reach
            used = torch.ones_like(used)
        ranks = torch.cat([one.ranks for one in seen])[used]
        if self.settings.temperature > 0:
            return path_shares(ranks, torch.cat([one.probs for one in seen])[used])
        return {path: n / len(ranks) for path, n in path_counts(ranks, num_ranks=self.num_ranks).items()}

    def _dense(self, seen: Sequence[Observation]) -> Iterator[dict[str, Any]]:
        """Full trees whose widths do not grow with depth."""
        every = dense_widths(self.head.config.num_heads, self.num_ranks, self.settings.max_nodes)
        for widths in every[:: 1 + len(every) // _MOST_DENSE]:
            tree = Tree.cartesian(widths)
            width = torch.tensor([*widths, *[0] * (self.head.config.num_heads - len(widths))])
            texts = [2 - (one.ranks < width).long().cumprod(1) for one in seen]  # 1 where it is kept, else 2
            yield {
                "widths": list(widths),
                "num_nodes": tree.num_nodes,
                "expected": simulate(texts, 1)[0],
            }

    def _dynamic(
        self, answers: Sequence[Answer], hidden: Sequence[Tensor], prompts: Sequence[Tensor]
    ) -> dict[str, Any]:
        """What growing trees promise, and how sure of whole paths one may be."""
        count = self._most_grown()
        shape = BestFirst(count, num_ranks=self.num_ranks, beam=self.settings.beam)
        texts: list[Tensor] = []
        bins: list[list[float]] = []
        for start in range(0, len(answers), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            kept, sure = replay(self.head, shape, answers[rows], hidden[rows], prompts[rows])
            texts += kept
            bins += sure
            for _ in answers[rows]:
                self.display.advance()
        return {**_promises(texts, count), "reliability": _together(bins)}

    def _most_grown(self) -> int:
        """Nodes that a growing tree can have."""
        found = level = 1
        for _ in range(self.head.config.num_heads):
            level = (min(level, self.settings.beam) if self.head.reads_path else level) * self.num_ranks
            found += level
        return min(self.settings.max_nodes, found)

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
                    settings=self._samplings(len(self.prompts)),
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


def marginal_accuracy(seen: Sequence[Observation]) -> list[list[float]]:
    """(K, R): how often each guess of each head is right, whatever the others do, where there is something to guess."""
    length = [torch.arange(len(one.ranks)) for one in seen]
    heads = seen[0].ranks.shape[1]
    found = []
    for i in range(heads):
        probs = torch.cat(
            [one.probs[: max(0, len(places) - 1 - i), i] for one, places in zip(seen, length, strict=True)]
        )
        found.append(probs.double().mean(0).nan_to_num(0.0).tolist())
    return found


def dense_widths(depth: int, widest: int, max_nodes: int) -> list[tuple[int, ...]]:
    """Widths of full trees of at most that many nodes, none growing with depth, small trees first.

    >>> dense_widths(2, 3, 8)
    [(1,), (2,), (1, 1), (3,), (2, 1), (2, 2), (3, 1)]
    """
    found: list[tuple[int, tuple[int, ...]]] = []

    def extend(widths: tuple[int, ...], nodes: int, level: int) -> None:
        for width in range(1, min(widest, *widths[-1:], widest) + 1):
            total = nodes + level * width
            if total <= max_nodes and len(widths) < depth:
                found.append((total, (*widths, width)))
                extend((*widths, width), total, level * width)

    extend((), 1, 1)
    return [widths for _, widths in sorted(found, key=lambda item: (item[0], len(item[1]), item[1]))]


def _together(bins: Sequence[Sequence[float]]) -> list[list[float]]:
    """Bins of [mean probability, share, count] of several groups as those of all, by probability in twelfths.

    >>> _together([[0.25, 0.0, 1.0], [0.75, 1.0, 2.0], [0.25, 0.5, 3.0]])
    [[0.25, 0.375, 4.0], [0.75, 1.0, 2.0]]
    """
    sums: dict[int, list[float]] = {}
    for said, right, count in bins:
        one = sums.setdefault(min(int(said * 12), 11), [0.0, 0.0, 0.0])
        one[:] = [one[0] + said * count, one[1] + right * count, one[2] + count]
    return [[said / count, right / count, count] for _, (said, right, count) in sorted(sums.items())]


def _promises(texts: Sequence[Tensor], count: int) -> dict[str, list[float]]:
    """Tokens per step and one standard error, of trees of 1 … count nodes."""
    found = [simulate(texts, size) for size in range(1, count + 1)]
    return {"expected": [ratio for ratio, _ in found], "error": [error for _, error in found]}
