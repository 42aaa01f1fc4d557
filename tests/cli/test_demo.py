"""``draftheads demo``: the table, the JSON object, and the answer as it is decoded."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_world import Run, run_process
from draftheads.bench.demo import Demo
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from draftheads.heads.base import DraftHead
from families import needs_library

HEADINGS = "method tokens/ s tokens/ step speed-up (quartiles) × trans- formers same text worst margin"
DEMO = ["demo", "--model", "model", "--max-new-tokens", "3", "--no-stream"]
COLUMNS = {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def shown(folder: Path) -> tuple[str, str]:
    """What the demo prints, in a process of its own and in fp32."""
    (folder / "two.jsonl").write_text('{"prompt": "[/b] ab"}\n{"turns": ["cabbage"]}\n', encoding="utf-8")
    arguments = ["demo", "--model", "model", "--heads", "./hydra", "medusa", "--prompts", "two.jsonl", "--json", "-"]
    environment = {**os.environ, **COLUMNS, "DRAFTHEADS_CACHE": str(folder)}
    done = run_process([*arguments, "--precision", "fp32", "--max-new-tokens", "24"], folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_demo_ends_with_one_json_object(shown: tuple[str, str]):
    lines = shown[0].splitlines()
    record = json.loads(lines[-1])
    assert list(record) == [
        *("model", "precision", "threads", "copy", "num_prompts", "max_new_tokens", "seconds"),
        *("rows", "step_milliseconds", "sentences", "provenance"),
    ]
    assert (record["model"], record["precision"]) == ("model", "fp32")
    assert (record["num_prompts"], record["max_new_tokens"], record["copy"]) == (2, 24, True)
    assert isinstance(record["threads"], int)
    assert 0 < record["seconds"] < 100
    assert record["provenance"]["command"].endswith("--max-new-tokens 24")
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == ["transformers", "plain", "hydra", "medusa"]
    for row in record["rows"]:
        assert row["identical"] is True
        assert row["num_different"] == 0
        assert 0 <= row["worst_margin"] < 1e-4
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows["plain"]["tokens_per_second"])
    assert rows["transformers"]["tokens_per_step"] == rows["plain"]["tokens_per_step"] == 1.0
    assert rows["medusa"]["tokens_per_step"] >= 1.0  # of a model so small nothing may be as fast as plain decoding
    assert rows["hydra"]["tokens_per_step"] >= 1.0
    parts = record["step_milliseconds"]
    fastest = max(("hydra", "medusa"), key=lambda name: rows[name]["tokens_per_second"])
    assert list(parts) == ["plain", fastest]
    assert set(parts["plain"]) == {"drafting", "verification", "accept and rest"}


def test_the_demo_shows_one_answer_and_a_table(shown: tuple[str, str], engine: Engine):
    out, err = shown
    notes = ("measuring ", "warning: other programs use the processor")
    assert all(line.startswith(notes) for line in err.splitlines()), "no bars, no other warnings"
    text = engine.generate(["[/b] ab"], max_new_tokens=24)[0].text
    title = "[/b] ab   (hydra)\n"
    assert out.startswith(f"{title}\n{text}\n\n")
    lines = out.removeprefix(f"{title}\n{text}\n\n").splitlines()[:-1]
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in out
    heads = [line for line in lines if line and not line.startswith("─")]
    record = json.loads(out.splitlines()[-1])
    best = max(record["rows"][2:], key=lambda row: row["speedup"])
    assert heads.pop(0).startswith(f"With the defaults on this machine: {best['speedup']:.2f} ± ")
    assert sorted(" ".join(heads[:2]).split()) == sorted(HEADINGS.split())
    table = [line.split() for line in heads[2:6]]
    assert [row[0] for row in table] == ["transformers", "plain", "hydra", "medusa"]
    for cells, row in zip(table, record["rows"], strict=True):
        low, high = row["speedup_quartiles"]
        assert cells[1:] == [
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}",
            f"({low:.2f}-{high:.2f})",
            f"{row['speedup_over_transformers']:.2f}",
            "yes",
            f"{row['worst_margin']:.1g}",
        ]
    assert heads[6].startswith("2 prompts, answers of at most 24 tokens, ")
    assert heads[7] == "Parts of a step, milliseconds"
    assert [line.split()[0] for line in heads[8:10]] == list(record["step_milliseconds"])
    assert " ".join(record["sentences"]) == " ".join(" ".join(heads[11:]).split())
    assert record["sentences"][0].startswith(f"With one request {list(record['step_milliseconds'])[1]} drafts ")


@pytest.mark.usefixtures("here")
def test_heads_draft_with_the_fast_kernels_in_the_demo(monkeypatch: pytest.MonkeyPatch):
    sped_up: list[str] = []
    monkeypatch.setattr(DraftHead, "speed_up", lambda head, **_: sped_up.append(head.config.method))
    arguments = [*DEMO, "--heads", "./medusa", "./hydra", "--limit", "1", "--no-transformers", "--precision", "fp32"]
    assert main(arguments) == 0
    assert sped_up == ["medusa", "hydra"]


@pytest.mark.parametrize(
    ("precision", "explained"),
    [
        ("bf16", ["--precision fp32 prevents"]),
        ("fp32", ["please report"]),
        pytest.param("int8", ["please report", "another model than int8"], marks=needs_library),
        pytest.param("int4", ["please report", "another model than int4"], marks=needs_library),
    ],
)
@pytest.mark.usefixtures("here")
def test_the_demo_explains_texts_that_differ(
    precision: str, explained: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
):
    compared, differing, said = Demo.rows, False, {}

    def rows(*arguments: Any) -> Any:
        return [replace(row, num_different=int(differing)) for row in compared(*arguments)]

    monkeypatch.setattr(Demo, "rows", rows)
    for differing in (False, True):
        out = run([*DEMO, "--heads", "./hydra", "--limit", "1", "--precision", precision]).out
        said[differing] = [
            words
            for words in ("--precision fp32 prevents", "please report", f"another model than {precision}")
            if words in out
        ]
        assert all(len(line) <= 80 for line in out.splitlines())
    assert said == {False: [], True: explained}


def test_demo_variants(here: Path, run: Run):
    """Own prompts, fewer of them, without transformers or a stream; two heads of one name keep their paths."""
    arguments = [*DEMO, "--limit", "1", "--no-transformers", "--precision", "fp32", "--no-copy", "--seconds", "inf"]
    out, err = run([*arguments, "--heads", "./medusa", str(here / "medusa"), "--json", "record.json"])
    assert not err
    assert "provenance" not in out
    assert "draft tokens are" not in out
    record = json.loads((here / "record.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in record["rows"]] == ["plain", "./medusa", str(here / "medusa")]
    assert [row["speedup_over_transformers"] for row in record["rows"]] == [None] * 3
    assert [row["num_copied"] for row in record["rows"]] == [0] * 3
    assert (record["copy"], record["num_prompts"], record["max_new_tokens"]) == (False, 1, 3)


@needs_library
@pytest.mark.usefixtures("here")
def test_the_demo_in_int8_compares_with_plain_int8(run: Run):
    """Transformers' model stays exact; plain and heads share the quantised one, and nothing is re-scored."""
    arguments = ["demo", "--model", "model", "--heads", "./hydra", "--limit", "2", "--no-stream", "--json", "-"]
    out = run([*arguments, "--precision", "int8", "--max-new-tokens", "24"]).out
    assert "margin" not in out.split("provenance")[0].split('{"model"')[0]
    record = json.loads(out.splitlines()[-1])
    assert record["precision"] == "int8"
    assert [row["worst_margin"] for row in record["rows"]] == [None] * 3
    rows = {row["method"]: row for row in record["rows"]}
    assert rows["plain"]["identical"]
    assert rows["hydra"]["identical"], "to the bit"
    assert rows["hydra"]["tokens_per_step"] > 1.0
