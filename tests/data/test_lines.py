"""Columns and keys that nothing reads are named once for each file, by every reader; what is used is not."""

import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from draftheads.data.lines import left_out_lines
from draftheads.data.records import read_chats, read_prompts
from draftheads.data.texts import read_texts
from draftheads.errors import DataWarning
from draftheads.serve.recorder import Exchange

SAID = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
USED: dict[str, tuple[Any, list[dict[str, Any]]]] = {  # a reader, and lines of which all is used
    "questions": (
        read_chats,
        [
            {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["p", "b"]]},
            {"question": "q", "context": "c", "answer": "a"},
            {"system_prompt": "s", "query": "q", "response": "a"},
            {"article": "x", "highlights": "y"},
        ],
    ),
    "pairs": (read_chats, [{"conversation": [{"human": "q", "assistant": "a"}], "system": "s"}, {"data": ["q", "a"]}]),
    "marks": (read_chats, [{"messages": [{**SAID[0], "weight": 0}, {**SAID[1], "weight": 1, "train": True}]}]),
    "tokens": (read_chats, [{"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]}]),
    "tools": (read_chats, [{"messages": SAID, "tools": [{"name": "f"}]}]),
    "prompts": (
        read_prompts,
        [{"id": 1, "prompt": "q"}, {"turns": ["q"], "category": "x", "reference": "y"}, {"prompt": SAID[:1]}],
    ),
    "texts": (read_texts, [{"text": "a b"}]),
}


def named(reader: Any, path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        for _ in reader(path):
            pass
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("name", USED)
def test_a_further_column_is_named_once(tmp_path: Path, name: str, kind: str):
    reader, lines = USED[name]
    if kind in (".csv", ".parquet"):
        flat = [{key: value if isinstance(value, str) else json.dumps(value) for key, value in lines[0].items()}]
        lines = [one for one in flat if name not in ("prompts", "tools")]
        if not lines:
            return
    for more, sentence in (
        ({}, None),
        ({"source": "x"}, "column source is"),
        ({"source": "x", "score": "2"}, "columns source, score are"),
    ):
        path = tmp_path / f"a{kind}"
        rows = [{**line, **more} for line in lines] * 2
        if kind == ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        elif kind == ".csv":
            text = ",".join(f'"{key}"' for key in rows[0]) + "\n"
            text += "".join(
                ",".join('"' + cell.replace('"', '""') + '"' for cell in row.values()) + "\n" for row in rows
            )
            path.write_text(text)
        else:
            path.write_text(json.dumps(rows) if kind == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
        assert named(reader, path) == ([f"{path}: {sentence} not read"] if sentence else [])


NAMES = st.text("abcxyz_", min_size=3).filter(lambda name: name not in ("bay", "abc"))


@given(NAMES, st.sampled_from(["messages", "conversations", "conversation"]), st.integers(0, 1))
def test_a_further_key_of_a_message_is_named(
    tmp_path_factory: pytest.TempPathFactory, key: str, field: str, place: int
):
    path = tmp_path_factory.mktemp("keys") / "a.jsonl"
    said = [dict(message) for message in SAID]
    said[place][key] = 1  # type: ignore[assignment]
    path.write_text(json.dumps({field: said}) + "\n")
    for reader in (read_chats, read_prompts):
        assert named(reader, path) == [f"{path}: column {field}.{key} is not read"]


def test_what_this_package_writes_is_all_used(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "q"}]
    distilled = {"messages": SAID, "finished": True, "temperature": 0.0, "seed": 3, "index": 0, "source": "p.jsonl:1"}
    recorded = Exchange("m", "f", (1, 2), (3,), "a", finished=True, messages=messages).line()
    path.write_bytes(json.dumps(distilled).encode() + b"\n" + recorded)
    assert named(read_chats, path) == []


def test_columns_of_lines_that_are_left_out_are_not_named_and_many_are_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": SAID, **{f"c{i}": 1 for i in range(30)}}) + '\n{"x": 1}\n')
    (sentence,) = named(read_chats, path)
    assert "c0, c1, " in sentence
    assert "c19 and 10 more are not read" in sentence
    assert "x" not in sentence.removeprefix(str(path))
    assert left_out_lines({str(i): ["a:1"] for i in range(22)})[-1] == "2 chats were left out: 2 other reasons"
