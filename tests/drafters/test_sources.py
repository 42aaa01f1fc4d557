"""Where copies come from, against searches over every place; the tree of copies, against a slow recursion."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.drafters.mixed import _LEAST, Copied, copy_tree
from draftheads.drafters.sources import DEFAULT_COPY_PROBS, MOST_PLACES, Copy, Corpus, TextIndex, TextSoFar, votes_of
from draftheads.errors import InvalidSettings
from families import IntegerTokenizer


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


def followed(text: list[int], place: int, count: int) -> tuple[int, ...]:
    """The tokens from a place on, as if each copy were appended to the text."""
    longer = list(text)
    for number in range(count):
        longer.append(longer[place + number])
    return tuple(longer[len(text) :])


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
        for place, _ in expected[:1]:
            assert tuple(index.following(place, 5)) == followed(text[:read], place, 5)


# --- a corpus ---


def index_of(text: list[int]) -> TextIndex:
    index = TextIndex(max_ngram=4)
    index.read(text)
    return index


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(3, 8))
def test_the_longest_matches_in_a_corpus(corpus: list[int], text: list[int], longest: int) -> None:
    def match(place: int) -> int:
        lengths = range(min(place, len(text), longest) + 1)
        return max(n for n in lengths if n == 0 or corpus[place - n : place] == text[-n:])

    found = Corpus(corpus, 1000).copies(index_of(text), 4, longest)
    every = sorted((match(place) for place in range(1, len(corpus) + 1)), reverse=True)
    assert [copy.match for copy in found] == [length for length in every if length >= 3][:MOST_PLACES]
    for copy in found:
        places = [place for place in range(1, len(corpus) + 1) if match(place) == copy.match]
        assert list(copy.following) in [corpus[place : place + 4] for place in places]


def test_tokens_that_the_model_does_not_have_are_not_copied() -> None:
    found = Corpus([5, 6, 7, 8, 400, 9], 10).copies(index_of([5, 6, 7]), 4, 3)
    assert [list(copy.following) for copy in found] == [[8]]


def test_a_corpus_is_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffabcdefg", encoding="utf-8")
    tokenizer = IntegerTokenizer()
    corpus = Corpus.read(str(tmp_path / "a.txt"), tokenizer, 999)
    assert [*corpus.ids[corpus.ids >= 0]] == tokenizer("abcdefg")["input_ids"], "a byte order mark is no text"
    (found,) = corpus.copies(index_of(tokenizer("bcd")["input_ids"]), 2, 8)
    assert (found.following, found.match) == (tokenizer("ef")["input_ids"], 3)
    with pytest.raises(InvalidSettings, match=r"corpus .*nothing.txt cannot be read: give a text file"):
        Corpus.read(str(tmp_path / "nothing.txt"), tokenizer, 999)


# --- the tree ---

VOTES = [0.3, 1.0, 2.0, 7.0]


def tree_of(text: list[int], count: int, votes: Sequence[float] = VOTES) -> list[Copied]:
    return copy_tree(TextSoFar().copies(index_of(text), count, len(votes)), votes, count)


def slow_tree(text: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """All copied paths down to a depth, with their probabilities."""
    places = index_of(text).matches(MOST_PLACES, len(VOTES))
    found = {(): 1.0}

    def go_on(path: tuple[int, ...]) -> None:
        agreeing = [place for place in places if followed(text, place, len(path)) == path]
        votes = {place: VOTES[min(places[place] + len(path), len(VOTES)) - 1] for place in agreeing}
        nexts = {place: followed(text, place, len(path) + 1)[-1] for place in agreeing}
        for token in set(nexts.values()):
            own = sum(votes[place] for place in agreeing if nexts[place] == token)
            found[(*path, token)] = found[path] * own / (1 + sum(votes.values()))
            if len(path) + 1 < depth:
                go_on((*path, token))

    go_on(())
    del found[()]
    return found


def paths_of(tree: list[Copied]) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = [()]
    for node in tree:
        paths.append((*paths[node.parent], node.token_id))
    assert len(set(paths)) == len(paths), "no two siblings have the same token"
    return {path: node.probability for path, node in zip(paths[1:], tree, strict=True)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_the_most_probable_copies_by_votes(text: list[int], count: int) -> None:
    tree = tree_of(text, count)
    found = paths_of(tree)
    probabilities = [node.probability for node in tree]
    assert probabilities == sorted(probabilities, reverse=True)
    likely = {path: p for path, p in slow_tree(text, count).items() if p >= _LEAST}
    best = sorted(likely.values(), reverse=True)[:count]
    assert probabilities == pytest.approx(best)
    assert found == pytest.approx({path: likely[path] for path in found})


def test_a_text_that_repeats_itself_is_copied_on_and_on() -> None:
    tree = tree_of([5, 6, 7] * 8, 9, votes_of(DEFAULT_COPY_PROBS))
    assert [node.token_id for node in tree] == [5, 6, 7] * 3
    assert [node.parent for node in tree] == list(range(9))
    assert tree[-1].probability > 0.9


def test_a_place_whose_text_ends_votes_for_no_token_and_unlikely_tokens_are_left_out() -> None:
    tree = copy_tree([Copy([7], 1), Copy([7, 8], 1)], [1.0], 3)
    assert tree == [Copied(7, 0, pytest.approx(2 / 3)), Copied(8, 1, pytest.approx(2 / 3 * 1 / 3))]
    assert len(copy_tree([Copy([7, 8], 1)], [0.05], 3)) == 1, "8 has a probability of 0.002"
