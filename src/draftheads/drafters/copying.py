"""A drafter that adds copies from the text so far to the trees of another one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from draftheads.drafters.copy_probs import DEFAULT_COPY_PROBS, MAX_NGRAM, CopyProbs, check_copy_probs, votes_of
from draftheads.drafters.copy_tree import Copied, Voter, copy_tree
from draftheads.drafters.text_index import RowTexts, TextIndex
from draftheads.errors import InvalidSettings, require_at_least
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.candidates import Candidates, merged
from draftheads.speculation.draft import Context, Draft, TokenRules
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import ROOT_ONLY, BestFirst, Shape
from draftheads.speculation.tree import Path, Tree
from draftheads.utils.transfer import to_device

# For static trees without measured values, close to hydra's: the probability of a node of rank 0 as a share of its
# parent's, and of a node of each next rank as a share of the rank before.
_BEST_RANK = 0.45
_NEXT_RANK = 0.3

NUM_TOKENS = 16  # that are copied at most
MOST_PLACES = 8  # of a text's last tokens that are looked at
_SEVERAL, _LIKELY_MATCH = 4, 3  # rows; tokens before a copied one


class Copying(Drafter):
    """Merges copies from the text so far into each tree of a drafter.

    Copies are what followed earlier places of the text's last tokens, see :func:`copy_tree`. The nodes with the highest
    probability of being accepted are kept, whether copied or drafted. Trees that are drawn (``Sampled``) and
    ``BestPaths`` are left as they are.

    Args:
        drafter: a draft head or draft model.
        probs: of copied tokens, by the length of the match, see :func:`copy_probs`.
        values: the measured probability that a node of a static tree is accepted, by its path of ranks. Without it
            the probability falls geometrically with depth and rank.
        num_tokens: the most tokens that are copied.

    Raises:
        InvalidSettings: impossible probs, no tokens, or a drafter that makes trees of its own.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        probs: CopyProbs = DEFAULT_COPY_PROBS,
        values: Mapping[Path, float] | None = None,
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        check_copy_probs(probs)
        require_at_least(1, num_tokens=num_tokens)
        if drafter.default_shape is None:
            raise InvalidSettings(
                f"{type(drafter).__name__} makes trees of its own: copies can be added only to trees of a given shape, "
                "such as those of a draft head"
            )
        self.drafter = drafter
        self.needs_history = True
        self.reads_whole_text, self.hidden_layers = drafter.reads_whole_text, drafter.hidden_layers
        self.default_shape, self.max_depth = drafter.default_shape, drafter.max_depth
        self.extra_nodes = num_tokens
        self.probs, self.values, self.num_tokens = probs, values or {}, num_tokens

    @classmethod
    def by_profile(cls, drafter: Drafter, profile: AcceptanceProfile) -> Self:
        """Copies compete for nodes by the probabilities in the profile."""
        gains = [after - before for before, after in pairwise(profile.static_tokens)]
        values = {tuple(path): gain for path, gain in zip(profile.paths, gains, strict=False) if 0.0 < gain < 1.0}
        return cls(drafter, probs=profile.copies or DEFAULT_COPY_PROBS, values=values)

    @property
    def name(self) -> str:
        return f"{self.drafter.name} with copies"

    @property
    def bytes_per_slot(self) -> int:
        return self.drafter.bytes_per_slot

    def bytes_of_rows(self, num_rows: int) -> int:
        return self.drafter.bytes_of_rows(num_rows)

    def check_shape(self, shape: Shape) -> None:
        self.drafter.check_shape(shape)

    def start(self) -> "CopyingSession":
        return CopyingSession(self)


class CopyingSession(DraftSession):
    """The texts of one batch, and the drafter's session."""

    def __init__(self, copying: Copying) -> None:
        self.session = copying.drafter.start()
        self.values, self.num_tokens = copying.values, copying.num_tokens
        self._votes = votes_of(copying.probs)
        self._texts = RowTexts(max_ngram=MAX_NGRAM)
        self._static: dict[Tree, Tensor] = {}  # (1, N) log-probabilities of static trees' nodes

    def propose(self, context: Context, shape: Shape) -> Draft:
        """The drafter's draft, with the copies of the rows that have a match."""
        self._texts.read(context)
        if shape == ROOT_ONLY:  # it needs no drafter
            self.session.observe(context)
            draft = Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])
        else:
            draft = self.session.propose(context, shape)
        if not isinstance(shape, Tree | BestFirst):
            return draft
        num_nodes = shape.num_nodes + context.extra_nodes
        if num_nodes == 1 or (shape == ROOT_ONLY and not self._has_match):
            return draft
        copies = [copy_tree(self._voters(text), self.num_tokens) for text in self._texts.rows]
        if context.rules is not None:
            copies = [_allowed(tree, row, context.rules) for row, tree in enumerate(copies)]
        if not any(copies):
            return draft
        candidates = self._candidates(copies, context.root_ids)
        if isinstance(shape, Tree):
            return merged(self._valued(draft, shape), candidates, BestFirst(num_nodes))
        return merged(draft, candidates, replace(shape, num_nodes=num_nodes))

    def observe(self, context: Context) -> None:
        self._texts.read(context)
        self.session.observe(context)

    def on_verify(self, draft: Draft, best: Callable[[], Tensor]) -> Tensor | None:
        return self.session.on_verify(draft, best)

    def on_read(self, values: Sequence[Sequence[int]]) -> None:
        self.session.on_read(values)

    def keep(self, rows: Tensor) -> None:
        """Texts move with their rows, as what the drafter's session keeps does."""
        self._texts.keep(rows)
        self.session.keep(rows)

    @property
    def _has_match(self) -> bool:
        """Whether a copy may be worth the time of looking for it: for several rows one that is not likely never is."""
        rows = self._texts.rows
        return len(rows) < _SEVERAL or any(text.has(_LIKELY_MATCH) for text in rows)

    def _voters(self, text: TextIndex) -> list[Voter]:
        """The earlier places of a text's last tokens."""
        places = text.matches(MOST_PLACES, len(self._votes))
        return [Voter(text.following(place, self.num_tokens), match, self._votes) for place, match in places.items()]

    def _candidates(self, copies: Sequence[Sequence[Copied]], root_ids: Tensor) -> Candidates:
        """The copies of all rows; a row with fewer is filled up with tokens of probability 0."""
        root, nothing = Copied(0, 0, probability=1.0), Copied(0, 0, probability=0.0)
        trees = [[root, *tree, *[nothing] * (self.num_tokens - len(tree))] for tree in copies]
        ids = [[node.token_id for node in tree] for tree in trees]
        parents = [[node.parent for node in tree] for tree in trees]
        log_probs = [[math.log(p) if (p := node.probability) else -math.inf for node in tree] for tree in trees]
        device = root_ids.device
        token_ids = to_device(ids, device)
        token_ids[:, 0] = root_ids
        return Candidates(token_ids, to_device(parents, device), to_device(log_probs, device, torch.float32))

    def _valued(self, draft: Draft, tree: Tree) -> Draft:
        """A draft on a static tree with the probabilities of its nodes."""
        if tree not in self._static:
            values = torch.tensor([node_values(tree, self.values)], dtype=torch.float32)
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
        if places[node.parent] < 0 or rules.num_allowed(row, path) < len(path):
            places.append(-1)
            continue
        kept.append(node._replace(parent=places[node.parent]))
        places.append(len(kept))
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
