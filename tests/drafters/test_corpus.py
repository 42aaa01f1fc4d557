"""The index of a corpus against a search through all texts."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.drafters.corpus import LONGEST_MATCH, MOST_PLACES, index_texts

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=5)


def slow_match(texts: list[list[int]], ending: list[int]) -> tuple[int, list[list[int]]]:
    """The longest match of an ending, and what follows it at each of its places."""
    found: dict[int, list[list[int]]] = {}
    for text in texts:
        for place in range(len(text) + 1):
            length = 0
            while length < min(place, len(ending), LONGEST_MATCH) and text[place - 1 - length] == ending[-1 - length]:
                length += 1
            found.setdefault(length, []).append(text[place:])
    longest = max(found, default=0)
    return longest, found[longest] if longest else []


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_a_match_is_what_a_search_through_all_texts_finds(
    texts: list[list[int]], ending: list[int], count: int
) -> None:
    length, found = index_texts(texts).match(ending, count, most=1000)
    longest, following = slow_match(texts, ending)
    assert length == longest
    assert sorted(found) == sorted(text[:count] for text in following)


@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_places_are_sorted_by_the_tokens_before_them(texts: list[list[int]]) -> None:
    corpus = index_texts(texts)
    ids = corpus.ids.tolist()
    keys = [ids[max(0, place - LONGEST_MATCH) : place][::-1] for place in corpus.places.tolist()]
    assert keys == sorted(keys)
    assert sorted(corpus.places.tolist()) == list(range(1, len(ids)))


def test_of_many_places_some_are_taken_evenly() -> None:
    texts = [[number, 1, 2, number] for number in range(10, 10 + 10 * MOST_PLACES)]
    length, found = index_texts(texts).match([1, 2], 1)
    assert length == 2
    numbers = [number for (number,) in found]
    assert len(set(numbers)) == len(numbers) == MOST_PLACES
    assert all(8 <= after - before <= 12 for before, after in pairwise(numbers))
