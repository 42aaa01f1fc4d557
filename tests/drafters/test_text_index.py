"""The index of n-grams of a text, against a search over every place."""

from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.drafters.text_index import TextIndex


def naive_copy(text: list[int], count: int, longest_ngram: int, longest: int) -> tuple[list[int], int]:
    """By looking at every place."""
    for size in range(longest_ngram, 0, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                match = size
                while match < longest and match < place and text[place - match - 1] == text[-match - 1]:
                    match += 1
                tokens = list(text)
                for i in range(count):
                    tokens.append(tokens[place + i])
                return tokens[len(text) :], match
    return [], 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 7), max_size=20),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_lookup_equals_looking_at_every_place(text: list[int], pieces: list[int], ngram: int, longest: int) -> None:
    index = TextIndex(max_ngram=ngram)
    read = 0
    for size in [*pieces, len(text)]:
        index.read(text[read : read + size])
        read = min(read + size, len(text))
        assert index.ids == text[:read]
        assert index.copy(5, longest=longest) == naive_copy(text[:read], 5, ngram, longest)


def naive_matches(text: list[int], longest_ngram: int, longest: int) -> dict[int, int]:
    """Every place after the last token, by the length of its n-gram and then the latest first."""
    found = {}
    for size in range(longest_ngram, 0, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if place not in found and text[place - size : place] == text[-size:]:
                match = size
                while match < longest and match < place and text[place - match - 1] == text[-match - 1]:
                    match += 1
                found[place] = match
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 7), max_size=20),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 50),
)
def test_matches_are_all_places_after_the_last_token(
    text: list[int], pieces: list[int], ngram: int, longest: int, most: int
) -> None:
    index = TextIndex(max_ngram=ngram)
    read = 0
    for size in [*pieces, len(text)]:
        index.read(text[read : read + size])
        read = min(read + size, len(text))
        expected = naive_matches(text[:read], ngram, longest)
        assert list(index.matches(most, longest).items()) == list(expected.items())[:most]
