"""``draftheads bench``: what it writes and prints, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from cli_world import Run
from draftheads.bench import compare
from draftheads.checkpoints.checkpoint import read_head
from draftheads.cli.main import main
from draftheads.models.model import TargetModel

PROMPTS = ["a dog", "hello", "fog and ice", "black ice on a hill"]
QUICK = ["--num-calibration-prompts", "4", "--max-new-tokens", "8", "--num-nodes", "5", "--num-speed-prompts", "3"]
BENCH = ["bench", "./model", *QUICK, "--prompts", "four.jsonl", "--limit", "3"]


@pytest.fixture(autouse=True)
def prompts(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    (here / "four.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    (here / "one.jsonl").write_text(json.dumps({"prompt": "mom"}))


def test_it_writes_a_record_a_table_and_a_page(here: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    heads = ["--heads", "./hydra", "lookahead", "--draft-model", "./model"]
    shown = run([*BENCH, *heads, "--out", str(out), "--json", str(tmp_path / "all.json")]).out
    record = json.loads((out / "bench.json").read_text())
    assert json.loads((tmp_path / "all.json").read_text()) == record
    assert "{" not in shown, "JSON only where it was asked for"
    first, _, third, *_ = (out / "bench.md").read_text().splitlines()
    assert 0 < shown.index(first) < shown.index("parameters")
    best = max(record["rows"][:2], key=lambda row: row["default_speedup"])
    speed = f"{best['default_speedup']:.2f} ± {best['default_speedup_error']:.2f}"
    assert first == f"With the defaults on this machine: {speed} × plain decoding ({best['name']})."
    assert record["rows"][2]["default_speedup"] is None, "a draft model is no head"
    assert third.startswith("| drafter |")
    assert f"wrote {out / 'bench.html'}" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "wrote" not in line)
    assert [row["name"] for row in record["rows"]] == ["hydra", "lookahead", "draft-model"]
    assert (record["num_prompts"], record["prompts"], record["settings"]["num_nodes"]) == (3, "four.jsonl", 5)
    assert record["rows"][2]["tokens_per_step"] > 2, "it drafts for itself"
    assert record["rows"][1]["tree"] == "its own, up to 6", "as few as possible"
    numbers = [row["num_parameters"] for row in record["rows"]]
    base = LlamaForCausalLM.from_pretrained(here / "model").num_parameters()
    assert numbers == [read_head(here / "hydra").num_parameters, 0, base], "also where weights are packed"
    assert record["drafters"].keys() == {"hydra", "lookahead", "draft-model"}
    assert read_head(here / "hydra").digest in record["drafters"]["hydra"]


def test_fresh_ignores_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    real = compare.answers_of

    def noted(engine: Any, *arguments: Any) -> Any:
        counted.append(type(engine.drafter).__name__)
        return real(engine, *arguments)

    monkeypatch.setattr(compare, "answers_of", noted)
    arguments = [*BENCH, "--heads", "lookahead", "--temperature", "0"]
    for more, times in (([], 1), ([], 1), (["--fresh"], 2)):
        assert main([*arguments, *more]) == 0
        assert counted.count("Lookahead") == times


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("./model --heads ./hydra --limit 2", "--limit is 2; it must be at least 3"),
        ("./model --heads ./hydra --prompts one.jsonl", "1 prompt: give at least 3"),
        ("./model --heads ./hydra ./hydra", "each must have a name of its own"),
        ("./model --heads nowhere", "no head 'nowhere'"),
        ("./no-model --heads ./hydra nowhere", "./no-model (did you mean ./model?) is not a folder here"),
        ("./model --heads ./hydra --out four.jsonl", "four.jsonl is not a folder; choose another one"),
    ],
)
def test_impossible_comparisons_are_refused_before_the_model_is_loaded(
    arguments: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    assert words in run(["bench", *arguments.split()], code=1).err
