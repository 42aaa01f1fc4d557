"""Shapes of drafts: rules by which each row's tree grows at each step, and trees whose tokens are drawn.

Knows nothing of models or tensors: :mod:`draftheads.speculation.growing` carries the rules out.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Self

from draftheads.errors import InvalidTree, require_at_least
from draftheads.speculation.tree import Tree
from draftheads.utils.files import user_path


@dataclass(frozen=True)
class BestFirst:
    """The draft tokens that are most likely to be accepted, by the probability of their whole path.

    For heads that do not read the path this is best-first search over products of their probabilities (DDTree). For
    heads that read the path it is EAGLE-2's method: at each depth the ``beam`` most probable nodes are expanded, and
    the most probable of all nodes are verified. A path is never more probable than its beginning, so they form a tree.
    """

    num_nodes: int
    """How many nodes are verified, root included."""
    top_k: int = 8
    """How many children a node may have."""
    beam: int = 8
    """How many nodes of a depth are expanded by heads that read the path."""
    max_depth: int | None = None
    """How deep the tree may grow; as deep as there are heads, or temperatures was measured, when left out."""
    threshold: float = 0.0
    """Nodes with a lower path probability are left out, as far as this holds for every row of a step. Only on a CPU:
    elsewhere the host would wait for the number of nodes."""
    temperatures: tuple[float, ...] = ()
    """Per depth, what logits are divided by so that the probabilities are calibrated; all 1 when empty."""
    min_level_probability: float | None = 0.0
    """The least probability of a further level. On a CPU, heads that read the path draft a level below the first one
    only if it can change the tree, and if the nodes that it extends have at least this probability in total, over all
    rows. None: all levels are drafted. Other heads and devices always draft all levels."""

    def __post_init__(self) -> None:
        _check_at_least_1(self, "num_nodes", "top_k", "beam")
        _check_confidence(self.temperatures)
        if self.min_level_probability is not None and not 0.0 <= self.min_level_probability < math.inf:
            raise InvalidTree(f"min_level_probability is {self.min_level_probability}; it must be at least 0, or None")
        if self.max_depth is not None:
            _check_at_least_1(self, "max_depth")
        if not 0.0 <= self.threshold < 1.0:
            raise InvalidTree(f"threshold is {self.threshold}; it must be at least 0 and below 1")

    @property
    def depth(self) -> int | None:
        """Of the deepest node; None where the number of heads decides."""
        return self.max_depth


@dataclass(frozen=True)
class BestPaths:
    """The most probable whole paths of a full tree, common beginnings merged (MLP Speculator, section 4)."""

    widths: tuple[int, ...] = (6, 3, 2)
    """How many children each node of a depth gets; all are expanded."""
    num_paths: int = 5
    """How many paths, from the root to the last depth, are verified."""
    temperatures: tuple[float, ...] = ()
    """As for :class:`BestFirst`."""

    def __post_init__(self) -> None:
        _check_at_least_1(self, "num_paths")
        _check_confidence(self.temperatures)
        if not self.widths or min(self.widths) < 1:
            raise InvalidTree(f"widths {list(self.widths)}: at least one, and every one at least 1")
        if self.num_paths > math.prod(self.widths):
            raise InvalidTree(
                f"num_paths is {self.num_paths} but widths {list(self.widths)} have {math.prod(self.widths)} paths"
            )

    @classmethod
    def within(cls, num_nodes: int, widths: tuple[int, ...] = (6, 3, 2)) -> Self:
        """As many paths as are sure to have no more than ``num_nodes`` nodes together, root included; at least one.

        >>> BestPaths.within(24), BestPaths.within(24).most_nodes, BestPaths.within(3).num_paths
        (BestPaths(widths=(6, 3, 2), num_paths=8, temperatures=()), 23, 1)
        """
        numbers = range(math.prod(widths), 1, -1)
        fitting = (shape for shape in (cls(widths, n) for n in numbers) if shape.most_nodes <= num_nodes)
        return next(fitting, cls(widths, 1))

    @property
    def most_nodes(self) -> int:
        """Of a tree, root included: no depth has more nodes than the full tree, or than there are paths."""
        return 1 + sum(min(math.prod(self.widths[:depth]), self.num_paths) for depth in range(1, self.depth + 1))

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return len(self.widths)


@dataclass(frozen=True)
class Sampled:
    """A static tree whose tokens are drawn: the children of a node one after the other, without replacement.

    Drawn tokens can be accepted by ``rejection`` or, on a chain, by ``block``. At a temperature these accept more than
    ``exact`` does if the drafter's distribution is close to the target's.
    """

    tree: Tree
    """How many children each node has; the n-th draw below a node is its n-th child."""

    def __post_init__(self) -> None:
        for node, path in enumerate(self.tree.paths):
            ranks = [self.tree.ranks[child] for child, parent in enumerate(self.tree.parents) if parent == node]
            if sorted(ranks) != list(range(len(ranks))):
                raise InvalidTree(
                    f"below {list(path)} the tree has ranks {sorted(ranks)}: "
                    "children that are drawn are numbered 0, 1, 2, …"
                )

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return self.tree.max_depth


@dataclass(frozen=True)
class ByProfile:
    """Not a shape yet: it follows from a head's acceptance profile."""

    profile: str | PathLike[str] = "auto"
    """Its file or folder; auto: what ``draftheads tune`` measured, else the head's own."""
    static_nodes: int | None = None
    """The profile's best static tree of so many nodes. None: the size of each draft follows from costs, too."""

    def __post_init__(self) -> None:
        require_at_least(1, static=self.static_nodes)


Shape = Tree | BestFirst | BestPaths | Sampled  # what a drafter fills at a step
ROOT_ONLY = Tree.chain(0)  # plain decoding
_NUMBERED = re.compile(r"(?:(static|paths|drawn):)?(\d+)")
_BY_NUMBER: dict[str | None, Callable[[int], Shape | ByProfile]] = {
    None: BestFirst,
    "static": lambda number: ByProfile(static_nodes=number),
    "paths": lambda number: BestPaths(num_paths=number),
    "drawn": lambda number: Sampled(Tree.chain(number)),
}


def as_shape(value: object) -> Shape | ByProfile:
    """What ``tree`` of :func:`draftheads.load`, ``--tree`` of commands and ``shape`` of an engine mean.

    A shape is itself. ``auto``, ``static:24`` and a file or folder of an acceptance profile need a head's profile.
    ``plain`` is the root alone, a number or its text a growing tree. ``paths:5``, ``drawn:3``, and rank paths, their
    JSON text or a file of it are trees, too.

    Raises:
        InvalidTree: none of these, not a tree, or a file that cannot be read.

    >>> as_shape([[0], [0, 0]]) == as_shape("[[0], [0, 0]]") == Tree.chain(2)
    True
    >>> as_shape("24") == as_shape(24) == BestFirst(24), as_shape("drawn:1") == Sampled(Tree.chain(1))
    (True, True)
    >>> as_shape("paths:5"), as_shape("static:24").static_nodes
    (BestPaths(widths=(6, 3, 2), num_paths=5, temperatures=()), 24)
    """
    if isinstance(value, Shape | ByProfile):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return BestFirst(value)
    if value in ("auto", "plain"):
        return ByProfile() if value == "auto" else ROOT_ONLY
    if isinstance(value, str) and (numbered := _NUMBERED.fullmatch(value.strip())):
        return _BY_NUMBER[numbered[1]](int(numbered[2]))
    if isinstance(value, PathLike | str):
        is_json = isinstance(value, str) and value.lstrip().startswith(("[", "{"))
        return Tree.from_json(str(value)) if is_json else _from_file(value)
    if isinstance(value, Sequence) and all(isinstance(path, Sequence) and not isinstance(path, str) for path in value):
        return Tree.from_paths(value)
    raise InvalidTree(
        f"tree is {value!r}; give a Tree, BestFirst, BestPaths or Sampled, or a list of paths such as [[0], [0, 0]]"
    )


def _from_file(path: str | PathLike[str]) -> Shape | ByProfile:
    """Rank paths as JSON; a folder or a JSON object is a profile."""
    place = user_path(path)
    try:
        if place.is_dir() or (text := place.read_text(encoding="utf-8")).lstrip().startswith("{"):
            return ByProfile(path)
    except (OSError, UnicodeDecodeError) as error:
        fix = "give auto, plain, a number of nodes, static:N, paths:N, drawn:N, rank paths or a file"
        raise InvalidTree(f"tree {path} cannot be read: {fix} ({error})") from None
    return Tree.from_json(text)


def depth_of(shape: Shape) -> int | None:
    """Of the deepest node; None where the drafter decides."""
    return shape.max_depth if isinstance(shape, Tree) else shape.depth


def most_nodes_of(shape: Shape) -> int:
    """The most nodes that a tree of the shape has, root included."""
    if isinstance(shape, BestPaths):
        return shape.most_nodes
    return shape.tree.num_nodes if isinstance(shape, Sampled) else shape.num_nodes


def calibrated(shape: Shape, temperatures: Sequence[float]) -> Shape:
    """The same shape with these divisors where it uses probabilities and has no divisors of its own.

    Depths beyond the last divisor get that one.

    >>> calibrated(BestFirst(9, max_depth=3), (1.0, 0.9)).temperatures
    (1.0, 0.9, 0.9)
    """
    if isinstance(shape, BestFirst | BestPaths) and not shape.temperatures:
        missing = (shape.depth or 0) - len(temperatures)
        return replace(shape, temperatures=(*temperatures, *(missing * tuple(temperatures[-1:]))))
    return shape


def in_words(shape: Shape) -> str:
    """The kind and the number of nodes.

    >>> in_words(BestPaths((6, 3, 2), 5)), in_words(Tree.chain(3))
    ('best 5 of 6x3x2, up to 16', 'static, 4')
    """
    if isinstance(shape, BestPaths):
        return f"best {shape.num_paths} of {'x'.join(map(str, shape.widths))}, up to {shape.most_nodes}"
    tree = shape.tree if isinstance(shape, Sampled) else shape
    return f"{'static' if isinstance(tree, Tree) else 'growing'}, {tree.num_nodes}"


def check_ranks(shape: Shape, num_tokens: int) -> None:
    """Are there enough draft tokens for the children of every node?

    Raises:
        InvalidTree: a node has more children, or one of a higher rank, than that.
    """
    if isinstance(shape, BestFirst):  # takes as many as there are
        return
    tree = shape.tree if isinstance(shape, Sampled) else shape
    rank = max(tree.ranks) if isinstance(tree, Tree) else max(tree.widths) - 1
    if rank >= num_tokens:
        raise InvalidTree(f"rank {rank} is beyond the draft vocabulary of {num_tokens}")


def _check_confidence(temperatures: Sequence[float]) -> None:
    if not all(0.0 < divisor < math.inf for divisor in temperatures):
        raise InvalidTree(f"temperatures is {list(temperatures)}; every number must be above 0")


def _check_at_least_1(rule: object, *names: str) -> None:
    for name in names:
        if getattr(rule, name) < 1:
            raise InvalidTree(f"{name} is {getattr(rule, name)}; it must be at least 1")
