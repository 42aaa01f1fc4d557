"""Where drafts are copied from: what followed the text's last tokens at earlier places of it, or in a corpus."""

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakValueDictionary

import numpy as np

from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import token_pieces
from draftheads.utils.files import user_path

MAX_NGRAM = 4  # tokens of the longest n-gram that is looked up in a text
MOST_PLACES = 8  # of a text's last tokens that are looked at
_NGRAM, _CANDIDATES = 3, 256  # of a corpus: tokens that are looked up, and places that are compared
_MOST_CHARACTERS = 32_000_000  # of a corpus
_NONE = -1  # in place of a token that is none of the model's
_FACTORS = np.array([1_000_003, 8_191, 1])  # of a hash
CopyProbs = Sequence[Sequence[float]]  # that a copied token is right, by the length of the match
# copy_probs() of search.tune on 8,253 chats of SmolLM2-135M-Instruct, 1.6 million tokens
DEFAULT_COPY_PROBS: CopyProbs = (
    (0.208, 0.107, 0.066, 0.045, 0.033, 0.025, 0.019, 0.016, 0.013),
    (0.501, 0.295, 0.2, 0.146, 0.112, 0.088, 0.072, 0.06, 0.05),
    (0.585, 0.394, 0.285, 0.218, 0.171, 0.139, 0.116, 0.098, 0.083),
    (0.676, 0.491, 0.379, 0.3, 0.246, 0.206, 0.175, 0.149, 0.13),
    (0.725, 0.559, 0.443, 0.365, 0.305, 0.26, 0.221, 0.194, 0.172),
    (0.77, 0.609, 0.503, 0.42, 0.358, 0.305, 0.267, 0.237, 0.214),
    (0.789, 0.651, 0.546, 0.465, 0.398, 0.348, 0.309, 0.279, 0.252),
    (0.928, 0.869, 0.821, 0.779, 0.743, 0.711, 0.683, 0.657, 0.634),
)


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
        """The text in a file; engines share it.

        Raises:
            InvalidSettings: it cannot be read, or has more than 32 million characters.
        """
        try:
            state = user_path(path).stat()
            key = user_path(path).resolve(), state.st_mtime_ns, state.st_size, tokenizer, vocab_size
            if (known := _READ.get(key)) is not None:
                return known  # type: ignore[return-value]
            text = user_path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise InvalidSettings(f"corpus {path} cannot be read: give a text file ({error})") from None
        if len(text) > _MOST_CHARACTERS:
            size = f"{len(text):,} characters; {_MOST_CHARACTERS:,} are allowed"
            raise InvalidSettings(f"corpus {path} has {size}: give the part that answers quote")
        corpus = _READ[key] = cls([token for ids in token_pieces(tokenizer, text) for token in ids], vocab_size)
        return corpus

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


_READ: WeakValueDictionary[Any, Corpus] = WeakValueDictionary()  # as long as an engine has it


class TextIndex:
    """A text that grows, and the places of each of its n-grams, the latest first.

    >>> text = TextIndex(max_ngram=2)
    >>> text.read([7, 8, 9, 5, 7, 8])
    >>> text.matches(1, 2), text.following(2, 2)
    ({2: 2}, [9, 5])

    Args:
        max_ngram: the longest n-gram that is looked up.
    """

    def __init__(self, *, max_ngram: int) -> None:
        self.sizes = range(max_ngram, 0, -1)
        self.ids: list[int] = []
        self._num_indexed = 0  # tokens whose n-grams are among the places
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that follows it
        # for n-grams of each size: the place before each place, from place ``size`` on; 0 where there is none
        self._earlier: dict[int, list[int]] = {size: [] for size in self.sizes}

    def read(self, ids: Sequence[int]) -> None:
        """Adds tokens. Their n-grams are noted once a match is asked for: many at once take less time."""
        self.ids += ids

    def _index(self) -> None:
        old, self._num_indexed = self._num_indexed, len(self.ids)
        if old == len(self.ids):
            return
        for size in self.sizes:
            start = max(old, size)
            tail = self.ids[start - size :]
            ngrams = zip(*(tail[i:] for i in range(size)), strict=False)
            earlier = self._earlier[size]
            for ngram, place in zip(ngrams, range(start, len(self.ids)), strict=False):
                earlier.append(self._places.get(ngram, 0))
                self._places[ngram] = place

    def following(self, place: int, count: int) -> list[int]:
        """The tokens from a place on. At the end of the text they go on with what follows the place."""
        ids = self.ids[place : place + count]
        while len(ids) < count:
            ids += ids[: count - len(ids)]
        return ids

    def has(self, size: int) -> bool:
        """Whether the text's last so many tokens, at most ``max_ngram``, stand at an earlier place."""
        self._index()
        return tuple(self.ids[-size:]) in self._places

    def matches(self, most: int, longest: int) -> dict[int, int]:
        """Earlier places of the text's last n-gram, the longest n-gram and the latest place first.

        Args:
            most: so many places.
            longest: how far a match is counted back.

        Returns:
            For the index of the token that follows, the length of the match.
        """
        self._index()
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


def votes_of(probs: CopyProbs) -> list[float]:
    """The odds p / (1 - p) that the next copied token is right, for matches of 1, 2, … tokens.

    The last row of the probs is for all longer matches. So its first value is an average, and the ratios of its further
    values show how p rises with each copied token: the match is one token longer there.

    >>> [round(vote, 2) for vote in votes_of([[0.2, 0.1], [0.5, 0.4]])]
    [0.25, 1.0, 4.0]
    """
    shares = [row[0] for row in probs] + [after / before for before, after in pairwise(probs[-1])]
    return [share / (1.0 - share) for share in shares]


def check_copy_probs(probs: CopyProbs) -> None:
    """Are these probs of copies?"""
    sizes = {len(row) for row in probs}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidSettings(f"probs have rows of {sorted(sizes)} tokens; they must be of one length of at least 1")
    for length, row in enumerate(probs, start=1):
        if any(not after < before for before, after in pairwise([1.0, *row, 0.0])):
            raise InvalidSettings(f"probs of a match of {length}: {list(row)} must lie between 0 and 1 and fall")
