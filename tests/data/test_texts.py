"""Chats as texts to learn from: how many are read, and which are left out."""

import tracemalloc
from itertools import chain
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from draftheads.data.lines import LeftOut, left_out_lines
from draftheads.data.texts import known_texts, load_blocks, load_texts
from draftheads.errors import DataError
from draftheads.models.chat_template import ids_of, token_ids_of
from draftheads.models.model import TargetModel
from think_world import think_model
from training_world import EOS, TEMPLATE, chat, chat_model, chat_tokenizer, counting_chats, write_chats


def test_reading_stops_at_max_tokens(target: TargetModel, tmp_path: Path):
    path = write_chats(tmp_path / "chats.jsonl.gz", counting_chats(10))
    every = load_texts(target, [path], max_length=64)
    some = load_texts(target, [path, path], max_length=64, max_tokens=len(every[0].token_ids) + 1)
    assert some == every[:2]


def test_of_a_large_text_no_more_is_read_than_needed(target: TargetModel, tmp_path: Path):
    path, lines = tmp_path / "a.txt", [f"w{i % 50} w{i % 7}\n" for i in range(300_000)]
    path.write_text("".join(lines))
    tracemalloc.start()
    try:
        blocks = list(load_blocks(target.tokenizer, [path], eos_ids=frozenset({EOS}), length=64, max_tokens=1000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(block.token_ids) for block in blocks] == [64] * 16
    assert [*chain(*(block.token_ids for block in blocks))] == target.tokenizer("".join(lines[:1000]))["input_ids"][
        :1024
    ]
    assert most < path.stat().st_size / 2
    path.write_text("\ufeffw1 w2")
    (block,) = load_blocks(target.tokenizer, [path], eos_ids=frozenset({EOS}), length=64)
    assert block.token_ids == (*target.tokenizer("w1 w2")["input_ids"], EOS)


def test_texts_that_cannot_be_read_are_left_out_and_never_all_of_them(target: TargetModel, tmp_path: Path):
    path, options = tmp_path / "a.jsonl", {"eos_ids": frozenset({EOS}), "length": 64}
    path.write_text('{"text": "w1"}\n{"messages": []}\n{"text": "\\ud800"}\n{"te\n{"text": 5}\n')
    left_out: LeftOut = {}
    (block,) = load_blocks(target.tokenizer, [path], left_out=left_out, **options)
    assert [len(places) for places in left_out.values()] == [2, 1, 1]
    path.write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"1 text was left out: .*--data"):
        next(load_blocks(target.tokenizer, [path], **options))
    path.write_text("")
    with pytest.raises(DataError, match="no text in"):
        next(load_blocks(target.tokenizer, [path], **options))
    assert list(known_texts([block], max(block.token_ids) + 1, left_out)) == [block], "and no more are left out"


def test_marks_and_masks_are_the_loss_mask(tmp_path: Path):
    said = [message for record in counting_chats(2) for message in record["messages"]]
    plain, marked = ([dict(message) for message in said] for _ in range(2))
    marked[1]["weight"] = 0
    tokens = {"input_ids": [3, 4, 5, 6, 7], "labels": [-100, 4, 5, 6, -100], "attention_mask": [1, 1, 1, 0, 1]}
    path = write_chats(tmp_path / "a.jsonl", [{"messages": plain}, {"messages": marked}, tokens, {"input_ids": [3, 4]}])
    first, second, third, fourth = load_texts(chat_model(), [path], max_length=200)
    assert second.token_ids == first.token_ids
    (start, *_), learned = (sorted(i for i, one in enumerate(text.loss_mask) if one) for text in (first, second))
    assert start not in learned
    assert set(learned) < {i for i, one in enumerate(first.loss_mask) if one}
    assert (third.token_ids, third.loss_mask) == ((3, 4, 5, 7), (False, True, True, False))
    assert fourth.loss_mask == (True, True)


@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A <e>", "$A <e>"])
@pytest.mark.parametrize("prompt", ["", "w1 w2"])
def test_a_completion_follows_what_generation_reads(tmp_path: Path, single: str, prompt: str):
    """A prompt, also an empty one, begins with the tokenizer's BOS and has no EOS behind it."""
    tokenizer = chat_tokenizer()
    specials = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<e>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    model = TargetModel(chat_model().model, tokenizer, "tiny-chat")
    [text] = load_texts(
        model, [write_chats(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": "w3"}])], max_length=9
    )
    read = [i for i, is_learned in zip(text.token_ids, text.loss_mask, strict=True) if not is_learned]
    expected = [dict(specials)["<s>"]] * ("<s>" in single) + ids_of(tokenizer, prompt)
    assert read == expected
    if prompt:
        assert token_ids_of(model, prompt) == expected


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
