"""Long texts to token ids, a piece after the other: the ids of the whole text in the memory of a piece.

A text is cut only where its ids are those of the two parts. This is tried on the characters around the place, as no
tokenizer says where it is so: one of words may be cut before a space, and one whose tokens span lines not at each end.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from draftheads.models.chat_template import continuing_ids, ids_of

PIECE = 1 << 13  # characters
LONGEST = 1 << 20  # characters without such a place: a text is then cut, and the ids there may differ
_AROUND = 128  # characters on each side of a place that is tried
_TRIES = 16  # of each kind
_PLACES = re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=\w)(?=\W)")  # the last one of the first kind is best


def token_pieces(
    tokenizer: Any, text: str | Iterable[str], *, first: Callable[[Any, str], list[int]] = ids_of
) -> Iterator[list[int]]:
    """Token ids of a text, or of the parts of a text, without the special tokens around it.

    Args:
        tokenizer: of ``transformers``.
        text: read as far as the ids are used.
        first: how the first piece is read; ``continuing_ids`` for a text that follows other tokens.
    """
    read = first
    for piece in _pieces(tokenizer, (text,) if isinstance(text, str) else text):
        yield read(tokenizer, piece)
        read = continuing_ids


def _pieces(tokenizer: Any, parts: Iterable[str]) -> Iterator[str]:
    held = ""
    for part in (long[start : start + PIECE] for long in parts for start in range(0, len(long), PIECE)):
        held += part
        place = _safe_place(tokenizer, held) if len(held) > PIECE else 0
        if place or len(held) >= LONGEST:
            yield held[: place or None]
            held = held[place:] if place else ""
    yield held


def _safe_place(tokenizer: Any, text: str) -> int:
    """The last place in the last piece of a text where it may be cut; 0 where none is found."""
    start, end = max(_AROUND, len(text) - PIECE), len(text) - _AROUND
    for places in _PLACES:
        for place in [found.start() for found in places.finditer(text, start, end)][: -_TRIES - 1 : -1]:
            left, right = text[place - _AROUND : place], text[place : place + _AROUND]
            if ids_of(tokenizer, left + right) == ids_of(tokenizer, left) + continuing_ids(tokenizer, right):
                return place
    return 0
