"""Static trees: which continuations a step tries, as paths of sibling ranks.

Knows nothing of models or tokens. A node is named by its *path* of ranks from the root: ``(0, 2)`` is the
third-best token at depth 2 below the best token at depth 1. The root, path ``()``, is the token that is already
decided; it is always node 0. Nodes are kept in breadth-first order, so a parent comes before its children and
the nodes of one depth are neighbours.

>>> tree = Tree.from_paths([(0,), (1,), (0, 0)])
>>> tree.parents
(-1, 0, 0, 1)
>>> tree.depths
(0, 1, 1, 2)
>>> tree.ancestor_mask.int().tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from draftheads.errors import InvalidTree

if TYPE_CHECKING:
    from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """An immutable tree of sibling ranks, root included. Build it with one of the class methods."""

    paths: tuple[Path, ...]  # of every node, breadth-first; paths[0] == ()

    def __post_init__(self) -> None:
        if list(self.paths) != sorted(set(self.paths), key=_breadth_first) or self.paths[:1] != ((),):
            raise InvalidTree("a tree's paths must be unique, start with the root () and be in breadth-first order")
        known = set(self.paths)
        for path in self.paths[1:]:
            if path[:-1] not in known:
                raise InvalidTree(f"path {list(path)} has no parent: add {list(path[:-1])}")

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Self:
        """A tree from rank paths in any order; the root may be left out.

        Raises:
            InvalidTree: a negative or non-integer rank, a path twice, or a path whose parent is missing.
        """
        given = [tuple(path) for path in paths]
        for path in given:
            if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
                raise InvalidTree(f"path {list(path)}: every rank must be an integer of at least 0")
        known = {(), *given}
        if len(set(given)) != len(given):
            twice = next(path for path in given if given.count(path) > 1)
            raise InvalidTree(f"path {list(twice)} is there twice")
        return cls(tuple(sorted(known, key=_breadth_first)))

    @classmethod
    def chain(cls, depth: int) -> Self:
        """The single path of best tokens, ``depth`` deep; ``chain(0)`` is the root alone (plain decoding)."""
        return cls(tuple((0,) * d for d in range(depth + 1)))

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> Self:
        """Every combination of the ``widths[d]`` best tokens at depth d+1 (Medusa section 3.1.2).

        >>> Tree.cartesian([2, 3]).num_nodes
        9
        """
        if any(width < 1 for width in widths):
            raise InvalidTree(f"widths {list(widths)}: every width must be at least 1")
        levels = [itertools.product(*map(range, widths[:d])) for d in range(len(widths) + 1)]
        return cls(tuple(itertools.chain.from_iterable(levels)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The tree written by :meth:`to_json`: a JSON list of rank paths.

        Raises:
            InvalidTree: not JSON, or not a list of lists of ranks.
        """
        try:
            paths = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidTree(f"a tree must be a JSON list of rank paths such as [[0], [0, 0]]: {error}") from None
        if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
            raise InvalidTree("a tree must be a JSON list of rank paths such as [[0], [0, 0]]")
        return cls.from_paths(paths)

    def to_json(self) -> str:
        """A JSON list of rank paths, root left out, in breadth-first order."""
        return json.dumps([list(path) for path in self.paths[1:]])

    @property
    def num_nodes(self) -> int:
        """Number of nodes N, root included: the tokens that the target checks in one pass."""
        return len(self.paths)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; the root has depth 0."""
        return len(self.paths[-1])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Sibling rank of every node; 0 for the root."""
        return tuple(path[-1] if path else 0 for path in self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Node index of every node's parent; -1 for the root."""
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index[path[:-1]] if path else -1 for path in self.paths)

    @cached_property
    def ancestor_mask(self) -> "Tensor":
        """Boolean (N, N) on the CPU: row n marks the nodes on the path from the root to n, n included."""
        import torch  # noqa: PLC0415 - slow to import; `--help` and `info` do not need it

        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def draw(self) -> str:
        """The tree as indented text, one node a line.

        >>> print(Tree.from_paths([(0,), (0, 0), (1,)]).draw())
        root
        ├── 0
        │   └── 0
        └── 1
        """
        lines = ["root"]

        def walk(path: Path, indent: str) -> None:
            children = sorted(other for other in self.paths if len(other) == len(path) + 1 and other[:-1] == path)
            for child in children:
                last = child == children[-1]
                lines.append(f"{indent}{'└' if last else '├'}── {child[-1]}")
                walk(child, indent + ("    " if last else "│   "))

        walk((), "")
        return "\n".join(lines)


def _breadth_first(path: Path) -> tuple[int, Path]:
    return len(path), path
