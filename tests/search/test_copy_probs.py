"""CopyProbs of copies: the probability that a copied token is right, by the length of the match."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.drafters.copy_probs import DEFAULT_COPY_PROBS, check_copy_probs
from draftheads.search.measure_acceptance import copy_probs


def falls(probs: list[list[float]]) -> bool:
    along = all(a > b > 0 for row in probs for a, b in pairwise(row))
    down = all(a <= b for one, other in pairwise(probs) for a, b in zip(one, other, strict=True))
    return along and down


def test_probabilities_of_a_text_that_repeats_itself() -> None:
    probs = copy_probs([([1, 2, 3, 4], [1, 2, 3, 4] * 200)], num_tokens=3, max_match=6)
    assert probs[-1] == [0.99, 0.98, 0.97]
    assert falls(probs)


def test_probabilities_of_single_tokens_that_are_followed_by_the_same_every_other_time() -> None:
    answer = [token for i in range(400) for token in (100 + i, 1, 2 + (i // 2) % 2)]
    probs = copy_probs([([1], answer)], num_tokens=2, max_match=3)
    assert probs[0][0] == pytest.approx(0.5, abs=0.03)  # 1 is followed by 2, 2, 3, 3, 2, 2, …
    assert probs[0][1] < 0.01, "then comes a new token"
    assert falls(probs)


def test_probabilities_without_a_match() -> None:
    """Nothing was observed: one half for each next token."""
    probs = copy_probs([([1, 2, 3], [4, 5, 6])], num_tokens=3, max_match=2)
    assert probs == [[0.5, 0.25, 0.125]] * 2


def test_probabilities_of_few_texts_stay_near_earlier_ones() -> None:
    assert falls([list(row) for row in DEFAULT_COPY_PROBS])
    assert copy_probs([], prior=DEFAULT_COPY_PROBS) == [pytest.approx(row, abs=1e-3) for row in DEFAULT_COPY_PROBS]
    once = copy_probs([([1, 2, 3], [1, 2, 3])], prior=DEFAULT_COPY_PROBS)
    assert DEFAULT_COPY_PROBS[0][0] < once[0][0] < DEFAULT_COPY_PROBS[0][0] + 0.1


def test_what_follows_the_end_of_an_answer_is_not_counted() -> None:
    """One token of each answer is known: the second copied one stays as uncertain as without texts."""
    probs = copy_probs([([1, 2, 1, 2, 1, 2], [1])] * 400, num_tokens=2, max_match=4)
    assert probs[3][0] == 0.99
    assert probs[3][1] == pytest.approx(0.99 / 2, abs=0.001)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), max_size=5), st.integers(1, 5), st.integers(1, 6))
def test_probabilities_fall_along_a_copy_and_rise_with_the_match(
    texts: list[list[int]], num_tokens: int, max_match: int
) -> None:
    probs = copy_probs([(text[:1], text[1:]) for text in texts], num_tokens=num_tokens, max_match=max_match)
    assert [len(row) for row in probs] == [num_tokens] * max_match
    assert falls(probs)
    assert all(row[0] < 1 for row in probs)
    check_copy_probs(probs)
