"""What a comparison compares: drafters by the names that they have in the table, and the trees that they fill."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from draftheads.bench.settings import DRAWN, LOADED, BenchSettings, Variant
from draftheads.bench.timing import PLAIN
from draftheads.checkpoints.checkpoint import ResolvedHead, resolve_head
from draftheads.checkpoints.registry import zoo_heads
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import LOOKUP_TOKENS, Mixed
from draftheads.errors import CheckpointError, InvalidSettings, InvalidTree
from draftheads.heads.base import DraftHead
from draftheads.loading import engine_on, load_drafter, load_target, with_draft_model
from draftheads.models.model import TargetModel
from draftheads.models.model_names import base_of
from draftheads.search.replay import Replay, own_answers
from draftheads.settings import Precision
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import UNTRAINED_HEADS, BestFirst, Drafting, Sampled, Shape, in_words
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import identity_digest, saved_json

DRAFT_MODEL = "draft-model"
_USUAL_NODES = 30  # of lookahead; prompt lookup has fewer
# the untrained drafters, with trees of at most so many nodes
_WITHIN: dict[str, Callable[[int], Drafter]] = {
    "lookahead": Lookahead.within,
    "prompt-lookup": lambda num_nodes: Mixed(None, num_tokens=max(1, min(LOOKUP_TOKENS, num_nodes - 1))),
}


@dataclass(frozen=True)
class Contender:
    """A drafter with its name in the table."""

    name: str
    drafter: Drafter
    identity: str  # differs for other weights, another drafter, or another way of drafting
    num_parameters: int = 0  # of the drafter
    as_loaded: Callable[[bool], Engine | None] = lambda _: None  # by ``draftheads.load``, with copies or without
    head: DraftHead | None = None  # the drafter, where its best tree is to be found
    draws: bool = False  # whether drafts can be drawn from it
    within: Callable[[int], Drafter] | None = None  # the drafter with trees of its own of at most so many nodes

    def sized(self, num_nodes: int | None) -> Drafter:
        """The drafter, for trees of at most so many nodes."""
        return self.drafter if self.within is None else self.within(num_nodes or 0)


def heads_for(model: str) -> tuple[str, ...]:
    """All bundled heads of a model, and drafters that need no training.

    Medusa comes first: others are compared with it.
    """
    base = base_of(model)
    bundled = sorted((head.method for head in zoo_heads() if head.base_name == base), key=lambda m: (m != "medusa", m))
    return (*bundled, *UNTRAINED_HEADS)


def names_of(heads: Sequence[str], *, taken: Sequence[str] = (PLAIN,)) -> dict[str, str]:
    """By its name in the table each head: the last part of a path or Hugging Face id, where that part is unique.

    ``taken`` are names that other rows of the table have.

    >>> names_of(["medusa", "you/hydra", "me/eagle", "you/eagle"])
    {'medusa': 'medusa', 'hydra': 'you/hydra', 'me/eagle': 'me/eagle', 'you/eagle': 'you/eagle'}
    """
    short = [Path(head).resolve().name if Path(head).is_dir() else Path(head).name for head in heads]
    names = [
        head if short.count(name) > 1 or name in ("", *taken) else name for head, name in zip(heads, short, strict=True)
    ]
    if len(set(names)) < len(names) or set(taken) & set(names):
        other = f", other than {' and '.join(taken)}" if taken else ""
        raise InvalidSettings(f"heads are {', '.join(heads)}: each must have a name of its own{other}")
    return dict(zip(names, heads, strict=True))


def load_contenders(
    named: Mapping[str, ResolvedHead | str],
    target: TargetModel,
    *,
    drafting: Drafting | None = None,
    precision: Precision = "auto",
    **load_options: Any,
) -> Iterator[Contender]:
    """The drafters, loaded.

    Args:
        named: by their names in the table what ``resolve`` found.
        target: the target.
        drafting: its draft model drafts as well, and heads as they are loaded also copy from its corpus.
        precision: of the draft model.
        load_options: of the draft model, as for :func:`draftheads.load`.
    """
    drafting = drafting or Drafting()
    for name, saved in named.items():
        if not isinstance(saved, ResolvedHead):
            within = _WITHIN[saved]
            usual = Engine(target, within(_USUAL_NODES), max_batch_size=1)
            yield Contender(name, usual.drafter, saved, as_loaded=partial(_same, usual), within=within)
            continue
        head = load_drafter(saved, target, fast=load_options.get("fast", True))
        identity = f"{saved.method}-{saved.digest}-{identity_digest(saved.config.options())[:8]}"
        size, as_loaded = saved.num_parameters, cache(partial(_as_loaded, target, head, saved, drafting.corpus))
        yield Contender(name, head, identity, size, as_loaded=as_loaded, head=head, draws=True)
    if drafting.draft_model is not None:
        small = load_target(drafting.draft_model, precision=precision, **load_options)
        with torch.device("meta"):  # the loaded layers hold packed weights, not parameters
            count = type(small.model)(small.config).num_parameters()
        identity = f"{DRAFT_MODEL}-{small.weights_fingerprint}"
        drafter = DraftModel(small, target)
        as_loaded = cache(partial(_with_draft_model, target, drafter, drafting))
        yield Contender(DRAFT_MODEL, drafter, identity, count, as_loaded=as_loaded, draws=True)


def _same(engine: Engine, _copy: bool) -> Engine:  # noqa: FBT001
    return engine


def _with_draft_model(target: TargetModel, drafter: DraftModel, drafting: Drafting, copy: bool) -> Engine:  # noqa: FBT001
    drafting = replace(drafting, copy=copy, corpus=drafting.corpus if copy else None)
    return with_draft_model(drafter, target, drafting, max_batch_size=1)


def _as_loaded(
    target: TargetModel,
    head: DraftHead,
    saved: ResolvedHead,
    corpus: str | None,
    copy: bool,  # noqa: FBT001
) -> Engine | None:
    """The engine that users have; None if its profile cannot be read, and loading would fail."""
    try:
        drafting = Drafting(saved.name, copy=copy, corpus=corpus if copy else None)
        return engine_on(target, resolve_head(saved.name, saved.model), drafting, drafter=head, max_batch_size=1)
    except (CheckpointError, InvalidTree):
        return None


# --- the tree that a drafter fills, by its kind and its number of nodes ---


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
    profile: AcceptanceProfile | None = None  # has the static trees of the one head, which need no search then
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
        if self.profile is not None:
            return _chosen(self.profile.tree(nodes))
        if contender.head is None:
            return _chosen(BestFirst(nodes)) if kind in ("best", "growing") else None
        found = self._replayed(contender, nodes)
        static, growing = (found[kind][:nodes][-1] for kind in ("static", "growing"))
        if kind == "growing" or (kind == "best" and growing >= static):
            temperatures = tuple(found["confidence"])
            shape = BestFirst(nodes, top_k=found["top_k"], beam=found["beam"], temperatures=temperatures)
            return Chosen(shape, f"growing, {min(nodes, len(found['growing']))}", growing)
        return _chosen(self._static(contender, nodes), static)

    def _static(self, contender: Contender, nodes: int) -> Tree:
        return Tree.from_paths(self._replayed(contender, nodes)["paths"][: nodes - 1])

    def _replayed(self, contender: Contender, nodes: int) -> dict[str, Any]:
        nodes = max((nodes, *self.settings.num_nodes))  # trees of all sizes are found at once
        path = self.folder / f"trees-{contender.identity}-{nodes}.json"
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
            "static": found["static"]["expected"],
            "growing": found["dynamic"]["expected"],
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
