"""The tree of copies: probabilities by votes against a slow recursion over all places."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.drafters.copy_probs import DEFAULT_COPY_PROBS, votes_of
from draftheads.drafters.copy_tree import LEAST, Copied, Voter, copy_tree
from draftheads.drafters.copying import MOST_PLACES
from draftheads.drafters.text_index import TextIndex

VOTES = [0.3, 1.0, 2.0, 7.0]


def index_of(text: list[int]) -> TextIndex:
    index = TextIndex(max_ngram=4)
    index.read(text)
    return index


def voters_of(text: list[int], count: int, votes: list[float] = VOTES) -> list[Voter]:
    index = index_of(text)
    places = index.matches(MOST_PLACES, len(votes))
    return [Voter(index.following(place, count), match, votes) for place, match in places.items()]


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


def followed(text: list[int], place: int, count: int) -> tuple[int, ...]:
    """The tokens from a place on, as if each copy were appended to the text."""
    longer = list(text)
    for number in range(count):
        longer.append(longer[place + number])
    return tuple(longer[len(text) :])


def paths_of(tree: list[Copied]) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = [()]
    for node in tree:
        paths.append((*paths[node.parent], node.token_id))
    assert len(set(paths)) == len(paths), "no two siblings have the same token"
    return {path: node.probability for path, node in zip(paths[1:], tree, strict=True)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_the_most_probable_copies_by_votes(text: list[int], count: int) -> None:
    tree = copy_tree(voters_of(text, count), count)
    found = paths_of(tree)
    probabilities = [node.probability for node in tree]
    assert probabilities == sorted(probabilities, reverse=True)
    likely = {path: p for path, p in slow_tree(text, count).items() if p >= LEAST}
    best = sorted(likely.values(), reverse=True)[:count]
    assert probabilities == pytest.approx(best)
    assert found == pytest.approx({path: likely[path] for path in found})


def test_a_text_that_repeats_itself_is_copied_on_and_on() -> None:
    tree = copy_tree(voters_of([5, 6, 7] * 8, 9, votes_of(DEFAULT_COPY_PROBS)), 9)
    assert [node.token_id for node in tree] == [5, 6, 7] * 3
    assert [node.parent for node in tree] == list(range(9))
    assert tree[-1].probability > 0.9


def test_a_place_whose_text_ends_votes_for_no_token_and_unlikely_tokens_are_left_out() -> None:
    tree = copy_tree([Voter([7], 1, [1.0]), Voter([7, 8], 1, [1.0])], 3)
    assert tree == [Copied(7, 0, pytest.approx(2 / 3)), Copied(8, 1, pytest.approx(2 / 3 * 1 / 3))]
    assert len(copy_tree([Voter([7, 8], 1, [0.05])], 3)) == 1, "8 has a probability of 0.002"
