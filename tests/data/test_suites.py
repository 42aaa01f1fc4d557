"""Suites of questions: our own, files, folders and data sets of the Hub; and the choice among their questions."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftheads.data.records import Record, own_prompts
from draftheads.data.suites import SUITES, read_suite, select
from draftheads.errors import DataError, InvalidSettings, MissingDependency

GSM8K = {"question": "q?", "answer": "#### 7"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["a"]}


# --- reading ---


@pytest.mark.parametrize("name", SUITES)
def test_our_own_suites_have_names(name: Any):
    records = read_suite(name)
    assert len(records) == len(own_prompts(name).read_text(encoding="utf-8").splitlines())
    assert {record.path for record in records} == {own_prompts(name)}


def test_tasks_has_questions_of_six_kinds_with_second_turns_and_results():
    records = read_suite("tasks")
    counts = Counter(record.category for record in records)
    assert counts.keys() == {"chat", "question_answering", "maths", "retrieval", "summarisation", "translation"}
    assert min(counts.values()) >= 20
    assert len({record.user_turns[0] for record in records}) == len(records) == 135
    assert Counter(len(record.user_turns) for record in records if record.category == "chat") == {1: 16, 2: 8}
    results = {record.labels["question_id"]: record.reference for record in records if record.reference is not None}
    assert set(results) == {*range(49, 71)} - {55, 62, 68}  # several numbers, or not a whole one
    # two that are computed here again
    assert results[51] == str(13 * 60 + 15 - (9 * 60 + 40) - 4 * 5)
    assert results[67] == f"{0.4 * sum(10 + 3 * row for row in range(7)):.1f}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "no_suffix"])
def test_a_file_is_read_whatever_its_name(tmp_path: Path, name: str):
    lines = [GSM8K, MT_BENCH, {"conversations": []}, {"prompt": "p"}]
    text = json.dumps(lines, indent=1) if ".json." in f"{name}." else "\n".join(map(json.dumps, lines))
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    records = read_suite(str(tmp_path / name))
    assert [record.user_turns for record in records] == [("q?",), ("one", "two"), ("p",)]
    assert [record.reference for record in records] == ["7", ["a"], None]
    assert [record.category for record in records] == ["", "writing", ""]


def test_a_folder_stands_for_its_files_by_name(tmp_path: Path):
    (tmp_path / "0.json").write_text(json.dumps([{"prompt": "0"}, {"prompt": "0, too"}]))
    for number in (5, 2, 4, 1, 3, 7, 6):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"prompt": str(number)}))
    (tmp_path / "README.md").write_text("# Questions")
    assert [record.prompt for record in read_suite(str(tmp_path))] == ["0", "0, too", *"1234567"]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("taskz", "'taskz'.*calibration, demo, tasks"),
        ("a/b/c", "'a/b/c'"),
        *((name, f"{name}: ") for name in ("data/missing.jsonl", "missing.parquet", "empty.jsonl", "folder")),
        ("bad.jsonl", r"bad.jsonl, line 2: "),
        ("damaged.parquet", "damaged.parquet: .*magic bytes"),
        ("nobody/nothing", r"nobody/nothing: .*Couldn't reach [^\n]* Hub$"),
        ("openai/gsm8k:main:validation", "openai/gsm8k:main:validation: "),
        ("me/a-bad-line", "me/a-bad-line, line 2: "),
    ],
)
@pytest.mark.usefixtures("parquet", "hub")
def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, named: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"ask": "x"}\n')
    (tmp_path / "damaged.parquet").write_text("x")
    with pytest.raises(DataError, match=named):
        read_suite(source)


# --- parquet files and the Hub: their packages are an extra, so stand-ins take their place ---


class ArrowError(Exception):
    """In place of pyarrow's."""


class ParquetFile:
    """In place of pyarrow's: a file of JSON lines, two in a batch."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        if not text.startswith("{"):
            raise ArrowError("magic bytes not found\nmore")
        self.rows = [json.loads(line) for line in text.splitlines()]

    def iter_batches(self) -> Any:
        for start in range(0, len(self.rows), 2):
            rows = self.rows[start : start + 2]
            yield SimpleNamespace(to_pylist=lambda rows=rows: rows)


@pytest.fixture
def parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pyarrow")
    module.ArrowException = ArrowError  # type: ignore[attr-defined]
    module.parquet = SimpleNamespace(ParquetFile=ParquetFile)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", module)


@pytest.mark.usefixtures("parquet")
def test_a_parquet_file_is_read_by_rows(tmp_path: Path):
    path = tmp_path / "test.parquet"
    rows = [MT_BENCH, {**GSM8K, "turns": None, "prompt": None}, {"prompt": "p"}]  # a column is there for all rows
    path.write_text("\n".join(map(json.dumps, rows)))
    for source in (path, tmp_path):
        records = read_suite(str(source))
        assert [record.user_turns for record in records] == [("one", "two"), ("q?",), ("p",)]
        assert [record.source for record in records] == [f"{path}:{number}" for number in (1, 2, 3)]


TRAIN, TEST = [{"prompt": "train"}], [GSM8K, {"question": "r?", "answer": "8"}]
DATA_SETS = {
    "openai/gsm8k": {"train": TRAIN, "test": TEST},
    "me/only-train": {"train": TRAIN},
    "me/a-bad-line": {"train": [GSM8K, {"text": "x"}]},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A Hub with some data sets; all calls."""
    calls: list[Any] = []

    def load_dataset(name: str, config: str | None = None, *, split: str | None = None) -> Any:
        calls.append((name, config, split))
        if name not in DATA_SETS:
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nmore")
        return DATA_SETS[name] if split is None else DATA_SETS[name][split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize(
    ("source", "call", "questions"),
    [
        ("openai/gsm8k", (None, None), ["q?", "r?"]),
        ("openai/gsm8k:main", ("main", None), ["q?", "r?"]),
        ("openai/gsm8k:main:train", ("main", "train"), ["train"]),
        ("openai/gsm8k::test", (None, "test"), ["q?", "r?"]),
        ("me/only-train", (None, None), ["train"]),
    ],
)
def test_a_data_set_of_the_hub_has_a_configuration_and_a_split(
    hub: list[Any], source: str, call: tuple[Any, ...], questions: list[str]
):
    records = read_suite(source)
    assert hub == [(source.partition(":")[0], *call)]
    assert [record.user_turns[0] for record in records] == questions
    assert records[0].source == f"{source}:1"


@pytest.mark.parametrize(("source", "package"), [("openai/gsm8k", "datasets"), ("x.parquet", "pyarrow")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, source: str, package: str):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"{package}.*draftheads\[bench\]"):
        read_suite(source)


# --- choosing ---


def records_of(categories: list[str]) -> list[Record]:
    return [
        Record((), line_number=number, labels={"category": name} if name else {})
        for number, name in enumerate(categories)
    ]


@given(st.lists(st.sampled_from(["a", "b", "c", ""])), st.sets(st.sampled_from("abc")), st.none() | st.integers(1, 4))
def test_a_selection_keeps_the_order_and_the_first_ones_of_each_category(
    names: list[str], wanted: set[str], limit: int | None
):
    records, wanted = records_of(names), wanted & set(names)
    chosen = select(records, sorted(wanted), limit)
    assert [record.line_number for record in chosen] == sorted(record.line_number for record in chosen)
    counts, all_counts = Counter(record.category for record in chosen), Counter(names)
    for name in all_counts:
        of_it = [record for record in records if record.category == name]
        expected = 0 if wanted and name not in wanted else min(all_counts[name], limit or len(names))
        assert counts[name] == expected
        assert [record for record in chosen if record.category == name] == of_it[:expected]


@pytest.mark.parametrize(
    ("categories", "options", "named"),
    [
        (["b", "a", "", "b"], {"categories": ["a", "d"]}, "'d'; .* b, a$"),
        (["", ""], {"categories": ["d"]}, "'d'; .* none"),
        (["a"], {"limit": 0}, "limit is 0"),
    ],
)
def test_an_impossible_choice_is_named(categories: list[str], options: dict[str, Any], named: str):
    with pytest.raises(InvalidSettings, match=named):
        select(records_of(categories), **options)
