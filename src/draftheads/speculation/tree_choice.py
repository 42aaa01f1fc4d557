"""The one way to say what is drafted: ``tree`` of :func:`draftheads.load`, ``--tree`` of commands."""

import re
from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

from draftheads.errors import InvalidTree, require_at_least
from draftheads.speculation.shapes import Shape, as_shape
from draftheads.utils.files import user_path

# a number, a kind with its number, or JSON; all else is a path
_SPEC = re.compile(r"\s*(\d+$|(static|paths|drawn):\d+$|\[|\{)")


class ChosenTree(NamedTuple):
    """What :func:`load` was told of trees."""

    shape: Shape | None = None  # None: by the profile
    profile: str | PathLike[str] = "auto"  # file or folder
    static_nodes: int | None = None  # of the profile's best static tree
    is_plain: bool = False


TreeChoice = Shape | ChosenTree | Sequence[Sequence[int]] | str | PathLike[str] | int


def read_tree(tree: TreeChoice) -> ChosenTree:
    """What ``tree`` of :func:`load` means.

    Raises:
        InvalidTree: it is none of what is known, or a file that cannot be read.

    >>> read_tree("static:24").static_nodes, read_tree("[[0]]").shape == as_shape([[0]]), read_tree("plain").is_plain
    (24, True, True)
    """
    if isinstance(tree, ChosenTree):
        return tree
    if tree in ("auto", "plain"):
        return ChosenTree(is_plain=tree == "plain")
    if isinstance(tree, PathLike) or (isinstance(tree, str) and not _SPEC.match(tree)):
        place = user_path(tree)
        try:
            if place.is_dir() or (text := place.read_text(encoding="utf-8")).lstrip().startswith("{"):
                return ChosenTree(profile=tree)
        except (OSError, UnicodeDecodeError) as error:
            fix = "give auto, plain, a number of nodes, static:N, paths:N, drawn:N, rank paths or a file"
            raise InvalidTree(f"tree {tree} cannot be read: {fix} ({error})") from None
        return ChosenTree(as_shape(text))
    if isinstance(tree, str) and tree.startswith("static:"):
        nodes = int(tree.removeprefix("static:"))
        require_at_least(1, static=nodes)
        return ChosenTree(static_nodes=nodes)
    return ChosenTree(as_shape(tree))
