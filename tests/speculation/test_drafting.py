"""What drafts is checked when it is said, by the command line, the server and Python alike."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import InvalidSettings, InvalidTree
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, ByProfile, Drafting
from draftheads.speculation.tree import Tree


def test_the_tree_of_a_file_or_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1]]")
    profile = tmp_path / "acceptance.json"
    profile.write_text("{}")
    trees: dict[Any, object] = {
        "auto": ByProfile(),
        "plain": ROOT_ONLY,
        " 24 ": BestFirst(24),
        file: Tree.from_paths([[0], [1]]),
        str(profile): ByProfile(str(profile)),
        tmp_path: ByProfile(tmp_path),
        "static:7": ByProfile(static_nodes=7),
    }
    assert {tree: Drafting("medusa", tree=tree).shape for tree in trees} == trees
    assert Drafting(tree="plain").is_plain
    assert not Drafting("medusa").is_plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"head": "medusa", "draft_model": "small"}, "head medusa and draft_model small: give one of them"),
        ({"tree": "24"}, r"^tree 24: this tree needs a drafter; give a draft head \(head\)"),
        ({"tree": [[0]]}, "^a tree of 2 nodes: this tree needs a drafter"),
        ({"head": "lookahead", "tree": "24"}, "^tree 24: lookahead takes no tree: leave it out"),
        ({"draft_model": "small", "tree": "static:24"}, r"tree static:24 is of a head's profile: give a draft head"),
        ({"draft_model": "small", "tree": "."}, r"tree \. is of a head's profile: give a draft head \(head\)"),
        ({"head": "medusa", "tree": "static:0"}, "static is 0; it must be at least 1"),
        ({"head": "medusa", "copy": None}, "copy is None; it must be True or False"),
        ({"head": "medusa", "tree": "nowhere.json"}, "tree nowhere.json cannot be read: give auto, plain"),
        ({"head": "medusa", "tree": True}, "tree is True; give a Tree"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidSettings, InvalidTree), match=words):
        Drafting(**given)
