"""``acceptance.json``: how many tokens a step gains with a head's trees of 1 to 64 nodes. It travels with the head.

Knows trees and numbers; knows nothing of models or machines. What a step costs is the machine's own
(:mod:`draftheads.decode.cost_profile`). The keys of the file are public names.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from draftheads.counts import counted
from draftheads.errors import CheckpointCorrupt, InvalidTree
from draftheads.files import write_atomic
from draftheads.shapes import BestFirst
from draftheads.strict_json import checked, read_object
from draftheads.tree import Tree

PROFILE_FILE = "acceptance.json"
PROFILE_VERSION = 1
MAX_NODES = 64  # of a tree, root included
DEFAULT_NODES = 10  # of the tree that a head drafts on where nothing else decides
Kind = Literal["static", "dynamic"]  # the same tree in every step, or a tree that grows for each row and step
KINDS: tuple[Kind, ...] = ("static", "dynamic")
_DIGITS = 4
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
    confidence: list[float]  # per head, what its logits are divided by so that its probabilities are calibrated
    paths: list[list[int]]  # the static tree of n nodes is the root and the first n-1 of these
    static_tokens: list[float]  # tokens per step of the static tree of 1, 2, … nodes
    dynamic_tokens: list[float]  # the same of trees that grow at each step; empty where there are none
    num_ranks: int  # of growing trees
    beam: int  # of growing trees
    # copies[m-1][d]: how often the first d+1 copied tokens are accepted after a match of m tokens; the last: m or more
    copies: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree(len(self.paths) + 1)
        for num_nodes in range(1, len(self.paths)):
            self.tree(num_nodes + 1)
        self.growing(1)
        expected = (*self.static_tokens, *self.dynamic_tokens)
        copied = [share for shares in self.copies for share in shares]
        _check(self.num_texts >= 0, f"num_texts is {self.num_texts}; it must be at least 0")
        _check(self.num_tokens >= 0, f"num_tokens is {self.num_tokens}; it must be at least 0")
        _check(0 <= self.temperature < math.inf, f"temperature is {self.temperature}; it must be at least 0")
        _check(bool(self.confidence), "confidence is empty; it must have one number for each head")
        _check(
            all(0.01 <= divisor <= 100 for divisor in self.confidence),
            f"confidence is {self.confidence}; every number must lie between 0.01 and 100",
        )
        _check([] not in self.paths, "paths has the root []; leave it out")
        size = counted(len(self.paths), "node")
        _check(len(self.paths) < MAX_NODES, f"paths has {size}; it must have at most {MAX_NODES - 1}")
        _check(
            len(self.static_tokens) == len(self.paths) + 1,
            f"static_tokens has {len(self.static_tokens)} numbers; {len(self.paths)} paths make "
            f"{len(self.paths) + 1} trees",
        )
        _check(
            len(self.dynamic_tokens) <= MAX_NODES,
            f"dynamic_tokens has {len(self.dynamic_tokens)} numbers; it must have at most {MAX_NODES}",
        )
        _check(
            all(1 <= tokens < math.inf for tokens in expected),
            f"a step has {min(expected)} tokens; it must have at least 1",
        )
        _check(
            all(0 <= share <= 1 for share in copied),
            f"copies is {self.copies}; every number must lie between 0 and 1",
        )

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
            confidence=[1.0] * num_heads,
            paths=[[0] * depth for depth in range(1, num_heads + 1)],
            static_tokens=[sum(_ASSUMED**d for d in range(depth + 1)) for depth in range(num_heads + 1)],
            dynamic_tokens=[],
            num_ranks=1,
            beam=1,
        )

    def tree(self, num_nodes: int) -> Tree:
        """The static tree of that many nodes, or of as many as there are."""
        return _tree(tuple(map(tuple, self.paths[: num_nodes - 1])))

    def growing(self, num_nodes: int) -> BestFirst:
        """The rule of trees of that many nodes that grow at each step, with the calibrated confidence."""
        return BestFirst(num_nodes, num_ranks=self.num_ranks, beam=self.beam, confidence=tuple(self.confidence))

    def shape(self, kind: Kind, num_nodes: int) -> Tree | BestFirst:
        """What a drafter fills."""
        return self.tree(num_nodes) if kind == "static" else self.growing(num_nodes)

    def tokens(self, kind: Kind) -> Sequence[float]:
        """Expected tokens per step of trees of 1, 2, … nodes."""
        return self.static_tokens if kind == "static" else self.dynamic_tokens

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


@lru_cache(maxsize=512)
def _tree(paths: tuple[tuple[int, ...], ...]) -> Tree:
    return Tree.from_paths(paths)
