"""Texts that surely have too many tokens are refused before they are tokenized, and no others."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from byte_tokenizers import LETTERS, TOKENIZERS, byte_fallback, byte_level
from draftheads.decode.engine import Engine
from draftheads.errors import PromptTooLong
from draftheads.models.chat_template import token_ids_of
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
SPACES = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
WORLD = {
    **TOKENIZERS,
    "byte level, composed to a long token": with_long_token(changed(byte_level(), normalizer=normalizers.NFC())),
    "byte level, an added token that takes spaces": with_added(byte_level(), lstrip=True, rstrip=True),
    "byte level, spaces vanish": changed(byte_level(), pre_tokenizer=SPACES),
    "byte fallback, spaces marked before": changed(byte_fallback(), normalizer=MARKS, pre_tokenizer=None),
    "letters are replaced": changed(byte_level(), normalizer=normalizers.Replace("the cat", "c")),
    "parts vanish": changed(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "unknown letters are one token": words_of_unknown_letters(),
    "letters are unknown within words": words_of_unknown_letters(ASCII, continuing_subword_prefix="##"),
    "not of tokenizers": IntegerTokenizer(),
}


class Reader:
    """A model with a tokenizer that notes what it reads."""

    model_id = "org/tiny"
    eos_ids: frozenset[int] = frozenset()
    chat_template = None

    def __init__(self, tokenizer: Any, max_positions: int | None) -> None:
        self.inner, self.max_positions = tokenizer, max_positions
        self.lengths: list[int] = []

    def tokenizer(self, text: str, **options: bool) -> Any:
        self.lengths.append(len(text))
        return self.inner(text, **options)


@pytest.mark.parametrize("name", WORLD)
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.text(LETTERS + "\u1fa8\u0345\u0344\u212b", max_size=20)
        | st.sampled_from(["a" * 200, " " * 200, "e\u0301" * 50, "<|a long added token|>", "cat " * 50, "▁" * 50])
        | st.sampled_from(["\xa0" * 90, "\n" * 90 + "<|a long added token|>", "<|a long added token|>" + "\n " * 90])
        | st.sampled_from(["the cat" * 60, "t" * 150])
    ).map("".join),
    st.integers(1, 12),
)
def test_a_text_is_read_as_it_is_or_has_too_many_tokens(name: str, text: str, limit: int):
    ids = WORLD[name](text)["input_ids"]
    try:
        assert token_ids_of(Reader(WORLD[name], limit), text) == ids
    except PromptTooLong:
        assert len(ids) > limit


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning():
    reader = Reader(TOKENIZERS["byte level"], 2048)
    with pytest.raises(PromptTooLong, match=r"the prompt has more than 2,048 tokens; org/tiny takes at most 2047"):
        token_ids_of(reader, "x " * 500_000)
    assert reader.lengths == [16 * 2048 - 1], "spaces at the end do not count"


@pytest.mark.parametrize("limit", [None, 10**6, 1000, 40])
def test_where_it_may_fit_it_is_tokenized_once(limit: int | None):
    reader = Reader(TOKENIZERS["byte level"], limit)
    text = "the cat sat " * 50
    assert token_ids_of(reader, text) == TOKENIZERS["byte level"](text)["input_ids"]
    assert reader.lengths == [len(text)]


@pytest.fixture(scope="module")
def server() -> Any:
    with running(tiny_engines()) as one:
        yield one


def test_no_prompt_of_any_way_is_tokenized_if_it_is_too_long(server: Running, monkeypatch: pytest.MonkeyPatch):
    engine: Engine = server.engines["tiny"]
    word = "w1 " * 600_000
    lengths = []
    kind = type(engine.model.tokenizer)
    read = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda self, text, **more: lengths.append(len(text)) or read(self, text, **more)
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [{"role": "user", "content": word}]
    for response in (server.complete(prompt=word), server.chat(messages=chat), server.chat(messages=chat, tools=tools)):
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "more than" in response.json()["error"]["message"]
    with pytest.raises(PromptTooLong):
        engine.encode(word)
    assert engine.model.max_positions is not None
    assert len(lengths) == 4
    assert max(lengths) <= 16 * engine.model.max_positions
