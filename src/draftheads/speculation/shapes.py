"""What drafts, and in which shape: rules by which each row's tree grows at each step, and trees whose tokens are drawn.

Knows nothing of models or tensors: :mod:`draftheads.speculation.growing` carries the rules out.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

from draftheads.errors import InvalidSettings, InvalidTree, require_at_least, require_bool
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted
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
        for name in ("num_nodes", "top_k", "beam", "max_depth"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InvalidTree(f"{name} is {number}; it must be at least 1")
        if not all(0.0 < divisor < math.inf for divisor in self.temperatures):
            raise InvalidTree(f"temperatures is {list(self.temperatures)}; every number must be above 0")
        if self.min_level_probability is not None and not 0.0 <= self.min_level_probability < math.inf:
            raise InvalidTree(f"min_level_probability is {self.min_level_probability}; it must be at least 0, or None")
        if not 0.0 <= self.threshold < 1.0:
            raise InvalidTree(f"threshold is {self.threshold}; it must be at least 0 and below 1")

    def divisor(self, depth: int) -> float:
        """Of the logits at a depth; depths beyond the last of ``temperatures`` get that one."""
        return self.temperatures[min(depth, len(self.temperatures) - 1)] if self.temperatures else 1.0


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
    def num_nodes(self) -> int:
        """As of its tree, root included."""
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
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


Shape = Tree | BestFirst | Sampled  # what a drafter fills at a step
ROOT_ONLY = Tree.chain(0)  # plain decoding
_NUMBERED = re.compile(r"(?:(static|drawn):)?(\d+)")
_BY_NUMBER: dict[str | None, Callable[[int], Shape | ByProfile]] = {
    None: BestFirst,
    "static": lambda number: ByProfile(static_nodes=number),
    "drawn": lambda number: Sampled(Tree.chain(number)),
}


def as_shape(value: object) -> Shape | ByProfile:
    """What ``tree`` of :func:`draftheads.load`, ``--tree`` of commands and ``shape`` of an engine mean.

    A shape is itself. ``auto``, ``static:24`` and a file or folder of an acceptance profile need a head's profile.
    ``plain`` is the root alone, a number or its text a growing tree. ``drawn:3``, and rank paths, their
    JSON text or a file of it are trees, too.

    Raises:
        InvalidTree: none of these, not a tree, or a file that cannot be read.

    >>> as_shape([[0], [0, 0]]) == as_shape("[[0], [0, 0]]") == Tree.chain(2)
    True
    >>> as_shape("24") == as_shape(24) == BestFirst(24), as_shape("drawn:1") == Sampled(Tree.chain(1))
    (True, True)
    >>> as_shape("static:24").static_nodes
    24
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
    raise InvalidTree(f"tree is {value!r}; give a Tree, BestFirst or Sampled, or a list of paths such as [[0], [0, 0]]")


def _from_file(path: str | PathLike[str]) -> Shape | ByProfile:
    """Rank paths as JSON; a folder or a JSON object is a profile."""
    place = user_path(path)
    try:
        if place.is_dir() or (text := place.read_text(encoding="utf-8")).lstrip().startswith("{"):
            return ByProfile(path)
    except (OSError, UnicodeDecodeError) as error:
        fix = "give auto, plain, a number of nodes, static:N, drawn:N, rank paths or a file"
        raise InvalidTree(f"tree {path} cannot be read: {fix} ({error})") from None
    return Tree.from_json(text)


def calibrated(shape: Shape, temperatures: Sequence[float]) -> Shape:
    """The same shape with these divisors where it uses probabilities and has no divisors of its own.

    Depths beyond the last divisor get that one.

    >>> calibrated(BestFirst(9, max_depth=3), (1.0, 0.9)).temperatures
    (1.0, 0.9, 0.9)
    """
    if isinstance(shape, BestFirst) and not shape.temperatures:
        missing = (shape.max_depth or 0) - len(temperatures)
        return replace(shape, temperatures=(*temperatures, *(missing * tuple(temperatures[-1:]))))
    return shape


def in_words(shape: Shape) -> str:
    """The kind and the number of nodes.

    >>> in_words(BestFirst(9)), in_words(Tree.chain(3))
    ('growing, 9', 'static, 4')
    """
    return f"{'growing' if isinstance(shape, BestFirst) else 'static'}, {shape.num_nodes}"


def check_ranks(shape: Shape, num_tokens: int) -> None:
    """Are there enough draft tokens for the children of every node?

    Raises:
        InvalidTree: a node has more children, or one of a higher rank, than that.
    """
    if isinstance(shape, BestFirst):  # takes as many as there are
        return
    tree = shape.tree if isinstance(shape, Sampled) else shape
    if (rank := max(tree.ranks)) >= num_tokens:
        raise InvalidTree(f"rank {rank} is beyond the draft vocabulary of {num_tokens}")


UNTRAINED_HEADS = ("prompt-lookup", "lookahead")  # names of what drafts without a head
AUTO_HEAD = "auto"  # the name of a head that is found by the model's name
TreeChoice = Shape | ByProfile | Sequence[Sequence[int]] | str | PathLike[str] | int


@dataclass(frozen=True)
class Drafting:
    """What is drafted.

    The command line, the server and :func:`draftheads.load` make it, and it is passed whole. The first line is a
    heading of ``--help``. The types are those of the command line. In Python ``head`` may also be a path,
    ``draft_model`` a loaded model, and ``tree`` a :data:`TreeChoice`.

    Raises:
        InvalidSettings: values that contradict each other or need another one.
        InvalidTree: ``tree`` is none of what is known, or a file that cannot be read.
    """

    head: str | None = None
    """The draft head: a name, a folder or a Hugging Face id. `draftheads info` lists the installed ones. auto takes one
    that is made for the model, else prompt-lookup. prompt-lookup copies from the text so far; lookahead refines draft
    tokens of the model itself. Plain decoding when left out."""
    draft_model: str | None = None
    """A smaller model drafts in place of a head: a folder or a Hugging Face id. Best with the same tokenizer."""
    tree: str = "auto"
    """What is drafted: auto, plain, 24, static:24, drawn:3, or a tree. auto: the fastest number of nodes, by the head's
    acceptance profile and the costs here; plain: nothing; 24: growing trees of so many nodes; static:24: the head's
    best fixed tree; drawn:3: chains of sampled tokens, for --acceptance rejection or block; JSON such as
    '[[0],[1],[0,0]]' or a file of it: this tree; or an acceptance.json, as auto."""
    copy: bool = True
    """Also draft copies from the text so far. That is what followed an earlier occurrence of its last tokens."""
    corpus: str | None = None
    """Also draft copies from this text file: documents or code that answers quote, or earlier answers."""

    def __post_init__(self) -> None:
        require_bool(copy=self.copy)
        if self.head is not None and self.draft_model is not None:
            model = getattr(self.draft_model, "name_or_path", self.draft_model)
            raise InvalidSettings(f"head {self.head} and draft_model {model}: give one of them")
        if self.corpus is not None and self.head == "lookahead":
            raise InvalidSettings(f"corpus {self.corpus}: lookahead makes trees of its own; give another head, or none")
        shape = self.shape
        is_head = self.head is not None and self.head not in UNTRAINED_HEADS
        fills_shapes = self.draft_model is not None and not isinstance(shape, ByProfile)
        if is_head or fills_shapes or shape in (ROOT_ONLY, ByProfile()):
            return
        if isinstance(shape, ByProfile) and (shape.profile != "auto" or self.draft_model is not None):
            named = self.tree if shape.profile == "auto" else shape.profile
            raise InvalidSettings(f"tree {named} is of a head's profile: give a draft head (head)")
        shown = f"a tree of {counted(shape.num_nodes, 'node')}" if isinstance(shape, Tree) else f"tree {self.tree}"
        what = f"{self.head} takes no tree: leave it out" if self.head else "this tree needs a drafter"
        raise InvalidSettings(f"{shown}: {what}; give a draft head (head) or a smaller model (draft_model)")

    @cached_property
    def shape(self) -> Shape | ByProfile:
        """What ``tree`` means. A file is read once: it may be a pipe."""
        return as_shape(self.tree)

    def keywords(self) -> dict[str, Any]:
        """The fields, as keywords of :func:`draftheads.load`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted, whatever the head."""
        return self.shape == ROOT_ONLY
