"""Chats of reasoning models: what is learned is what the model would have written after its generation prompt."""

from typing import Any

import pytest

from draftheads.data.records import Record
from draftheads.data.texts import EncodedChat, _Template, encode_chat
from draftheads.errors import UnlearnableChat
from draftheads.models.chat_template import render
from draftheads.models.pretrained import ModelTokenizer
from think_world import TEMPLATES, WORDS, think_tokenizer
from training_world import EOS, chat

E = "<e>"


def encode(name: str, messages: list[dict[str, Any]], *, finished: bool = True, **options: Any) -> list[EncodedChat]:
    """The texts of a chat, each checked to begin as generation does."""
    reader = ModelTokenizer(think_tokenizer(name), frozenset({EOS}))
    last = encode_chat(reader, Record(tuple(messages), finished=finished, **options), max_length=500)
    return [*last.earlier, last]


def learned(texts: list[EncodedChat]) -> list[str]:
    return [
        " ".join(WORDS[token] for token, is_said in zip(text.token_ids, text.loss_mask, strict=True) if is_said)
        for text in texts
    ]


THOUGHT = "<think> \n w8 w9 \n </think> \n w2"  # a thought and an answer, as the optional template writes them
CASES = [
    # an answer without a thought, of a data set
    ("optional", chat("w1", "w2"), [f"<think> \n \n </think> \n w2 {E}"]),
    ("always", chat("w1", "w2"), [f"\n </think> \n w2 {E}"]),
    ("dropping", chat("w1", "w2"), [f"w2 {E}"]),
    ("never", chat("w1", "w2"), [f"w2 {E}"]),
    # with a thought
    ("optional", chat("w1", THOUGHT), [f"{THOUGHT} {E}"]),
    ("always", chat("w1", THOUGHT), [f"w8 w9 \n </think> \n w2 {E}"]),
    ("always", chat("w1", "w8 w9 \n </think> \n w2"), [f"w8 w9 \n </think> \n w2 {E}"]),
    ("dropping", chat("w1", THOUGHT), [f"w8 w9 \n </think> \n w2 {E}"]),
    ("dropping", chat("w1", "w8 \n </think> \n w2"), [f"w8 \n </think> \n w2 {E}"]),
    ("never", chat("w1", THOUGHT), [f"w2 {E}"]),
    # the turn begins with the same letter as the tag of a thought, which the template leaves out
    ("calling", chat("w1", "w2"), [f"w2 {E}"]),
    ("calling", chat("w1", "<tool> w2"), [f"<tool> w2 {E}"]),
    ("calling", chat("w1", THOUGHT, "w5", "<tool>"), [f"w8 w9 \n </think> \n w2 {E}", f"<tool> {E}"]),
    ("calling", chat("w1", "", "w5", ""), [f"{E} {E}"]),
    # the words of the answer are in the thought, too
    ("optional", chat("w1", "<think> \n w2 w3 \n </think> \n w2"), [f"<think> \n w2 w3 \n </think> \n w2 {E}"]),
    # another layout than the template's
    ("optional", chat("w1", "<think> w8 w9 </think> w2"), [f"{THOUGHT} {E}"]),
    # cut off in the thought, or ended in it
    ("optional", chat("w1", "<think> \n w8", finished=False), ["<think> \n w8"]),
    ("optional", chat("w1", "<think> \n w8"), [f"<think> \n w8 {E}"]),
    ("always", chat("w1", "w8", finished=False), ["w8"]),
    ("always", chat("w1", "<think> \n w8", finished=False), ["w8"]),
    ("dropping", chat("w1", "w8", finished=False), ["w8"]),
    ("never", chat("w1", "w8", finished=False), ["w8"]),
    # two turns: a text for each, or one if the template keeps what the model wrote
    ("optional", chat("w1", THOUGHT, "w5", THOUGHT), [f"{THOUGHT} {E}"] * 2),
    ("optional", chat("w1", "w2", "w5", "w6"), [f"<think> \n \n </think> \n {w} {E}" for w in ("w2", "w6")]),
    ("always", chat("w1", "w2", "w5", THOUGHT), [f"\n </think> \n w2 {E}", f"w8 w9 \n </think> \n w2 {E}"]),
    ("dropping", chat("w1", THOUGHT, "w5", "w6"), [f"w8 w9 \n </think> \n w2 {E}", f"w6 {E}"]),
    ("dropping", chat("w1", "w2", "w5", "w6"), [f"w2 {E} w6 {E}"]),
    ("never", chat("w1", THOUGHT, "w5", "w6"), [f"w2 {E}", f"w6 {E}"]),
]


@pytest.mark.parametrize(("name", "record", "expected"), CASES)
def test_the_mask_covers_what_the_template_lets_the_model_write(
    name: str, record: dict[str, Any], expected: list[str]
) -> None:
    texts = encode(name, record["messages"], finished=record["finished"])
    assert learned(texts) == expected
    for text in texts:
        assert text.loss_mask[-1], "nothing follows"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("words", ["w2", "w8 \n </think> \n w2", "<think> w8", " \n <think> w8 </think>w2 \n", ""])
def test_what_the_model_wrote_is_learned_as_it_is(name: str, words: str) -> None:
    """Word for word after the generation prompt of each turn, whatever the template would write."""
    messages = chat("w1", words, "w5", "w3", "w6", words)["messages"]
    tokenizer = think_tokenizer(name)
    texts = encode(name, messages, is_generated=True)
    turns = []
    for place in (1, 3, 5):
        prompt = render(ModelTokenizer(tokenizer, frozenset()), messages[:place], add_generation_prompt=True)
        prompt_ids, said = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, messages[place]["content"])
        )
        turns.append((prompt_ids, [*said, EOS]))
    for prompt_ids, said in turns:
        whole = [*prompt_ids, *said]
        (mask,) = {text.loss_mask[: len(whole)] for text in texts if list(text.token_ids[: len(whole)]) == whole}
        assert all(mask[len(prompt_ids) :])
    assert sum(sum(text.loss_mask) for text in texts) == sum(len(said) for _, said in turns)


@pytest.mark.parametrize(
    ("name", "finished", "content", "expected"),
    [
        ("optional", True, "w2", f"{THOUGHT} {E}"),
        ("always", True, "w2", f"w8 w9 \n </think> \n w2 {E}"),
        ("dropping", True, "w2", f"w8 w9 \n </think> \n \n w2 {E}"),  # does not read reasoning_content
        ("never", True, "w2", f"w2 {E}"),
        ("optional", False, "", "<think> \n w8 w9"),
        ("always", False, "", "w8 w9"),
        ("dropping", False, "", "w8 w9"),
        ("optional", False, "w2", "<think> \n w8 w9 \n </think> \n w2"),
        ("dropping", False, "w2", "w8 w9 \n </think> \n \n w2"),
        # the words are those of the thought, or begin it, or end it
        *(
            (name, finished, words, f"{tag}w8 w9 \n </think> \n {more}{words}{end}")
            for name, tag, more in (("optional", "<think> \n ", ""), ("always", "", ""), ("dropping", "", "\n "))
            for finished, end in ((True, f" {E}"), (False, ""))
            for words in ("w8 w9", "w8", "w9", "w9 \n w8 w9 w8")
        ),
    ],
)
def test_a_thought_of_its_own_field_is_written_by_the_template(
    name: str, finished: bool, content: str, expected: str
) -> None:
    messages = chat("w1", content)["messages"]
    messages[1]["reasoning_content"] = "w8 w9"
    for is_generated in (False, True):
        assert learned(encode(name, messages, finished=finished, is_generated=is_generated)) == [expected]


def test_a_template_that_reads_thoughts_by_another_name_and_begins_with_a_channel() -> None:
    template = (
        "{% for m in messages %}<s> {{ m.role }}{% if m.role == 'assistant' %}"
        "{% if m.thinking %} w50 {{ m.thinking }} \n{% endif %} w51{% endif %} {{ m.content }} <e>{% endfor %}"
        "{% if add_generation_prompt %}<s> assistant{% endif %}"
    )
    reader = ModelTokenizer(think_tokenizer("never"), frozenset({EOS}), template)
    messages = chat("w1", "w2")["messages"]
    assert learned([encode_chat(reader, Record(tuple(messages)), max_length=99)]) == [f"w51 w2 {E}"]
    messages[1]["reasoning_content"] = "w8"
    assert learned([encode_chat(reader, Record(tuple(messages)), max_length=99)]) == [f"w50 w8 \n w51 w2 {E}"]
    messages[1]["content"] = "w5"  # a part of another word that the template writes before it
    assert learned([encode_chat(reader, Record(tuple(messages), finished=False), max_length=99)]) == [
        "w50 w8 \n w51 w5"
    ]


@pytest.mark.parametrize("name", ["optional", "always"])
@pytest.mark.parametrize("thought", ["hi", "think", "th", ">"])
@pytest.mark.parametrize("words", ["hi", "k", "</"])
def test_short_words_are_not_taken_for_those_in_a_tag(name: str, thought: str, words: str) -> None:
    """Cut off behind the words, in the text itself: no such words are tokens of the tiny tokenizer."""
    reader = ModelTokenizer(think_tokenizer(name), frozenset({EOS}))
    messages = chat("w1", words)["messages"]
    messages[1]["reasoning_content"] = thought
    turn = _Template(reader, ()).turn(messages, finished=False, is_generated=False)
    begun = "" if name == "always" else "<think> \n "
    assert turn.words == f"{begun}{thought} \n </think> \n {words}"
    messages[1]["content"] = ""
    assert _Template(reader, ()).turn(messages, finished=False, is_generated=False).words == begun + thought


def call_of(name: str, at: str = "w31") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"at": at}}}


def calling(thought: str = "", words: str = "", calls: tuple[dict[str, Any], ...] = (call_of("w30"),)) -> list[Any]:
    said = {"role": "assistant", "content": words, "tool_calls": list(calls)}
    return [
        {"role": "user", "content": "w1"},
        {**said, **({"reasoning_content": thought} if thought else {})},
        {"role": "tool", "content": "w40"},
        {"role": "assistant", "content": "w2"},
    ]


def test_calls_are_learned_with_their_thoughts() -> None:
    empty = "<think> \n \n </think> \n"
    assert learned(encode("optional", calling())) == [f"{empty} w30 w31 {E} {empty} w2 {E}"]
    assert learned(encode("optional", calling("w8"))) == [f"<think> \n w8 \n </think> \n w30 w31 {E} {empty} w2 {E}"]
    assert learned(encode("always", calling("w8")))[0] == f"w8 \n </think> \n w30 w31 {E} \n </think> \n w2 {E}"


@pytest.mark.parametrize("thought", ["", "w8", "w30", "tool"])
@pytest.mark.parametrize("words", ["", "w3", "w30 w31"])
@pytest.mark.parametrize("names", [("w30",), ("w33", "w30"), ("w30", "w30")])
def test_calls_are_learned_where_the_template_leaves_the_thought_before_them_out(
    thought: str, words: str, names: tuple[str, ...]
) -> None:
    texts = learned(encode("calling", calling(thought, words, tuple(map(call_of, names)))))
    calls = " \n ".join(f"<tool> {name} w31" for name in names)
    assert texts == [f"{words} \n {calls} {E} w2 {E}" if words else f"{calls} {E} w2 {E}"]


@pytest.mark.parametrize("name", ["never", "dropping"])
@pytest.mark.parametrize(("thought", "words"), [("", ""), ("", "w30 w8"), ("w8 w30", ""), ("w30", "w30")])
def test_a_template_that_hides_calls_is_no_text_to_learn(name: str, thought: str, words: str) -> None:
    with pytest.raises(UnlearnableChat, match="does not write calls"):
        encode(name, calling(thought, words))


@pytest.mark.parametrize("calls", [(call_of("w30"), call_of("w30")), (call_of("w30"), call_of("w30", "w32"))])
def test_a_template_that_hides_the_second_call_is_no_text_to_learn(calls: tuple[dict[str, Any], ...]) -> None:
    template = TEMPLATES["calling"].replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
    reader = ModelTokenizer(think_tokenizer("calling"), frozenset({EOS}), template)
    with pytest.raises(UnlearnableChat, match="does not write calls"):
        encode_chat(reader, Record(tuple(calling(calls=calls))), max_length=99)
    assert encode_chat(reader, Record(tuple(calling(calls=calls[:1]))), max_length=99)
