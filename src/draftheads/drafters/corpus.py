"""An index of texts: what follows the longest match of another text's end in them. Knows token ids only.

The places of all texts are sorted by the tokens before them, read backwards. So the places after a given ending are
neighbours, and a binary search finds them (a suffix array of the reversed texts).
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

import numpy as np
import numpy.typing as npt

from draftheads.utils.progress import NoProgress, Progress

Ids = npt.NDArray[np.int32]

LONGEST_MATCH = 16  # tokens by which places are sorted; a power of 2
MOST_PLACES = 32  # of a match that are looked at
_END = -1  # before, between and after the texts


@dataclass(frozen=True)
class Corpus:
    """Texts and their sorted places. Made by :func:`index_texts`.

    >>> corpus = index_texts([[1, 2, 3, 4], [9, 2, 3, 5, 6]])
    >>> corpus.match([8, 2, 3], 2)
    (2, [[4], [5, 6]])
    """

    ids: Ids  # (T,) token ids of all texts, -1 around each
    places: Ids  # (T - 1,) indices in ``ids``, sorted by the tokens before them

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the texts."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()[:16]

    def match(self, ids: Sequence[int], count: int, *, most: int = MOST_PLACES) -> tuple[int, list[list[int]]]:
        """The places of the longest match of a text's end.

        Args:
            ids: the text, or its last :data:`LONGEST_MATCH` tokens; longer matches are not looked for.
            count: of tokens that follow each place.
            most: so many places, evenly spread over all.

        Returns:
            The length of the match, and what follows at each place: up to ``count`` tokens, fewer at the end of a text.
            0 and no place without a match.
        """
        length, first, last = self._longest(list(ids[: -LONGEST_MATCH - 1 : -1]))
        if not length:
            return 0, []
        spread = np.unique(np.linspace(first, last - 1, min(most, last - first)).astype(np.int64))
        chosen = self.places[spread].tolist()
        return length, [self._following(place, count) for place in chosen]

    def _longest(self, ending: list[int]) -> tuple[int, int, int]:
        """Length of the longest match of an ending that is read backwards, and the range of places after it."""
        place = bisect_left(self.places, ending, key=self._before)
        near = self.places[max(0, place - 1) : place + 1].tolist()
        length = max((_num_equal(ending, self._before(neighbour)) for neighbour in near), default=0)
        if not length:
            return 0, 0, 0
        part = ending[:length]
        first = bisect_left(self.places, part, hi=place, key=lambda other: self._before(other)[:length])
        last = bisect_right(self.places, part, lo=place, key=lambda other: self._before(other)[:length])
        return length, first, last

    def _before(self, place: int) -> list[int]:
        """The tokens before a place, read backwards."""
        tokens: list[int] = self.ids[max(0, place - LONGEST_MATCH) : place][::-1].tolist()
        return tokens

    def _following(self, place: int, count: int) -> list[int]:
        """The tokens from a place to the end of its text."""
        tokens: list[int] = self.ids[place : place + count].tolist()
        return tokens[: tokens.index(_END)] if _END in tokens else tokens


def index_texts(texts: Iterable[Sequence[int]], *, progress: Progress | None = None) -> Corpus:
    """Sorts the places of texts; takes about two seconds for each million tokens.

    Args:
        texts: token ids.
        progress: receives the rounds of sorting.
    """
    progress = progress or NoProgress()
    ids = np.concatenate([np.array([_END], np.int32), *(np.array([*text, _END], np.int32) for text in texts)])
    rounds = LONGEST_MATCH.bit_length() - 1
    ranks, order = _ranked(ids.astype(np.int64))
    for number in range(rounds):
        progress.progress(number, rounds)
        size = 1 << number  # tokens by which places are sorted; the next round sorts by twice as many
        earlier = np.zeros_like(ranks)
        earlier[size:] = ranks[:-size]
        ranks, order = _ranked(ranks * (len(ids) + 1) + earlier)
    progress.progress(rounds, rounds)
    places = (order + 1).astype(np.int32)  # from a token to the place after it
    return Corpus(ids, places[places < len(ids)])


def _ranked(keys: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ranks from 1 on, equal ones for equal keys, and the order of the keys."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    steps = np.ones(len(keys), dtype=np.int64)
    steps[1:] = ordered[1:] != ordered[:-1]
    ranks = np.empty(len(keys), dtype=np.int64)
    ranks[order] = steps.cumsum()
    return ranks, order


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens are equal."""
    return sum(takewhile(bool, map(eq, left, right)))
