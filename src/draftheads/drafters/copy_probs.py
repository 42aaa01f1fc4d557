"""The probability that a copied token is right, by the length of the match; measured on recorded answers."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from draftheads.errors import InvalidSettings

CopyProbs = Sequence[Sequence[float]]
# copy_probs() of 8,253 chats of SmolLM2-135M-Instruct, 1.6 million tokens
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

MAX_NGRAM = 4  # tokens of the longest n-gram that is looked up
_PRIOR = 20.0  # pseudo-count of the prior probs, or of those of the next shorter match
_HIGHEST = 0.99  # probability of a copied token given those before it
_STEP = 0.001  # probs are rounded to this, and fall by at least this from token to token


def copy_probs(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    num_tokens: int = 9,
    max_match: int = 8,
    prior: CopyProbs | None = None,
) -> list[list[float]]:
    """Row m-1, place d: the probability that the first d+1 copied tokens are right after a match of m tokens.

    At every token of an answer, what would be copied is compared with what follows. The last row is for ``max_match``
    tokens and more. Rows fall from token to token and do not fall from a match to a longer one; with few observations
    they are drawn to ``prior``, or to the row of the next shorter match.

    Args:
        texts: pairs of prompt and answer, token ids.
        num_tokens: the most tokens that are copied.
        max_match: longer matches count as matches of this length.
        prior: probs of as many tokens and matches, measured on other texts.
    """
    from draftheads.drafters.text_index import TextIndex  # noqa: PLC0415 - slow to import; `info` needs the probs only

    right = [[0] * (num_tokens + 1) for _ in range(max_match)]  # the first d tokens are; all of them are known
    tried = [[0] * (num_tokens + 1) for _ in range(max_match)]  # the first d-1 are, and the next one is known
    for prompt, answer in texts:
        text = TextIndex(max_ngram=MAX_NGRAM)
        text.read(prompt)
        for place, token in enumerate(answer):
            copied, match = text.copy(num_tokens, longest=max_match)
            if match:
                row = min(match, max_match) - 1
                for depth, (copy, real) in enumerate(zip(copied, answer[place:], strict=False), start=1):
                    tried[row][depth] += 1
                    if copy != real:
                        break
                    right[row][depth] += 1
            text.read([token])
    return _smooth(right, tried, num_tokens, prior)


def votes_of(probs: CopyProbs) -> list[float]:
    """The odds p / (1 - p) that the next copied token is right, for matches of 1, 2, … tokens.

    The last row of the probs is for all longer matches. So its first value is an average, and the ratios of its further
    values show how p rises with each copied token: the match is one token longer there.

    >>> [round(vote, 2) for vote in votes_of([[0.2, 0.1], [0.5, 0.4]])]
    [0.25, 1.0, 4.0]
    """
    shares = [row[0] for row in probs] + [after / before for before, after in pairwise(probs[-1])]
    return [share / (1.0 - share) for share in shares]


def _smooth(
    right: Sequence[Sequence[int]], tried: Sequence[Sequence[int]], num_tokens: int, prior: CopyProbs | None
) -> list[list[float]]:
    """Counts as smooth products of conditional probabilities."""
    depths = range(1, num_tokens + 1)
    all_right, all_tried = (list(map(sum, zip(*counts, strict=True))) for counts in (right, tried))
    shares = [(all_right[d] + 1) / (all_tried[d] + 2) for d in depths]
    probs: list[list[float]] = []
    for number, (hits, trials) in enumerate(zip(right, tried, strict=True)):
        if prior is not None:
            shares = [after / before for before, after in pairwise([1.0, *prior[number]])]
        shares = [(hits[d] + _PRIOR * shares[d - 1]) / (trials[d] + _PRIOR) for d in depths]
        row, product = [], 1.0
        for share in shares:
            product *= min(share, _HIGHEST)
            row.append(product)
        probs.append([max(pair) for pair in zip(row, probs[-1], strict=True)] if probs else row)
    return [_rounded(row) for row in probs]


def _rounded(row: Sequence[float]) -> list[float]:
    """To three digits, still falling, above 0."""
    rounded: list[float] = []
    for depth, value in enumerate(row):
        lowest = _STEP * (len(row) - depth)
        highest = rounded[-1] - _STEP if rounded else 1.0
        rounded.append(round(min(max(value, lowest), highest), 3))
    return rounded


def check_copy_probs(probs: CopyProbs) -> None:
    """Are these probs of copies?"""
    sizes = {len(row) for row in probs}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidSettings(f"probs have rows of {sorted(sizes)} tokens; they must be of one length of at least 1")
    for length, row in enumerate(probs, start=1):
        if any(not after < before for before, after in pairwise([1.0, *row, 0.0])):
            raise InvalidSettings(f"probs of a match of {length}: {list(row)} must lie between 0 and 1 and fall")
