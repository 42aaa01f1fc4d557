"""``draftheads reproduce``: the list of tables, and a table of one's own file."""

import json
from pathlib import Path

import pytest

from cli_world import Run
from draftheads.bench.paper_tables import table_names

TABLE = """
title = "Mine"
source = "me, table 1"
needs = "nothing"
heads = ["./hydra"]
columns = "part"
values = ["speedup", "tokens_per_step", "tokens_per_second"]
[runs.""]
trees = ["chain"]
num_nodes = [3]
max_new_tokens = 6
num_calibration_prompts = 2
[published.A]
hydra = { "all × plain" = 2.5 }
"""


def test_without_a_table_all_are_listed(run: Run) -> None:
    shown = run(["reproduce"]).out
    assert all(name in shown for name in table_names())
    assert "--quick" in shown


@pytest.mark.parametrize("parts", [1, 4])
def test_a_table_is_written_and_shown_whole(
    here: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    (here / "mine.toml").write_text(TABLE)
    lines = [{"prompt": f"{'a dog' if n % 2 else 'fog'} {n}", "category": f"kind {n % parts}"} for n in range(4)]
    (here / "four.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["reproduce", "./mine.toml", "--model", "./model", "--prompts", "four.jsonl", "--precision", "fp32"]
    shown = run([*command, "--out", "out"]).out
    text = (here / "out" / "table.md").read_text()
    assert "(2.50)" in text or "(2.5)" in text
    assert ("kind 3 tokens/step" in text) == (parts == 4)
    assert "…" not in shown, "no column is cut"
    assert all(len(line) <= 80 for line in shown.splitlines() if "wrote" not in line)
    assert sum(line.startswith("hydra") for line in shown.splitlines()) >= 1 + (parts == 4), "in every part"
    assert "wrote out/table.md and out/table.json" in shown
    record = json.loads((here / "out" / "table.json").read_text())
    assert record["cells"]["hydra"]["all tokens/step"] >= 1
