"""``acceptance.json``: there and back, and every broken one refused by file, place and both values."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, DraftHeadsError, InvalidTree, StorageError
from draftheads.speculation.acceptance_profile import MAX_NODES, AcceptanceProfile, read_profile
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


def test_numbers_are_rounded_for_people(path: Path) -> None:
    replace(PROFILE, temperature=0.123456).save(path)
    assert read_profile(path).temperature == 0.1235


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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, r"temperature is -1\.0; it must be at least 0"),
    ({"num_texts": -1}, "num_texts is -1; it must be at least 0"),
    ({"num_tokens": -2}, "num_tokens is -2; it must be at least 0"),
    ({"temperatures": []}, "temperatures is empty"),
    ({"temperatures": [1.0, 0.001]}, r"temperatures is \[1\.0, 0\.001\]; every number must lie between 0\.01 and 100"),
    ({"temperatures": [1.0] * 129, "shallower_tokens": []}, "temperatures 129 is more than the 128 nodes"),
    ({"top_k": 10**9}, "top_k 1000000000 is more than the 128 nodes that a tree may have"),
    ({"beam": 129}, "beam 129 is more than the 128 nodes that a tree may have"),
    ({"static_tokens": [1.0, 1.5]}, "static_tokens has 2 numbers; 5 paths make 6 trees"),
    ({"static_tokens": [0.5, 1.5, 1.8, 1.9, 2.0, 2.0]}, r"a step has 0\.5 tokens; it must have at least 1"),
    ({"dynamic_tokens": [1.0] * 129}, "dynamic_tokens has 129 numbers; it must have at most 128"),
    ({"paths": [[n] for n in range(128)], "static_tokens": [1.0] * 129}, "paths has 128 nodes; it must have at most"),
    ({"copies": [[0.5], [1.5]]}, r"copies is \[\[0\.5\], \[1\.5\]\]; every number must lie between 0 and 1"),
    ({"shallower_tokens": [[1.0]]}, "shallower_tokens has 1 list; 3 depths in temperatures make 2"),
    ({"shallower_tokens": [[1.0], [0.4]]}, r"a step has 0\.4 tokens; it must have at least 1"),
    ({"shallower_tokens": [[1.0], [1.0] * 129]}, "shallower_tokens has 129 numbers; it must have at most 128"),
    ({"paths": [[0], [0] * 2, [0] * 3, [0] * 4, [1]]}, "paths has a node of depth 4; temperatures has 3 depths"),
    ({"top_k": 1.5}, r"top_k is 1\.5; it must be int"),
    ({"surprise": 1}, "unknown key surprise"),
    ({"beam": "6"}, "beam is '6'; it must be int"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_a_broken_profile_is_named(change: dict[str, Any], words: str, path: Path) -> None:
    path.write_text(json.dumps({**json.loads(PROFILE.to_json()), **change}))
    with pytest.raises(CheckpointCorrupt, match=words) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"paths": [[0], [1, 0]], "static_tokens": [1.0] * 3}, InvalidTree),
        ({"paths": [[0], [0]], "static_tokens": [1.0] * 3}, InvalidTree),
        ({"paths": [[-1]], "static_tokens": [1.0] * 2}, InvalidTree),
        ({"paths": [[0, 0], [0]], "static_tokens": [1.0] * 3}, InvalidTree),  # the tree of two nodes lacks a parent
        ({"top_k": 0}, InvalidTree),
        ({"format_version": 3}, CheckpointMismatch),
        ({"format_version": None}, CheckpointCorrupt),
    ],
)
def test_trees_and_versions_that_cannot_be_are_refused(
    change: dict[str, Any], kind: type[DraftHeadsError], path: Path
) -> None:
    path.write_text(json.dumps({**json.loads(PROFILE.to_json()), **change}))
    with pytest.raises(kind, match=r"acceptance\.json"):
        read_profile(path)


@pytest.mark.parametrize("key", list(json.loads(PROFILE.to_json())))
def test_a_missing_key_is_named(key: str, path: Path) -> None:
    raw = json.loads(PROFILE.to_json())
    del raw[key]
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointCorrupt, match=f"{key} is {'None' if key == 'format_version' else 'missing'}"):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1, "temperature": NaN}'])
def test_what_is_no_profile_is_refused(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(CheckpointCorrupt, match=r"acceptance\.json"):
        read_profile(path)


def test_a_profile_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        PROFILE.save(tmp_path / "file" / "acceptance.json")


def test_the_assumed_profile_is_a_chain() -> None:
    profile = AcceptanceProfile.assumed(3)
    assert profile.tree(MAX_NODES) == Tree.chain(3)
    assert profile.static_tokens == [1.0, 1.5, 1.75, 1.875]
    assert (profile.num_texts, profile.dynamic_tokens) == (0, [])


def test_shallower_trees_are_no_larger_than_the_deepest() -> None:
    numbers = len(PROFILE.dynamic_tokens)
    with pytest.raises(ValueError, match=f"a list of {numbers + 1} numbers; dynamic_tokens has {numbers}"):
        replace(PROFILE, shallower_tokens=[[1.0], [1.0] * (numbers + 1)])
