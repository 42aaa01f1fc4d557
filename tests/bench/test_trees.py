"""Trees of a comparison: by kind and number of nodes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftheads.bench.contenders import Contender, TreeFinder, dense_tree, numbered
from draftheads.bench.settings import BenchSettings, Variant
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.models.model import TargetModel
from draftheads.search.replay import Replay
from draftheads.speculation.shapes import BestFirst, Sampled
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import NoProgress
from families import tiny_head

pytestmark = pytest.mark.usefixtures("one_thread")
OTHERS = [[9, 3 + row, 8] for row in range(4)]
SETTINGS = BenchSettings(num_nodes=6, max_new_tokens=10, num_calibration_prompts=4)


def finder(model: TargetModel, folder: Path, **changes: Any) -> TreeFinder:
    return TreeFinder(model, OTHERS, replace(SETTINGS, **changes), folder=folder, progress=NoProgress())


def contender(model: TargetModel, method: str = "hydra", **options: Any) -> Contender:
    head = tiny_head(method, model, **options)
    return Contender(method, head, "1", head=head, draws=True)


@pytest.mark.parametrize("grows", [True, False])
def test_best_is_the_better_one_of_growing_and_static(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, grows: bool
):
    run = Replay.run

    def changed(self: Replay, answers: Any) -> dict[str, Any]:
        found = run(self, answers)
        found["dynamic"]["expected"][-1] = found["static"]["expected"][-1] + (0.1 if grows else -0.1)
        found["confidence"]["temperatures"] = [1.5, 1.25, 0.75]
        return found

    monkeypatch.setattr(Replay, "run", changed)
    variants = Variant("best", 6), Variant("static", 6), Variant("growing", 6)
    chosen = finder(model, tmp_path).find(contender(model), variants[0])
    monkeypatch.setattr(Replay, "run", None)
    best, static, growing = (finder(model, tmp_path).find(contender(model), variant) for variant in variants)
    assert best == chosen == (growing if grows else static), "the search is done once"
    assert growing is not None
    assert static is not None
    assert growing.shape == BestFirst(6, top_k=10, beam=6, temperatures=(1.5, 1.25, 0.75))
    assert isinstance(static.shape, Tree)
    assert static.shape.num_nodes == 6
    assert static.words == "static, 6"


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_one_search_finds_trees_of_all_sizes(
    method: str, model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each is that of a search for its own size."""
    head, kinds = contender(model, method), ("best", "static", "growing")
    expected = {
        size: [finder(model, tmp_path / str(size), num_nodes=(size,)).find(head, Variant(kind, size)) for kind in kinds]
        for size in (2, 5, 14)
    }
    both = finder(model, tmp_path / "all", num_nodes=(14, 2, 5))
    both.find(head, Variant("best", 5))
    monkeypatch.setattr(Replay, "run", None)
    for size, trees in expected.items():
        assert [both.find(head, Variant(kind, size)) for kind in kinds] == trees
    assert len({tree.words for trees in expected.values() for tree in trees if tree}) == 6


@pytest.mark.parametrize(("num_paths", "nodes"), [(1, 4), (5, 16)])
def test_trees_in_place_of_paths_are_as_large(num_paths: int, nodes: int, model: TargetModel, tmp_path: Path):
    one, head = finder(model, tmp_path), contender(model, "mlp-speculator")
    assert one.find(head, Variant("paths", num_paths)) == one.find(head, Variant("static", nodes))


def test_other_kinds_need_no_search(model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replay, "run", None)
    one, head = finder(model, tmp_path), contender(model, "mlp-speculator", num_heads=4)
    small = Contender("draft-model", DraftModel(model, model), "1", draws=True)

    def shape(which: Contender, *variant: Any) -> Any:
        chosen = one.find(which, Variant(*variant))
        return None if chosen is None else chosen.shape

    assert shape(head, "chain", 3) == Tree.chain(2)
    assert shape(head, "chain", 9) == Tree.chain(4)
    assert shape(head, "paths", 37) is None, "there are 36"
    assert shape(contender(model, num_heads=2), "paths", 3) is None, "too few heads"
    assert shape(head, "dense", 12) == dense_tree(12, depth=4)
    assert shape(head, "best", 6, "block") == Sampled(Tree.chain(4))
    assert shape(small, "best", 6, "rejection") == Sampled(Tree.chain(5))
    assert shape(small, "best", 6) == BestFirst(6)
    assert shape(small, "static", 6) is None
    assert shape(head, "growing", 6, "rejection") is None, "only static trees are drawn"


def test_drawn_drafts_have_the_head_s_static_tree(model: TargetModel, tmp_path: Path):
    one, head = finder(model, tmp_path), contender(model)
    static, drawn = one.find(head, Variant("static", 6)), one.find(head, Variant("static", 6, "rejection"))
    assert static is not None
    assert drawn is not None
    assert isinstance(static.shape, Tree)
    assert drawn.shape == Sampled(numbered(static.shape))


def test_drafters_with_trees_of_their_own_are_measured_once(model: TargetModel, tmp_path: Path):
    lookahead = Contender("lookahead", Lookahead(), "1", within=Lookahead.within)
    one = finder(model, tmp_path, trees=("defaults", "static", "best"))
    found = one.find(lookahead, Variant("static", 9))
    assert found is not None
    assert found.words == f"its own, up to {Lookahead.within(9).default_shape.num_nodes}"
    assert one.find(lookahead, Variant("best", 9)) is one.find(lookahead, Variant("static", 9, "rejection")) is None


@pytest.mark.parametrize(("num_nodes", "depth"), [(2, 4), (16, 3), (24, 4), (64, 4), (100, 5), (128, 8)])
def test_dense_trees_fill_their_size(num_nodes: int, depth: int):
    tree = dense_tree(num_nodes, depth=depth)
    assert 0.8 * num_nodes <= tree.num_nodes <= num_nodes
    assert tree.max_depth <= depth
    widths = [max(path[level] for path in tree.paths if len(path) > level) + 1 for level in range(tree.max_depth)]
    assert tree == Tree.cartesian(widths)
    assert tree == dense_tree(num_nodes, depth=depth), "the same each time"


def test_siblings_of_a_drawn_tree_are_numbered_in_order():
    tree = Tree.from_paths([(1,), (4,), (1, 3), (4, 0), (4, 2)])
    assert numbered(tree) == Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1)])
    assert numbered(Tree.cartesian([3, 2])) == Tree.cartesian([3, 2])
