"""Chats become tokens with a mask of exactly what the model would have said."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftheads.data.chat import EncodedChat, encode_chat, read_chats
from draftheads.errors import DataError
from training_world import EOS, TEMPLATE, VOCAB, chat, chat_tokenizer, counting_chats, write_chats


def encode(record: dict[str, Any], *, max_length: int = 100, template: str = TEMPLATE, eos: int = EOS) -> EncodedChat:
    return encode_chat(
        chat_tokenizer(template),
        record["messages"],
        finished=record.get("finished", True),
        max_length=max_length,
        eos_ids=frozenset({eos}),
    )


def said(text: EncodedChat) -> list[str]:
    return [VOCAB[token] for token, is_said in zip(text.token_ids, text.loss_mask, strict=True) if is_said]


def words(text: EncodedChat) -> str:
    return " ".join(VOCAB[token] for token in text.token_ids)


def test_loss_is_on_the_answer_and_the_token_that_ends_it() -> None:
    text = encode(chat("w1 w2", "w3 w4"))
    assert words(text) == "<s> user \n w1 w2 <e> \n <s> assistant \n w3 w4 <e>"
    assert said(text) == ["w3", "w4", "<e>"]


def test_every_turn_of_the_assistant_counts_and_the_text_is_the_rendered_chat() -> None:
    record = chat("w1", "w2 w3", "w4", "w5")
    text = encode(record)
    assert said(text) == ["w2", "w3", "<e>", "w5", "<e>"]
    rendered = chat_tokenizer().apply_chat_template(record["messages"], tokenize=False)
    assert list(text.token_ids) == chat_tokenizer()(rendered, add_special_tokens=False)["input_ids"][:-1]


def test_a_cut_off_answer_has_no_end() -> None:
    text = encode(chat("w1", "w2 w3", "w4", "w5 w6", finished=False))
    assert said(text) == ["w2", "w3", "<e>", "w5", "w6"]
    assert words(text).endswith("w5 w6")


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert encode(chat("w1", "w2", "w3")) == encode(chat("w1", "w2"))


def test_a_template_whose_end_of_turn_is_no_end_of_text_teaches_the_words_only() -> None:
    text = encode(chat("w1", "w2", "w3", "w4"), eos=1)
    assert said(text) == ["w2", "w4"]
    assert "w2 <e> \n <s> user \n w3" in words(text)


def test_spaces_that_the_template_strips_do_not_matter() -> None:
    template = TEMPLATE.replace("m['content']", "m['content'] | trim")
    assert encode(chat("w1", " \n w2 \n "), template=template) == encode(chat("w1", "w2"))


def test_spaces_that_the_template_keeps_are_the_models() -> None:
    assert said(encode(chat("w1", "w2 \n"))) == ["w2", "\n", "<e>"]


def test_an_empty_answer_is_its_end() -> None:
    assert said(encode(chat("w1", ""))) == ["<e>"]


@pytest.mark.parametrize("length", range(1, 20))
def test_cutting_keeps_the_beginning(length: int) -> None:
    record = chat("w1", "w2 w3", "w4", "w5")
    whole, cut = encode(record), encode(record, max_length=length)
    assert cut.token_ids == whole.token_ids[:length]
    assert cut.loss_mask == whole.loss_mask[:length]
    assert cut.is_cut == (length < len(whole.token_ids))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE.replace("m['content']", "m['content'] | upper"), "hides or changes .* message 1"),
        (
            TEMPLATE.replace("m['content']", "'' if m['role'] == 'assistant' else m['content']"),
            "hides or changes",
        ),
        (TEMPLATE.replace("m['content']", "m['content'] if loop.last else 'w9'"), "rewrites"),
        (TEMPLATE.replace("<s> assistant", "<s> w7"), "another prompt"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (TEMPLATE.replace("{{ m['content'] }}", "w8 {{ m['content'] }}"), "hides or changes"),
    ],
)
def test_a_template_that_hides_what_was_said_is_an_error(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(chat("w1", "w2 w3", "w4", "w5"), template=template)


def test_no_chat_template_is_an_error() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="template"):
        encode_chat(tokenizer, chat("w1", "w2")["messages"], finished=True, max_length=9, eos_ids=frozenset({EOS}))


def test_no_answer_is_an_error() -> None:
    with pytest.raises(DataError, match="assistant"):
        encode(chat("w1"))


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_files_are_read_zipped_or_not(tmp_path: Path, name: str) -> None:
    records = counting_chats(5)
    chats = list(read_chats(write_chats(tmp_path / name, records)))
    assert [list(chat.messages) for chat in chats] == [record["messages"] for record in records]
    assert [chat.finished for chat in chats] == [record["finished"] for record in records]
    assert [chat.line_number for chat in chats] == [1, 2, 3, 4, 5]


def test_empty_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"\n{json.dumps(chat('w1', 'w2'))}\n\n", encoding="utf-8")
    assert [(chat.line_number, chat.finished) for chat in read_chats(path)] == [(2, True)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "not JSON"),
        ("[1, 2]", "a chat is an object"),
        ('{"text": "w1"}', "a chat is an object"),
        ('{"messages": "w1"}', "a chat is an object"),
        ('{"messages": ["w1"]}', "message 0 is 'w1'"),
        ('{"messages": [{"role": "user"}]}', "message 0: content is None"),
        ('{"messages": [{"role": 3, "content": "w1"}]}', "message 0: role is 3"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "no message of role 'assistant'"),
        ('{"messages": [{"role": "assistant", "content": "w1"}], "finished": 1}', "finished is 1"),
        (
            '{"messages": [{"role": "user", "content": "w1 \\ud800"}]}',
            r"message 0: content holds half .*'\\ud800' as its",
        ),
        ('{"messages": [{"role": "\\udfff", "content": "w1"}]}', "message 0: role holds half a character"),
        ("[" * 100_000, r"nested too deeply to be read: '\[{57}…'"),
        ('{"messages": ' + '{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(chat('w1', 'w2'))}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        list(read_chats(path))
    assert f"{path}, line 2" in str(caught.value)
    assert caught.value.line_number == 2


@pytest.mark.parametrize("damage", ["cut", "garbled", "no gzip", "not utf-8", "missing", "folder"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / ("chats.jsonl" if damage in {"not utf-8", "missing", "folder"} else "chats.jsonl.gz")
    content = gzip.compress(json.dumps(chat("w1", "w2 " * 1000)).encode())
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(
            {"cut": content[:30], "garbled": content[:12] + b"\xff" * 30, "no gzip": b"{}", "not utf-8": b'{"\xff'}[
                damage
            ]
        )
    with pytest.raises(DataError, match="cannot be read"):
        list(read_chats(path))
