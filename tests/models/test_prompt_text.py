"""Texts that surely have too many tokens are refused before they are tokenized, and no others."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from byte_tokenizers import LETTERS, TOKENIZERS, byte_fallback, byte_level
from draftheads.decode.engine import Engine
from draftheads.errors import PromptTooLong
from draftheads.models import prompt_text
from draftheads.models.prompt_text import fewest_tokens, token_ids_of
from families import IntegerTokenizer
from serve_world import Running, running, tiny_engines


def changed(tokenizer: Any, **parts: Any) -> Any:
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def with_added(tokenizer: Any, **options: bool) -> Any:
    tokenizer.add_tokens([AddedToken("<|a long added token|>", special=True, **options)])
    return tokenizer


def with_long_token(tokenizer: Any) -> Any:
    tokenizer.add_tokens([AddedToken("é" * 20, normalized=True)])
    return tokenizer


def words_of_unknown_letters(known: str = "th", **options: str) -> Any:
    vocabulary = {token: i for i, token in enumerate(["<unk>", *known])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


ASCII = "".join(map(chr, range(33, 127)))
MARKS = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
WORDS = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(" ?[a-z]+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
)
SPACES = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
KNOWN = {
    **TOKENIZERS,
    "byte level, split": changed(byte_level(), pre_tokenizer=WORDS),
    "byte level, composed": changed(byte_level(), normalizer=normalizers.NFC()),
    "byte level, composed to a long token": with_long_token(changed(byte_level(), normalizer=normalizers.NFC())),
    "byte level, an added token that takes spaces": with_added(byte_level(), lstrip=True, rstrip=True),
    "byte level, an added token": with_added(byte_level()),
    "byte level, lower case": changed(byte_level(), normalizer=normalizers.Lowercase()),
    "byte level, stripped": changed(byte_level(), normalizer=normalizers.Strip()),
    "byte level, spaces vanish": changed(byte_level(), pre_tokenizer=SPACES),
    "byte fallback, spaces marked before": changed(byte_fallback(), normalizer=MARKS, pre_tokenizer=None),
}
UNKNOWN = {
    "letters are replaced": changed(byte_level(), normalizer=normalizers.Replace("the cat", "c")),
    "parts vanish between others": changed(byte_level(), pre_tokenizer=pre_tokenizers.CharDelimiterSplit("t")),
    "parts vanish": changed(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "unknown letters are one token": words_of_unknown_letters(),
    "letters are unknown within words": words_of_unknown_letters(ASCII, continuing_subword_prefix="##"),
    "letters are unknown at the end of words": words_of_unknown_letters(ASCII, end_of_word_suffix="</w>"),
    "not of tokenizers": IntegerTokenizer(),
}


@pytest.mark.parametrize("name", KNOWN)
@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.text(LETTERS + "\u1fa8\u0345\u0344\u212b", max_size=20)
        | st.sampled_from(["a" * 200, " " * 200, "e\u0301" * 50, "<|a long added token|>", "cat " * 50, "▁" * 50])
        | st.sampled_from(["\xa0" * 90, "\n" * 90 + "<|a long added token|>", "<|a long added token|>" + "\n " * 90])
    ).map("".join)
)
def test_never_more_than_there_are(name: str, text: str):
    assert fewest_tokens(KNOWN[name], text) <= len(KNOWN[name](text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", KNOWN)
def test_it_is_no_small_number(name: str):
    """The longest token of these vocabularies has 40 bytes."""
    least = 12_000 // 40
    assert fewest_tokens(KNOWN[name], "the cat" * 2000) >= least


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_known_of_tokenizers_in_which_text_may_vanish(name: str):
    assert fewest_tokens(UNKNOWN[name], "the cat" * 2000) == 0


class Refusing:
    """A tokenizer that must not be called."""

    def __init__(self) -> None:
        self.backend_tokenizer = TOKENIZERS["byte level"].backend_tokenizer

    def __call__(self, text: str, **_: object) -> None:
        raise AssertionError(f"{len(text)} characters are tokenized")


class Reader:
    model_id = "org/tiny"

    def __init__(self, tokenizer: Any, max_positions: int | None) -> None:
        self.tokenizer, self.max_positions = tokenizer, max_positions


def test_a_text_that_is_surely_too_long_is_not_tokenized():
    with pytest.raises(PromptTooLong, match=r"the prompt has at least 3,572 tokens; org/tiny takes at most 2047"):
        token_ids_of(Reader(Refusing(), 2048), "x " * 50_000)


def test_where_it_may_fit_it_is_tokenized():
    tokenizer = TOKENIZERS["byte level"]
    text = "the cat sat " * 100
    ids = tokenizer(text)["input_ids"]
    least = fewest_tokens(tokenizer, text)
    assert 0 < least < len(ids)
    for limit in (None, 10**6, least + 1):
        assert token_ids_of(Reader(tokenizer, limit), text) == ids


@pytest.fixture(scope="module")
def server() -> Any:
    with running(tiny_engines()) as one:
        yield one


def test_no_prompt_of_any_way_is_tokenized_if_it_is_too_long(server: Running, monkeypatch: pytest.MonkeyPatch):
    word = "x" * 1_900_000
    asked = []
    monkeypatch.setattr(prompt_text, "fewest_tokens", lambda _, text: asked.append(len(text)) or 10**6)
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [{"role": "user", "content": word}]
    for response in (server.complete(prompt=word), server.chat(messages=chat), server.chat(messages=chat, tools=tools)):
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "at least 1,000,000 tokens" in response.json()["error"]["message"]
    engine: Engine = server.engines["tiny"]
    with pytest.raises(PromptTooLong):
        engine.encode(word)
    assert len(asked) == 4
