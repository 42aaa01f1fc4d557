"""Fills a shape with draft tokens: a static tree rank by rank, a sampled tree, or one that grows by probability.

Knows draft heads and draft models as a :class:`Predictor`. Which nodes of a growing tree get children, and which become
its nodes, is decided in :mod:`draftheads.speculation.candidates`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.cpu.drafts import largest
from draftheads.speculation.candidates import Candidates, selected, with_children
from draftheads.speculation.draft import Context, Draft, Places, TokenRules
from draftheads.speculation.sampling import RowSettings, draw, probabilities
from draftheads.speculation.shapes import Sampled, Shape
from draftheads.speculation.tree import Tree
from draftheads.utils.transfer import to_device

Begin = Callable[[int], Any]  # the state at the roots, for a tree of that depth
Expand = Callable[..., Candidates]  # finds all candidates in one call: beams, then ``top_k``, ``divisors``, ``limit``


class Predictor(ABC):
    """What filling a tree needs of a draft head or draft model."""

    reads_path: bool = True
    """Whether the logits at a node depend on the draft tokens above it."""

    @abstractmethod
    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits (B, W, V') of the children, at depth+1, of the W nodes at hand; W = 1 unless it reads the path."""

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        """The state at some of the children that were predicted at ``depth``.

        Args:
            state: at their parents.
            depth: of their parents.
            parents: (B, W') int64, places among the W nodes at hand.
            token_ids: (B, W') the children's tokens, as target ids.
        """
        return state

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary indices as the target's token ids."""
        return draft_ids


class _MaskedState(NamedTuple):
    """Of the predictor, and the places of the nodes at hand."""

    inner: Any
    places: Places


class _MaskedPredictor(Predictor):
    """A predictor whose logits of forbidden tokens are minus infinity. They depend on the path, as the rules do."""

    def __init__(self, predictor: Predictor, rules: TokenRules) -> None:
        self.predictor, self.rules = predictor, rules
        self.to_target_ids = predictor.to_target_ids  # type: ignore[method-assign]

    def predict(self, state: _MaskedState, depth: int) -> Tensor:
        logits = self.predictor.predict(state.inner, depth)
        draft_ids = torch.arange(logits.shape[-1], device=logits.device)
        target_ids = self.predictor.to_target_ids(draft_ids)
        return self.rules.drafted(logits, state.places, None if target_ids is draft_ids else target_ids)

    def descend(self, state: _MaskedState, depth: int, parents: Tensor, token_ids: Tensor) -> _MaskedState:
        inner = state.inner
        if self.predictor.reads_path:
            inner = self.predictor.descend(inner, depth, parents, token_ids)
        return _MaskedState(inner, self.rules.below(state.places, parents, token_ids))


@dataclass(frozen=True)
class _Level:
    """The W' nodes of one depth d+1 of a static tree, and how they hang on the expanded nodes of depth d."""

    depth: int  # d: the head that predicts them
    above: Tensor  # the expanded nodes of depth d
    top_k: int  # how many of the most probable tokens are needed
    ranks: Tensor  # (W',)
    parents: Tensor  # (W',) for each node: its parent's place among the expanded nodes of depth d
    expanded: Tensor  # the places of nodes that have children


Choose = Callable[[Tensor, _Level], Tensor]  # logits (B, W or 1, V') of a level -> draft ids of as many, (B, …, ranks)


@lru_cache(maxsize=256)
def _levels(tree: Tree, device: torch.device) -> tuple[_Level, ...]:
    """The levels below the root, which are filled one after the other; made once.

    >>> [level.expanded.tolist() for level in _levels(Tree.from_paths([(0,), (1,), (1, 0)]), torch.device("cpu"))]
    [[1], []]
    """
    with_children = set(tree.parents)
    levels, above = [], [0]
    for depth in range(tree.max_depth):
        nodes = [node for node, d in enumerate(tree.depths) if d == depth + 1]
        ranks = [tree.ranks[node] for node in nodes]
        parents = [above.index(tree.parents[node]) for node in nodes]
        expanded = [place for place, node in enumerate(nodes) if node in with_children]
        with torch.inference_mode(mode=False):  # so that training can use the cached tensors
            first, *tensors = (to_device(part, device, torch.long) for part in (above, ranks, parents, expanded))
        levels.append(_Level(depth, first, max(ranks) + 1, *tensors))
        above = [nodes[place] for place in expanded]
    return tuple(levels)


def fill(
    head: Predictor, shape: Shape, context: Context, *, begin: Begin, max_depth: int, expand: Expand | None = None
) -> Draft:
    """Draft tokens for every row of the context.

    Args:
        head: what predicts.
        shape: what is filled.
        context: the roots; for :class:`Sampled` also settings and random numbers.
        begin: gives the state at the roots.
        max_depth: of trees whose shape gives no depth; no tree that grows is deeper.
        expand: used for trees that grow in place of ``begin`` and the head, unless tokens are forbidden.
    """
    if (rules := context.rules) is not None:
        head, unmasked, expand = _MaskedPredictor(head, rules), begin, None
        roots = [[0]] * len(context.root_ids)
        begin = lambda depth: _MaskedState(unmasked(depth), roots)  # noqa: E731
    if isinstance(shape, Tree):
        return _on_tree(head, shape, context, begin, lambda logits, level: largest(logits, level.top_k)[1])
    if isinstance(shape, Sampled):
        return _sample(head, shape, context, begin)
    depth = min(shape.max_depth or max_depth, max_depth, shape.num_nodes - 1)
    # A child at depth d+1 brings its d+1 ancestors along, and all nodes of its parent's depth that are likelier than
    # its parent. So of depth d only the N - d - 1 likeliest need children: the tree is the same, a small one is cheap.
    # Where the path does not matter nothing is computed for a node, and that is the only limit.
    beams = [min(shape.num_nodes - d - 1, shape.beam if head.reads_path else shape.num_nodes) for d in range(depth)]
    stops_early = head.reads_path and shape.min_level_probability is not None and context.root_ids.device.type == "cpu"
    limit = (shape.num_nodes, shape.min_level_probability or 0.0) if stops_early else None
    step_by_step = partial(_expand, head, begin, context.root_ids)
    candidates = ((expand if beams else None) or step_by_step)(
        beams, top_k=shape.top_k, divisors=[shape.divisor(d) for d in range(depth)], limit=limit
    )
    return selected(candidates, shape, depth)[0]


def _on_tree(head: Predictor, tree: Tree, context: Context, begin: Begin, choose: Choose) -> Draft:
    """A tree that is the same for all rows, with the tokens that ``choose`` takes of the logits below its nodes."""
    tokens, state = [context.root_ids[:, None]], begin(tree.max_depth)
    for level in _levels(tree, context.root_ids.device):
        chosen = choose(head.predict(state, level.depth), level)  # (B, W or 1, ranks)
        place = level.parents if chosen.shape[1] > 1 else torch.zeros_like(level.parents)
        children = head.to_target_ids(chosen[:, place, level.ranks])  # (B, nodes of this depth)
        tokens.append(children)
        if len(level.expanded):
            above = level.parents[level.expanded].expand(len(children), -1)
            state = head.descend(state, level.depth, above, children[:, level.expanded])
    return Draft.on_tree(tree, torch.cat(tokens, 1))


def _sample(head: Predictor, shape: Sampled, context: Context, begin: Begin) -> Draft:
    """Draft tokens that are drawn from the head's distribution, with each row's own settings."""
    rows, draws, tree, root = context.rows, context.draws, shape.tree, context.root_ids
    if rows is None or draws is None:
        raise ValueError("to draw tokens a context needs rows and draws")
    log_probs = [torch.zeros_like(root[:, None], dtype=torch.float32)]
    probs = torch.zeros(len(root), 1, 1, device=root.device)  # (B, N, V), or of a root alone

    def drawn(logits: Tensor, level: _Level) -> Tensor:
        nonlocal probs
        below = _distributions(logits, rows, len(level.above))  # (B, W, V') float32
        whole = _over_vocabulary(head, below, rows)
        if not level.depth:
            probs = whole.new_zeros(len(root), tree.num_nodes, whole.shape[-1])
        probs[:, level.above] = whole
        ids, of_ids = _without_replacement(below, level.top_k, draws(len(level.above) * level.top_k))
        log_probs.append(of_ids[:, level.parents, level.ranks])
        return ids

    draft = _on_tree(head, tree, context, begin, drawn)
    most = max((level.top_k for level in _levels(tree, root.device)), default=0)
    return replace(draft, log_probs=torch.cat(log_probs, 1), probs=probs, max_siblings=most)


def _distributions(logits: Tensor, rows: RowSettings, count: int) -> Tensor:
    """The distribution at W nodes, (B, W or 1, V') logits -> (B, W, V') float32; greedy rows take the best token.

    All 0 where it is not a number: no token is allowed, or a logit is infinite or not a number.
    """
    probs = probabilities(logits.float(), rows)
    best = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    probs = torch.where(rows.greedy[:, None, None], best, probs)
    return probs.float().nan_to_num_(0.0).expand(-1, count, -1)


def _over_vocabulary(head: Predictor, probs: Tensor, rows: RowSettings) -> Tensor:
    """(B, W, V') -> (B, W, V)."""
    draft_ids = torch.arange(probs.shape[-1], device=probs.device)
    size = max(rows.vocab_size, probs.shape[-1])
    return probs.new_zeros(*probs.shape[:-1], size).index_copy_(-1, head.to_target_ids(draft_ids), probs)


def _without_replacement(probs: Tensor, count: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """So many draws at each of W nodes, in order, none twice.

    Args:
        probs: (B, W, V').
        count: k draws.
        uniforms: (B, W·k) float64.

    Returns:
        Draft ids and log-probabilities given the draws before, each (B, W, k); minus infinity where nothing is left.
    """
    left = probs.double().flatten(0, 1)  # (B·W, V')
    uniforms = uniforms.view(len(left), count)
    ids, log_probs = [], []
    for number in range(count):
        total = left.sum(1)
        chosen = draw(left, uniforms[:, number]).clamp_max(left.shape[1] - 1)
        share = left.gather(1, chosen[:, None])[:, 0]
        log_probs.append(torch.where(total > 0, share / total.clamp_min(1e-300), 0.0).log())
        ids.append(chosen)
        left = left.scatter(1, chosen[:, None], 0.0)
    shape = (*probs.shape[:2], count)
    return torch.stack(ids, 1).view(shape), torch.stack(log_probs, 1).view(shape).float()


def _expand(
    head: Predictor,
    begin: Begin,
    root_ids: Tensor,
    beams: Sequence[int],
    *,
    top_k: int,
    divisors: Sequence[float],
    limit: tuple[int, float] | None,
) -> Candidates:
    """All candidates of growing trees.

    Args:
        head: what predicts.
        begin: gives the state at the roots.
        root_ids: (B,).
        beams: for each depth how many of its most probable nodes get children.
        top_k: so many children each.
        divisors: of the logits of each depth.
        limit: as for :func:`draftheads.speculation.candidates.with_children`.
    """
    root = root_ids[:, None]  # (B, 1)
    node = torch.zeros_like(root)  # the places in the list of the nodes at hand
    # log-probabilities of their paths, and of all in the list
    score = total = torch.zeros_like(root, dtype=torch.float32)
    tokens, parents, state, num_children = [root], [node], begin(len(beams)), 1
    # heads that do not read the path are asked all at once
    ready = None if head.reads_path or not beams else _likeliest(head, state, range(len(beams)), top_k, divisors)
    for depth, beam in enumerate(beams):
        if depth:
            first = total.shape[1] - tokens[-1].shape[1]
            score, place = with_children(total, first, beam, limit)
            if not score.shape[1]:
                break
            node = first + place
            if head.reads_path:
                state = head.descend(state, depth - 1, place // num_children, tokens[-1].gather(1, place))
        found = ready or _likeliest(head, state, (depth,), top_k, divisors)
        log_probs, ids = (part[depth if ready else 0] for part in found)  # (B, W or 1, R)
        paths = score[:, :, None] + log_probs  # (B, W, R)
        num_children = paths.shape[2]
        tokens.append(ids.expand(paths.shape).flatten(1))
        parents.append(node[:, :, None].expand(paths.shape).flatten(1))
        total = torch.cat([total, paths.flatten(1)], 1)
    return Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), total)


def _likeliest(
    head: Predictor, state: Any, depths: Sequence[int], count: int, divisors: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and target ids of the most probable children at some depths, each (depths, B, W, R)."""
    log_probs, ids = [], []
    for depth in depths:
        values, places, total = largest(head.predict(state, depth), count, divisors[depth])
        # rounding must not make a child likelier than its parent; where no token is allowed, all have probability 0
        log_probs.append((values - total.clamp_min(torch.finfo(total.dtype).min)).clamp_max(0.0))
        ids.append(places)
    # a damaged or overflowing head: nothing is drafted where the probabilities are not numbers
    whole = torch.stack(log_probs).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return whole, head.to_target_ids(torch.stack(ids))
