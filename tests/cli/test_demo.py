"""``draftheads demo``: an answer, the tables of ``bench``, and the JSON object."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli_world import PROMPTS, Run
from families import needs_library

DEMO = ["demo", "--model", "model", "--prompts", "demo.jsonl", "--max-new-tokens", "8", "--json", "-"]


@pytest.fixture(autouse=True)
def prompts(here: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "demo.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS[:4]))


def test_it_shows_an_answer_a_comparison_and_a_verdict(run: Run) -> None:
    out, err = run([*DEMO, "--heads", "./hydra", "medusa", "--precision", "fp32", "--limit", "3"])
    assert not err, "no bars, no warnings"
    *lines, last = out.splitlines()
    record = json.loads(last)
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["plain", "transformers", "hydra", "medusa"]
    for row in rows.values():
        assert (row["num_answers"], row["num_different"]) == (3, 0)
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows["plain"]["tokens_per_second"])
    assert (record["num_prompts"], record["settings"]["trees"]) == (3, ["defaults"])
    example = record["example"]
    assert f"{PROMPTS[0]}   ({example['way']})" in lines
    assert "".join(text for text, _ in example["pieces"]).strip() in out
    assert any(line.startswith("With the defaults on this machine: ") for line in lines)
    assert all(words in out for words in ("× transformers", "same text", "3 of 3", "tokens/s"))
    assert all(len(line) <= 80 for line in lines)


@needs_library
def test_in_int8_transformers_stays_exact_and_heads_are_compared_with_plain_int8(run: Run) -> None:
    out = run([*DEMO, "--heads", "./hydra", "--precision", "int8", "--seconds", "inf"]).out
    record: Any = json.loads(out.splitlines()[-1])
    rows = {row["name"]: row for row in record["rows"]}
    assert record["precision"] == "int8"
    assert rows["hydra"]["num_different"] == 0, "to the bit"
