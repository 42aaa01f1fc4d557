"""How surely a copy from the text so far is what follows, by the length of the match: measured on recorded answers."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from draftheads.drafters.text_index import TextIndex
from draftheads.errors import InvalidSettings

Odds = Sequence[Sequence[float]]

_PRIOR = 20.0  # matches that "as for the next shorter match" counts as
_HIGHEST = 0.99  # probability of a copied token given those before it
_STEP = 0.001  # odds are rounded to this, and fall by at least this from token to token


def copy_odds(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    num_tokens: int = 9,
    max_ngram: int = 4,
    max_match: int = 8,
) -> list[list[float]]:
    """Row m-1, place d: the probability that the first d+1 copied tokens are right after a match of m tokens.

    At every token of an answer, what would be copied is compared with what follows. The last row is for ``max_match``
    tokens and more. Rows fall from token to token and do not fall from a match to a longer one; with few observations
    they are drawn to the row of the next shorter match.

    Args:
        texts: pairs of prompt and answer, token ids.
        num_tokens: the most tokens that are copied.
        max_ngram: the longest n-gram that is looked up.
        max_match: the longest match that is told from a longer one.
    """
    right = [[0] * (num_tokens + 1) for _ in range(max_match)]  # the first d tokens are; all of them are known
    tried = [[0] * (num_tokens + 1) for _ in range(max_match)]  # the first d-1 are, and the next one is known
    for prompt, answer in texts:
        text = TextIndex(max_ngram=max_ngram)
        text.read(prompt)
        for place, token in enumerate(answer):
            copied, match = text.copy(num_tokens, longest=max_match)
            if match:
                row = min(match, max_match) - 1
                for depth, (one, other) in enumerate(zip(copied, answer[place:], strict=False), start=1):
                    tried[row][depth] += 1
                    if one != other:
                        break
                    right[row][depth] += 1
            text.read([token])
    return _odds(right, tried, num_tokens)


def _odds(right: Sequence[Sequence[int]], tried: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
    """Counts as smooth products of conditional probabilities."""
    depths = range(1, num_tokens + 1)
    all_right, all_tried = (list(map(sum, zip(*counts, strict=True))) for counts in (right, tried))
    shares = [(all_right[d] + 1) / (all_tried[d] + 2) for d in depths]
    odds: list[list[float]] = []
    for hits, trials in zip(right, tried, strict=True):
        shares = [(hits[d] + _PRIOR * shares[d - 1]) / (trials[d] + _PRIOR) for d in depths]
        row, product = [], 1.0
        for share in shares:
            product *= min(share, _HIGHEST)
            row.append(product)
        odds.append([max(pair) for pair in zip(row, odds[-1], strict=True)] if odds else row)
    return [_rounded(row) for row in odds]


def _rounded(row: Sequence[float]) -> list[float]:
    """To three digits, still falling, above 0."""
    found: list[float] = []
    for depth, value in enumerate(row):
        lowest = _STEP * (len(row) - depth)
        highest = found[-1] - _STEP if found else 1.0
        found.append(round(min(max(value, lowest), highest), 3))
    return found


def check_odds(odds: Odds) -> None:
    """Are these odds of copies?

    Raises:
        InvalidSettings: no rows, rows without tokens or of different lengths, or values that are not probabilities
            that fall along a row.
    """
    sizes = {len(row) for row in odds}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidSettings(f"odds have rows of {sorted(sizes)} tokens; they must be of one length of at least 1")
    for length, row in enumerate(odds, start=1):
        if any(not after < before for before, after in pairwise([1.0, *row, 0.0])):
            raise InvalidSettings(f"odds of a match of {length}: {list(row)} must lie between 0 and 1 and fall")
