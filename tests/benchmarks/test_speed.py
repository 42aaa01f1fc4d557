"""The comparison by batch size and by task, on a tiny model."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import speed

from draftheads.decode.engine import Engine
from families import tiny_head, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    kinds = ["chat", "maths", "chat", "maths"]
    lines = [json.dumps({"turns": [f"question {n}"], "category": kind}) for n, kind in enumerate(kinds)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model and a tiny head in place of real ones; prompts are their lengths."""
    model = tiny_model("llama")
    monkeypatch.setattr(speed, "load_target", lambda *_, **__: model)
    monkeypatch.setattr(speed, "load_drafter", lambda *_: tiny_head("hydra", model))
    monkeypatch.setattr(Engine, "encode", lambda _, prompt: [5, 6, len(prompt)] if isinstance(prompt, str) else prompt)
    monkeypatch.setattr(speed, "head_engine", lambda target, drafter, **_: Engine(target, drafter))


def names(found: list[tuple[str, speed.Row]]) -> list[tuple[str, str]]:
    return [(cell, row.name) for cell, row in found]


def test_each_batch_size_has_a_row_for_each_way(prompts: Path):
    found = speed.measure(speed.Options(prompts=prompts, batch_sizes=(1, 2), max_new_tokens=5, rounds=2))
    assert names(found) == [
        *(("1 at a time", name) for name in ("plain", "hydra", "transformers")),
        *(("2 at a time", name) for name in ("plain", "hydra")),  # transformers answers one prompt at a time
    ]
    assert {row.num_tokens for _, row in found} == {2 * 4 * 5}, "two rounds of four prompts"
    assert all(row.tokens_per_step == 1.0 for _, row in found if row.name != "hydra")


def test_each_task_has_a_row_for_each_way(prompts: Path):
    options = speed.Options(prompts=prompts, by_task=True, transformers=False, max_new_tokens=5, limit=1)
    found = speed.measure(options)
    assert names(found) == [(task, name) for task in ("chat", "maths") for name in ("plain", "hydra")]


def test_the_table_and_the_json_file_have_all_rows(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    speed.main(speed.Options(prompts=prompts, transformers=False, max_new_tokens=5, json=tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["cell"], row["way"]) for row in rows] == [("1 at a time", "plain"), ("1 at a time", "hydra")]
    assert "hydra" in capsys.readouterr().out
