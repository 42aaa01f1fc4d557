"""``acceptance.json``: how many tokens a step gains with a head's trees of up to 128 nodes. It travels with the head.

Knows trees and numbers; knows nothing of models or machines. What a step costs is the machine's own
(:mod:`draftheads.decode.step_costs`). The keys of the file are public names.
"""

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from draftheads.errors import CheckpointCorrupt, InvalidTree
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted
from draftheads.utils.files import write_atomic
from draftheads.utils.strict_json import checked, read_object

PROFILE_FILE = "acceptance.json"
PROFILE_VERSION = 2
MAX_NODES = 128  # of a tree, root included
DEFAULT_NODES = 10  # of the tree that a head drafts on where nothing else decides
Kind = Literal["static", "dynamic"]  # the same tree in every step, or a tree that grows for each row and step
KINDS: tuple[Kind, ...] = ("static", "dynamic")
_DIGITS = 4
_tree = lru_cache(maxsize=512)(Tree.from_paths)  # few trees are asked for again and again
_ASSUMED = 0.5  # share of draft tokens that are accepted, per depth, where nothing was measured


@dataclass(frozen=True)
class AcceptanceProfile:
    """Expected tokens per step by kind and size of tree.

    Raises:
        InvalidTree, ValueError: on construction, where the parts do not fit each other.
    """

    temperature: float  # of the answers that it was measured on
    num_texts: int  # of these answers; 0 where nothing was measured
    num_tokens: int  # of these answers
    temperatures: list[float]  # per depth, what logits are divided by so that the probabilities are calibrated
    paths: list[list[int]]  # the static tree of n nodes is the root and the first n-1 of these
    static_tokens: list[float]  # tokens per step of the static tree of 1, 2, … nodes
    dynamic_tokens: list[float]  # the same of trees that grow at each step; empty where there are none
    top_k: int  # of growing trees
    beam: int  # of growing trees
    # copies[m-1][d]: how often the first d+1 copied tokens are accepted after a match of m tokens; the last: m or more
    copies: list[list[float]] = field(default_factory=list)
    # shallower_tokens[d-1]: dynamic_tokens of trees of at most depth d, for d below the depth; empty: not measured
    shallower_tokens: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for num_nodes in range(2, len(self.paths) + 2):
            self.tree(num_nodes)
        self.growing(1)
        depth, size = counted(self.depth, "depth"), counted(len(self.paths), "node")
        deepest, longest = (max(map(len, lists), default=0) for lists in (self.paths, self.shallower_tokens))
        num_dynamic = len(self.dynamic_tokens)
        expected = [*self.static_tokens, *self.dynamic_tokens, *chain.from_iterable(self.shallower_tokens)]
        for name in ("num_texts", "num_tokens", "temperature"):
            number = getattr(self, name)
            _check(0 <= number < math.inf, f"{name} is {number}; it must be at least 0")
        _check(bool(self.temperatures), "temperatures is empty; it must have one number for each depth")
        for name, most in (("temperatures", self.depth), ("top_k", self.top_k), ("beam", self.beam)):
            _check(most <= MAX_NODES, f"{name} {most} is more than the {MAX_NODES} nodes that a tree may have")
        shares = chain.from_iterable(self.copies)
        for name, numbers, least, most in (("temperatures", self.temperatures, 0.01, 100), ("copies", shares, 0, 1)):
            is_right = all(least <= number <= most for number in numbers)
            _check(is_right, f"{name} is {getattr(self, name)}; every number must lie between {least} and {most}")
        _check([] not in self.paths, "paths has the root []; leave it out")
        _check(len(self.paths) < MAX_NODES, f"paths has {size}; it must have at most {MAX_NODES - 1}")
        _check(
            len(self.static_tokens) == len(self.paths) + 1,
            f"static_tokens has {len(self.static_tokens)} numbers; {len(self.paths)} paths make "
            f"{len(self.paths) + 1} trees",
        )
        _check(num_dynamic <= MAX_NODES, f"dynamic_tokens has {num_dynamic} numbers; it must have at most {MAX_NODES}")
        _check(
            longest <= num_dynamic,
            f"shallower_tokens has a list of {longest} numbers; dynamic_tokens has {num_dynamic}",
        )
        _check(deepest <= self.depth, f"paths has a node of depth {deepest}; temperatures has {depth}")
        _check(
            len(self.shallower_tokens) in (0, self.depth - 1),
            f"shallower_tokens has {counted(len(self.shallower_tokens), 'list')}; {depth} in temperatures make "
            f"{self.depth - 1}",
        )
        _check(
            all(1 <= tokens < math.inf for tokens in expected),
            f"a step has {min(expected)} tokens; it must have at least 1",
        )

    @property
    def most_nodes(self) -> int:
        """Of the largest tree, root included."""
        return max(len(self.static_tokens), len(self.dynamic_tokens))

    @classmethod
    def assumed(cls, num_heads: int) -> Self:
        """For a head that nobody has measured: a chain, half of whose tokens are accepted at each depth.

        >>> AcceptanceProfile.assumed(2).static_tokens
        [1.0, 1.5, 1.75]
        """
        return cls(
            temperature=0.0,
            num_texts=0,
            num_tokens=0,
            temperatures=[1.0] * num_heads,
            paths=[[0] * depth for depth in range(1, num_heads + 1)],
            static_tokens=[sum(_ASSUMED**d for d in range(depth + 1)) for depth in range(num_heads + 1)],
            dynamic_tokens=[],
            top_k=1,
            beam=1,
        )

    @classmethod
    def of_rates(cls, rates: Sequence[float], num_nodes: int = MAX_NODES) -> Self:
        """For a head whose best token is accepted so often at each depth, where the tokens above it were.

        Its next best one is accepted as often where the best one is not, and so on: that of rank r at depth d in
        a_d (1 - a_d)^r of all cases. Trees have up to so many nodes.

        >>> AcceptanceProfile.of_rates([0.8, 0.5], num_nodes=4).static_tokens
        [1.0, 1.8, 2.2, 2.4000000000000004]
        """
        found: list[tuple[float, list[int]]] = []
        waiting = [(-rates[0], [0])]  # the most frequent path comes first
        while len(found) < num_nodes - 1:
            share, path = heapq.heappop(waiting)
            found.append((-share, path))
            last = rates[len(path) - 1]
            heapq.heappush(waiting, (share * (1.0 - last), [*path[:-1], path[-1] + 1]))
            if len(path) < len(rates):
                heapq.heappush(waiting, (share * rates[len(path)], [*path, 0]))
        return cls(
            temperature=0.0,
            num_texts=0,
            num_tokens=0,
            temperatures=[1.0] * len(rates),
            paths=[path for _, path in found],
            static_tokens=list(accumulate((share for share, _ in found), initial=1.0)),
            dynamic_tokens=[],
            top_k=1,
            beam=1,
        )

    @property
    def depth(self) -> int:
        """Of the deepest trees that were measured. It can be above the number of heads."""
        return len(self.temperatures)

    def depths(self, kind: Kind) -> range:
        """The depths at which :meth:`tokens` is known."""
        if kind == "static":
            return range(1, max(map(len, self.paths), default=0) + 1)
        return range(1 if self.shallower_tokens else self.depth, self.depth + 1)

    def tree(self, num_nodes: int, depth: int | None = None) -> Tree:
        """The static tree of that many nodes, or of as many as there are, and of at most that depth."""
        return _tree(tuple(path for path, _ in self._static(depth)[: num_nodes - 1]))

    def growing(self, num_nodes: int, depth: int | None = None) -> BestFirst:
        """The rule of trees of that many nodes that grow at each step, with the calibrated temperatures."""
        limit = None if depth is None or depth >= self.depth else depth
        temperatures = tuple(self.temperatures)
        return BestFirst(num_nodes, top_k=self.top_k, beam=self.beam, max_depth=limit, temperatures=temperatures)

    def shape(self, kind: Kind, num_nodes: int, depth: int | None = None) -> Tree | BestFirst:
        """What a drafter fills."""
        return self.tree(num_nodes, depth) if kind == "static" else self.growing(num_nodes, depth)

    def tokens(self, kind: Kind, depth: int | None = None) -> Sequence[float]:
        """Expected tokens per step of trees of 1, 2, … nodes, as deep as they were measured or of at most that depth.

        A static tree without its deeper nodes gains what the other nodes add.

        >>> profile = AcceptanceProfile.assumed(3)
        >>> profile.tokens("static"), profile.tokens("static", 1)
        ([1.0, 1.5, 1.75, 1.875], [1.0, 1.5])
        """
        if depth is None or depth >= self.depth:
            return self.static_tokens if kind == "static" else self.dynamic_tokens
        if kind == "dynamic":
            return self.shallower_tokens[depth - 1]
        return list(accumulate((added for _, added in self._static(depth)), initial=self.static_tokens[0]))

    def levels(self, kind: Kind, depth: int) -> list[int]:
        """How many levels below the root trees of 1, 2, … nodes and of at most that depth have.

        >>> AcceptanceProfile.assumed(3).levels("static", 2)
        [0, 1, 2]
        """
        if kind == "dynamic":
            return [min(number, depth) for number in range(len(self.tokens(kind, depth)))]
        return list(accumulate((len(path) for path, _ in self._static(depth)), max, initial=0))

    def _static(self, depth: int | None) -> list[tuple[RankPath, float]]:
        """The paths of the static trees of at most that depth, and the tokens per step that each adds."""
        added = (after - before for before, after in pairwise(self.static_tokens))
        return [
            (tuple(path), tokens)
            for path, tokens in zip(self.paths, added, strict=False)
            if depth is None or len(path) <= depth
        ]

    def to_json(self) -> str:
        """What :func:`read_profile` reads; numbers are rounded."""
        return json.dumps(_rounded({"format_version": PROFILE_VERSION, **asdict(self)})) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        write_atomic(path, self.to_json().encode())


def read_profile(path: str | PathLike[str]) -> AcceptanceProfile:
    """The profile in a file.

    Raises:
        CheckpointCorrupt: not a profile, or its parts do not fit each other.
        CheckpointMismatch: written by a newer version.
        InvalidTree: its paths are not a tree.
    """
    path = Path(path)
    raw = read_object(path, newest=PROFILE_VERSION)
    values = checked(raw, {"format_version": int, **get_type_hints(AcceptanceProfile)}, path)
    try:
        return AcceptanceProfile(**{name: value for name, value in values.items() if name != "format_version"})
    except InvalidTree as error:
        raise InvalidTree(f"{path}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise CheckpointCorrupt(f"{path}: {error}") from None


def _check(is_right: bool, problem: str) -> None:  # noqa: FBT001 - a condition
    if not is_right:
        raise ValueError(problem)


def _rounded(value: Any) -> Any:
    """Every number in a JSON value with few digits: the files are read by people, too.

    >>> _rounded({"a": [1.23456, 2]})
    {'a': [1.2346, 2]}
    """
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value
