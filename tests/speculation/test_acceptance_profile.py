"""``acceptance.json``: there and back, and every broken one refused by file, place and both values."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, DraftHeadsError, InvalidTree
from draftheads.speculation.acceptance_profile import AcceptanceProfile, read_profile
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree
from families import tiny_profile

PATHS = [[0], [0, 0], [1], [0, 0, 0], [0, 1]]
PROFILE = tiny_profile(Tree.chain(1), paths=PATHS, static_tokens=[1.0, 1.5, 1.8, 1.9, 2.0, 2.0], copies=[[0.5, 0.25]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "acceptance.json"


@pytest.mark.parametrize("profile", [PROFILE, replace(PROFILE, dynamic_tokens=[]), AcceptanceProfile.assumed(4)])
def test_a_profile_comes_back(profile: AcceptanceProfile, path: Path) -> None:
    profile.save(path)
    assert read_profile(path) == profile
    assert json.loads(path.read_text())["format_version"] == 2
    replace(profile, temperature=0.123456).save(path)
    assert read_profile(path).temperature == 0.1235, "people read it, too"


def test_trees_of_a_lower_depth() -> None:
    shallower = [[1.0, 1.3], [1.0, 1.3, 1.4]]
    profile = replace(PROFILE, shallower_tokens=shallower)
    assert (PROFILE.depth, PROFILE.depths("static"), PROFILE.depths("dynamic")) == (3, range(1, 4), range(3, 4))
    assert profile.depths("dynamic") == range(1, 4)
    assert [profile.tokens("dynamic", depth) for depth in (1, 2, 3, 9)] == [*shallower, *[PROFILE.dynamic_tokens] * 2]
    assert profile.growing(5, 2) == replace(profile.growing(5), max_depth=2)
    assert profile.growing(5, 3) == profile.growing(5)
    # [0], [0, 0], [1], [0, 0, 0], [0, 1] add 0.5, 0.3, 0.1, 0.1 and 0
    assert profile.tokens("static", 1) == pytest.approx([1.0, 1.5, 1.6])
    assert profile.tokens("static", 2) == pytest.approx([1.0, 1.5, 1.8, 1.9, 1.9])
    assert set(profile.tree(5, 2).paths) == {(), (0,), (0, 0), (1,), (0, 1)}
    assert profile.tree(9, 1).paths == ((), (0,), (1,))
    assert profile.tree(9, 3) == profile.tree(9)
    assert profile.levels("static", 3) == [0, 1, 2, 2, 3, 3]
    assert profile.levels("static", 1) == [0, 1, 1]
    assert profile.levels("dynamic", 2) == [0, 1, 2]
    assert all(profile.levels("dynamic", 3)[n] == min(n, 3) for n in range(24))


def test_trees_are_nested_in_the_order_of_the_paths() -> None:
    trees = [PROFILE.tree(nodes) for nodes in range(1, 7)]
    assert [tree.num_nodes for tree in trees] == [1, 2, 3, 4, 5, 6]
    assert set(trees[3].paths) == {(), (0,), (0, 0), (1,)}
    assert all(set(small.paths) < set(large.paths) for small, large in pairwise(trees))
    assert PROFILE.tree(64) == trees[-1], "there are no more"
    growing = BestFirst(7, top_k=6, beam=4, temperatures=tuple(PROFILE.temperatures))
    assert PROFILE.growing(7) == PROFILE.shape("dynamic", 7) == growing
    assert PROFILE.shape("static", 3) == trees[2]
    assert (PROFILE.tokens("static"), PROFILE.tokens("dynamic")) == (PROFILE.static_tokens, PROFILE.dynamic_tokens)


RAW = json.loads(PROFILE.to_json())
WRONG: list[tuple[dict[str, Any], str, type[DraftHeadsError]]] = [
    *(
        (change, name, CheckpointCorrupt)
        for name, change in (
            ("temperature", {"temperature": -1.0}),
            ("num_tokens", {"num_tokens": -2}),
            ("temperatures", {"temperatures": []}),
            ("temperatures", {"temperatures": [1.0, 0.001]}),
            ("temperatures 129", {"temperatures": [1.0] * 129, "shallower_tokens": []}),
            ("top_k", {"top_k": 10**9}),
            ("beam", {"beam": 129}),
            ("static_tokens", {"static_tokens": [1.0, 1.5]}),
            ("0.5 tokens", {"static_tokens": [0.5, 1.5, 1.8, 1.9, 2.0, 2.0]}),
            ("dynamic_tokens", {"dynamic_tokens": [1.0] * 129}),
            ("128 nodes", {"paths": [[n] for n in range(128)], "static_tokens": [1.0] * 129}),
            ("copies", {"copies": [[0.5], [1.5]]}),
            ("shallower_tokens", {"shallower_tokens": [[1.0]]}),
            ("0.4 tokens", {"shallower_tokens": [[1.0], [0.4]]}),
            ("shallower_tokens", {"shallower_tokens": [[1.0], [1.0] * 25]}),  # dynamic_tokens has 24
            ("depth 4", {"paths": [[0], [0] * 2, [0] * 3, [0] * 4, [1]]}),
            ("format_version", {"format_version": None}),
        )
    ),
    ({"paths": [[0], [1, 0]], "static_tokens": [1.0] * 3}, "[1, 0]", InvalidTree),
    ({"paths": [[0], [0]], "static_tokens": [1.0] * 3}, "[0]", InvalidTree),
    ({"paths": [[-1]], "static_tokens": [1.0] * 2}, "[-1]", InvalidTree),
    ({"paths": [[0, 0], [0]], "static_tokens": [1.0] * 3}, "[0, 0]", InvalidTree),  # the tree of two nodes
    ({"top_k": 0}, "top_k", InvalidTree),
    ({"format_version": 3}, "format_version", CheckpointMismatch),
]
TEXTS = [
    *((json.dumps({**RAW, **change}), named, error) for change, named, error in WRONG),
    *((json.dumps({name: RAW[name] for name in RAW if name != key}), key, CheckpointCorrupt) for key in RAW),
    (f'{json.dumps(RAW)[:-1]}, "top_k": 3}}', "the key 'top_k' is there twice", CheckpointCorrupt),
    *((text, "", CheckpointCorrupt) for text in ("", "[]", "{", '{"format_version": 1, "temperature": NaN}')),
]


@pytest.mark.parametrize(("text", "named", "error"), TEXTS, ids=range(len(TEXTS)))
def test_a_broken_profile_is_named(text: str, named: str, error: type[DraftHeadsError], path: Path) -> None:
    path.write_text(text)
    with pytest.raises(error) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
