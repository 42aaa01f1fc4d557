"""What drafter, target and acceptance rule hand to each other in a step.

Alphabet: B rows, N nodes of a tree (root included), P tokens accepted in a step, D hidden size, V vocabulary.
Trees may be shared by all rows (leading dimension 1) or differ by row (leading dimension B).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from draftheads.cpu.kernels import NativeInt8, Product
from draftheads.speculation.sampling import RowSettings
from draftheads.speculation.tree import Tree
from draftheads.utils.transfer import to_device

_OF_NODES = ("token_ids", "parents", "depths", "log_probs", "path_log_probs", "probs", "copied")  # tensors (B, N, …)


@dataclass(frozen=True)
class Draft:
    """A tree filled with tokens. Node 0 is the root: decided, but not yet in the target's cache.

    A parent's index is lower than its children's. Nodes of depth 0 behind the root fill up rows that have less to
    draft than others; no rule accepts them.
    """

    token_ids: Tensor  # (B, N) int64
    parents: Tensor  # (1 or B, N) int64: node index of the parent; 0 for the root itself
    depths: Tensor  # (1 or B, N) int64: root 0
    ancestors: Tensor  # (1 or B, N, N) bool: [n, m] says that m lies on the path from the root to n, n included
    max_depth: int  # at least the depth of the deepest node, known without asking the device
    log_probs: Tensor | None = None  # (B, N), of sampled drafts: of each draw, given its path and the draws before it
    path_log_probs: Tensor | None = None  # (B, N): of each node's whole path; falls along what grew best first
    probs: Tensor | None = None  # (B, N, V) float32, of sampled drafts: what a node's children were drawn from
    max_siblings: int = 0  # of sampled drafts: the most children that a node has
    copied: Tensor | None = None  # (B, N) bool: nodes that only a copy from the text so far brought
    reads_all_nodes: bool = False  # whether the drafter reads the target's logits at all nodes, accepted or not

    @property
    def sampled(self) -> bool:
        """Whether the nodes were drawn: a node's children one after the other, without replacement, in this order."""
        return self.probs is not None

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.token_ids.shape[1]

    def first(self, num_nodes: int) -> Self:
        """The tree of the first ``num_nodes`` nodes; they must form a tree, as in grown trees."""
        if num_nodes >= self.num_nodes:
            return self
        of_nodes = {name: getattr(self, name) for name in _OF_NODES}
        first: dict[str, Any] = {name: part[:, :num_nodes] for name, part in of_nodes.items() if part is not None}
        first["ancestors"] = self.ancestors[:, :num_nodes, :num_nodes]
        return replace(self, max_depth=min(self.max_depth, num_nodes - 1), **first)

    def filled_up(self, filling: Tensor) -> Self:
        """The same draft where some nodes, (B, N) bool, and the nodes below them only fill up their row."""
        alone = torch.eye(self.num_nodes, dtype=torch.bool, device=filling.device)
        alone[:, 0] = True
        return replace(
            self,
            parents=self.parents.masked_fill(filling, 0),
            depths=self.depths.masked_fill(filling, 0),
            ancestors=torch.where(filling[:, :, None], alone, self.ancestors),
            copied=None if self.copied is None else self.copied & ~filling,
        )

    @classmethod
    def on_tree(cls, tree: Tree, token_ids: Tensor) -> Self:
        """A draft on one static tree for all rows; ``token_ids`` is (B, N) in the tree's node order."""
        return cls(token_ids, *tree_tensors(tree, token_ids.device), tree.max_depth)


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
    given = {name: getattr(draft, name) for name in (*_OF_NODES, "ancestors")}
    kept: dict[str, Any] = {
        name: part.expand(len(nodes), *part.shape[1:])[batch, order] for name, part in given.items() if part is not None
    }
    kept["parents"] = new.gather(1, kept["parents"])
    kept["ancestors"] = kept["ancestors"].take_along_dim(order[:, None], 2) & ~filling[:, None]
    for name in {"log_probs", "path_log_probs"} & kept.keys():
        kept[name] = kept[name].masked_fill(filling, -torch.inf)
    return replace(draft, max_depth=max_depth, **kept).filled_up(filling)


@lru_cache(maxsize=256)
def tree_tensors(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents (1, N), depths (1, N) and ancestors (1, N, N) of a static tree, as in a draft; made once."""
    with torch.inference_mode(mode=False):  # so that training can use the cached tensors
        parents = to_device([tree.parents], device).clamp_min_(0)
        return parents, to_device([tree.depths], device), to_device(tree.ancestor_mask[None], device)


@dataclass(frozen=True)
class AcceptResult:
    """What a step keeps: per row an accepted path (root first) and the token decided after it."""

    path: Tensor  # (B, P) int64 node indices, root first; entries at num_accepted and beyond are meaningless
    num_accepted: Tensor  # (B,) int64 in 1 … P: nodes kept, root included
    next_ids: Tensor  # (B,) int64: the next step's root

    def num_copied(self, draft: Draft) -> Tensor:
        """(B,) how many accepted nodes only a copy brought."""
        if draft.copied is None:
            return torch.zeros_like(self.num_accepted)
        accepted = torch.arange(self.path.shape[1], device=self.path.device) < self.num_accepted[:, None]
        return (draft.copied.gather(1, self.path) & accepted).sum(1)


Places = list[list[int]]  # (B, W): points of the rows' texts, as :class:`TokenRules` numbers them; the root's is 0
FORBIDDEN = -1  # the place after a token that the rules forbid, or after another such place
AFTER_END = -2  # the place after the token that ends an answer


class TokenRules(Protocol):
    """The tokens that rows with a grammar allow at each place below their roots, and logit biases."""

    def below(self, places: Places, parents: Tensor, token_ids: Tensor) -> Places:
        """The places (B, W') of children, from the indices (B, W') of their parents' places and their tokens."""

    def num_allowed(self, row: int, token_ids: Sequence[int]) -> int:
        """How many tokens of a chain below the root are allowed."""

    def drafted(self, logits: Tensor, places: Places, target_ids: Tensor | None = None) -> Tensor:
        """A drafter's logits at places, (B, W or 1, V') -> (B, W, V'): minus infinity for forbidden tokens.

        ``target_ids`` are the tokens (V',) of a draft vocabulary; None if they are the first tokens of the vocabulary.
        """


@dataclass(frozen=True)
class Context:
    """What a drafter sees: the tokens that entered the target's cache since it was last asked, and the new root.

    In the papers' terms the last accepted token is x_t, ``last_hidden`` is h_t and ``root_ids`` is x_{t+1}.
    """

    # (B, P, D): the target's last hidden states (after its final norm) of the accepted tokens; for a drafter that reads
    # the inputs of n layers (B, P, n·D)
    hidden: Tensor
    token_ids: Tensor  # (B, P) int64: those tokens
    num_accepted: Tensor  # (B,) int64: how many of the P entries are real, counted from the left
    root_ids: Tensor  # (B,) int64: x_{t+1}
    rows: RowSettings | None = None  # how the next tokens of the B rows are chosen
    draws: Callable[[int], Tensor] | None = None  # n -> (B, n) float64 random numbers in [0, 1), new ones at each call
    rules: TokenRules | None = None  # where a row has a grammar or logit biases
    known_ids: Sequence[Sequence[int]] | None = None  # :attr:`ids`, where the host has them already
    num_nodes: int | None = None  # of the draft, where copies may add to the shape's own

    @cached_property
    def ids(self) -> Sequence[Sequence[int]]:
        """For each row the accepted tokens and then the root, on the host; read from the device if not known."""
        if self.known_ids is not None:
            return self.known_ids
        counts, roots = self.num_accepted[:, None], self.root_ids[:, None]
        packed = torch.cat([counts, roots, self.token_ids], 1).tolist()  # one transfer
        return [[*ids[:count], root] for count, root, *ids in packed]

    @cached_property
    def counts(self) -> list[int]:
        """``num_accepted`` on the host; read from the device if not known."""
        return [len(ids) - 1 for ids in self.ids]

    @property
    def last_hidden(self) -> Tensor:
        """h_t, (B, D); or the inputs of n layers at t, (B, n·D)."""
        rows = torch.arange(self.hidden.shape[0], device=self.hidden.device)
        return self.hidden[rows, self.num_accepted - 1]

    def num_new_rows(self, known: int) -> int:
        """How many rows have joined those that a drafter knows; new ones are the last.

        Raises:
            ValueError: there are fewer rows: some left and ``keep`` was not called.
        """
        batch = len(self.root_ids)
        if batch < known:
            raise ValueError(f"the context has {batch} rows but {known} are at work: tell keep() which of them left")
        return batch - known

    def keep(self, rows: Sequence[int]) -> Self:
        """The same context for the rows whose indices are given, in that order."""
        index = to_device(rows, self.root_ids.device, torch.long)
        known_ids = None if self.known_ids is None else [self.known_ids[row] for row in rows]
        names = "hidden", "token_ids", "num_accepted", "root_ids"
        return type(self)(**{name: getattr(self, name)[index] for name in names}, known_ids=known_ids)

    def beside(self, new: Self) -> Self:
        """These rows, then the new ones; the shorter of the two is padded."""
        width = max(self.token_ids.shape[1], new.token_ids.shape[1])

        def wide(values: Tensor) -> Tensor:
            padding = values.new_zeros(values.shape[0], width - values.shape[1], *values.shape[2:])
            return torch.cat([values, padding], 1)

        return type(self)(
            torch.cat([wide(self.hidden), wide(new.hidden)]),
            torch.cat([wide(self.token_ids), wide(new.token_ids)]),
            torch.cat([self.num_accepted, new.num_accepted]),
            torch.cat([self.root_ids, new.root_ids]),
            known_ids=[*self.ids, *new.ids],
        )


@dataclass(frozen=True)
class TargetWeights:
    """The frozen tensors of the target that a draft head may read."""

    embedding: Tensor  # (V, D)
    lm_head: Tensor  # (V, D)
    lm_head_bias: Tensor | None = None  # (V,)
    logit_scale: float = 1.0  # what the target multiplies its logits by
    logit_softcap: float | None = None  # c where the target then takes c · tanh(logits / c)
    lm_head_product: Product | None = None  # the lm_head in its kernel's form, if it is packed
    rounded_embedding: NativeInt8 | None = None  # the embedding as it is stored, if in 8 bits


def as_logits(outputs: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The target's logits from the outputs of its lm_head; scale and cap as in :class:`TargetWeights`."""
    logits = outputs if scale == 1.0 else outputs * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
