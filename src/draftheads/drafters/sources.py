"""Where drafts are copied from: what followed the text's last tokens at earlier places of it, or in a corpus."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.speculation.draft import Context
from draftheads.utils.files import user_path

MOST_PLACES = 8  # of a text's last tokens that are looked at
_NGRAM, _CANDIDATES = 3, 256  # of a corpus: tokens that are looked up, and places that are compared
_MOST_CHARACTERS, _LINES = 32_000_000, 256  # of a corpus, and of a piece that is tokenized
_NONE = -1  # in place of a token that is none of the model's
_FACTORS = np.array([1_000_003, 8_191, 1])  # of a hash


class Copy(NamedTuple):
    """A place of a text's last tokens."""

    following: Sequence[int]  # the tokens from there on
    match: int  # how many tokens before the place equal the text's last ones


class Source(Protocol):
    """What drafts are copied from."""

    def copies(self, text: "TextIndex", count: int, longest: int) -> list[Copy]:
        """Places of the text's last tokens, up to so many tokens from there on; matches are counted to ``longest``."""


class TextSoFar:
    """Earlier places in the text itself, the latest first."""

    def copies(self, text: "TextIndex", count: int, longest: int) -> list[Copy]:
        places = text.matches(MOST_PLACES, longest)
        return [Copy(text.following(place, count), match) for place, match in places.items()]


class Corpus:
    """A text of others, such as a file of documents or code: the places with the longest matches.

    Args:
        ids: its tokens.
        vocab_size: of the model. Tokens from there on are not copied.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self.ids = np.asarray([*[-1] * _NGRAM, *ids], dtype=np.int64)
        self.ids[self.ids >= vocab_size] = -1
        keys = np.lib.stride_tricks.sliding_window_view(self.ids, _NGRAM) @ _FACTORS
        self._order = keys.argsort(kind="stable")
        self._keys = keys[self._order]

    @classmethod
    def read(cls, path: str, tokenizer: Any, vocab_size: int) -> Self:
        """The text in a file.

        Raises:
            InvalidSettings: it cannot be read, or is larger than 32 MB: a token takes about 300 bytes meanwhile.
        """
        try:
            text = user_path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidSettings(f"corpus {path} cannot be read: give a text file ({error})") from None
        if len(text) > _MOST_CHARACTERS:
            size = f"{len(text):,} characters; {_MOST_CHARACTERS:,} are allowed"
            raise InvalidSettings(f"corpus {path} has {size}: give the part that answers quote")
        lines = text.splitlines(keepends=True)
        pieces = ["".join(lines[start : start + _LINES]) for start in range(0, len(lines), _LINES)]
        each = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
        return cls([token for ids in each for token in ids], vocab_size)

    def copies(self, text: "TextIndex", count: int, longest: int) -> list[Copy]:
        if len(text.ids) < _NGRAM:
            return []
        key = np.array(text.ids[-_NGRAM:]) @ _FACTORS
        first, last = np.searchsorted(self._keys, key), np.searchsorted(self._keys, key, side="right")
        places = self._order[first:last][-_CANDIDATES:] + _NGRAM
        tail = np.array(text.ids[-longest:])[::-1]
        before = places[:, None] - 1 - np.arange(len(tail))
        same = (self.ids[before.clip(0)] == tail) & (before >= 0)
        matches = same.cumprod(1).sum(1)  # 0 where only the hashes are equal
        best = (-matches).argsort(kind="stable")[:MOST_PLACES]
        found = zip(places[best].tolist(), matches[best].tolist(), strict=True)
        following = ((list(takewhile(_NONE.__ne__, self.ids[at : at + count].tolist())), match) for at, match in found)
        return [Copy(ids, match) for ids, match in following if match]


class TextIndex:
    """A text that grows, and the places of each of its n-grams, the latest first.

    >>> text = TextIndex(max_ngram=2)
    >>> text.read([7, 8, 9, 5, 7, 8])
    >>> text.copy(2)
    ([9, 5], 2)

    Args:
        max_ngram: the longest n-gram that is looked up.
    """

    def __init__(self, *, max_ngram: int) -> None:
        self.sizes = range(max_ngram, 0, -1)
        self.ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that follows it
        # for n-grams of each size: the place before each place, from place ``size`` on; 0 where there is none
        self._earlier: dict[int, list[int]] = {size: [] for size in self.sizes}

    def read(self, ids: Sequence[int]) -> None:
        old = len(self.ids)
        self.ids += ids
        for size in self.sizes:
            start = max(old, size)
            tail = self.ids[start - size :]
            ngrams = zip(*(tail[i:] for i in range(size)), strict=False)
            earlier = self._earlier[size]
            for ngram, place in zip(ngrams, range(start, len(self.ids)), strict=False):
                earlier.append(self._places.get(ngram, 0))
                self._places[ngram] = place

    def copy(self, count: int, *, longest: int = 0) -> tuple[list[int], int]:
        """What followed the text's last n-gram at its latest earlier place, the longest n-gram first.

        Where the copy reaches the end of the text, it goes on with what it has copied.

        Args:
            count: how many tokens to copy.
            longest: how far the match is counted back beyond the longest n-gram.

        Returns:
            The tokens, and the length of the match; no tokens and 0 without a match.
        """
        for place, match in self.matches(1, longest).items():
            return self.following(place, count), match
        return [], 0

    def following(self, place: int, count: int) -> list[int]:
        """The tokens from a place on. At the end of the text they go on with what follows the place."""
        ids = self.ids[place : place + count]
        while len(ids) < count:
            ids += ids[: count - len(ids)]
        return ids

    def has(self, size: int) -> bool:
        """Whether the text's last so many tokens, at most ``max_ngram``, stand at an earlier place."""
        return tuple(self.ids[-size:]) in self._places

    def matches(self, most: int, longest: int) -> dict[int, int]:
        """Earlier places of the text's last n-gram, the longest n-gram and the latest place first.

        Args:
            most: so many places.
            longest: how far a match is counted back.

        Returns:
            For the index of the token that follows, the length of the match.
        """
        matches: dict[int, int] = {}
        for size in self.sizes:
            place = self._places.get(tuple(self.ids[-size:]), 0) if size <= len(self.ids) else 0
            while place and len(matches) < most:
                if place not in matches:
                    length = size
                    while length < min(longest, place) and self.ids[place - 1 - length] == self.ids[-1 - length]:
                        length += 1
                    matches[place] = length
                place = self._earlier[size][place - size]
        return matches


class RowTexts:
    """The texts of a batch's rows, roots included. Arguments as for :class:`TextIndex`."""

    def __init__(self, *, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self._texts: list[TextIndex] = []
        self._unread: list[list[int]] = []  # tokens of each row that are not in its index yet: many at once take less

    def read(self, context: Context) -> None:
        """Adds the tokens of a context and its roots."""
        known = len(self._texts)
        new = context.num_new_rows(known)
        self._texts += [TextIndex(max_ngram=self.max_ngram) for _ in range(new)]
        self._unread += [[] for _ in range(new)]
        for row, (unread, ids) in enumerate(zip(self._unread, context.ids, strict=True)):
            # the first token of a known row was its root: it is in the text already
            unread.extend(ids[1 if row < known else 0 :])

    @property
    def rows(self) -> list[TextIndex]:
        for text, unread in zip(self._texts, self._unread, strict=True):
            if unread:
                text.read(unread)
                unread.clear()
        return self._texts

    def keep(self, rows: Tensor) -> None:
        """Row ``rows[i]`` is row i from now on."""
        self._texts = [self._texts[row] for row in rows.tolist()]
        self._unread = [self._unread[row] for row in rows.tolist()]
