"""The tree that a drafter fills in a comparison, by its kind and its number of nodes."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from draftheads.bench.contenders import Contender
from draftheads.bench.settings import DRAWN, LOADED, BenchSettings, Variant
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Replay, own_answers
from draftheads.speculation.shapes import BestFirst, Sampled, Shape, in_words
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import saved_json


@dataclass(frozen=True)
class Chosen:
    """What a drafter drafts."""

    shape: Shape | None  # None: trees of its own
    words: str
    predicted: float | None = None  # tokens per step of greedy answers, by the search for the tree on other prompts


@dataclass
class TreeFinder:
    """Finds trees for the drafters of a comparison, and saves what takes long."""

    target: TargetModel
    prompts: Sequence[list[int]]  # token ids: trees are found on the model's greedy answers to them
    settings: BenchSettings  # of the comparison
    folder: Path  # where findings are saved; they are used again
    progress: Progress
    # of each head that was searched with: by depth and rank
    accuracy: dict[str, list[list[float]]] = field(default_factory=dict)

    def find(self, contender: Contender, variant: Variant) -> Chosen | None:
        """What a drafter with ``num_nodes`` nodes drafts; None if it cannot draft such trees, or not so drawn."""
        nodes, kind = variant.num_nodes or 0, variant.tree
        if not contender.drafter.fills_shapes:
            return self._own(contender, variant)
        if variant.acceptance in DRAWN:
            return self._drawn(contender, variant)
        if kind == "paths":
            return self._paths(contender, nodes)
        if kind in ("chain", "dense"):
            depth = min(contender.drafter.max_depth, nodes - 1)
            return _chosen(Tree.chain(depth) if kind == "chain" else dense_tree(nodes, depth=depth))
        return self._searched(contender, kind, nodes)

    def _own(self, contender: Contender, variant: Variant) -> Chosen | None:
        """Trees of the drafter itself, which have no kinds: they are measured once."""
        first = next(tree for tree in self.settings.trees if tree not in LOADED)
        if variant.tree != first or variant.acceptance in DRAWN:
            return None
        return Chosen(None, f"its own, up to {contender.sized(variant.num_nodes).default_shape.num_nodes}")

    def _drawn(self, contender: Contender, variant: Variant) -> Chosen | None:
        """Drafts of drawn tokens: rejection has the head's static tree or a chain, block verification a chain."""
        fitting = ("best", "chain") if variant.acceptance == "block" else ("best", "static", "chain")
        if variant.tree not in fitting or not contender.draws:
            return None
        nodes = variant.num_nodes or 0
        is_chain = variant.acceptance == "block" or variant.tree == "chain" or contender.head is None
        chain = Tree.chain(min(contender.drafter.max_depth, nodes - 1))
        return _chosen(Sampled(chain if is_chain else numbered(self._static(contender, nodes))))

    def _paths(self, contender: Contender, num_paths: int) -> Chosen | None:
        """A static tree with as many nodes as the most probable of 6 · 3 · 2 paths may have (MLP Speculator)."""
        widths, depth = (6, 3, 2), contender.drafter.max_depth
        if depth < len(widths) or num_paths > math.prod(widths):
            return None
        nodes = 1 + sum(min(math.prod(widths[: level + 1]), num_paths) for level in range(depth))
        return self._searched(contender, "static", nodes)

    def _searched(self, contender: Contender, kind: str, nodes: int) -> Chosen | None:
        """Trees by the accuracy of a head; other drafters only grow."""
        if contender.head is None:
            return _chosen(BestFirst(nodes)) if kind in ("best", "growing") else None
        found = self._replayed(contender, nodes)
        static, growing = found["static"], found["growing"]
        if kind == "growing" or (kind == "best" and growing >= static):
            temperatures = tuple(found["confidence"])
            shape = BestFirst(nodes, top_k=found["top_k"], beam=found["beam"], temperatures=temperatures)
            return Chosen(shape, f"growing, {min(nodes, found['most_grown'])}", growing)
        return _chosen(self._static(contender, nodes), static)

    def _static(self, contender: Contender, nodes: int) -> Tree:
        return Tree.from_paths(self._replayed(contender, nodes)["paths"])

    def _replayed(self, contender: Contender, nodes: int) -> dict[str, Any]:
        path = self.folder / f"tree-{contender.identity}-{nodes}.json"
        assert contender.head is not None
        found: dict[str, Any] = saved_json(path, partial(self._replay, contender.name, contender.head, nodes))
        self.accuracy[contender.name] = found["accuracy"]
        return found

    def _replay(self, name: str, head: DraftHead, nodes: int) -> dict[str, Any]:
        settings, folder = self.settings.replay(nodes), self.folder / "answers"
        answers = own_answers(self.target, self.prompts, settings, folder=folder, progress=self.progress)
        self.progress.stage(f"{name}: finding its tree of {nodes} nodes")
        replay = Replay(self.target, head, settings, progress=self.progress)
        found = replay.run(answers)
        return {
            "accuracy": found["accuracy"],
            "confidence": found["confidence"]["temperatures"],
            "top_k": replay.top_k,
            "beam": settings.beam,
            "paths": found["static"]["paths"],
            "static": found["static"]["expected"][-1],
            "growing": found["dynamic"]["expected"][-1],
            "most_grown": len(found["dynamic"]["expected"]),
        }


def _chosen(shape: Shape, predicted: float | None = None) -> Chosen:
    return Chosen(shape, in_words(shape), predicted)


def numbered(tree: Tree) -> Tree:
    """The tree in which the children of each node have the ranks 0, 1, 2 …, as drawn siblings have.

    >>> numbered(Tree.from_paths([(0,), (2,), (2, 1)])).paths
    ((), (0,), (1,), (1, 0))
    """
    new: dict[RankPath, RankPath] = {(): ()}
    num_children: dict[RankPath, int] = {}
    for path in tree.paths[1:]:  # parents come first, siblings by rank
        parent = path[:-1]
        rank = num_children[parent] = num_children.get(parent, -1) + 1
        new[path] = (*new[parent], rank)
    return Tree.from_paths(list(new.values())[1:])


def dense_tree(num_nodes: int, *, depth: int) -> Tree:
    """A full tree with random widths, as large as fits into ``num_nodes`` nodes (Medusa, figure 6).

    The same arguments give the same tree.

    >>> dense_tree(24, depth=4).num_nodes <= 24
    True
    """
    fitting: list[tuple[tuple[int, ...], int]] = []  # widths of all full trees, and their nodes

    def extend(widths: tuple[int, ...], last: int, left: int) -> None:
        """All ways to go on below ``last`` nodes, where ``left`` more are allowed."""
        if widths:
            fitting.append((widths, num_nodes - left))
        if len(widths) < depth:
            for width in range(1, left // last + 1):
                extend((*widths, width), last * width, left - last * width)

    extend((), 1, num_nodes - 1)
    largest = max(size for _, size in fitting)
    near = [widths for widths, size in fitting if size >= 0.9 * largest and len(widths) > 1]
    return Tree.cartesian(random.Random(num_nodes).choice(near or [fitting[0][0]]))  # noqa: S311 - no secret
