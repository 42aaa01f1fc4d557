"""The probability that a copied token is right, by the length of the match."""

from collections.abc import Sequence
from itertools import pairwise

from draftheads.errors import InvalidSettings

CopyProbs = Sequence[Sequence[float]]
# copy_probs() of search.measure_acceptance on 8,253 chats of SmolLM2-135M-Instruct, 1.6 million tokens
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
