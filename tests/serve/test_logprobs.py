"""Tokens as bytes and text."""

from typing import Any

import pytest

from byte_tokenizers import TOKENIZERS
from draftheads.serve.call import TokenNames, completion_logprobs
from families import IntegerTokenizer

TEXT = "the cat naïve 日本🙂"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_a_texts_tokens_are_its_bytes(name: str):
    tokenizer: Any = TOKENIZERS[name]
    names, text = TokenNames(tokenizer), TEXT if name == "byte level" else "the cat 日本"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(map(names.of, ids)).decode().removeprefix(" ") == text


def test_half_characters_have_names_of_their_own():
    names = TokenNames(TOKENIZERS["byte level"])
    halves = [token for token in range(300) if names.unique_text_of(token).startswith("bytes:")]
    assert len({names.unique_text_of(token) for token in halves}) == len(halves) > 100
    assert all("�" in names.text_of(token) for token in halves)


def test_a_tokenizer_that_only_decodes_is_enough():
    assert TokenNames(IntegerTokenizer()).text_of(65) == "<65>"


def test_impossible_tokens_are_numbers_in_json():
    tokens = [(3, None, None), (4, -1.0, ((5, -float("inf")),))]
    form = completion_logprobs(TokenNames(IntegerTokenizer()), tokens, [0, 3], has_tops=True)
    assert form["top_logprobs"] == [None, {"<5>": -9999.0, "<4>": -1.0}]
    assert form["text_offset"] == [0, 3]
