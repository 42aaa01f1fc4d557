"""A drafter that adds a copy from the text so far to the trees of another one (prompt lookup in a tree)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import gt

import torch
from torch import Tensor

from draftheads.draft import Context, Draft, Drafter, Watcher, hidden_layers_of
from draftheads.drafters.copy_odds import DEFAULT_ODDS, MAX_NGRAM, Odds, check_odds
from draftheads.drafters.text_index import RowTexts
from draftheads.errors import InvalidSettings
from draftheads.filling import likely_enough
from draftheads.merging import merged
from draftheads.models.transfer import to_device
from draftheads.shapes import ROOT_ONLY, BestFirst, Shape
from draftheads.tree import Path, Tree

# For static trees without measured values, close to hydra's: the probability of a node of rank 0 as a share of its
# parent's, and of a node of each next rank as a share of the rank before.
_BEST_RANK = 0.45
_NEXT_RANK = 0.3


class Copying:
    """Merges a copy from the text so far into each tree of a drafter.

    The copy is what followed the latest earlier place of the text's last n-gram, the longest n-gram first. The nodes
    with the highest probability of being accepted are kept, whether copied or drafted. Trees that are drawn
    (``Sampled``) and ``BestPaths`` are left as they are.

    Args:
        drafter: a draft head or draft model.
        odds: of copied tokens, by the length of the match, see :func:`copy_odds`. As many tokens are copied as a row
            has.
        values: the measured probability that a node of a static tree is accepted, by its path of ranks. Without it
            the probability falls geometrically with depth and rank.

    Raises:
        InvalidSettings: impossible odds, or a drafter that makes trees of its own.
    """

    needs_history = True

    def __init__(
        self, drafter: Drafter, *, odds: Odds = DEFAULT_ODDS, values: Mapping[Path, float] | None = None
    ) -> None:
        check_odds(odds)
        if drafter.default_shape is None:
            raise InvalidSettings(
                f"{type(drafter).__name__} makes trees of its own: copies can be added only to trees of a given shape, "
                "such as those of a draft head"
            )
        self.drafter = drafter
        self.odds, self.values = odds, values or {}

    @property
    def num_tokens(self) -> int:
        """The most tokens that are copied."""
        return len(self.odds[0])

    @property
    def default_shape(self) -> Shape | None:
        """The drafter's."""
        return self.drafter.default_shape

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The drafter's."""
        return hidden_layers_of(self.drafter)

    def check_shape(self, shape: Shape) -> None:
        """Can the drafter fill it?

        Raises:
            InvalidTree: as of the drafter.
        """
        check = getattr(self.drafter, "check_shape", None)
        if check is not None:
            check(shape)

    def start(self) -> "CopyingSession":
        """A session without texts."""
        return CopyingSession(self)


class CopyingSession:
    """The texts of one batch, and the drafter's session."""

    def __init__(self, copying: Copying) -> None:
        self.session = copying.drafter.start()
        self.odds, self.values, self.num_tokens = copying.odds, copying.values, copying.num_tokens
        self._texts = RowTexts(max_ngram=MAX_NGRAM)
        self._log_odds = [[-math.inf] * self.num_tokens, *([math.log(p) for p in row] for row in self.odds)]
        self._static: dict[Tree, Tensor] = {}  # (1, N) log-probabilities of static trees' nodes

    def propose(
        self, context: Context, shape: Shape, *, extra_nodes: int = 0, min_gains: Sequence[float] = ()
    ) -> Draft:
        """The drafter's draft, with the copies of the rows that have a match.

        Args:
            context: of all rows.
            shape: for the drafter.
            extra_nodes: how many nodes the tree may have beyond the shape's own.
            min_gains: where nothing but copies is drafted: n tokens are copied only for some n for which the expected
                number of accepted tokens of all rows is above ``min_gains[n-1]``. Empty: always.
        """
        self._texts.read(context)
        draft = self._drafted(context, shape)
        if not isinstance(shape, Tree | BestFirst):
            return draft
        num_nodes = shape.num_nodes + extra_nodes
        matches = [text.copy(self.num_tokens, longest=len(self.odds)) for text in self._texts.rows]
        if num_nodes == 1 or not any(length for _, length in matches):
            return draft
        if shape == ROOT_ONLY and min_gains:
            found = [self.odds[min(length, len(self.odds)) - 1] for _, length in matches if length]
            gains = accumulate(map(sum, zip(*found, strict=True)))
            if not any(map(gt, gains, min_gains)):
                return draft
        device = context.root_ids.device
        tokens = to_device([copied or [0] * self.num_tokens for copied, _ in matches], device)
        odds = [self._log_odds[min(length, len(self.odds))] for _, length in matches]
        if context.rules is not None:  # a copy ends before the first token that is forbidden
            ends = [context.rules.num_allowed(row, copied) for row, (copied, _) in enumerate(matches)]
            odds = [[*own[:end], *[-math.inf] * (self.num_tokens - end)] for own, end in zip(odds, ends, strict=True)]
        log_probs = to_device(odds, device, torch.float32)
        if isinstance(shape, Tree):
            return merged(self._valued(draft, shape), tokens, log_probs, num_nodes)
        draft = merged(draft, tokens, log_probs, num_nodes)
        assert draft.path_log_probs is not None
        return draft.first(likely_enough(draft.path_log_probs, num_nodes, shape.threshold))

    def follow(self, context: Context) -> None:
        """Reads the accepted tokens."""
        self._texts.read(context)
        self.session.follow(context)

    def keep(self, rows: Tensor) -> None:
        """Texts move with their rows, as what the drafter's session keeps does."""
        self._texts.keep(rows)
        self.session.keep(rows)

    def watch(self, draft: Draft, logits: Tensor) -> None:
        """Passes the target's logits on to a session that learns from them."""
        if isinstance(self.session, Watcher):
            self.session.watch(draft, logits)

    def _drafted(self, context: Context, shape: Shape) -> Draft:
        if shape != ROOT_ONLY:
            return self.session.propose(context, shape)
        self.session.follow(context)  # the root alone needs no drafter
        return Draft.on_tree(ROOT_ONLY, context.root_ids[:, None])

    def _valued(self, draft: Draft, tree: Tree) -> Draft:
        """A draft on a static tree with the probabilities of its nodes."""
        if tree not in self._static:
            values = torch.tensor([node_values(tree, self.values)], dtype=torch.float32)
            self._static[tree] = values.log().to(draft.token_ids.device)
        return replace(draft, path_log_probs=self._static[tree].expand_as(draft.token_ids))


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
