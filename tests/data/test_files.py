"""Files of all kinds are read alike, alone and in a folder; errors name the line; an endless line is not read whole."""

import gzip
import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from draftheads.data import files
from draftheads.data.files import READERS, read_lines, read_values
from draftheads.errors import DataError, MissingDependency

RECORDS = [{"a": 1}, {"b": ["x, ]", {"c": []}]}, {"d": "[\n"}]


def rows_of(path: Path) -> list[Any]:
    """The rows of a place; the parts of a text are joined."""
    rows = []
    for file, number, value in read_values(path):
        is_text = file.name.removesuffix(".gz").endswith(".txt")
        rows.append((file, number, {"text": "".join(value["text"])} if is_text else value))
    return rows


def json_lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (json_lines(RECORDS), [1, 2, 3]),
        (json.dumps(RECORDS), [1, 1, 1]),
        ("\n \n" + json.dumps(RECORDS), [3, 3, 3]),
        (json.dumps(RECORDS, indent=1), [2, 5, 13]),
        ("[\r\n" + ",\r\n".join(map(json.dumps, RECORDS)) + "\r\n]\r\n", [2, 3, 4]),
        ("\ufeff" + json_lines(RECORDS), [1, 2, 3]),
        ("\ufeff" + json.dumps(RECORDS), [1, 1, 1]),
        ("\ufeff" + json_lines(RECORDS[:1]) + "\ufeff" + json_lines(RECORDS[1:]), [1, 2, 3]),  # files that were joined
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz", "no_suffix", "other.data"])
def test_an_array_is_read_as_lines_are(tmp_path: Path, text: str, lines: list[int], name: str):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert list(read_values(path)) == [(path, line, record) for line, record in zip(lines, RECORDS, strict=True)]


@pytest.mark.parametrize("text", ["[]", " [ \n ]\n", "", "\n"])
def test_there_may_be_nothing_in_it(tmp_path: Path, text: str):
    (tmp_path / "chats.json").write_text(text)
    assert list(read_values(tmp_path / "chats.json")) == []


ROWS = [{"prompt": "a, b\nc", "completion": None}, {"prompt": '"d"', "completion": "é"}]


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=1)


KINDS: dict[str, tuple[bytes | Callable[[Path], None], list[Any]]] = {  # content, and its lines and values
    ".jsonl": (json_lines(ROWS).encode(), [*enumerate(ROWS, 1)]),
    ".json": (json.dumps(ROWS).encode(), [(1, row) for row in ROWS]),
    ".csv": ('\ufeffprompt,completion\n"a, b\nc",\n"""d""",é\n'.encode(), [*zip((3, 4), ROWS, strict=True)]),
    ".parquet": (write_parquet, [*enumerate(ROWS, 1)]),
    ".txt": ("\ufeffone\r\ntwo é".encode(), [(1, {"text": "one\ntwo é"})]),
}


@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("suffix", READERS)
def test_a_file_of_each_kind_is_read_alone_and_in_a_folder(tmp_path: Path, suffix: str, zipped: str):
    content, values = KINDS[suffix]
    path, inside = tmp_path / f"a{suffix}", tmp_path / "folder" / f"a{suffix}{zipped}"
    inside.parent.mkdir()
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    inside.write_bytes(gzip.compress(path.read_bytes()) if zipped else path.read_bytes())
    (inside.parent / "README.md").write_text("# Not read")
    (inside.parent / f".hidden{suffix}").write_text("{")
    for place in (inside, inside.parent):
        assert rows_of(place) == [(inside, *each) for each in values]


def test_of_a_folder_all_files_are_read_by_name_and_of_each_what_is_whole(tmp_path: Path):
    """A server may be writing the last line. The manifest of a distilled file is no data."""
    (tmp_path / "b.jsonl.manifest.json").write_text('{\n "format": 2\n}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n{"n": ')
    (tmp_path / "c.jsonl").write_text('{"n": 3}\n{"n": 4}')
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'[{"n": 1}]'))
    assert [value["n"] for *_, value in read_values(tmp_path)] == [1, 2, 3, 4]
    with pytest.raises(DataError, match=r"b.jsonl, line 2: not JSON"):
        list(read_values(tmp_path / "b.jsonl"))


CUT = gzip.compress(json_lines([{"a": "x y" * 1000}]).encode(), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.json", b'[\n{"a": 1}\n{"b": 2}\n]', "a.json, line 3: .* character 1"),
        ("a.json", b'[\n{"a": 1}, {"b": 2}}]', "line 2: .* character 19"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', "line 2: .* character 1"),
        ("a.json", b'[\n{"a": 1},', "line 2: "),
        ("a.json", b"[" * 100_000, "line 1: nested"),
        ("a.json", b'[{"a": 1},\n {"b": 1, "a": 2, "b": 3}]', "the key 'b' is there twice"),
        ("a.jsonl", b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv, line 1: the header has 'a' twice"),
        ("a.json", b'{"a": 1}\n{"a": 1', "line 2: .* character 8"),
        ("a.json", b'{"a": 1}\n[1,\n2]', "line 2: .* character 4"),
        ("a.json", b"[" + b"9" * 5000 + b"]", "line 1: "),
        ("a.jsonl", b'{"\xff', r"line 1: .*byte 0xff; .*\.parquet"),
        ("a.txt", b"x\xff", r"line 1: .*byte 0xff"),
        *(
            (name, '{"a": 1}\n'.encode("utf-16"), "line 1: .*save it as UTF-8")
            for name in ("a.jsonl", "a.txt", "a.csv")
        ),
        ("a.csv", b'a,b\n1,2\n1,2,3\n"', "a.csv, line 3: .* more cells"),
        ("a.csv", b'a,b\n"1', "a.csv, line 2: not CSV"),
        ("a.parquet", b"x", "a.parquet: .*Parquet"),
        ("a.jsonl.gz", CUT[:30], "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", CUT[:12] + b"\xff" * 30, "a.jsonl.gz"),
        ("a.jsonl", None, "a.jsonl: cannot be read"),
        ("folder/README.md", b"", r"folder: cannot be read: .*\.jsonl"),
        ("folder/in/a.csv", b"", "folder: cannot be read: .*; give a folder in it: in"),
    ],
)
def test_an_error_names_the_place(tmp_path: Path, name: str, content: bytes | None, named: str):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=named):
        rows_of(tmp_path / name.partition("/")[0])


@pytest.mark.parametrize("part", [1, 7, 1000])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, indent: int | None):
    monkeypatch.setattr(files, "PART", part)
    values = [*RECORDS, 12, -3.5e3, "a\\n]", None, [], True] * 3
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values, indent=indent))
    assert [value for *_, value in read_values(path)] == values
    text = json.dumps([1, {"a": 2}], indent=indent)
    path.write_text(text := text[:-1] + " 7]")
    with pytest.raises(json.JSONDecodeError) as whole:
        json.loads(text)
    where = f"line {whole.value.lineno}: not JSON: {whole.value.msg} at character {whole.value.colno}"
    with pytest.raises(DataError, match=where):
        list(read_values(path))


def test_a_large_array_takes_the_memory_of_a_part(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": "x" * 1000}] * 20_000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_values(path)) == 20_000
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 << 20


def test_a_bad_line_among_others_stands_for_itself(tmp_path: Path):
    for name, text in (("a.jsonl", '{"a": "1"}\n{"a\n{"a": "2"}\n'), ("a.csv", "a\n1\n2,3\n2\n")):
        (tmp_path / name).write_text(text)
        first, bad, last = [value for *_, value in read_lines(tmp_path / name, says=False)]
        assert (first, last) == ({"a": "1"}, {"a": "2"})
        assert isinstance(bad, DataError)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pyarrow.*\.\[bench\]"):
        list(read_values(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "start", "line"), [("a.jsonl.gz", b'{"a": 1}\n{"a": "', 2), ("a.csv.gz", b"a\n1\n", 3)]
)
def test_an_endless_line_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: bytes, line: int
):
    monkeypatch.setattr(files, "MOST_CHARACTERS", 1 << 20)
    path = tmp_path / name
    with gzip.open(path, "wb") as file:
        file.write(start)
        for _ in range(200):
            file.write(b"a" * 1_000_000)
    assert path.stat().st_size < 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"line {line}: .*1,048,576"):
            list(read_values(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def test_the_manual_has_all_kinds():
    manual = (Path(__file__).parents[2] / "docs" / "train" / "data.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\.\w+)`", manual, re.MULTILINE)) == set(READERS)
