"""Drafts without tokens that their rows forbid. Knows the rules as :class:`draftheads.speculation.draft.TokenRules`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from draftheads.speculation.draft import Draft, Places, TokenRules
from draftheads.utils.transfer import to_device


class Predictor(Protocol):
    """What filling a tree needs of a draft head or draft model."""

    @property
    def reads_path(self) -> bool:
        """Whether the logits at a node depend on the draft tokens above it."""

    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits (B, W, V') of the children, at depth+1, of the W nodes at hand."""

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        """The state at children (B, W'): places (B, W') of their parents among the nodes at hand, and their tokens."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary indices as the target's token ids."""


class _State(NamedTuple):
    """Of the predictor, and the places of the nodes at hand."""

    inner: Any
    places: Places


class MaskedPredictor:
    """A predictor whose logits of forbidden tokens are minus infinity. They depend on the path, as the rules do."""

    reads_path = True

    def __init__(self, predictor: Predictor, rules: TokenRules) -> None:
        self.predictor, self.rules = predictor, rules

    def state(self, inner: Any) -> _State:
        """At the roots."""
        return _State(inner, self.rules.roots())

    def predict(self, state: _State, depth: int) -> Tensor:
        """(B, W, V')."""
        logits = self.predictor.predict(state.inner, depth)
        draft_ids = torch.arange(logits.shape[-1], device=logits.device)
        target_ids = self.predictor.to_target_ids(draft_ids)
        return self.rules.drafted(logits, state.places, None if target_ids is draft_ids else target_ids)

    def descend(self, state: _State, depth: int, parents: Tensor, token_ids: Tensor) -> _State:
        """The predictor's state and the places of the children."""
        inner = state.inner
        if self.predictor.reads_path:
            inner = self.predictor.descend(inner, depth, parents, token_ids)
        return _State(inner, self.rules.below(state.places, parents, token_ids))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """As the predictor does."""
        return self.predictor.to_target_ids(draft_ids)


def with_nodes(draft: Draft, nodes: Sequence[Sequence[int]], *, max_depth: int) -> Draft:
    """The draft with some of its nodes only. Rows that keep fewer nodes than others are filled up.

    Args:
        draft: of B rows.
        nodes: of each row those that remain, ascending: the root first, and no node without its parent.
        max_depth: of the deepest of them.
    """
    device = draft.token_ids.device
    width = max(map(len, nodes))
    order = to_device([[*row, *[0] * (width - len(row))] for row in nodes], device)  # (B, n)
    numbers = torch.arange(width, device=device)
    filling = numbers >= to_device([[len(row)] for row in nodes], device)  # (B, n)
    batch = torch.arange(len(nodes), device=device)[:, None]
    new = torch.zeros(len(nodes), draft.num_nodes + 1, dtype=torch.long, device=device)  # the number of each node
    new.scatter_(1, order.masked_fill(filling, draft.num_nodes), numbers.expand_as(order))

    def of(values: Tensor) -> Tensor:
        return values.expand(len(nodes), *values.shape[1:])[batch, order]

    def log_probs(values: Tensor | None) -> Tensor | None:
        return None if values is None else of(values).masked_fill(filling, -torch.inf)

    return replace(
        draft,
        token_ids=of(draft.token_ids),
        parents=new.gather(1, of(draft.parents)),
        depths=of(draft.depths),
        ancestors=of(draft.ancestors).take_along_dim(order[:, None], 2) & ~filling[:, None],
        max_depth=max_depth,
        log_probs=log_probs(draft.log_probs),
        path_log_probs=log_probs(draft.path_log_probs),
        probs=None if draft.probs is None else of(draft.probs),
        copied=None if draft.copied is None else of(draft.copied),
    ).filled_up(filling)
