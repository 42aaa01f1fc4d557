"""What followed earlier places of a text's last tokens, as a tree of copied tokens with their probabilities."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

LEAST = 0.01  # probability of a copied token


class Voter(NamedTuple):
    """An earlier place of a text's last tokens."""

    following: Sequence[int]  # the tokens from there on
    match: int  # how many tokens before the place equal the text's last ones
    votes: Sequence[float]  # after a match of 1, 2, … tokens; the last for all longer ones


class Copied(NamedTuple):
    """A node of the tree."""

    token_id: int
    parent: int  # 0 is the root, n the n-th node of the list
    probability: float  # that it and all tokens above it are right


def copy_tree(voters: Sequence[Voter], count: int) -> list[Copied]:
    """The most probable continuations of a text.

    Each earlier place of the text's last tokens votes for the token that follows it there. A token's probability is its
    share of all votes and of one further vote, which is for none of them. So a single place with v votes is right with
    a probability of v / (1 + v). Below a copied token only the places that go on with it vote, and their match is one
    token longer.

    Args:
        voters: the earlier places.
        count: how many tokens to copy at most.

    Returns:
        Parents before children, the most probable first.

    >>> voters = [Voter([1, 8], 2, [0.5, 1.0]), Voter([2, 7], 1, [0.5, 1.0])]
    >>> [(node.token_id, node.parent, round(node.probability, 2)) for node in copy_tree(voters, 3)]
    [(1, 0, 0.4), (2, 0, 0.2), (8, 1, 0.2)]
    """
    tree: list[Copied] = []
    waiting: list[tuple[float, int, int, int, int, list[Voter]]] = []  # the most probable first, the oldest of equals
    depth, parent, above = 0, 0, 1.0
    while len(tree) < count:
        shares: dict[int, float] = {}
        agreeing: dict[int, list[Voter]] = {}
        total = 1.0
        for voter in voters:
            vote = voter.votes[min(voter.match + depth, len(voter.votes)) - 1]
            total += vote
            if depth < len(voter.following):
                token = voter.following[depth]
                shares[token] = shares.get(token, 0.0) + vote
                agreeing.setdefault(token, []).append(voter)
        for token, share in shares.items():
            probability = above * share / total
            if probability >= LEAST:
                heappush(waiting, (-probability, len(tree), token, parent, depth + 1, agreeing[token]))
        if not waiting:
            break
        negative, _, token, parent, depth, voters = heappop(waiting)
        above = -negative
        tree.append(Copied(token, parent, above))
        parent = len(tree)
    return tree
