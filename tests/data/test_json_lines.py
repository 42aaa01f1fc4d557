"""Lines and arrays are read alike, errors name the line, and an endless line is not read to its end."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from draftheads.data import json_lines
from draftheads.data.json_lines import read_json_lines
from draftheads.errors import DataError

RECORDS = [{"a": 1}, {"b": ["x, ]", {"c": []}]}, {"d": "[\n"}]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("".join(json.dumps(record) + "\n" for record in RECORDS), [1, 2, 3]),
        (json.dumps(RECORDS), [1, 1, 1]),
        ("\n \n" + json.dumps(RECORDS), [3, 3, 3]),
        (json.dumps(RECORDS, indent=1), [2, 5, 13]),
        ("[\r\n" + ",\r\n".join(map(json.dumps, RECORDS)) + "\r\n]\r\n", [2, 3, 4]),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_array_is_read_as_lines_are(tmp_path: Path, text: str, lines: list[int], suffix: str):
    path = tmp_path / f"chats.json{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    assert list(read_json_lines(path)) == list(zip(lines, RECORDS, strict=True))


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None):
    values = [{"a": "x" * n, "b": [n, {"c": "],[\n"}]} for n in range(30)] + [
        12345,
        -6.5e-3,
        6.5,
        6e-1,
        "é\U0001f600",
        [],
        None,
    ]
    (tmp_path / "chats.json").write_text(json.dumps(values, indent=indent), encoding="utf-8")
    lines = list(read_json_lines(tmp_path / "chats.json"))
    for size in (1, 2, 3, 5, 7, 64):
        monkeypatch.setattr(json_lines, "_PIECE", size)
        assert list(read_json_lines(tmp_path / "chats.json")) == lines
    assert [value for _, value in lines] == values
    monkeypatch.setattr(json_lines, "_PIECE", 2)
    (tmp_path / "chats.json").write_text("[\n6.5]")  # read as "[\n", "6.", "5]"
    assert list(read_json_lines(tmp_path / "chats.json")) == [(2, 6.5)]


def test_an_array_may_be_longer_than_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_lines, "MOST_CHARACTERS", 1000)
    monkeypatch.setattr(json_lines, "_PIECE", 100)
    values = [{"a": "x" * 500}] * 20
    (tmp_path / "chats.json").write_text(json.dumps(values))
    assert [value for _, value in read_json_lines(tmp_path / "chats.json")] == values


@pytest.mark.parametrize("text", ['{"a": 1}\n', '[{"a": 1}]'])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, text: str):
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8-sig")
    assert [value for _, value in read_json_lines(tmp_path / "a.jsonl")] == [{"a": 1}]


@pytest.mark.parametrize("text", ["[]", " [ \n ]\n", ""])
def test_there_may_be_nothing_in_it(tmp_path: Path, text: str):
    (tmp_path / "chats.json").write_text(text)
    assert list(read_json_lines(tmp_path / "chats.json")) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[\n{"a": 1}\n{"b": 2}\n]', "line 3: .* character 1"),
        ('[{"a": 1} {"b": 2}]', "line 1: .* character 11"),
        ('[\n{"a": 1}, {"b": 2}}]', "line 2: .* character 19"),
        ('[{"a": 1}]\n[{"a": 2}]', "line 2: .* character 1"),
        ('[\n{"a": 1},', "line 2: "),
        ("[" * 100_000, "line 1: nested"),
        ('{"a": 1}\n{"a": 1', "line 2: .* character 8"),
        ('{"a": 1}\n[1,\n2]', "line 2: .* character 4"),
        ("[" + "9" * 5000 + "]", "line 1: "),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, text: str, named: str):
    (tmp_path / "chats.json").write_text(text)
    with pytest.raises(DataError, match=f"chats.json, {named}"):
        list(read_json_lines(tmp_path / "chats.json"))


@pytest.mark.parametrize(("start", "line"), [(b'{"a": 1}\n{"a": "', 2), (b'["', 1)])
def test_an_endless_line_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, line: int
):
    monkeypatch.setattr(json_lines, "MOST_CHARACTERS", 1 << 20)
    path = tmp_path / "chats.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(start)
        for _ in range(200):
            file.write(b"a" * 1_000_000)
    assert path.stat().st_size < 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"line {line}: .*1,048,576"):
            list(read_json_lines(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
