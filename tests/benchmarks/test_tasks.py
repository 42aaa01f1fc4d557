"""The prompts in six kinds, that benchmarks are run on."""

import json
from collections import Counter
from pathlib import Path

from draftheads.data.records import read_prompts

TASKS = Path(__file__).parents[2] / "benchmarks" / "tasks.jsonl"
KINDS = {"chat", "question_answering", "maths", "retrieval", "summarisation", "translation"}


def test_at_least_twenty_prompts_of_each_kind_with_unique_ids_and_texts():
    records = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
    counts = Counter(record["category"] for record in records)
    assert counts.keys() == KINDS
    assert min(counts.values()) >= 20
    assert len({record["question_id"] for record in records}) == len(records)
    assert len({record["turns"][0] for record in records}) == len(records)


def test_the_commands_read_them():
    assert len(list(read_prompts(TASKS))) == len(TASKS.read_text(encoding="utf-8").splitlines())
