"""Chats as texts to learn from: how many are read, and which are left out."""

from pathlib import Path

import pytest

from draftheads.data.texts import left_out_lines, load_texts
from draftheads.errors import DataError
from draftheads.models.model import TargetModel
from think_world import think_model
from training_world import TEMPLATE, chat, chat_model, chat_tokenizer, counting_chats, write_chats


def test_reading_stops_at_max_tokens(target: TargetModel, tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl.gz", counting_chats(10))
    every = load_texts(target, [path], max_length=64)
    some = load_texts(target, [path, path], max_length=64, max_tokens=len(every[0].token_ids) + 1)
    assert some == every[:2]


REFUSING = "{% if messages[0].content == 'w9' %}{{ raise_exception('no w9') }}{% endif %}" + TEMPLATE


def test_chats_that_cannot_be_learned_are_counted_by_their_reasons(tmp_path: Path):
    said = [("w9", "w2"), ("w1", "w2"), ("w1",), ("w9", "w3"), ("w1 " * 30, "w2"), ("w3", "w4")]
    records = [chat(*turns) for turns in said]
    path = write_chats(tmp_path / "chats.jsonl", records)
    model = TargetModel(chat_model().model, chat_tokenizer(REFUSING), "tiny-chat")
    left_out: dict[str, list[str]] = {}
    texts = load_texts(model, [path], max_length=20, left_out=left_out)
    assert [text.source for text in texts] == [f"{path}:2", f"{path}:6"]
    assert [[place[-1] for place in places] for places in left_out.values()] == [["1", "4"], ["3"], ["5"]]
    first = left_out_lines(left_out)[0]
    assert first.startswith("2 chats")
    assert first.endswith(f"no w9 (the first is {path}:1)")
    with pytest.raises(DataError, match=r"2 chats .* no w9 .*chats.jsonl:1\)$"):
        load_texts(model, [write_chats(path, [chat("w9", "w2"), chat("w9", "w2")])], max_length=20)


def test_each_turn_whose_history_the_template_changes_is_a_text(tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl", [chat("w1", "<think> w8 </think> w2", "w3", "w4"), chat("w5", "w6")])
    texts = load_texts(think_model("optional"), [path], max_length=64)
    assert [text.source.rpartition(":")[2] for text in texts] == ["1", "1", "2"]
    assert not any(text.earlier for text in texts)
    # of a chat that is cut, the texts with an answer stay
    short = load_texts(think_model("optional"), [path], max_length=len(texts[0].token_ids))
    assert short[0] == texts[0]
    assert [text.source for text in short] == [texts[0].source, texts[2].source]
