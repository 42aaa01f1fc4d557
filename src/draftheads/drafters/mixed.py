"""Drafts of a head or draft model together with copies from sources, or copies alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from draftheads.drafters.sources import (
    DEFAULT_COPY_PROBS,
    MAX_NGRAM,
    Copy,
    CopyProbs,
    Source,
    TextIndex,
    TextSoFar,
    check_copy_probs,
    votes_of,
)
from draftheads.errors import InvalidSettings, require_at_least
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.candidates import Candidates, merged
from draftheads.speculation.draft import Context, Draft, TokenRules
from draftheads.speculation.drafter import Drafter, DraftSession, NoDraft
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Shape
from draftheads.speculation.tree import Path, Tree
from draftheads.utils.transfer import to_device

# For static trees without measured values, close to hydra's: the probability of a node of rank 0 as a share of its
# parent's, and of a node of each next rank as a share of the rank before.
_BEST_RANK = 0.45
_NEXT_RANK = 0.3

NUM_TOKENS = 16  # that are copied at most
LOOKUP_TOKENS = 8  # the same without a drafter
_SEVERAL, _LIKELY_MATCH = 4, 3  # rows; tokens before a copied one
_LEAST = 0.01  # probability of a copied token


class Copied(NamedTuple):
    """A node of the tree."""

    token_id: int
    parent: int  # 0 is the root, n the n-th node of the list
    probability: float  # that it and all tokens above it are right


def copy_tree(copies: Sequence[Copy], votes: Sequence[float], count: int) -> list[Copied]:
    """The most probable continuations of a text.

    Each earlier place of the text's last tokens votes for the token that follows it there. A token's probability is its
    share of all votes and of one further vote, which is for none of them. So a single place with v votes is right with
    a probability of v / (1 + v). Below a copied token only the places that go on with it vote, and their match is one
    token longer.

    Args:
        copies: the places.
        votes: after a match of 1, 2, … tokens; the last for all longer ones.
        count: how many tokens to copy at most.

    Returns:
        Parents before children, the most probable first.

    >>> copies = [Copy([1, 8], 2), Copy([2, 7], 1)]
    >>> [(node.token_id, node.parent, round(node.probability, 2)) for node in copy_tree(copies, [0.5, 1.0], 3)]
    [(1, 0, 0.4), (2, 0, 0.2), (8, 1, 0.2)]
    """
    tree: list[Copied] = []
    waiting: list[tuple[float, int, int, int, int, list[Copy]]] = []  # the most probable first, the oldest of equals
    depth, parent, above = 0, 0, 1.0
    while len(tree) < count:
        shares: dict[int, float] = {}
        agreeing: dict[int, list[Copy]] = {}
        total = 1.0
        for copy in copies:
            vote = votes[min(copy.match + depth, len(votes)) - 1]
            total += vote
            if depth < len(copy.following):
                token = copy.following[depth]
                shares[token] = shares.get(token, 0.0) + vote
                agreeing.setdefault(token, []).append(copy)
        for token, share in shares.items():
            probability = above * share / total
            if probability >= _LEAST:
                heappush(waiting, (-probability, len(tree), token, parent, depth + 1, agreeing[token]))
        if not waiting:
            break
        negative, _, token, parent, depth, copies = heappop(waiting)
        above = -negative
        tree.append(Copied(token, parent, above))
        parent = len(tree)
    return tree


class Mixed(Drafter):
    """Merges copies into each tree of a drafter; without one, the copies are the tree.

    Copies are what followed the text's last tokens elsewhere, see :func:`copy_tree`. The nodes with the highest
    probability of being accepted are kept, whether copied or drafted. Trees that are drawn (``Sampled``) are left as
    they are.

    Args:
        drafter: a draft head or draft model; None: copies alone.
        sources: of the copies; the text so far when left out.
        probs: of copied tokens, by the length of the match, see :func:`copy_probs`.
        values: the measured probability that a node of a static tree is accepted, by its path of ranks. Without it
            the probability falls geometrically with depth and rank.
        num_tokens: the most tokens that are copied.

    Raises:
        InvalidSettings: impossible probs, no tokens, or a drafter that makes trees of its own.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        sources: Sequence[Source] = (TextSoFar(),),
        *,
        probs: CopyProbs = DEFAULT_COPY_PROBS,
        values: Mapping[Path, float] | None = None,
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        check_copy_probs(probs)
        require_at_least(1, num_tokens=num_tokens)
        if drafter is not None and not drafter.fills_shapes:
            raise InvalidSettings(
                f"{type(drafter).__name__} makes trees of its own: copies can be added only to trees of a given shape, "
                "such as those of a draft head"
            )
        self.is_alone, self.drafter = drafter is None, drafter or NoDraft()
        self.sources, self.probs, self.values, self.num_tokens = tuple(sources), probs, values or {}, num_tokens
        self.needs_history, self.fills_shapes = True, not self.is_alone
        self.reads_whole_text, self.hidden_layers = self.drafter.reads_whole_text, self.drafter.hidden_layers
        self.default_shape = BestFirst(1 + num_tokens) if self.is_alone else self.drafter.default_shape
        self.max_depth, self.budget = self.drafter.max_depth, 0 if self.is_alone else num_tokens

    @classmethod
    def by_profile(
        cls, drafter: Drafter, profile: AcceptanceProfile, sources: Sequence[Source] = (TextSoFar(),)
    ) -> Self:
        """Copies compete for nodes by the probabilities in the profile."""
        gains = [after - before for before, after in pairwise(profile.static_tokens)]
        values = {tuple(path): gain for path, gain in zip(profile.paths, gains, strict=False) if 0.0 < gain < 1.0}
        return cls(drafter, sources, probs=profile.copies or DEFAULT_COPY_PROBS, values=values)

    @property
    def name(self) -> str:
        return "copies" if self.is_alone else f"{self.drafter.name} with copies"

    @property
    def bytes_per_slot(self) -> int:
        return self.drafter.bytes_per_slot

    def bytes_of_rows(self, num_rows: int) -> int:
        return self.drafter.bytes_of_rows(num_rows)

    def check_shape(self, shape: Shape) -> None:
        self.drafter.check_shape(shape)

    def start(self) -> "MixedSession":
        return MixedSession(self)


class MixedSession(DraftSession):
    """The texts of one batch, and the drafter's session."""

    def __init__(self, mixed: Mixed) -> None:
        self.mixed, self.session = mixed, mixed.drafter.start()
        self._votes = votes_of(mixed.probs)
        self._texts: list[TextIndex] = []  # of the rows, roots included
        self._static: dict[Tree, Tensor] = {}  # (1, N) log-probabilities of static trees' nodes

    def propose(self, context: Context, shape: Shape) -> Draft:
        """The drafter's draft, with the copies of the rows that have a match."""
        self._read(context)
        if shape.num_nodes > 1:
            draft = self.session.propose(context, shape)
        else:  # it needs no drafter
            self.session.observe(context)
            draft = Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])
        num_nodes = context.num_nodes or shape.num_nodes
        if not isinstance(shape, Tree | BestFirst) or num_nodes == 1 or (shape.num_nodes == 1 and not self._has_match):
            return draft
        trees = [copy_tree(self._copies(text), self._votes, self.mixed.num_tokens) for text in self._texts]
        if context.rules is not None:
            trees = [_allowed(tree, row, context.rules) for row, tree in enumerate(trees)]
        if not any(trees):
            return draft
        if draft.path_log_probs is None:
            draft = self._valued(draft, shape if isinstance(shape, Tree) and draft.num_nodes > 1 else ROOT_ONLY)
        rule = shape if isinstance(shape, BestFirst) else BestFirst(num_nodes)
        return merged(draft, self._candidates(trees, context.root_ids), replace(rule, num_nodes=num_nodes))

    def observe(self, context: Context) -> None:
        self._read(context)
        self.session.observe(context)

    def on_verify(self, draft: Draft, best: Callable[[], Tensor]) -> Tensor | None:
        return self.session.on_verify(draft, best)

    def on_read(self, values: Sequence[Sequence[int]]) -> None:
        self.session.on_read(values)

    def keep(self, rows: Tensor) -> None:
        """Texts move with their rows, as what the drafter's session keeps does."""
        self._texts = [self._texts[row] for row in rows.tolist()]
        self.session.keep(rows)

    @property
    def _has_match(self) -> bool:
        """Whether a copy may be worth the time of looking for it: for several rows one that is not likely never is."""
        if len(self._texts) < _SEVERAL or any(not isinstance(source, TextSoFar) for source in self.mixed.sources):
            return True
        return any(text.has(_LIKELY_MATCH) for text in self._texts)

    def _read(self, context: Context) -> None:
        """Adds the tokens of a context and its roots to the texts."""
        known = len(self._texts)
        self._texts += [TextIndex(max_ngram=MAX_NGRAM) for _ in range(context.num_new_rows(known))]
        for row, (text, ids) in enumerate(zip(self._texts, context.ids, strict=True)):
            # the first token of a known row was its root: it is in the text already
            text.read(ids[1 if row < known else 0 :])

    def _copies(self, text: TextIndex) -> list[Copy]:
        sources, count = self.mixed.sources, self.mixed.num_tokens
        return [copy for source in sources for copy in source.copies(text, count, len(self._votes))]

    def _candidates(self, copies: Sequence[Sequence[Copied]], root_ids: Tensor) -> Candidates:
        """The copies of all rows; a row with fewer is filled up with tokens of probability 0."""
        root, nothing = Copied(0, 0, probability=1.0), Copied(0, 0, probability=0.0)
        width = max(map(len, copies)) if self.mixed.is_alone else self.mixed.num_tokens
        trees = [[root, *tree, *[nothing] * (width - len(tree))] for tree in copies]
        ids = [[node.token_id for node in tree] for tree in trees]
        parents = [[node.parent for node in tree] for tree in trees]
        log_probs = [[math.log(p) if (p := node.probability) else -math.inf for node in tree] for tree in trees]
        device = root_ids.device
        token_ids, above = to_device([ids, parents], device).unbind(0)
        token_ids[:, 0] = root_ids
        return Candidates(token_ids, above, to_device(log_probs, device, torch.float32))

    def _valued(self, draft: Draft, tree: Tree) -> Draft:
        """A draft on a static tree with the probabilities of its nodes."""
        if tree not in self._static:
            values = torch.tensor([node_values(tree, self.mixed.values)], dtype=torch.float32)
            self._static[tree] = to_device(values.log(), draft.token_ids.device)
        return replace(draft, path_log_probs=self._static[tree].expand_as(draft.token_ids))


def _allowed(tree: Sequence[Copied], row: int, rules: TokenRules) -> list[Copied]:
    """The copies without those that a row's rules forbid, and without the tokens below these."""
    paths: list[list[int]] = [[]]
    places = [0]  # of each copied token among those that are kept; -1 for others
    kept: list[Copied] = []
    for node in tree:
        path = [*paths[node.parent], node.token_id]
        paths.append(path)
        is_allowed = places[node.parent] >= 0 and rules.num_allowed(row, path) == len(path)
        if is_allowed:
            kept.append(node._replace(parent=places[node.parent]))
        places.append(len(kept) if is_allowed else -1)
    return kept


def node_values(tree: Tree, known: Mapping[Path, float]) -> list[float]:
    """The probability that each node is accepted: as known, else a share of its parent's; never more than its parent's.

    >>> node_values(Tree.from_paths([(0,), (1,), (0, 0)]), {(0,): 0.7})
    [1.0, 0.7, 0.135, 0.315]
    """
    values: dict[Path, float] = {(): 1.0}
    for path in tree.paths[1:]:
        above = values[path[:-1]]
        values[path] = min(above, known.get(path, above * _BEST_RANK * _NEXT_RANK ** path[-1]))
    return list(values.values())
