"""Lines of published data sets are recognised by their fields: as questions, and as chats to learn from."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from draftheads.data.forms import tool_call
from draftheads.data.lines import LeftOut
from draftheads.data.records import NO_ANSWER, prompts_in, read_chats, read_prompts
from draftheads.errors import DataError, DataWarning
from training_world import write_chats

CODE = 'def one():\n    """One."""\n'
COMPLETE = "Complete this Python function. Answer with the whole function in one code block."
TASK = {"task_id": "HumanEval/0", "prompt": f"\n\n{CODE}", "entry_point": "one", "test": "def check(f): ..."}
TURNS = [("system", "s"), ("gpt", "the end of an answer"), ("human", "q1"), ("chatgpt", "a1"), ("user", "q2")]
TURNS += [("assistant", "a2"), ("human", " "), ("gpt", "")]
SHARE_GPT = {"id": "x_1", "conversations": [{"from": side, "value": words} for side, words in TURNS]}
# a line, what is asked, the answer to learn from, the reference
FORMS: dict[str, tuple[dict[str, Any], str, str | None, Any]] = {
    "gsm8k": ({"question": "q?", "answer": "Half of it.\n#### 1,234"}, "q?", "Half of it.\n#### 1,234", "1234"),
    "questions and answers": ({"question": "q?", "answer": "Paris"}, "q?", "Paris", "Paris"),
    "human-eval": ({**TASK, "canonical_solution": "    return 1\n"}, f"{COMPLETE}\n\n```python\n{CODE}```", None, None),
    "alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2", "3", "3"),
    "alpaca without input": ({"instruction": "Add.", "input": "", "output": "3"}, "Add.", "3", "3"),
    "alpaca-eval": ({"instruction": "Add.", "dataset": "koala"}, "Add.", None, None),
    "alpaca without output": ({"instruction": "Add.", "input": None, "output": " "}, "Add.", None, " "),
    "cnn": ({"article": "a b", "highlights": "a", "id": "7"}, "Article: a b\nSummary:", "a", "a"),
    "dolly": ({"instruction": "When?", "context": "In 2000.", "response": "2000"}, "When?\n\nIn 2000.", "2000", "2000"),
    "meta-math": ({"query": "q?", "response": "a, b"}, "q?", "a, b", "a, b"),
    "nan of a table": ({"instruction": "Add.", "input": float("nan"), "output": "3"}, "Add.", "3", "3"),
    "dpo": ({"prompt": "q?", "chosen": "a", "rejected": "b"}, "q?", "a", "a"),
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


USER, SYSTEM = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}
ANSWER = {"role": "assistant", "content": "a"}
OTHER, ASKED = [{**USER, "content": "p"}, {**ANSWER, "content": "b"}], [USER, ANSWER]
PAIRS = [{"human": "p", "assistant": "b"}, {"input": "q", "output": "a"}]
PAIR = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHATS: dict[str, tuple[dict[str, Any], list[Any]]] = {  # a line, and its chat
    "magpie": ({"instruction": "x", "response": "y", "conversations": PAIR}, [USER, ANSWER]),
    "messages beside prompt": ({"prompt": "x", "completion": "y", "messages": [USER, ANSWER]}, [USER, ANSWER]),
    "no messages": ({"prompt": [USER], "completion": [ANSWER], "messages": []}, [USER, ANSWER]),
    "open orca": ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, USER, ANSWER]),
    "history": ({"instruction": "q", "output": "a", "system": "s", "history": [["p", "b"]]}, [SYSTEM, *OTHER, *ASKED]),
    "system beside messages": ({"system": "s", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
    "ultra-chat": ({"data": ["p", "b", "q", "a"]}, [*OTHER, USER, ANSWER]),
    "json text": ({"conversations": json.dumps(PAIR)}, [USER, ANSWER]),
    "nemotron": ({"input": [USER], "output": "a"}, [USER, ANSWER]),
    "dpo with messages": ({"prompt": "q", "chosen": [USER, ANSWER]}, [USER, ANSWER]),
    "pairs": ({"conversation": PAIRS}, [*OTHER, *ASKED]),
    "names of roles": ({"messages": [{**USER, "role": "prompter"}, {**ANSWER, "role": "Bot"}]}, ASKED),
    "parts": ({"messages": [{**USER, "content": ["q"]}, {**ANSWER, "content": [{"text": "a"}]}]}, ASKED),
}


@pytest.mark.parametrize("name", CHATS)
def test_forms_of_chats_are_asked_and_learned_with_all_that_belongs_to_them(tmp_path: Path, name: str):
    line, messages = CHATS[name]
    path = write_chats(tmp_path / "a.jsonl", [line])
    (chat,), (prompt,) = read_chats(path), read_prompts(path)
    assert list(chat.messages) == messages
    asked = [message for message in prompt.messages if message["role"] != "assistant"]
    assert asked == [message for message in messages if message["role"] != "assistant"]


MARKS = ["weight", "train", "training", "train_on_turn", "loss_mask"]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("off", [0, False, "false", 0.0])
def test_what_is_marked_is_read_and_not_learned(tmp_path: Path, mark: str, off: Any):
    lines = [
        {"messages": [*OTHER[:1], {**OTHER[1], mark: off}, USER, {**ANSWER, mark: 1}]},
        {"conversations": [*OTHER, USER, ANSWER], mark: [0, 1, 0, off]},
        {"messages": [USER, {**ANSWER, mark: off}]},
        {"prompt": "q", "completion": "a", mark: off},
        {"instruction": "q", "output": "a", mark: off},
        {"messages": [USER, {**ANSWER, mark: 0.5}]},
        {"messages": [USER, ANSWER], mark: [1]},
    ]
    first, second, *others, fraction, number = read_chats(write_chats(tmp_path / "a.jsonl", lines))
    assert (list(first.before), list(first.messages)) == (OTHER, [USER, ANSWER])
    assert (list(second.before), list(second.messages)) == ([], [*OTHER, USER])
    assert [chat.problem for chat in others] == ["it is marked as not to learn"] * 3
    assert f"{mark} is 0.5: only 0 and 1" in fraction.problem
    assert f"{mark} has 1 values for 2 messages" in number.problem


@pytest.mark.parametrize("name", ["image", "images", "videos", "audios"])
def test_lines_with_more_than_texts_are_left_out(tmp_path: Path, name: str):
    lines = [{"messages": [USER, ANSWER], name: ["1.png"]}, {"instruction": "q", "output": "a", name: []}]
    bad, good = read_chats(write_chats(tmp_path / "a.jsonl", lines))
    assert (name in bad.problem, good.problem) == (True, "")


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


def test_a_conversation_of_share_gpt_begins_with_a_question_and_ends_before_empty_turns(tmp_path: Path):
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
        with pytest.warns(DataWarning, match=f"1 prompt was left out: .*{reason}.*a.jsonl:1"):
            assert len(list(read_prompts(path))) == 1


def turn(side: str, words: str, form: int) -> dict[str, Any]:
    """A turn in one of five forms; every part of a form may be missing or null."""
    name = {"user": "human", "assistant": "gpt"}[side]
    forms: list[dict[str, Any]] = [{"role": side, "content": words}, {"from": name, "value": words}]
    forms += [{"from": side, "content": words, "value": None}, {"role": name, "value": words, "content": None}]
    return [*forms, {"role": side, "content": [{"type": "text", "text": words}]}][form]


@pytest.mark.parametrize("field", ["conversations", "conversation", "messages", "prompt"])
def test_every_mixture_of_the_forms_of_turns_is_read_and_no_line_is_lost(tmp_path: Path, field: str):
    lines: list[dict[str, Any]] = []
    for number, (first, second) in enumerate(product(range(5), repeat=2)):
        question, answer = turn("user", f"q{number}", first), turn("assistant", f"a{number}", second)
        parts = {"prompt": [question], "completion": [answer]} if field == "prompt" else {field: [question, answer]}
        lines.append({"id": number, **parts})
    path = write_chats(tmp_path / "a.jsonl", lines)
    said = [[m["content"] for m in record.messages] for record in read_chats(path)]
    assert said == [[f"q{i}", f"a{i}"] for i in range(len(lines))]
    assert [record.user_turns for record in read_prompts(path)] == [(f"q{i}",) for i in range(len(lines))]


NOW = {"type": "function", "function": {"name": "now", "arguments": {"at": "UTC"}}}
TOOL = {"type": "function", "function": {"name": "now"}}
SAID = [USER, {**ANSWER, "content": "", "tool_calls": [NOW]}, {"role": "tool", "content": "12"}, ANSWER]


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
    {"conversations": [*PAIR[:1], {"from": "gpt", "value": " "}, *PAIR]},
    {"instruction": " ", "output": ""},
]


def test_published_lines_without_a_question_are_left_out(tmp_path: Path):
    path = write_chats(tmp_path / "a.jsonl", [*NOTHING, SHARE_GPT])
    left_out: LeftOut = {}
    assert [record.line_number for record in read_prompts(path, left_out=left_out)] == [6]
    assert sum(map(len, left_out.values())) == 5
    chats = list(read_chats(path))
    empty = "an empty turn has others after it in conversations"
    assert [chat.problem for chat in chats] == [NO_ANSWER, NO_ANSWER, empty, empty, NO_ANSWER, ""]
    assert [len(chat.messages) for chat in chats] == [0, 0, 0, 0, 0, 5]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"questions": "q?"}, "GSM8K"),
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
    left_out: LeftOut = {}
    assert len(list(read_prompts(path, left_out=left_out))) == 1
    for problem in ([chat.problem for chat in read_chats(path)][1], *left_out):
        assert re.search(named, problem)


def test_a_masked_line_of_speed_bench_is_an_error(tmp_path: Path):
    masked = {"question_id": "1", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE …"]}
    with pytest.raises(DataError, match=r"prepare_data.py.*a.jsonl:1"):
        list(read_prompts(write_chats(tmp_path / "a.jsonl", [masked])))
