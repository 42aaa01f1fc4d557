"""``draftheads tune`` on a tiny model: the plan it leaves, how it goes on after a kill, and what it refuses."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import draftheads
from draftheads.checkpoint import read_head
from draftheads.cli.main import main
from draftheads.cli.tune import own_folder, work_folder
from draftheads.errors import CheckpointCorrupt, InvalidSettings
from draftheads.files import locked
from draftheads.loading import plans_folder
from draftheads.plan import Conditions, read_plan
from draftheads.search.calibrate import Answer
from draftheads.search.cost import StepBench, Way
from draftheads.search.tune import TuneSettings
from draftheads.search.verify import PAPER_TREE
from draftheads.target.model import TargetModel
from draftheads.tree import Tree
from draftheads.zoo.registry import zoo_heads
from families import SMALL, VOCAB, tiny_head, tiny_model
from nursery import Nursery
from test_cli import SPECIAL, letters_tokenizer

QUICK = ["--num-prompts", "6", "--max-new-tokens", "10", "--batch-sizes", "1", "3", "--max-nodes", "6", "--rounds", "1"]
PROMPTS = ["a dog", "hello", "fog and ice", "black ice on a hill", "mom", "a bad lad", "peking", "old film"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing goes to the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEADS_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two heads for it, and prompts to tune and to verify on."""
    place = tmp_path_factory.mktemp("tune")
    torch.manual_seed(22)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 512})).eval()
    model.lm_head.weight.data[: len(SPECIAL)] = 0
    model.save_pretrained(place / "model")
    letters_tokenizer().save_pretrained(str(place / "model"))
    base = TargetModel.load(str(place / "model"), dtype=torch.float32)
    for method in ("medusa", "hydra"):
        draftheads.save_head(tiny_head(method, base), place / method, base=base, dtype=torch.float32)
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (place / "prompts.jsonl").write_text("\n".join(lines[:6]), encoding="utf-8")
    (place / "others.jsonl").write_text("\n".join(lines[4:]), encoding="utf-8")
    (place / "one.jsonl").write_text(lines[0], encoding="utf-8")
    return place


@pytest.fixture
def here(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(world)
    monkeypatch.setenv("COLUMNS", "100")
    return world


def tune(method: str, *more: str) -> list[str]:
    options = ["--precision", "fp32", "--prompts", "prompts.jsonl", *QUICK, *more]
    return ["tune", "./model", f"./{method}", *options]


@pytest.fixture(scope="module")
def tuned(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a search for hydra, with a comparison on other prompts, leaves in a folder."""
    out = tmp_path_factory.mktemp("out") / "hydra"
    with contextlib.chdir(world):
        assert main(tune("hydra", "--out", str(out), "--verify", "others.jsonl")) == 0
    return out


def test_it_leaves_a_plan_a_record_and_a_page(tuned: Path) -> None:
    plan = read_plan(tuned / "plan.json")
    assert plan.tuned is not None
    assert [choice.batch_size for choice in plan.tuned.choices] == [1, 3]
    assert plan.tuned.command.split()[0] == "draftheads"
    assert len(plan.tuned.confidence) == 3
    record = json.loads((tuned / "tune.json").read_text())
    assert record["head"] == "./hydra"
    assert record["num_tokens"] == 6 * 10
    page = (tuned / "tune.html").read_text()
    assert page.count("<svg") >= 6
    assert "others.jsonl" in page


def test_every_size_is_measured_at_every_batch_size_in_all_its_parts(tuned: Path) -> None:
    record = json.loads((tuned / "tune.json").read_text())
    measured = {(cost["batch_size"], cost["kind"]) for cost in record["cost"]}
    assert measured == {(size, kind) for size in (1, 3) for kind in ("none", "static", "dynamic")}
    for cost in record["cost"]:
        assert cost["verify"] > 0
        assert cost["rest"] > 0
        guessing = cost["kind"] != "none"
        plain = next(one for one in record["cost"] if one["kind"] == "none")
        assert (cost["draft"] > plain["draft"]) is guessing or cost["batch_size"] != 1
    assert {run["kind"] for run in record["runs"]} == {"none", "static", "dynamic"}


def test_what_was_compared_names_every_way(tuned: Path) -> None:
    record = json.loads((tuned / "tune.json").read_text())["verified"]
    assert record["num_prompts"] == 4
    ways = {(row["batch_size"], row["way"]) for row in record["rows"]}
    for size in (1, 3):
        assert {(size, way) for way in ("plain", "plan", "plan, not adaptive", "static 4", "paper 62")} <= ways
    assert (1, "dynamic 4") in ways
    assert all(row["speedup"] == 1.0 for row in record["rows"] if row["way"] == "plain")
    assert {phase["batch_size"] for phase in record["mixed_load"]} == {1, 4, 16}
    assert {"plain", "plan"} <= {phase["way"] for phase in record["mixed_load"]}
    assert record["predictions"]


def test_the_papers_tree_has_its_64_nodes():
    assert PAPER_TREE.num_nodes == 64
    assert [PAPER_TREE.depths.count(depth) for depth in range(5)] == [1, 10, 28, 23, 2]


def test_a_tuned_head_is_loaded_with_its_plan_and_says_what_plain_says(here: Path, tuned: Path) -> None:
    plain = draftheads.load("./model", precision="fp32")
    prompts = ["a dog", "ice", "hello"]
    expected = [result.token_ids for result in plain.generate(prompts, max_new_tokens=30)]
    for adaptive in (True, False):
        engine = draftheads.load("./model", "./hydra", plan=tuned, adaptive=adaptive, precision="fp32")
        assert engine.tuned == read_plan(tuned / "plan.json").tuned
        assert engine.drafter.confidence == tuple(engine.tuned.confidence)  # type: ignore[union-attr,attr-defined]
        assert [result.token_ids for result in engine.generate(prompts, max_new_tokens=30)] == expected


def test_a_head_of_ones_own_gets_its_plan_into_its_folder(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["draftheads", *tune("medusa")])
    assert main(tune("medusa")) == 0
    shown = capsys.readouterr().out
    assert "over plain" in shown
    saved = read_plan("medusa/plan.json").tuned
    assert saved is not None
    assert saved.command.split()[:4] == ["draftheads", "tune", "./model", "./medusa"]
    engine = draftheads.load("./model", "./medusa", precision="fp32")
    assert engine.tuned == saved
    assert draftheads.load("./model", "./medusa", plan=None, precision="fp32").tuned is None
    assert main(["info", "./medusa"]) == 0
    assert "Tuned" in capsys.readouterr().out
    before = Path("medusa/tune.html").read_bytes()
    Path("medusa/tune.html").unlink()
    assert main(["report", "medusa"]) == 0
    assert Path("medusa/tune.html").read_bytes() == before


@pytest.mark.parametrize("plan", ["{}", "not JSON", None])
def test_a_broken_plan_is_mended_by_tuning(here: Path, tmp_path: Path, plan: str | None) -> None:
    folder = shutil.copytree("medusa", tmp_path / "head")
    (folder / "plan.json").unlink()
    if plan is not None:
        (folder / "plan.json").write_text(plan)
    with pytest.raises(CheckpointCorrupt, match=r"plan\.json"):
        draftheads.load("./model", folder, precision="fp32")
    assert main(["tune", "./model", str(folder), *tune("medusa")[3:]]) == 0
    assert draftheads.load("./model", folder, precision="fp32").tuned is not None


def test_prompts_do_not_travel_with_a_head(here: Path, tuned: Path) -> None:
    assert {path.name for path in tuned.iterdir()} == {"plan.json", "tune.json", "tune.html", ".lock"}
    assert (work_folder(tuned) / "answers-000.json").exists()
    assert not work_folder(tuned).is_relative_to(tuned)


def test_calibrating_twice_finds_the_same(here: Path, tuned: Path, tmp_path: Path) -> None:
    assert main(tune("hydra", "--out", str(tmp_path / "again"))) == 0
    first, second = (json.loads((place / "tune.json").read_text()) for place in (tuned, tmp_path / "again"))
    for part in ("static", "marginal", "dynamic", "dense", "accuracy", "confidence"):
        assert first[part] == second[part]


def test_a_search_for_a_temperature_counts_probabilities(here: Path, tmp_path: Path) -> None:
    assert main(tune("medusa", "--temperature", "0.9", "--out", str(tmp_path / "warm"))) == 0
    record = json.loads((tmp_path / "warm" / "tune.json").read_text())
    counted = [share * record["num_tokens"] for share in record["static"]["shares"][1:]]
    assert any(abs(count - round(count)) > 1e-3 for count in counted)
    plan = read_plan(tmp_path / "warm" / "plan.json").tuned
    assert plan is not None
    assert plan.temperature == 0.9


def test_killed_in_the_middle_it_goes_on_with_what_it_had(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    nursery = Nursery("tune")
    arguments = tune("hydra", "--out", str(out), "--num-prompts", "6")[1:]
    try:
        for name in ("answers-000", "calibration", "costs-1"):
            process = nursery.start(arguments, folder=world)
            until = time.monotonic() + 60
            while not (work_folder(out) / f"{name}.json").exists() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(process, signal.SIGKILL)
            assert nursery.wait() == -signal.SIGKILL
        found = {path.name: path.stat().st_mtime_ns for path in work_folder(out).glob("*.json")}
        assert {"answers-000.json", "calibration.json", "costs-1.json"} <= set(found)
        assert not (out / "plan.json").exists()
        nursery.start(arguments, folder=world)
        assert nursery.wait() == 0
    finally:
        nursery.close()
    after = {path.name: path.stat().st_mtime_ns for path in work_folder(out).glob("*.json")}
    assert {name: after[name] for name in found} == found, "what was found before the kill was found again"
    assert read_plan(out / "plan.json").tuned is not None


def test_a_finished_search_begins_anew_and_verifying_uses_what_it_found(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "twice"
    assert main(tune("medusa", "--out", str(out))) == 0
    work = work_folder(out) / "costs-1.json"
    first = work.stat().st_mtime_ns
    assert main(tune("medusa", "--out", str(out), "--verify", "others.jsonl", "--verify-prompts", "2")) == 0
    assert work.stat().st_mtime_ns == first
    assert main(tune("medusa", "--out", str(out))) == 0
    assert work.stat().st_mtime_ns != first


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    return capsys.readouterr().err


def test_impossible_searches_are_refused(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "no")]
    one = ["tune", "./model", "./hydra", "--precision", "fp32", "--prompts", "one.jsonl", *QUICK, *out]
    assert "1 prompts to calibrate on" in refused(one, capsys)
    assert "no head" in refused(["tune", "./model", "./nothing", *out], capsys)
    assert "cannot be read" in refused(["tune", "./model", "./hydra", "--prompts", "none.jsonl", *out], capsys)
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(tune("hydra", "--out", str(tmp_path / "file" / "x")), capsys)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_prompts": 1}, "num_prompts is 1; it must be at least 2"),
        ({"max_nodes": 1}, "max_nodes is 1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_sizes": (2, 1)}, r"batch_sizes are \[2, 1\]"),
        ({"batch_sizes": ()}, "batch_sizes are"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        TuneSettings(**wrong)


def test_two_searches_into_one_folder_do_not_meet(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / "busy", ""):
        assert "another process is writing" in refused(tune("hydra", "--out", str(tmp_path / "busy")), capsys)


def test_plans_of_heads_that_are_not_ones_own_go_to_the_cache(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    saved = read_head("hydra")
    conditions = Conditions("a processor", "cpu", 2, "float32", "fast", "2.9", "5.10", "0.1.0", saved.digest)
    assert own_folder(saved, conditions) == Path("hydra")
    in_cache = plans_folder("hydra", conditions)
    assert in_cache.is_relative_to(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here))
    assert own_folder(saved, conditions) == in_cache
    monkeypatch.undo()
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(here)
    for head in zoo_heads():
        bundled = read_head(head.folder)
        assert own_folder(bundled, conditions).is_relative_to(tmp_path / "cache")


def test_a_file_of_prompts_to_verify_on_is_read_before_the_search(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "cannot be read" in refused(tune("hydra", "--out", str(out), "--verify", "nothing.jsonl"), capsys)
    assert not (out / "plan.json").exists()


def test_steps_are_timed_up_to_the_last_position_that_a_model_knows() -> None:
    model = tiny_model("llama", max_position_embeddings=40)
    head = tiny_head("medusa", model)
    bench = StepBench(model, head, [Answer((3, 4, 5), (6, 7, 8, 9))] * 2, 2)
    for _ in range(6):
        cost = bench.measure(Way("static", 4, Tree.chain(3)), repeats=6)
        assert (cost.batch_size, cost.num_nodes) == (2, 4)
        assert len(bench.batch.sequences) in (1, 2)
