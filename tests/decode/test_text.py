"""Streamed text: whole characters only, nothing lost, nothing of a stop string shown."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizers import LETTERS, TOKENIZERS, whole_text
from draftheads.decode.text import StopText, TextStream

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
    assert not any(piece.endswith(BROKEN) for piece in pieces), "it may yet become a character"


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = tokenizer("a𝄞b")["input_ids"]
    assert len(token_ids) == 6  # four bytes in the middle
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in token_ids] == ["a", "", "", "", "𝄞", "b"]


def test_half_a_character_at_the_end_is_shown_once_nothing_can_follow() -> None:
    tokenizer = TOKENIZERS["byte level"]
    stream = TextStream(tokenizer)
    token_ids = tokenizer("a𝄞")["input_ids"][:3]
    assert stream.push(token_ids) == ""
    assert stream.flush() == whole_text(tokenizer, token_ids) == f"a{BROKEN}"
    assert stream.flush() == ""


def test_special_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    stream = TextStream(tokenizer)
    (token,) = tokenizer("a")["input_ids"]
    assert [stream.push([token]), stream.push([tokenizer.eos_token_id]), stream.push([token])] == ["a", "", "a"]


def test_long_texts_are_decoded_in_small_windows() -> None:
    class Counting:
        longest = 0

        def decode(self, token_ids: list[int], **_: object) -> str:
            self.longest = max(self.longest, len(token_ids))
            return "x" * len(token_ids)

    tokenizer = Counting()
    stream = TextStream(tokenizer)
    assert "".join(stream.push([0, 0]) for _ in range(100)) == "x" * 200
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


def test_without_stop_strings_nothing_is_held_back() -> None:
    stream = StopText(())
    assert [stream.push("a"), stream.push(""), stream.push("b")] == ["a", "", "b"]
    assert not stream.found
    assert stream.flush() == ""
