"""Lines of published data sets are recognised by their fields: as questions, and as chats to learn from."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftheads.data.forms import tool_call
from draftheads.data.records import NO_ANSWER, prompts_in, read_chats, read_prompts
from draftheads.errors import DataError
from training_world import write_chats

CODE = 'def one():\n    """One."""\n'
TASK = {"task_id": "HumanEval/0", "prompt": f"\n\n{CODE}", "entry_point": "one", "test": "def check(f): ..."}
SHARE_GPT = {
    "id": "x_1",
    "conversations": [
        {"from": "system", "value": "s"},
        {"from": "gpt", "value": "the end of an answer"},
        {"from": "human", "value": "q1"},
        {"from": "chatgpt", "value": "a1"},
        {"from": "user", "value": "q2"},
        {"from": "assistant", "value": "a2"},
        {"from": "human", "value": " "},
        {"from": "gpt", "value": "never"},
    ],
}
# a line, what is asked, the answer to learn from, the reference
FORMS: dict[str, tuple[dict[str, Any], str, str | None, Any]] = {
    "gsm8k": ({"question": "q?", "answer": "Half of it.\n#### 1,234"}, "q?", "Half of it.\n#### 1,234", "1234"),
    "questions and answers": ({"question": "q?", "answer": "Paris"}, "q?", "Paris", "Paris"),
    "human-eval": (
        {**TASK, "canonical_solution": "    return 1\n"},
        f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{CODE}```",
        None,
        None,
    ),
    "alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2", "3", "3"),
    "alpaca without input": ({"instruction": "Add.", "input": "", "output": "3"}, "Add.", "3", "3"),
    "alpaca-eval": ({"instruction": "Add.", "dataset": "koala"}, "Add.", None, None),
    "alpaca without output": ({"instruction": "Add.", "input": None, "output": " "}, "Add.", None, " "),
    "cnn": ({"article": "a b", "highlights": "a", "id": "7"}, "Article: a b\nSummary:", "a", "a"),
    "xsum": ({"document": "a b", "summary": "a"}, "Article: a b\nSummary:", "a", "a"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_a_question_and_a_chat(tmp_path: Path, name: str):
    line, question, answer, reference = FORMS[name]
    path = write_chats(tmp_path / "any name", [{"prompt": "first"}, line])
    _, record = read_prompts(path)
    assert (record.prompt, record.user_turns, record.reference) == (question, (question,), reference)
    (chat,) = read_chats(write_chats(path, [line]))
    spoken = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert list(chat.messages) == (spoken if answer else [])
    assert not chat.is_completion


def test_labels_stay(tmp_path: Path):
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["r1", "r2"]},
        {"question_id": "5ab", "category": "rag", "sub_category": "x", "turns": ["one"], "source": "y", "src_id": None},
        TASK,
        {"prompt": "one", "category": None},
        {**FORMS["gsm8k"][0], "category": "maths"},
    ]
    records = list(read_prompts(write_chats(tmp_path / "a.jsonl", lines)))
    assert [record.category for record in records] == ["writing", "rag", "", "", "maths"]
    assert [record.labels.get("question_id") for record in records] == [81, "5ab", "HumanEval/0", None, None]
    assert [record.user_turns for record in records[:2]] == [("one", "two"), ("one",)]
    assert [record.reference for record in records[:2]] == [["r1", "r2"], None]


def test_our_fields_count_before_those_of_others(tmp_path: Path):
    lines = [{"prompt": "ours", "instruction": "x"}, {"turns": ["ours"], "question": "x", "answer": "y"}]
    assert prompts_in(write_chats(tmp_path / "a.jsonl", lines)) == ["ours", "ours"]
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "instruction": "x"}
    (record,) = read_chats(write_chats(tmp_path / "a.jsonl", [chat]))
    assert record.messages[0]["content"] == "q"


def test_a_conversation_of_share_gpt_begins_with_a_question_and_ends_before_an_empty_turn(tmp_path: Path):
    path = write_chats(tmp_path / "sharegpt.jsonl", [SHARE_GPT])
    said = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    for reader in (read_prompts, read_chats):
        (record,) = reader(path)
        assert [(message["role"], message["content"]) for message in record.messages] == said
        assert record.user_turns == ("q1", "q2")
        assert record.labels == {"id": "x_1"}


@pytest.mark.parametrize(
    ("given", "role"),
    [
        *(("User", "user"), ("HUMAN", "user"), ("Assistant", "assistant"), ("GPT", "assistant"), ("System", "system")),
        *(("tool_response", "tool"), ("Observation", "tool"), ("function_response", "tool")),
    ],
)
@pytest.mark.parametrize("name", ["from", "role"])
def test_names_of_roles_in_capitals_or_of_other_projects(tmp_path: Path, name: str, given: str, role: str):
    turns = [{"role": "user", "content": "q"}, {name: given, "value": "w"}, {"role": "assistant", "content": "a"}]
    (record,) = read_chats(write_chats(tmp_path / "a.jsonl", [{"messages": turns}]))
    assert record.messages[1] == {"role": role, "content": "w"}


NO_TEXT = [  # messages that hold something else than texts, and the reason
    ({"role": "assistant", "content": None}, "null as its content"),
    ({"from": "human", "value": None}, "null as its content"),
    ({"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {}}]}, "image_url"),
    ({"from": "human", "value": [{"type": "image"}, {"type": "audio"}]}, "audio, image"),
    ({"role": "function_call", "content": "now(at=UTC)"}, "a call is not JSON"),
    ({"role": "assistant", "content": "", "tool_calls": "{'name': 'now'}"}, "a call is not JSON"),
]


@pytest.mark.parametrize(("message", "reason"), NO_TEXT)
@pytest.mark.parametrize("field", ["messages", "conversations", "prompt"])
def test_chats_with_more_than_texts_are_no_prompts_and_are_not_learned(
    tmp_path: Path, field: str, message: dict[str, Any], reason: str
):
    said = [{"role": "user", "content": "w1"}, message, {"role": "assistant", "content": "w2"}]
    line = {"prompt": said[:-1], "completion": said[-1:]} if field == "prompt" else {field: said}
    path = write_chats(tmp_path / "a.jsonl", [line, FORMS["alpaca"][0]])
    first, second = read_chats(path)
    assert (first.messages, second.problem) == ((), "")
    assert reason in first.problem
    if field == "messages":
        with pytest.raises(DataError, match=f"a.jsonl, line 1: .*{reason}"):
            list(read_prompts(path))


def turn(side: str, words: str, form: str) -> dict[str, Any]:
    """A turn in one of the forms; every part of a form may be missing or null."""
    names = {"user": "human", "assistant": "gpt"}
    return {
        "role, content": {"role": side, "content": words},
        "from, value": {"from": names[side], "value": words},
        "from, content": {"from": side, "content": words, "value": None},
        "role, value": {"role": names[side], "value": words, "content": None},
        "parts": {"role": side, "content": [{"type": "text", "text": words}]},
    }[form]


TURN_FORMS = ["role, content", "from, value", "from, content", "role, value", "parts"]


@pytest.mark.parametrize("field", ["conversations", "conversation", "messages", "prompt"])
def test_every_mixture_of_the_forms_of_turns_is_read_and_no_line_is_lost(tmp_path: Path, field: str):
    lines: list[dict[str, Any]] = []
    for number, (first, second) in enumerate((a, b) for a in TURN_FORMS for b in TURN_FORMS):
        question, answer = turn("user", f"q{number}", first), turn("assistant", f"a{number}", second)
        parts = {"prompt": [question], "completion": [answer]} if field == "prompt" else {field: [question, answer]}
        lines.append({"id": number, **parts})
    path = write_chats(tmp_path / "a.jsonl", lines)
    said = [[m["content"] for m in record.messages] for record in read_chats(path)]
    assert said == [[f"q{i}", f"a{i}"] for i in range(len(lines))]
    assert [record.user_turns for record in read_prompts(path)] == [(f"q{i}",) for i in range(len(lines))]


NOW = {"type": "function", "function": {"name": "now", "arguments": {"at": "UTC"}}}
TOOL = {"type": "function", "function": {"name": "now"}}
SAID = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [NOW]},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "a"},
]


@pytest.mark.parametrize(
    ("call", "tools"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [NOW]}, [TOOL]),
        ({"role": "assistant", "tool_calls": [NOW]}, [{"name": "now"}]),
        ({"role": "assistant", "content": "", "tool_calls": [NOW["function"]]}, json.dumps([{"name": "now"}])),
        ({"from": "function_call", "value": '{"name": "now", "arguments": {"at": "UTC"}}'}, json.dumps([TOOL])),
        ({"from": "tool_call", "value": '{"name": "now", "arguments": {"at": "UTC"}}'}, TOOL),
        ({"role": "Tool_Call", "content": '{"name": "now", "arguments": {"at": "UTC"}}'}, json.dumps({"name": "now"})),
        ({"from": "gpt", "value": None, "function_call": {"name": "now", "arguments": '{"at": "UTC"}'}}, [TOOL]),
    ],
)
@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_calls_and_tools_are_read_in_all_their_forms(tmp_path: Path, call: dict[str, Any], tools: Any, field: str):
    result = {"from": "observation", "value": "12"} if "from" in call else SAID[2]
    line = {field: [SAID[0], call, result, SAID[3]], "tools": tools}
    (record,) = read_chats(write_chats(tmp_path / "a.jsonl", [line]))
    assert list(record.messages) == SAID
    assert list(record.tools) == [TOOL]


@pytest.mark.parametrize(
    ("given", "value"), [("", {}), ("null", {}), ("{}", {}), (None, {}), ("[1", "[1"), ('"x"', "x")]
)
def test_arguments_are_values(given: Any, value: Any):
    call = {"id": "c7", "type": "function", "function": {"name": "now", "arguments": given}}
    assert tool_call(call) == {"id": "c7", "type": "function", "function": {"name": "now", "arguments": value}}


def test_thoughts_names_and_a_system_text_of_a_line_are_kept(tmp_path: Path):
    said = [{"role": "user", "content": "q", "name": "Ada"}, {"role": "assistant", "content": "a"}]
    lines = [{"messages": [said[0], {**said[1], name: "t"}]} for name in ("reasoning_content", "reasoning", "thinking")]
    lines += [{"conversations": said, "system": "s"}, {"conversations": said, "system": ""}]
    *thoughts, system, without = read_chats(write_chats(tmp_path / "a.jsonl", lines))
    assert [list(record.messages) for record in thoughts] == [[said[0], {**said[1], "reasoning_content": "t"}]] * 3
    assert list(system.messages) == [{"role": "system", "content": "s"}, *said]
    assert list(without.messages) == said


NOTHING = [
    {"conversations": []},
    {"conversations": [{"from": "gpt", "value": "a"}]},
    {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "a"}]},
    {"instruction": " ", "output": ""},
]


def test_published_lines_without_a_question_are_left_out(tmp_path: Path):
    path = write_chats(tmp_path / "a.jsonl", [*NOTHING, SHARE_GPT])
    assert [record.line_number for record in read_prompts(path)] == [5]
    chats = list(read_chats(path))
    assert [(len(chat.messages), chat.problem) for chat in chats] == [(0, NO_ANSWER)] * 4 + [(5, "")]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"question": "q?"}, "GSM8K"),
        ({"question": 5, "answer": "x"}, "question is 5"),
        ({"conversations": {"from": "human"}}, "conversations is "),
        ({"conversations": ["x"]}, r"conversations is \['x'\]"),
        ({"conversations": [{"from": "human", "value": 5}]}, "message 0: content is 5"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "cat", "value": "a"}]}, "role is 'cat'"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": ["x"], "value": "a"}]}, r"role is \['x'\]"),
        ({"conversations": [{"speaker": "human", "text": "q"}]}, "message 0: role is None"),
        ({"conversation": "x"}, "conversation is 'x'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: dict[str, Any], named: str):
    path = write_chats(tmp_path / "a.jsonl", [FORMS["alpaca"][0], line])
    for reader in (read_prompts, read_chats):
        with pytest.raises(DataError, match=f"a.jsonl, line 2: .*{named}"):
            list(reader(path))


def test_a_masked_line_of_speed_bench_is_an_error(tmp_path: Path):
    masked = {"question_id": "1", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE …"]}
    with pytest.raises(DataError, match=r"a.jsonl, line 1: .*prepare_data.py"):
        list(read_prompts(write_chats(tmp_path / "a.jsonl", [masked])))
