"""Chats become tokens with a mask of exactly what the model would have said."""

from typing import Any

import pytest
from tokenizers import processors

from draftheads.data.records import Record
from draftheads.data.texts import EncodedChat, encode_chat
from draftheads.errors import DataError, UnlearnableChat
from draftheads.models.chat_template import read_template, render
from draftheads.models.pretrained import ModelTokenizer
from spaced_tokenizer import spaced_tokenizer
from training_world import EOS, TEMPLATE, VOCAB, chat, chat_tokenizer


def encode(record: dict[str, Any], *, max_length: int = 100, template: str = TEMPLATE, eos: int = EOS) -> EncodedChat:
    reader = ModelTokenizer(chat_tokenizer(template), frozenset({eos}))
    return encode_chat(
        reader, Record(tuple(record["messages"]), finished=record.get("finished", True)), max_length=max_length
    )


def said(text: EncodedChat) -> list[str]:
    return [VOCAB[token] for token, is_said in zip(text.token_ids, text.loss_mask, strict=True) if is_said]


def words(text: EncodedChat) -> str:
    return " ".join(VOCAB[token] for token in text.token_ids)


@pytest.mark.parametrize(
    ("record", "learned"),
    [
        (chat("w1 w2", "w3 w4"), ["w3", "w4", "<e>"]),
        (chat("w1", "w2 w3", "w4", "w5 w6", finished=False), ["w2", "w3", "<e>", "w5", "w6"]),
        (chat("w1", "w2 \n"), ["w2", "\n", "<e>"]),  # spaces that the template keeps
        (chat("w1", ""), ["<e>"]),
    ],
)
def test_the_loss_covers_answers_and_the_tokens_that_end_them(record: dict[str, Any], learned: list[str]):
    text = encode(record)
    assert said(text) == learned
    assert text.loss_mask[-1], "nothing follows"


def test_the_text_is_the_rendered_chat():
    record = chat("w1", "w2 w3", "w4", "w5")
    rendered = chat_tokenizer().apply_chat_template(record["messages"], tokenize=False)
    assert list(encode(record).token_ids) == chat_tokenizer()(rendered, add_special_tokens=False)["input_ids"][:-1]


def test_special_tokens_are_the_templates_matter():
    tokenizer = chat_tokenizer()
    processor = processors.TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = processor
    messages = chat("w1", "w2", "w3", "w4")["messages"]
    found = encode_chat(ModelTokenizer(tokenizer, frozenset({EOS})), Record(tuple(messages)), max_length=99)
    assert found == encode({"messages": messages})


def test_what_follows_the_last_answer_is_left_out():
    assert encode(chat("w1", "w2", "w3")) == encode(chat("w1", "w2"))


def test_an_end_of_turn_that_does_not_end_the_text_is_not_learned():
    text = encode(chat("w1", "w2", "w3", "w4"), eos=1)
    assert said(text) == ["w2", "w4"]
    assert "w2 <e> \n <s> user \n w3" in words(text)


def test_spaces_that_the_template_strips_are_ignored():
    template = TEMPLATE.replace("m['content']", "m['content'] | trim")
    assert encode(chat("w1", " \n w2 \n "), template=template) == encode(chat("w1", "w2"))


@pytest.mark.parametrize("length", [1, 9, 10, 11, 23, 24, 25])
def test_cutting_keeps_the_beginning(length: int):
    record = chat("w1", "w2 w3", "w4", "w5")
    whole, cut = encode(record), encode(record, max_length=length)
    assert cut.token_ids == whole.token_ids[:length]
    assert cut.loss_mask == whole.loss_mask[:length]
    assert cut.is_cut == (length < len(whole.token_ids))


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (TEMPLATE.replace("m['content']", "m['content'] | replace('w2', 'w9')"), [["w2", "w3", "<e>"], ["w5", "<e>"]]),
        (TEMPLATE.replace("m['content']", "'' if m['role'] == 'assistant' else m['content']"), None),
        (TEMPLATE.replace("m['content']", "m['content'] if loop.last else 'w9'"), None),
        (TEMPLATE.replace("<s> assistant", "<s> w7"), None),
        (TEMPLATE.replace("{{ m['content", "w8 {{ m['content"), [["w8", "w2", "w3", "<e>", "w8", "w5", "<e>"]]),
        (TEMPLATE.replace("<s> assistant", ""), None),
    ],
)
def test_words_that_the_template_later_hides_or_changes_are_learned_turn_by_turn(template: str, learned: Any):
    """After the generation prompt of their turn, which is what the model reads when it is asked."""
    messages = chat("w1", "w2 w3", "w4", "w5")["messages"]
    last = encode({"messages": messages}, template=template)
    texts = [*last.earlier, last]
    assert [said(text) for text in texts] == learned or [["w2", "w3", "<e>"], ["w5", "<e>"]]
    tokenizer = chat_tokenizer(template)
    for text, place in zip(texts, (1, 3), strict=len(texts) == 2):
        prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert list(text.token_ids[: len(ids)]) == ids
        assert text.loss_mask.index(True) == len(ids)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", UnlearnableChat, "roles must alternate"),
        (TEMPLATE.replace("m['role']", "m['role'] + '\ud800'"), UnlearnableChat, "half a character"),
        ("", DataError, "no chat template: give one by --chat-template"),
    ],
)
def test_a_template_that_refuses_a_chat_and_no_template_are_errors(template: str, error: type, message: str):
    with pytest.raises(error, match=message) as caught:
        encode(chat("w1", "w2 w3", "w4", "w5"), template=template)
    assert type(caught.value) is error


@pytest.mark.parametrize("style", ["prepend", "metaspace"])
@pytest.mark.parametrize("template", ["vicuna", "llama-2"])
def test_no_second_space_is_put_before_an_answer(style: str, template: str):
    """Some tokenizers put a space before each text. The model generates none between its prompt and its first word."""
    tokenizer = spaced_tokenizer(style)
    reader = ModelTokenizer(tokenizer, frozenset({tokenizer.eos_token_id}), read_template(template))
    messages = chat("hi", "yes  b", "go", "no")["messages"]
    text = encode_chat(reader, Record(tuple(messages)), max_length=2000)
    words = tokenizer.convert_ids_to_tokens(list(text.token_ids))
    said = "".join(word for word, is_said in zip(words, text.loss_mask, strict=True) if is_said)
    assert said == "▁yes▁▁b</s>▁no</s>"
    for turn in (1, 3):  # each answer follows the tokens that generation reads as its prompt
        prompt = render(reader, messages[:turn], add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert list(text.token_ids[: len(ids)]) == ids
