"""The index of n-grams of a text, against a search over every place."""

from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.drafters.text_index import TextIndex


def naive_matches(text: list[int], longest_ngram: int, longest: int) -> dict[int, int]:
    """Every place after the last token, by the length of its n-gram and then the latest first."""
    matches = {}
    for size in range(longest_ngram, 0, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if place not in matches and text[place - size : place] == text[-size:]:
                match = size
                while match < longest and match < place and text[place - match - 1] == text[-match - 1]:
                    match += 1
                matches[place] = match
    return matches


def naive_copy(text: list[int], place: int, count: int) -> list[int]:
    """The tokens from a place on, one appended to the text after the other."""
    tokens = list(text)
    for i in range(count):
        tokens.append(tokens[place + i])
    return tokens[len(text) :]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 7), max_size=20),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 50),
)
def test_matches_and_copies_are_those_of_a_search_over_every_place(
    text: list[int], pieces: list[int], ngram: int, longest: int, most: int
) -> None:
    index = TextIndex(max_ngram=ngram)
    read = 0
    for size in [*pieces, len(text)]:
        index.read(text[read : read + size])
        read = min(read + size, len(text))
        assert index.ids == text[:read]
        expected = list(naive_matches(text[:read], ngram, longest).items())
        assert list(index.matches(most, longest).items()) == expected[:most]
        copies = [(naive_copy(text[:read], place, 5), match) for place, match in expected[:1]]
        assert index.copy(5, longest=longest) == (copies or [([], 0)])[0]
