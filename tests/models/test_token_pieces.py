"""Long texts in pieces have the ids of the whole text, also where tokens span lines."""

from itertools import chain
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from byte_tokenizers import CORPUS, TOKENIZERS
from draftheads.models import chat_template as module
from draftheads.models.chat_template import continuing_ids, ids_of, token_pieces
from spaced_tokenizer import spaced_tokenizer

LINES = ["one\ntwo", "a}\n\n{b", "two\nthree four"] * 9 + CORPUS


def spanning(kind: str) -> Any:
    """No words: tokens span lines, or, as of SentencePiece, spaces are letters and unknown characters are bytes."""
    every = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "sentencepiece"))
    if kind == "sentencepiece":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=every, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORLD = {**TOKENIZERS, "a space before": spaced_tokenizer(), "metaspace": spaced_tokenizer("metaspace")}
WORLD |= {kind: spanning(kind) for kind in ("lines", "sentencepiece")}
ATOMS = ["\n", "\n\n", " ", "   ", "\t", "the cat", " sat", "two", "one", "three", "}", "{", "123456", "é", "e\u0301"]
ATOMS += ["one\ntwo", "two\nthree four", "a}\n\n{b", "日本語", "。", "🙂", "'s", "<eos>", "</s>"]
ATOMS += ["\r\n", "a" * 30, "мир", "."]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 120)
    monkeypatch.setattr(module, "_AROUND", 40)


def test_tokens_span_lines():
    """Else the test below proves little."""
    ids = ids_of(WORLD["lines"], "one\ntwo")
    assert ids != ids_of(WORLD["lines"], "one\n") + ids_of(WORLD["lines"], "two")


@pytest.mark.parametrize("name", WORLD)
@example(["one\ntwo"] * 60, 400)  # each is a token
@given(st.lists(st.sampled_from(ATOMS), max_size=250), st.integers(1, 400))
def test_pieces_have_the_ids_of_the_whole_text(name: str, atoms: list[str], size: int):
    tokenizer, text = WORLD[name], "".join(atoms)
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    for given_text, first in ((text, ids_of), (parts, ids_of), (text, continuing_ids)):
        assert [*chain(*token_pieces(tokenizer, given_text, first=first))] == first(tokenizer, text)


@pytest.mark.parametrize("name", WORLD)
def test_long_texts_are_cut_and_read_no_further_than_needed(name: str):
    read = []

    def parts() -> Any:
        for number in range(100):
            read.append(number)
            yield f"the cat sat {number}\non the mat, mat."

    pieces = token_pieces(WORLD[name], parts())
    assert len(next(pieces)) < 200
    assert len(read) < 12
    assert len([*pieces]) > 10


def test_a_text_without_a_safe_place_is_cut_where_it_is_too_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LONGEST", 500)
    tokenizer = WORLD["byte level"]
    pieces = [*token_pieces(tokenizer, "a" * 1700)]
    assert len(pieces) > 3
    assert tokenizer.decode([*chain(*pieces)]) == "a" * 1700
