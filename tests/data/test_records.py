"""Files of prompts and chats are read in one way, and every error names the file and the line."""

import gzip
import json
from pathlib import Path

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


def test_line_separators_other_than_line_feed_belong_to_the_text(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "dead\u2028cab\u0085"}\n', encoding="utf-8")
    assert prompts_in(path) == ["dead\u2028cab\u0085"]


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
    ("[" * 100_000, r"nested too deeply to be read: '\[{57}…'"),
    ('{"messages": ["w1"]}', "message 0 is 'w1'"),
    ('{"messages": [{"role": "user"}]}', "message 0: content is None"),
    ('{"messages": [{"role": "assistant", "tool_calls": [{"name": 5}]}]}', "a call is {'name': 5}; it must be"),
    ('{"messages": [{"role": "user", "content": "w1"}], "tools": [5]}', r"tools is \[5\]; it must be a list"),
    ('{"messages": [{"role": "user", "content": "w1 \\ud800"}]}', r"message 0: content holds half a character"),
]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *BOTH,
        ("[1, 2]", "a chat is an object"),
        ('{"messages": "w1"}', "a chat is an object"),
        ('{"messages": []}', "a chat is an object"),
        ('{"mesages": []}', r"unknown field 'mesages'; did you mean 'messages'\? a chat is an object"),
        ('{"prompt": "w1", "complet": "w2"}', "unknown field 'complet'; did you mean 'completion'"),
        ('{"messages": [{"role": "assistant", "content": "w1"}], "finished": 1}', "finished is 1"),
        ('{"prompt": "w1", "completion": 3}', "prompt and completion must be two texts or two lists of messages, not"),
        ('{"completion": "w1"}', "prompt and completion must be two texts"),
        ('{"prompt": [], "completion": []}', "a chat is an object"),
        ('{"prompt": "w1", "completion": "w2 \\ud800"}', "message 1: content holds half a character"),
    ],
)
def test_a_malformed_chat_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(chat('w1', 'w2'))}\n{line}\n", encoding="utf-8")
    found = read_chats(path)
    assert next(found).line_number == 1
    with pytest.raises(DataError, match=message) as caught:
        next(found)
    assert f"{path}, line 2" in str(caught.value)
    assert caught.value.line_number == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *BOTH,
        ('"hello"', 'needs "prompt"'),
        ("{}", 'needs "prompt"'),
        ('{"prompt": 5}', 'needs "prompt"'),
        ('{"prompt": ""}', 'needs "prompt"'),
        ('{"prompt": " "}', 'needs "prompt"'),
        ('{"messages": []}', 'needs "prompt"'),
        ('{"mesages": []}', r"unknown field 'mesages'; did you mean 'messages'\? needs \"prompt\""),
        ('{"promt": "w1"}', "unknown field 'promt'; did you mean 'prompt'"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', 'needs "prompt"'),
        ('{"turns": "w1"}', 'needs "prompt"'),
        ('{"turns": []}', 'needs "prompt"'),
        ('{"turns": [""]}', 'needs "prompt"'),
        ('{"turns": ["w1", 5]}', "message 1: content is 5"),
    ],
)
def test_a_malformed_prompt_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n', encoding="utf-8")  # empty lines are skipped, but counted
    found = read_prompts(path)
    assert next(found).prompt == "fine"
    with pytest.raises(DataError, match=message) as caught:
        next(found)
    assert f"{path}, line 3" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "garbled", "no gzip", "not utf-8", "missing", "folder"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, damage: str):
    zipped = gzip.compress(json.dumps(chat("w1", "w2 " * 1000)).encode())
    contents = {"cut": zipped[:30], "garbled": zipped[:12] + b"\xff" * 30, "no gzip": b"{}", "not utf-8": b'{"\xff'}
    path = tmp_path / ("chats.jsonl" if damage in {"not utf-8", "missing", "folder"} else "chats.jsonl.gz")
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(contents[damage])
    words = "not UTF-8 text: byte 0xff" if damage == "not utf-8" else "cannot be read|not UTF-8"
    with pytest.raises(DataError, match=words):
        list(read_chats(path))


# --- our own prompts ---


def test_there_are_64_different_calibration_prompts_and_each_eight_in_a_row_are_of_all_kinds():
    records = [json.loads(line) for line in own_prompts("calibration").read_text(encoding="utf-8").splitlines()]
    assert prompts_in(own_prompts("calibration")) == [record["prompt"] for record in records]
    assert len(records) == len({record["prompt"] for record in records}) == 64
    kinds = [record["kind"] for record in records]
    assert all(len(set(kinds)) == 8 and set(kinds[start : start + 8]) == set(kinds) for start in range(0, 64, 8))
    for record in records:  # as long as first turns
        low, high = (80, 190) if record["kind"] == "extraction" else (15, 120)
        assert low <= len(record["prompt"].split()) <= high, record["kind"]


def test_the_demos_own_prompts_are_a_handful():
    prompts = prompts_in(own_prompts("demo"))
    assert len(prompts) == len(set(map(str, prompts))) == 6
