"""Prompts, chats and suites of questions are read in one way, and every error names the file and the line."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftheads.data.lines import LeftOut
from draftheads.data.records import (
    SUITES,
    Record,
    check_chats,
    own_prompts,
    prompts_in,
    read_chats,
    read_prompts,
    read_suite,
    select,
)
from draftheads.errors import DataError, DataWarning, InvalidSettings, MissingDependency
from training_world import chat, counting_chats, write_chats


@pytest.mark.parametrize(
    ("line", "prompt", "user_turns"),
    [
        ('{"prompt": "a b", "turns": ["not this"]}', "a b", ("a b",)),
        ('{"turns": ["one", "two"]}', "one", ("one", "two")),
        (
            '{"id": 7, "messages": [{"role": "user", "content": "a", "x": 1}, {"role": "assistant", "content": "b"}]}',
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            ("a",),
        ),
        (
            '{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}',
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
            ("a",),
        ),
        ('{"prompt": null, "turns": ["one"]}', "one", ("one",)),
        ('{"prompt": "dead\u2028cab\u0085"}', "dead\u2028cab\u0085", ("dead\u2028cab\u0085",)),  # no line breaks
    ],
)
def test_a_prompt_has_one_of_three_forms(tmp_path: Path, line: str, prompt: object, user_turns: tuple[str, ...]):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    (record,) = read_prompts(path)
    assert (record.prompt, record.user_turns, record.source) == (prompt, user_turns, f"{path}:1")


def test_chats_are_prompts_and_chats_to_learn_from(tmp_path: Path):
    records = counting_chats(5)
    path = write_chats(tmp_path / "chats.jsonl.gz", records)
    for reader in (read_chats, read_prompts):
        found = list(reader(path if reader is read_chats else tmp_path))
        assert [list(record.messages) for record in found] == [record["messages"] for record in records]
        assert [record.finished for record in found] == [record["finished"] for record in records]
        assert [record.line_number for record in found] == [1, 2, 3, 4, 5]


def test_a_prompt_and_its_completion_are_texts_or_messages(tmp_path: Path):
    user, assistant = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    lines = [
        {"prompt": "w1", "completion": "w2", "finished": False},
        {"prompt": [user], "completion": [assistant]},
        {"messages": [user, assistant], "completion": "ignored"},
    ]
    found = list(read_chats(write_chats(tmp_path / "chats.jsonl", lines)))
    assert [record.messages for record in found] == [(user, assistant)] * 3
    assert [record.is_completion for record in found] == [True, False, False]
    assert [record.finished for record in found] == [False, True, True]


BOTH = [
    ("hello", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"messages": ["w1"]}', r"messages is \['w1'\]"),
    ('{"messages": [{"role": "user"}]}', "message 0: content is None"),
    ('{"messages": [{"role": "assistant", "tool_calls": [{"name": 5}]}]}', "a call is {'name': 5}"),
    ('{"messages": [{"role": "user", "content": "w1"}], "tools": [5]}', r"tools is \[5\]"),
    ('{"messages": [{"role": "user", "content": "w1 \\ud800"}]}', "message 0: content"),
    ('{"mesages": []}', "'mesages'; did you mean 'messages'"),
]
NO_CHATS = [
    *((line, "a chat is") for line in ("7", '{"messages": []}')),
    ('{"messages": "w1"}', "messages is 'w1'"),
    ('{"input_ids": [5, 6], "labels": [-100, 7]}', "labels must have one value .* 2 input_ids"),
    ('{"input_ids": [5, 6], "loss_mask": [1]}', "loss_mask must have one value"),
    ('{"input_ids": [5, 6], "loss_mask": [0, 0]}', "not to learn"),
    ('{"input_ids": [5, "x"]}', "input_ids is"),
    ('{"prompt": [], "completion": []}', "a chat is"),
    ('{"prompt": "w1", "complet": "w2"}', "'complet'; did you mean 'completion'"),
    ('{"messages": [{"role": "assistant", "content": "w1"}], "finished": 1}', "finished is 1"),
    ('{"prompt": "w1", "completion": 3}', "prompt and completion"),
    ('{"completion": "w1"}', "prompt and completion"),
    ('{"prompt": "w1", "completion": "w2 \\ud800"}', "message 1: content"),
]
NO_PROMPTS = [
    *((line, 'needs "prompt"') for line in ('"hello"', "{}", '{"prompt": 5}', '{"prompt": ""}', '{"prompt": " "}')),
    *((f'{{"{name}": {value}}}', "needs") for name, value in (("messages", "[]"), ("turns", "[]"), ("turns", '[""]'))),
    ('{"promt": "w1"}', "'promt'; did you mean 'prompt'"),
    ('{"messages": [{"role": "assistant", "content": "w1"}]}', "no question of the user"),
    ('{"turns": "w1"}', "needs"),
    ('{"turns": ["w1", 5]}', "message 1: content is 5"),
]


@pytest.mark.parametrize(
    ("reader", "line", "named"),
    [*((read_chats, *case) for case in (*BOTH, *NO_CHATS)), *((read_prompts, *case) for case in (*BOTH, *NO_PROMPTS))],
)
def test_a_line_that_cannot_be_used_is_left_out_with_its_reason_and_never_all_of_them(
    tmp_path: Path, reader: Any, line: str, named: str
):
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{json.dumps(chat('w1', 'w2'))}\n\n{line}\n", encoding="utf-8")  # empty lines count, too
    left_out: LeftOut = {}
    first, *others = reader(path) if reader is read_chats else reader(path, left_out=left_out)
    assert first.line_number == 1
    left_out |= {chat.problem: [chat.source] for chat in others}
    ((reason, places),) = left_out.items()
    assert re.search(named, reason)
    assert places == [f"{path}:3"]
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=str(path) + (".* line 1" if named == "not JSON" else ".*: 2 .* left out: .*:1")
    ):
        check_chats(path) if reader is read_chats else list(reader(path))


def test_there_are_64_different_calibration_prompts_and_each_eight_in_a_row_are_of_all_kinds():
    records = [json.loads(line) for line in own_prompts("calibration").read_text(encoding="utf-8").splitlines()]
    assert prompts_in(own_prompts("calibration")) == [record["prompt"] for record in records]
    assert len(records) == len({record["prompt"] for record in records}) == 64
    kinds = [record["category"] for record in records]
    assert all(len({*kinds[start : start + 8]}) == len({*kinds}) == 8 for start in range(0, 64, 8))


# --- suites of questions ---


GSM8K = {"question": "q?", "answer": "#### 7"}


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


def test_a_suite_is_a_file_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["a"]},
        {**GSM8K, "turns": None, "prompt": None},  # a column of a table is there for all rows
        {"conversations": []},
        {"prompt": "p"},
    ]
    write_chats(tmp_path / "a.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    for source in ("a.jsonl", str(tmp_path)):
        with pytest.warns(DataWarning, match=r"1 prompt was left out: .*a.jsonl:3"):
            records = read_suite(source)
        assert [record.user_turns for record in records] == [("one", "two"), ("q?",), ("p",)]
        assert [record.reference for record in records] == [["a"], "7", None]
        assert [record.category for record in records] == ["writing", "", ""]
        assert [record.line_number for record in records] == [1, 2, 4]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("taskz", "'taskz'.*calibration, demo, tasks"),
        ("a/b/c", "'a/b/c'"),
        *((name, f"{name}: ") for name in ("data/missing.jsonl", "missing.parquet", "empty.jsonl", "folder")),
        ("bad.jsonl", r"bad.jsonl: 1 prompt was left out: .*bad.jsonl:2"),
        ("nobody/nothing", r"nobody/nothing: .*Couldn't reach [^\n]* Hub$"),
        ("openai/gsm8k:main:validation", "openai/gsm8k:main:validation: "),
        ("me/a-bad-line", "me/a-bad-line: 1 prompt was left out: .*me/a-bad-line:1"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, named: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.jsonl").write_text('\n{"ask": "x"}\n')
    with pytest.raises(DataError, match=named):
        read_suite(source)


TRAIN, TEST = [{"prompt": "train"}], [GSM8K, {"question": "r?", "answer": "8"}]
DATA_SETS = {
    "openai/gsm8k": {"train": TRAIN, "test": TEST},
    "me/only-train": {"train": TRAIN},
    "me/a-bad-line": {"train": [{"text": "x"}]},
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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match=r"datasets.*\.\[bench\]"):
        read_suite("openai/gsm8k")


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
