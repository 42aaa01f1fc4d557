"""Streamed text: whole characters only, nothing lost, nothing of a stop string shown."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizers import LETTERS, TOKENIZERS, whole_text
from draftheads.decode.text import StopText, TextStream
from draftheads.models.chat_template import byte_of_letter
from families import IntegerTokenizer

BROKEN = "\ufffd"


def cut(items: list[int], widths: Iterator[int]) -> list[list[int]]:
    """Neighbouring pieces of the given widths."""
    pieces = []
    while items:
        width = next(widths)
        pieces.append(items[:width])
        items = items[width:]
    return pieces


def widths(smallest: int = 1) -> st.SearchStrategy[Callable[[], Iterator[int]]]:
    """Piece widths, repeated for as long as there is something to cut."""

    def forever(pattern: list[int]) -> Iterator[int]:
        while True:
            yield from pattern

    patterns = st.lists(st.integers(smallest, 5), min_size=1, max_size=6).filter(any)
    return patterns.map(lambda pattern: lambda: forever(pattern))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(st.text(LETTERS, max_size=25), widths(0))
def test_pieces_are_whole_characters_and_make_the_text(
    name: str, typed: str, pattern: Callable[[], Iterator[int]]
) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer(typed, add_special_tokens=False)["input_ids"]
    text = whole_text(tokenizer, token_ids)  # some tokenizers drop a space at the start
    assert len(text) >= len(typed) - 1
    stream = TextStream(tokenizer)
    pieces = [stream.push(piece) for piece in cut(token_ids, pattern())]
    assert "".join(pieces) == text, "whole characters are shown as soon as they are there"
    assert stream.flush() == ""
    assert not any(BROKEN in piece for piece in pieces)


@settings(deadline=None)
@given(st.data(), widths())
def test_any_bytes_make_the_text(data: st.DataObject, pattern: Callable[[], Iterator[int]]) -> None:
    """Also what no encoder would write: halves of characters and special tokens anywhere."""
    tokenizer = TOKENIZERS["byte level"]
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    stream = TextStream(tokenizer)
    pieces = [stream.push(piece) for piece in cut(token_ids, pattern())]
    assert "".join([*pieces, stream.flush()]) == whole_text(tokenizer, token_ids)


def ids_of_bytes(name: str, text: bytes) -> list[int]:
    """A token for each byte; in the second tokenizer letters are no bytes."""
    if name == "byte level":
        letters = {byte: letter for letter, byte in byte_of_letter().items()}
        tokens = [letters[byte] for byte in text]
    else:
        tokens = [chr(byte) if chr(byte).isalpha() and byte < 128 else f"<0x{byte:02X}>" for byte in text]
    ids: list[int] = TOKENIZERS[name].convert_tokens_to_ids(tokens)
    assert TOKENIZERS[name].unk_token_id not in ids
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("🙂👩日é字𝄞"), st.integers(1, 3), st.integers(1, 20)), max_size=4), widths())
def test_characters_that_are_cut_in_the_middle(
    name: str, parts: list[tuple[str, int, int]], pattern: Callable[[], Iterator[int]]
) -> None:
    """First parts of characters, once or many times in a row, between whole ones."""
    halves = b"".join(b"cat" + letter.encode()[:-1][:length] * times for letter, length, times in parts)
    token_ids = ids_of_bytes(name, halves + b"t" + "🙂".encode() * 3)
    stream = TextStream(TOKENIZERS[name])
    pieces = [stream.push(piece) for piece in cut(token_ids, pattern())]
    assert pieces[-1].endswith("🙂")
    assert "".join(pieces) == whole_text(TOKENIZERS[name], token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40), widths())
def test_a_run_of_bytes_with_a_wrong_one_shows_no_character(
    rest: list[int], pattern: Callable[[], Iterator[int]]
) -> None:
    """In tokenizers as Llama-2's, even if its other bytes are characters."""
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in [0x80, *rest]])
    stream = TextStream(tokenizer)
    pieces = [stream.push(piece) for piece in cut(token_ids, pattern())]
    assert "".join([*pieces, stream.flush()]) == whole_text(tokenizer, token_ids) == BROKEN * len(token_ids)


class Counting:
    """A tokenizer that notes how many tokens it decodes at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        text: str = self._tokenizer.decode(token_ids, **options)
        return text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("half", [b"\x80", b"\xf0", b"\xf0\x9f", b"\x98\x80\xf0\x9f"])
def test_the_window_does_not_grow_with_many_half_characters(name: str, half: bytes) -> None:
    """And broken text may end or become whole."""
    for rest in ("", "🙂", "t"):
        token_ids = ids_of_bytes(name, half * 100 + rest.encode())
        tokenizer = Counting(TOKENIZERS[name])
        stream = TextStream(tokenizer)
        pieces = [stream.push([token]) for token in token_ids]
        assert tokenizer.longest <= 20
        assert "".join([*pieces, stream.flush()]) == whole_text(tokenizer, token_ids)


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    """However many they are: the window does not grow with them, either."""
    whole = TOKENIZERS["byte level"]
    tokenizer = Counting(whole)
    stream = TextStream(tokenizer)
    first, *rest = ids_of_bytes("byte level", "🙂".encode())
    pieces = [stream.push([token]) for token in [first, *[whole.eos_token_id] * 100, *rest]]
    assert pieces == [""] * 103 + ["🙂"]
    assert tokenizer.longest <= 20


def test_long_texts_are_decoded_in_small_windows() -> None:
    tokenizer = Counting(IntegerTokenizer())
    stream = TextStream(tokenizer)
    assert "".join(stream.push([5, 5]) for _ in range(100)) == IntegerTokenizer().decode([5] * 200)
    assert tokenizer.longest <= 4


# --- stop strings ---

stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def slow_cut(text: str, stop: tuple[str, ...]) -> str | None:
    """The text before the stop string that ends first (of those the longest); None where there is none."""
    ends = [(place + len(each), place) for each in stop if (place := text.find(each)) >= 0]
    return text[: min(ends)[1]] if ends else None


@settings(deadline=None, max_examples=150)
@given(st.text("ab", max_size=12) | st.text("abc", max_size=30), stops, widths(0))
def test_stop_strings_are_found_across_pieces(
    text: str, stop: tuple[str, ...], pattern: Callable[[], Iterator[int]]
) -> None:
    expected = slow_cut(text, stop)
    stream = StopText(stop)
    shown, read = "", 0
    for piece in cut(list(range(len(text))), pattern()):
        shown += stream.push("".join(text[i] for i in piece))
        read += len(piece)
        assert stream.found == (slow_cut(text[:read], stop) is not None), "found as soon as it is there"
        if not stream.found:
            ends = [text[start:read] for start in range(read)]
            maybe = [end for end in ends if any(each.startswith(end) for each in stop)]
            assert text[len(shown) : read] == max(maybe, key=len, default=""), "no more is held back than needed"
    shown += stream.flush()
    assert shown == (text if expected is None else expected)
    assert stream.found == (expected is not None)
