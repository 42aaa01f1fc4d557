"""``plan.json``: which tree a head drafts on; once it is tuned, which one pays at each batch size, on what machine.

Knows trees and numbers; knows nothing of models. Version 1 holds a tree and what it was chosen on; version 2 adds
``tuned``. These keys are public names.
"""

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from draftheads.errors import CheckpointCorrupt, InvalidTree
from draftheads.files import write_atomic
from draftheads.growth import BestFirst
from draftheads.strict_json import checked, read_dataclass, read_object
from draftheads.tree import Tree

PLAN_VERSION = 2
_LARGEST = 1 << 20  # rows or nodes
Part = Literal["draft", "verify", "rest", "total"]  # of a step
Kind = Literal["none", "static", "dynamic"]  # plain decoding, the same tree for all, a tree for each row and step


@dataclass(frozen=True)
class Conditions:
    """What measured speeds hold for."""

    processor: str
    device: str
    threads: int
    dtype: str
    kernels: str  # fast, stock or exact_bits
    torch: str
    transformers: str
    draftheads: str
    head: str  # a digest of its tensors

    def differences(self, other: Self) -> list[str]:
        """What is different there, in words: "threads 2, here 8"."""
        return [
            f"{f.name} {getattr(self, f.name)}, here {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True)
class Cost:
    """Median seconds of a step and of its parts."""

    batch_size: int
    kind: Kind
    num_nodes: int
    draft: float
    verify: float
    rest: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.draft + self.verify + self.rest


@dataclass(frozen=True)
class Choice:
    """What was fastest at a batch size, measured end to end."""

    batch_size: int
    kind: Kind
    num_nodes: int
    tokens_per_second: float
    speedup: float  # over plain decoding


@dataclass(frozen=True)
class Tuned:
    """What ``draftheads tune`` found.

    Raises:
        InvalidTree, ValueError: on construction, where the parts do not fit each other.
    """

    command: str  # that makes it anew
    conditions: Conditions
    temperature: float  # of the answers that it was tuned on
    confidence: list[float]  # per head, what its logits are divided by so that its probabilities mean what they say
    paths: list[list[int]]  # of the static trees: the tree of n nodes is the root and the first n-1 of them
    static_tokens: list[float]  # expected tokens per step of the static tree of 1, 2, … nodes
    dynamic_tokens: list[float]  # the same of trees that grow at each step; empty where there are none
    num_ranks: int  # of growing trees
    beam: int  # of growing trees
    costs: list[Cost]
    choices: list[Choice]  # by batch size, ascending

    def __post_init__(self) -> None:
        for num_nodes in range(len(self.paths) + 1):
            self.tree(num_nodes + 1)
        self.growing(1)
        sizes = [choice.batch_size for choice in self.choices]
        steps = [(cost.batch_size, cost.kind, cost.num_nodes) for cost in self.costs]
        parts = [part for cost in self.costs for part in (cost.draft, cost.verify, cost.rest)]
        largest = max(
            *(choice.batch_size for choice in self.choices),
            *(number for cost in self.costs for number in (cost.batch_size, cost.num_nodes)),
            0,
            0,
        )
        problems = {
            "numbers of rows and nodes must be of this world": largest > _LARGEST,
            "temperature must be at least 0": not 0 <= self.temperature < math.inf,
            "confidence must lie between 0.01 and 100": not self.confidence
            or not all(0.01 <= divisor <= 100 for divisor in self.confidence),
            "paths must not have the root": [] in self.paths,
            "static_tokens must have one number for each tree": len(self.static_tokens) != len(self.paths) + 1,
            "a step has at least one token": not all(
                1 <= tokens < math.inf for tokens in (*self.static_tokens, *self.dynamic_tokens)
            ),
            "choices: batch sizes must be there, be at least 1 and ascend": not sizes
            or sizes != sorted(set(sizes))
            or sizes[0] < 1,
            "costs must be positive": not all(0 <= part < math.inf for part in parts)
            or not all(cost.total > 0 for cost in self.costs),
            "costs are of at least one row and node": any(min(c.batch_size, c.num_nodes) < 1 for c in self.costs),
            "costs: steps without guesses have one node": any(
                cost.kind == "none" and cost.num_nodes != 1 for cost in self.costs
            ),
            "costs must have steps without guesses": not any(cost.kind == "none" for cost in self.costs),
            "costs must have each step once": len(steps) != len(set(steps)),
            "a choice needs measured steps of its kind": any(
                choice.kind not in {cost.kind for cost in self.costs} for choice in self.choices
            ),
            "a choice needs a tree of that many nodes": any(
                not 1 <= choice.num_nodes <= len(self.tokens(choice.kind)) for choice in self.choices
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(problem)

    def tree(self, num_nodes: int) -> Tree:
        """The static tree of that many nodes."""
        return _tree(tuple(map(tuple, self.paths[: num_nodes - 1])))

    def growing(self, num_nodes: int) -> BestFirst:
        """The rule of trees that grow at each step."""
        return BestFirst(num_nodes, num_ranks=self.num_ranks, beam=self.beam)

    def tokens(self, kind: Kind) -> Sequence[float]:
        """Expected tokens per step of trees of 1, 2, … nodes."""
        return {"none": [1.0], "static": self.static_tokens, "dynamic": self.dynamic_tokens}[kind]

    def choice(self, batch_size: int) -> Choice:
        """The choice of the measured batch size that is nearest, as a ratio, of the larger one of two; else none."""
        if not self.knows(batch_size):
            return Choice(batch_size, "none", 1, 0.0, 1.0)
        return min(reversed(self.choices), key=lambda choice: abs(math.log(choice.batch_size / batch_size)))

    def knows(self, batch_size: int) -> bool:
        """Whether about so many rows were measured. With many more none is guessed: the more rows, the less it pays."""
        return batch_size <= 2 * self.choices[-1].batch_size

    def sizes(self, kind: Kind) -> list[int]:
        """Numbers of nodes whose cost was measured, ascending."""
        return sorted({cost.num_nodes for cost in self.costs if cost.kind == kind})

    def seconds(self, kind: Kind, batch_size: int, num_nodes: int, part: Part = "total") -> float:
        """Seconds of a step, by straight lines between what was measured; beyond the largest batch in proportion."""
        largest = self.cost_batch_sizes[-1]
        if batch_size > largest:
            return self.seconds(kind, largest, num_nodes, part) * batch_size / largest
        points = [(size, self._at(kind, size, num_nodes, part)) for size in self.cost_batch_sizes]
        return _between([(size, seconds) for size, seconds in points if seconds is not None], batch_size)

    @cached_property
    def cost_batch_sizes(self) -> list[int]:
        """Batch sizes at which steps were measured, ascending."""
        return sorted({cost.batch_size for cost in self.costs})

    def _at(self, kind: Kind, batch_size: int, num_nodes: int, part: Part) -> float | None:
        found = self._points.get(("none" if num_nodes == 1 else kind, batch_size))
        return _between([(cost.num_nodes, getattr(cost, part)) for cost in found], num_nodes) if found else None

    @cached_property
    def _points(self) -> dict[tuple[str, int], list[Cost]]:
        points: dict[tuple[str, int], list[Cost]] = {}
        for cost in sorted(self.costs, key=lambda cost: cost.num_nodes):
            points.setdefault((cost.kind, cost.batch_size), []).append(cost)
        return points


@dataclass(frozen=True)
class Plan:
    """A head's ``plan.json``."""

    tree: Tree  # to draft on where nothing is tuned
    measured: dict[str, Any] = field(default_factory=dict)  # what that tree was chosen on
    tuned: Tuned | None = None

    def to_json(self) -> str:
        """What :func:`read_plan` reads; of version 1 unless it is tuned."""
        raw: dict[str, Any] = {
            "format_version": 1 if self.tuned is None else PLAN_VERSION,
            "tree": json.loads(self.tree.to_json()),
            "num_nodes": self.tree.num_nodes,
            "measured": self.measured,
        }
        return json.dumps(raw if self.tuned is None else {**raw, "tuned": asdict(self.tuned)}) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        write_atomic(path, self.to_json().encode())


def read_plan(path: str | PathLike[str]) -> Plan:
    """The plan in a file.

    Raises:
        CheckpointCorrupt: not a plan, or its parts do not fit each other.
        CheckpointMismatch: written by a newer version.
        InvalidTree: its paths form no tree.
    """
    path = Path(path)
    raw = {"measured": {}, **read_object(path, newest=PLAN_VERSION)}
    keys = {"format_version": int, "tree": list, "num_nodes": int, "measured": dict}
    checked(raw, keys if raw["format_version"] == 1 else {**keys, "tuned": dict}, path)
    try:
        tree = Tree.from_json(json.dumps(raw["tree"]))
        tuned = _read_tuned(raw["tuned"], path) if "tuned" in raw else None
    except InvalidTree as error:
        raise InvalidTree(f"{path}: {error}") from None
    if tree.num_nodes != raw["num_nodes"]:
        raise CheckpointCorrupt(
            f"{path}: num_nodes is {raw['num_nodes']} but the tree has {tree.num_nodes}, root included"
        )
    return Plan(tree, raw["measured"], tuned)


def _read_tuned(raw: dict[str, Any], path: Path) -> Tuned:
    parts: dict[str, Any] = {"conditions": dict, "costs": list, "choices": list}
    shallow = {
        "command": str,
        "temperature": float,
        "confidence": list[float],
        "paths": list[list[int]],
        "static_tokens": list[float],
        "dynamic_tokens": list[float],
        "num_ranks": int,
        "beam": int,
        **parts,
    }
    checked(raw, shallow, path, "tuned")
    values = {name: value for name, value in raw.items() if name not in parts}
    try:
        return Tuned(
            conditions=read_dataclass(Conditions, raw["conditions"], path, "tuned.conditions"),
            costs=[read_dataclass(Cost, item, path, f"tuned.costs[{i}]") for i, item in enumerate(raw["costs"])],
            choices=[
                read_dataclass(Choice, item, path, f"tuned.choices[{i}]") for i, item in enumerate(raw["choices"])
            ],
            **values,
        )
    except InvalidTree as error:
        raise InvalidTree(f"tuned: {error}") from None
    except (ValueError, OverflowError) as error:
        raise CheckpointCorrupt(f"{path}: tuned: {error}") from None


@lru_cache(maxsize=512)
def _tree(paths: tuple[tuple[int, ...], ...]) -> Tree:
    return Tree.from_paths(paths)


def _between(points: Sequence[tuple[int, float]], at: int) -> float:
    """The value at a place of the straight lines through (place, value) points; the last one goes on unless it falls.

    >>> _between([(1, 10.0), (3, 30.0)], 2), _between([(1, 10.0), (3, 30.0)], 4), _between([(2, 10.0)], 4)
    (20.0, 40.0, 10.0)
    """
    right = bisect.bisect_left(points, at, key=lambda point: point[0])
    if right == 0 or len(points) == 1:
        return points[0][1]
    right = min(right, len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    if at > x1:
        return max(y1, y0 + (y1 - y0) * (at - x0) / (x1 - x0))
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
