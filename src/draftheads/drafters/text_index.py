"""The text of each row so far, and where its n-grams stood earlier."""

from collections.abc import Sequence

from torch import Tensor

from draftheads.speculation.draft import Context


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
