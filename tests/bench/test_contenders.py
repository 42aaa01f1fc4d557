"""Drafters of a comparison, and their names in the table."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from draftheads.bench import contenders
from draftheads.bench.contenders import heads_for, load_contenders, names_of
from draftheads.checkpoints.checkpoint import ResolvedHead, save_head
from draftheads.drafters.mixed import Mixed
from draftheads.errors import InvalidSettings
from draftheads.loading import load_target, resolve
from draftheads.models.model import TargetModel
from draftheads.speculation.shapes import UNTRAINED_HEADS, Drafting
from families import TREES, tiny_head, tiny_profile


@pytest.fixture(scope="module")
def target(world: Path) -> TargetModel:
    return load_target(str(world / "model"), precision="fp32", fast=False)


def test_folders_with_the_same_name_keep_their_paths(tmp_path: Path):
    (tmp_path / "hydra").mkdir()
    assert names_of([str(tmp_path / "hydra")]) == {"hydra": str(tmp_path / "hydra")}
    assert list(names_of([str(tmp_path / "hydra"), "hydra"])) == [str(tmp_path / "hydra"), "hydra"]
    for heads in (["medusa", "medusa"], ["plain"]):
        with pytest.raises(InvalidSettings, match="each must have a name of its own, other than plain"):
            names_of(heads)


def test_by_default_all_heads_of_the_model_and_the_untrained_drafters_are_compared():
    found = heads_for("smollm2-135m")
    assert found[0] == "medusa"
    assert found[-len(UNTRAINED_HEADS) :] == tuple(UNTRAINED_HEADS)
    assert heads_for("HuggingFaceTB/SmolLM2-135M-Instruct") == found
    assert heads_for("elsewhere") == tuple(UNTRAINED_HEADS)


def _found(named: dict[str, str], world: Path) -> dict[str, ResolvedHead | str]:
    return {name: resolve(head, world / "model", ignore_profile=True) for name, head in named.items()}


def test_untrained_drafters_keep_to_a_number_of_nodes(world: Path, target: TargetModel):
    named = {"lookup": "prompt-lookup", "lookahead": "lookahead"}
    for found in load_contenders(_found(named, world), target):
        assert found.within is not None
        for num_nodes in (1, 4, 6, 24):
            drafter = found.within(num_nodes)
            assert type(drafter) is type(found.drafter)
            assert drafter.default_shape.num_nodes <= max(num_nodes, 6), "lookahead has at least six"


@pytest.mark.usefixtures("cheap_nodes")
def test_drafters_come_with_the_engine_that_users_have(
    world: Path, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = Mock(side_effect=contenders.engine_on)
    monkeypatch.setattr(contenders, "engine_on", made)
    profile = tiny_profile(TREES["ragged"])
    save_head(tiny_head("hydra", target), tmp_path / "hydra", base=target, profile=profile)
    shutil.copytree(tmp_path / "hydra", tmp_path / "broken")
    (tmp_path / "broken" / "acceptance.json").write_text("{}")
    named = {"hydra": str(tmp_path / "hydra"), "lookup": "prompt-lookup", "broken": str(tmp_path / "broken")}
    hydra, lookup, broken = load_contenders(_found(named, world), target)
    assert not made.called, "what it needs is measured when it is wanted"
    usual = hydra.as_loaded(True)
    assert usual is not None
    assert (usual.profile, type(usual.drafter)) == (profile, Mixed)
    assert hydra.as_loaded(True) is usual
    assert made.call_count == 1
    alone = hydra.as_loaded(False)
    assert alone is not None
    assert (alone.profile, alone.drafter) == (profile, hydra.drafter), "the head, without copies"
    assert isinstance(getattr(lookup.as_loaded(True), "drafter", None), Mixed)
    assert broken.as_loaded(True) is None, "such a head is compared, but cannot be loaded"


def test_a_draft_model_comes_with_copies_as_users_have_it(world: Path, target: TargetModel, tmp_path: Path):
    (tmp_path / "texts.txt").write_text("abcabc", encoding="utf-8")
    drafting = Drafting(draft_model=str(world / "model"), corpus=str(tmp_path / "texts.txt"))
    (found,) = load_contenders({}, target, drafting=drafting, precision="fp32")
    usual, alone = found.as_loaded(True), found.as_loaded(False)
    assert usual is not None
    assert alone is not None
    assert found.as_loaded(True) is usual, "the corpus is read once"
    assert isinstance(usual.drafter, Mixed)
    assert (usual.drafter.drafter, len(usual.drafter.sources)) == (found.drafter, 2)
    assert alone.drafter is found.drafter
