"""``draftheads bench``: what it writes and prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import LlamaForCausalLM

from cli_world import Run
from draftheads.bench import compare
from draftheads.checkpoints.checkpoint import read_head
from draftheads.cli.show import print_table
from draftheads.models.model import TargetModel
from draftheads.utils.machine import OtherPrograms

PROMPTS = ["a dog", "hello", "fog and ice", "black ice on a hill"]
QUICK = ["--max-new-tokens", "8", "--num-nodes", "5", "--precision", "fp32"]
BENCH = ["bench", "./model", *QUICK, "--prompts", "four.jsonl", "--limit", "3"]


@pytest.fixture(autouse=True)
def prompts(here: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "four.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    monkeypatch.setattr(compare, "own_prompts", lambda _: here / "four.jsonl")


@pytest.mark.parametrize("lines", [1, 9])
def test_tables_fit_80_columns_and_wide_ones_have_their_columns_as_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    headings = ["drafter", "tree", *(f"number {n}" for n in range(12))]
    print_table(
        Console(), headings, [[f"{'name' * 9}{n}", "defaults, with copies", *["12345.67"] * 12] for n in range(lines)]
    )
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert ("number 11" in " ".join(" ".join(shown).split())) == (lines == 1)
    assert "…" not in "".join(shown)


@pytest.mark.parametrize("disturbed", [True, False])
def test_it_says_that_other_programs_computed(run: Run, monkeypatch: pytest.MonkeyPatch, disturbed: bool) -> None:
    monkeypatch.setattr(OtherPrograms, "disturb", lambda *_: disturbed)
    shown = run([*BENCH, "--heads", "prompt-lookup", "--trees", "best"]).out
    assert ("other programs used the processor" in " ".join(shown.split())) == disturbed


def test_it_writes_a_record_tables_answers_and_a_page(here: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    heads = ["--heads", "./hydra", "lookahead", "--draft-model", "./model", "--transformers", "--quality", "agreement"]
    shown = run([*BENCH, *heads, "--out", str(out), "--json", str(tmp_path / "all.json")]).out
    record = json.loads((out / "bench.json").read_text())
    assert json.loads((tmp_path / "all.json").read_text()) == record
    assert "{" not in shown, "JSON only where it was asked for"
    assert [(row["name"], row["settings"].get("tree")) for row in record["rows"]] == [
        ("plain", None), ("transformers", None), ("hydra", "best"), ("hydra", "defaults"), ("lookahead", "best"),
        ("lookahead", "defaults"), ("draft-model", "best"), ("draft-model", "defaults"),
    ]  # fmt: skip
    first, _, third, *_ = (out / "bench.md").read_text().splitlines()
    assert first in " ".join(shown.split())
    best = max(record["rows"][2:], key=lambda row: row["speedup"])
    assert f"{best['speedup']:.2f} ± {best['speedup_error']:.2f} ×" in first
    assert third.startswith("| drafter |")
    assert f"wrote {out / 'bench.html'}" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "wrote" not in line)
    assert (record["num_prompts"], record["prompts"], record["settings"]["num_nodes"]) == (3, "four.jsonl", [5])
    assert record["rows"][-2]["tokens_per_step"] > 2, "it drafts for itself"
    assert record["rows"][4]["tree"] == "its own, up to 6", "as few as possible"
    assert {row["quality"]["agreement"] for row in record["rows"]} == {100.0}
    numbers = [row["num_parameters"] for row in record["rows"][2::2]]
    base = LlamaForCausalLM.from_pretrained(here / "model").num_parameters()
    assert numbers == [read_head(here / "hydra").num_parameters, 0, base], "also where weights are packed"
    assert record["drafters"].keys() == {"hydra", "lookahead", "draft-model"}
    assert read_head(here / "hydra").digest in record["drafters"]["hydra"]
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 8
    assert all(sum(line["step_tokens"]) == len(line["token_ids"]) - 1 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("./model --heads ./hydra --limit 0", "limit is 0; it must be at least 1"),
        ("./model --heads ./hydra --prompts four.jsonl --limit 2", "2 prompts: give at least 3"),
        ("./model --heads ./hydra --category poetry", "no question has the category 'poetry'"),
        ("./model --heads ./hydra ./hydra", "each must have a name of its own"),
        ("./model --heads ./hydra --out four.jsonl", "four.jsonl is not a folder; choose another one"),
    ],
)
def test_impossible_comparisons_are_refused_before_the_model_is_loaded(
    arguments: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    assert words in run(["bench", *arguments.split()], code=1).err


def test_bench_shows_what_a_head_would_bring(here: Path, run: Run) -> None:
    """Timed with an untrained head, and predicted alone by the costs of another machine."""
    options = ["--precision", "fp32", "--prompts", "four.jsonl", "--json", "found.json"]
    shown = run(["bench", "./model", "--accept", "0.8,0.6", "--heads", "medusa", *options]).out
    found = json.loads((here / "found.json").read_text())
    assert (found["accept"], found["method"]) == ([0.8, 0.6], "medusa")
    assert [row["numbers"]["num_nodes"] for row in found["rows"]] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(row["decode_speedup"] for row in found["rows"])
    assert "fastest by prediction" in shown
    costs = {"format_version": 12, "of_passes": [[1, 28.0], [64, 32.0]], "of_drafts": [[1, 1, 1.0]]}
    (here / "costs.json").write_text(json.dumps(costs))
    run(["bench", "./model", "--accept", "0.8,0.6", "--costs", "costs.json", "--json", "found.json"])
    rows = json.loads((here / "found.json").read_text())["rows"]
    assert rows[1]["numbers"]["predicted_speedup"] == pytest.approx(1.8 * 28 / (28 + 4 / 63 + 1))
    assert rows[1]["decode_speedup"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--accept", "0.8,1.2"], "accept is '0.8,1.2'; give shares between 0 and 1, such as 0.8,0.6,0.5"),
        (["--accept", "often"], "accept is 'often'; give shares"),
        (["--costs", "costs.json"], "costs is costs.json, and accept is missing: give --accept"),
        (["--accept", "0.8", "--heads", "hydra", "eagle"], "accept is for one method (--heads), --prompts"),
        (["--accept", "0.8", "--heads", "nothing"], "nothing"),
    ],
)
def test_bench_refuses_impossible_acceptances(run: Run, options: list[str], message: str) -> None:
    assert message in " ".join(run(["bench", "./model", *options], code=1).err.split())
