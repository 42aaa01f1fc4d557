"""Training texts in pieces: whole characters, special tokens by name, and what the loss mask covers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizers import LETTERS, TOKENIZERS, whole_text
from draftheads.data.records import Record
from draftheads.data.texts import EncodedChat, encode_chat
from draftheads.models.pretrained import ModelTokenizer
from draftheads.reports.page import Pieces
from draftheads.reports.record_pages import VISIBLE, pieces_of
from training_world import EOS, chat, chat_tokenizer

BROKEN = "\ufffd"


def encode(tokenizer: Any, *parts: tuple[str, bool]) -> EncodedChat:
    """Texts one after the other, each with whether it is learned."""
    token_ids: list[int] = []
    mask: list[bool] = []
    for words, is_learned in parts:
        ids = tokenizer(words, add_special_tokens=False)["input_ids"]
        token_ids += ids
        mask += [is_learned] * len(ids)
    return EncodedChat(tuple(token_ids), tuple(mask))


def joined(pieces: Pieces, *, learned: bool | None = None) -> str:
    return "".join(words for words, classes in pieces if learned in (None, classes.startswith("learned")))


# --- pieces ---


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(st.lists(st.tuples(st.text(LETTERS, max_size=12), st.booleans()), max_size=5))
def test_pieces_are_whole_characters_and_make_the_text(name: str, parts: list[tuple[str, bool]]):
    tokenizer = TOKENIZERS[name]
    text = encode(tokenizer, *parts)
    pieces = pieces_of(tokenizer, text)
    assert not any(BROKEN in words or not words for words, _ in pieces)
    whole = whole_text(tokenizer, list(text.token_ids))
    # a space that the decoder drops is shown as the token's own name
    assert joined(pieces).replace("▁", " ").lstrip(" ") == whole.lstrip(" ").translate(VISIBLE)
    if name == "byte level":
        for learned in (False, True):
            said = "".join(words for words, is_said in parts if is_said == learned)
            assert joined(pieces, learned=learned) == said.translate(VISIBLE)


def test_a_piece_is_a_token_unless_tokens_share_a_character():
    tokenizer = TOKENIZERS["byte level"]
    text = encode(tokenizer, ("a𝄞", False), ("𝄞b", True))
    assert len(text.token_ids) == 10, "four tokens each"
    assert pieces_of(tokenizer, text) == [("a", ""), ("𝄞", ""), ("𝄞", "learned"), ("b", "learned")]


def test_special_tokens_have_their_names():
    tokenizer = TOKENIZERS["byte level"]
    eos = tokenizer.eos_token_id
    (a,) = tokenizer("a")["input_ids"]
    text = EncodedChat((eos, a, eos, eos), (False, True, True, False))
    assert pieces_of(tokenizer, text) == [
        ("<eos>", "special"),
        ("a", "learned"),
        ("<eos>", "learned special"),
        ("<eos>", "special"),
    ]


def test_letters_that_look_like_a_special_token_are_letters():
    tokenizer = TOKENIZERS["byte level"]
    pieces = pieces_of(tokenizer, encode(tokenizer, ("<e", True), ("os>", True)))
    assert joined(pieces) == "<eos>"
    assert not any(classes.endswith("special") for _, classes in pieces)


def test_a_character_that_the_length_cut_through_is_shown_as_broken():
    tokenizer = TOKENIZERS["byte level"]
    whole = encode(tokenizer, ("a𝄞", True))
    pieces = pieces_of(tokenizer, EncodedChat(whole.token_ids[:3], whole.loss_mask[:3]))
    assert pieces == [("a", "learned"), (BROKEN, "learned")]


def test_a_token_without_words_is_not_unseen():
    tokenizer = TOKENIZERS["byte fallback"]
    space = tokenizer.convert_tokens_to_ids("▁")
    assert tokenizer.decode([space]) == ""
    assert pieces_of(tokenizer, EncodedChat((space,), (True,))) == [("▁", "learned")]


def test_the_mask_of_a_chat_is_what_the_assistant_says():
    record = chat("w1 w2", "w3 w4", "w5", "w6")
    tokenizer = chat_tokenizer()
    text = encode_chat(ModelTokenizer(tokenizer, frozenset({EOS})), Record(tuple(record["messages"])), max_length=99)
    pieces = [(words.strip(" "), classes) for words, classes in pieces_of(tokenizer, text)]
    learned = [piece for piece in pieces if piece[1].startswith("learned")]
    end = ("<e>", "learned special")
    assert learned == [("w3", "learned"), ("w4", "learned"), end, ("w6", "learned"), end]
    assert len(pieces) == len(text.token_ids)
    assert [words for words, classes in pieces if classes.endswith("special")] == ["<e>"] * 4


def test_control_characters_are_visible():
    tokenizer = TOKENIZERS["byte level"]
    pieces = pieces_of(tokenizer, encode(tokenizer, ("a\x1b[2J\r\n\tb\x9b\x7f\0c", True)))
    assert joined(pieces) == "a␛[2J␍↵\n⇥   b\\x9b␡␀c"
