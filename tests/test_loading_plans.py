"""Which plan a head is loaded with: the user's before the head's own, one asked for by name before both."""

import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import draftheads
from draftheads.checkpoint import PLAN_FILE, TENSORS_FILE, conditions, read_head, save_head
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from draftheads.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    InvalidSettings,
    InvalidTree,
    ModelNotFound,
    PlanWarning,
)
from draftheads.loading import find_tuned, load_drafter, load_target, plans_folder
from draftheads.plan import Choice, Conditions, Cost, Plan, Tuned
from draftheads.tree import Tree
from families import SMALL, tiny_head
from training_world import VOCAB, chat_tokenizer

TREE = Tree.chain(3)
FP32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
COMMAND = "draftheads tune model head --max-nodes 40"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model and a head for it."""
    place = tmp_path_factory.mktemp("plans")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": len(VOCAB)})).save_pretrained(place / "model")
    chat_tokenizer().save_pretrained(str(place / "model"))
    base = load_target(place / "model", **FP32)
    head = tiny_head("medusa", base)
    head.tree = TREE
    save_head(head, place / "head", base=base, dtype=torch.float32)
    return place


@pytest.fixture(scope="module")
def here(world: Path) -> Conditions:
    """Those of the tests."""
    return conditions(read_head(world / "head").digest, load_target(world / "model", **FP32))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is empty, and so is the head of any tuned plan."""
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    Plan(TREE).save(world / "head" / PLAN_FILE)
    return tmp_path / "cache"


def tuned(here: Conditions, nodes: int = 2, **changes: Any) -> Tuned:
    """A plan that says ``nodes`` at every batch size."""
    return Tuned(
        command=COMMAND,
        conditions=replace(here, **changes),
        temperature=0.0,
        confidence=[1.5, 1.25, 1.0],
        paths=[[0], [1], [0, 0], [0, 0, 0]],
        static_tokens=[1.0, 1.5, 1.6, 1.9, 2.1],
        dynamic_tokens=[],
        num_ranks=4,
        beam=2,
        costs=[Cost(1, "none", 1, 0.0, 0.01, 0.0), Cost(1, "static", 5, 0.0, 0.011, 0.0)],
        choices=[Choice(1, "static", nodes, 150.0, 1.5)],
    )


def save(folder: Path, found: Tuned | None) -> Path:
    Plan(TREE, {}, found).save(folder / PLAN_FILE)
    return folder / PLAN_FILE


def own_cache(here: Conditions) -> Path:
    return plans_folder("medusa", here)


def load(world: Path, **options: Any) -> Engine:
    return draftheads.load(world / "model", world / "head", **{**FP32, **options})


# --- which one ---


def test_without_a_tuned_plan_the_heads_own_tree_is_drafted_on(world: Path) -> None:
    engine = load(world)
    assert engine.tuned is None
    assert engine.drafter.tree == TREE  # type: ignore[attr-defined]


def test_the_plan_in_the_heads_folder_is_found(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here))
    engine = load(world)
    assert engine.tuned == tuned(here)
    assert engine.drafter.confidence == (1.5, 1.25, 1.0)  # type: ignore[attr-defined]
    assert engine.adaptive
    assert not load(world, adaptive=False).adaptive


def test_the_plan_in_the_cache_comes_before_the_heads(world: Path, here: Conditions, cache: Path) -> None:
    save(world / "head", tuned(here))
    path = save(own_cache(here), tuned(here, 4))
    assert path.is_relative_to(cache)
    assert load(world).tuned == tuned(here, 4)


def test_the_cache_keeps_a_plan_for_each_type_and_each_head(world: Path, here: Conditions) -> None:
    for other in ({"dtype": "bfloat16"}, {"kernels": "exact_bits"}, {"device": "a GPU"}, {"head": "0" * 16}):
        save(plans_folder("medusa", replace(here, **other)), tuned(here, 4))
    save(plans_folder("hydra", here), tuned(here, 4))
    assert load(world).tuned is None


def test_info_shows_the_plans_in_the_cache(
    world: Path, here: Conditions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    paths = [
        save(plans_folder("medusa", one), tuned(one, nodes))
        for nodes, one in ((3, here), (4, replace(here, dtype="bf16")))
    ]
    (save(plans_folder("medusa", replace(here, dtype="broken")), None)).write_text("{")
    other = save(plans_folder("medusa", replace(here, head="0" * 16)), tuned(here, 4))
    assert main(["info", str(world / "head")]) == 0
    shown = capsys.readouterr().out
    assert all(str(path) in shown for path in paths)
    assert str(other) not in shown
    assert "static tree of 3 nodes" in shown
    assert "static tree of 4 nodes" in shown


def test_a_plan_in_the_cache_that_is_not_tuned_is_no_tuned_plan(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here))
    save(own_cache(here), None)
    assert load(world).tuned is None


def test_no_plan_ignores_what_is_tuned(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here, threads=99))
    save(own_cache(here), tuned(here, threads=99))
    engine = load(world, plan=None)
    assert engine.tuned is None
    assert engine.drafter.tree == TREE  # type: ignore[attr-defined]
    assert engine.drafter.confidence == (1.0, 1.0, 1.0)  # type: ignore[attr-defined]


def test_a_tree_comes_before_what_is_tuned(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here, threads=99))
    engine = load(world, tree=Tree.chain(2))
    assert engine.tuned is None
    assert engine.drafter.tree == Tree.chain(2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_by_name_comes_before_all(world: Path, here: Conditions, tmp_path: Path, kind: Any) -> None:
    save(world / "head", tuned(here, 2))
    save(own_cache(here), tuned(here, 3))
    path = save(tmp_path / "mine", tuned(here, 4))
    assert load(world, plan=kind(path)).tuned == tuned(here, 4)
    assert load(world, plan=kind(path.parent)).tuned == tuned(here, 4)
    path = path.rename(tmp_path / "other-name.json")
    assert load(world, plan=kind(path)).tuned == tuned(here, 4)


def test_a_plan_by_name_may_lie_in_the_home_folder(
    world: Path, here: Conditions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "mine", tuned(here, 4))
    assert load(world, plan="~/mine").tuned == tuned(here, 4)


# --- what cannot be ---


def test_a_plan_by_name_that_is_not_there(world: Path, tmp_path: Path) -> None:
    for plan in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ModelNotFound, match=r"no plan at .*: no such file; `draftheads tune` makes one") as caught:
            load(world, plan=plan)
        assert str(plan) in str(caught.value)


def test_a_plan_by_name_that_is_not_tuned(world: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"is not tuned: run `draftheads tune .* --precision fp32`") as caught:
        load(world, plan=world / "head")
    assert str(world / "head" / PLAN_FILE) in str(caught.value)


def test_tree_and_plan_contradict_each_other(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here))
    with pytest.raises(InvalidSettings, match=r"tree and plan .*head contradict each other: give one of them"):
        load(world, plan=world / "head", tree=Tree.chain(1))


@pytest.mark.parametrize("plan", [None, "auto"])
def test_a_tree_and_no_plan_by_name_do_not(world: Path, plan: str | None) -> None:
    assert load(world, plan=plan, tree=Tree.chain(1)).drafter.tree == Tree.chain(1)  # type: ignore[attr-defined]


def test_a_plan_needs_a_head(world: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"a plan needs a head to draft by it: give head="):
        draftheads.load(world / "model", plan=world / "head")
    for plan in (None, "auto"):
        assert draftheads.load(world / "model", plan=plan, **FP32).tuned is None


def break_confidence(raw: dict[str, Any]) -> None:
    raw["tuned"]["confidence"] = [1.0, 1.0]


def break_depth(raw: dict[str, Any]) -> None:
    raw["tuned"]["paths"] = [[0] * depth for depth in range(1, 5)]


def break_width(raw: dict[str, Any]) -> None:
    raw["tuned"]["paths"][1] = [len(VOCAB)]


def break_version(raw: dict[str, Any]) -> None:
    raw["format_version"] = 3


def break_keys(raw: dict[str, Any]) -> None:
    raw["tuned"]["more"] = 1


BROKEN = {
    "another number of heads": (break_confidence, CheckpointCorrupt, "confidence has 2 numbers but the head has 3"),
    "too deep": (break_depth, InvalidTree, "the tree is 4 deep but the head has 3 heads"),
    "too wide": (break_width, InvalidTree, f"rank {len(VOCAB)} is beyond the draft vocabulary of {len(VOCAB)}"),
    "of a newer version": (break_version, CheckpointMismatch, "upgrade it with"),
    "surplus": (break_keys, CheckpointCorrupt, r"unknown key tuned\.more"),
    "no JSON": (None, CheckpointCorrupt, "cannot be read as JSON"),
}


@pytest.mark.parametrize("place", ["head", "cache", "by name"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plan_is_an_error(world: Path, here: Conditions, tmp_path: Path, place: str, case: str) -> None:
    how, error, words = BROKEN[case]
    folder = {"head": world / "head", "cache": own_cache(here), "by name": tmp_path / "mine"}[place]
    path = save(folder, tuned(here, threads=99))
    raw = json.loads(path.read_text())
    if how is not None:
        how(raw)
    path.write_text(json.dumps(raw) if how is not None else "{")
    with pytest.raises(error, match=words) as caught:
        load(world, plan=path if place == "by name" else "auto")
    assert str(caught.value).startswith(str(path))


# --- other conditions ---

OTHERS: dict[str, Any] = {
    "processor": "Another CPU",
    "device": "NVIDIA H200",
    "threads": 99,
    "dtype": "float16",
    "kernels": "stock",
    "torch": "1.13.1",
    "transformers": "4.0.0",
    "draftheads": "0.0.1",
    "head": "f" * 16,
}


def test_every_condition_is_tested(here: Conditions) -> None:
    assert set(OTHERS) == set(vars(here))


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_from_elsewhere_is_used_with_a_warning(world: Path, here: Conditions, name: str) -> None:
    path = save(world / "head", tuned(here, **{name: OTHERS[name]}))
    with pytest.warns(PlanWarning) as caught:
        engine = load(world)
    difference = f"{name} {OTHERS[name]}, here {getattr(here, name)}"
    # the command tunes what was loaded, whatever it was that tuned this plan
    command = f"draftheads tune {world / 'model'} {world / 'head'} --precision fp32"
    expected = f"{path} was tuned under other conditions ({difference}): tune again with `{command}`"
    assert [str(warning.message) for warning in caught] == [expected]
    assert caught[0].filename == __file__, "it must point at who loads"
    assert engine.tuned == tuned(here, **{name: OTHERS[name]})


def test_all_differences_are_told_at_once(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here, **OTHERS))
    with pytest.warns(PlanWarning) as caught:
        load(world)
    assert len(caught) == 1
    for name, value in OTHERS.items():
        assert f"{name} {value}, here {getattr(here, name)}" in str(caught[0].message)


def test_nothing_is_said_where_nothing_differs(world: Path, here: Conditions) -> None:
    save(world / "head", tuned(here))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load(world).tuned is not None
    assert [str(warning.message) for warning in caught if issubclass(warning.category, PlanWarning)] == []


def test_what_differs_is_what_the_model_is_loaded_with(world: Path, here: Conditions) -> None:
    path = save(world / "head", tuned(here))
    for options, words in (
        ({"dtype": torch.bfloat16}, "dtype float32, here bfloat16"),
        ({"fast": False}, "kernels fast, here stock"),
    ):
        with pytest.warns(PlanWarning, match=words):
            load(world, plan=path, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(PlanWarning, match=f"threads {threads}, here {threads + 1}"):
            load(world)
    finally:
        torch.set_num_threads(threads)


def test_a_head_that_was_trained_further_is_another_one(world: Path, here: Conditions, tmp_path: Path) -> None:
    base = load_target(world / "model", **FP32)
    save_head(tiny_head("medusa", base, seed=1), tmp_path / "head", base=base, dtype=torch.float32)
    save(tmp_path / "head", tuned(here))
    digest = read_head(tmp_path / "head").digest
    assert digest != here.head
    with pytest.warns(PlanWarning, match=f"head {here.head}, here {digest}"):
        find_tuned(tmp_path / "head", world / "model", base, load_drafter(tmp_path / "head", world / "model", base))
    assert (tmp_path / "head" / TENSORS_FILE).is_file()


# --- the command line ---

GENERATE = ["generate", "w1 w2", "--model", "model", "--head", "head", "--precision", "fp32", "--max-new-tokens", "3"]


def test_the_command_line_warns_in_one_line(
    world: Path, here: Conditions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(world / "head", tuned(here, processor="Another CPU"))
    monkeypatch.chdir(world)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # what it is for users
        assert main(GENERATE) == 0
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if "tuned" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: head/plan.json was tuned under other conditions (processor Another CPU, here ")
    assert re.search(r": tune again with `draftheads tune \S+ \S+ --precision fp32`$", told[0])
    assert not any(".py:" in line or "warnings.warn" in line for line in lines), "Python's own form"


@pytest.mark.parametrize(
    ("category", "expected"), [(PlanWarning, ["warning: slow"]), (UserWarning, ["UserWarning", "slow"])]
)
def test_only_our_own_warnings_are_short(
    category: type[Warning],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(arguments: list[str]) -> int:
        warnings.simplefilter("always")
        warnings.warn("slow", category, stacklevel=2)
        return 0

    def others(message: Warning, category: type[Warning], *_: object) -> None:
        sys.stderr.write(f"{category.__name__}\n{message}\n")

    monkeypatch.setattr("draftheads.cli.main._command", command)
    with warnings.catch_warnings():
        warnings.showwarning = others
        assert main([]) == 0
        assert warnings.showwarning is others
    assert capsys.readouterr().err.splitlines() == expected
