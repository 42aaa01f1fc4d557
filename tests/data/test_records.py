"""Files of prompts and chats are read in one way, and every error names the file and the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftheads.data.records import own_prompts, prompts_in, read_chats, read_prompts
from draftheads.errors import DataError
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


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_files_are_read_zipped_or_not(tmp_path: Path, name: str):
    records = counting_chats(5)
    path = write_chats(tmp_path / name, records)
    for reader in (read_chats, read_prompts):
        found = list(reader(path))
        assert [list(record.messages) for record in found] == [record["messages"] for record in records]
        assert [record.finished for record in found] == [record["finished"] for record in records]
        assert [record.line_number for record in found] == [1, 2, 3, 4, 5]


def test_a_prompt_and_its_completion_are_texts_or_messages(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    user, assistant = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    lines = [
        {"prompt": "w1", "completion": "w2", "finished": False},
        {"prompt": [user], "completion": [assistant]},
        {"messages": [user, assistant], "completion": "ignored"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(read_chats(path))
    assert [record.messages for record in found] == [(user, assistant)] * 3
    assert [record.is_completion for record in found] == [True, False, False]
    assert [record.finished for record in found] == [False, True, True]


BOTH = [
    ("hello", "not JSON"),
    ("[" * 100_000, r"nested .*'\[{57}…'"),
    ('{"messages": ["w1"]}', "message 0 is 'w1'"),
    ('{"messages": [{"role": "user"}]}', "message 0: content is None"),
    ('{"messages": [{"role": "assistant", "tool_calls": [{"name": 5}]}]}', "a call is {'name': 5}"),
    ('{"messages": [{"role": "user", "content": "w1"}], "tools": [5]}', r"tools is \[5\]"),
    ('{"messages": [{"role": "user", "content": "w1 \\ud800"}]}', "message 0: content"),
    ('{"mesages": []}', "'mesages'; did you mean 'messages'"),
]
NO_CHATS = [
    *((line, "a chat is") for line in ("[1, 2]", '{"messages": "w1"}', '{"messages": []}')),
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
    ('{"messages": [{"role": "assistant", "content": "w1"}]}', "needs"),
    ('{"turns": "w1"}', "needs"),
    ('{"turns": ["w1", 5]}', "message 1: content is 5"),
]


@pytest.mark.parametrize(
    ("reader", "line", "named"),
    [
        *((read_chats, *case) for case in (*BOTH, *NO_CHATS)),
        *((read_prompts, *case) for case in (*BOTH, *NO_PROMPTS)),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, reader: Any, line: str, named: str):
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{json.dumps(chat('w1', 'w2'))}\n\n{line}\n", encoding="utf-8")  # empty lines count, too
    found = reader(path)
    assert next(found).line_number == 1
    with pytest.raises(DataError, match=named) as caught:
        next(found)
    assert f"{path}, line 3" in str(caught.value)
    assert caught.value.line_number == 3


def test_of_a_folder_all_files_are_read_and_of_each_what_is_whole(tmp_path: Path):
    """A server may be writing the last line."""
    line = json.dumps(chat("w1", "w2"))
    (tmp_path / "b.jsonl").write_text(f"{line}\n{line}", encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(f"{line}\n".encode()))
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert [record.source for record in read_chats(tmp_path)] == [f"{tmp_path}/a.jsonl.gz:1", f"{tmp_path}/b.jsonl:1"]
    assert len(list(read_chats(tmp_path / "b.jsonl"))) == 2


@pytest.mark.parametrize("damage", ["cut", "garbled", "no gzip", "not utf-8", "missing", "folder"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, damage: str):
    zipped = gzip.compress(json.dumps(chat("w1", "w2 " * 1000)).encode())
    contents = {"cut": zipped[:30], "garbled": zipped[:12] + b"\xff" * 30, "no gzip": b"{}", "not utf-8": b'{"\xff'}
    path = tmp_path / ("chats.jsonl" if damage in {"not utf-8", "missing", "folder"} else "chats.jsonl.gz")
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(contents[damage])
    with pytest.raises(DataError, match="byte 0xff" if damage == "not utf-8" else str(path)):
        list(read_chats(path))


def test_there_are_64_different_calibration_prompts_and_each_eight_in_a_row_are_of_all_kinds():
    records = [json.loads(line) for line in own_prompts("calibration").read_text(encoding="utf-8").splitlines()]
    assert prompts_in(own_prompts("calibration")) == [record["prompt"] for record in records]
    assert len(records) == len({record["prompt"] for record in records}) == 64
    kinds = [record["kind"] for record in records]
    assert all(len({*kinds[start : start + 8]}) == len({*kinds}) == 8 for start in range(0, 64, 8))
