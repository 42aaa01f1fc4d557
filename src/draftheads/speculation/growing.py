"""Fills a shape with draft tokens: a static tree rank by rank, a sampled tree, or one that grows by probability.

Knows draft heads and draft models by three calls: ``begin`` gives the state at the roots, ``predict`` gives logits for
the children of the W nodes at hand, ``descend`` steps down to some of those children. Where the logits do not depend on
the path, ``predict`` gives one set of logits (W = 1) for all nodes of a depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftheads.cpu.top import largest
from draftheads.speculation.candidates import Candidates, best_nodes
from draftheads.speculation.draft import Context, Draft, tree_tensors
from draftheads.speculation.masking import MaskedPredictor, Predictor
from draftheads.speculation.sampling import RowSettings, draw, probabilities
from draftheads.speculation.shapes import BestFirst, BestPaths, Sampled, Shape
from draftheads.speculation.tree import Tree
from draftheads.utils.transfer import to_device

Begin = Callable[[int], Any]  # the state at the roots, for a tree of that depth
Levels = Sequence[tuple[int, int | None]]  # for each depth the width and the beam, see _expand
Expand = Callable[..., Candidates]  # finds all candidates in one call: the levels, then ``divisors`` and ``limit``


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth d+1 of a static tree, and how they hang on the expanded nodes of depth d."""

    depth: int  # d: the head that predicts them
    start: int  # their node indices, start … stop-1
    stop: int
    top_k: int  # how many of the most probable tokens are needed
    parents: tuple[int, ...]  # for each node: its parent's place among the expanded nodes of depth d
    expanded: tuple[int, ...]  # the places in start … stop-1 of nodes that have children


@lru_cache(maxsize=256)
def _levels(tree: Tree) -> tuple[_Level, ...]:
    """The levels below the root, which are filled one after the other.

    >>> [level.expanded for level in _levels(Tree.from_paths([(0,), (1,), (1, 0)]))]
    [(1,), ()]
    """
    with_children = set(tree.parents)
    levels = []
    for depth in range(tree.max_depth):
        nodes = [node for node, d in enumerate(tree.depths) if d == depth + 1]
        above = [node for node, d in enumerate(tree.depths) if d == depth and node in with_children]
        levels.append(
            _Level(
                depth=depth,
                start=nodes[0],
                stop=nodes[-1] + 1,
                top_k=max(tree.ranks[node] for node in nodes) + 1,
                parents=tuple(above.index(tree.parents[node]) for node in nodes),
                expanded=tuple(i for i, node in enumerate(nodes) if node in with_children),
            )
        )
    return tuple(levels)


@lru_cache(maxsize=1024)
def _on_device(places: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # so that training can use the cached tensors
        return to_device(places, device, torch.long)


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
    if context.rules is not None:
        masked, unmasked = MaskedPredictor(head, context.rules), begin
        head, begin, expand = masked, lambda depth: masked.state(unmasked(depth)), None
    if isinstance(shape, Tree):
        return _fill_static(head, shape, context, begin)
    if isinstance(shape, Sampled):
        return _sample(head, shape, context, begin)

    def step_by_step(levels: Levels, **options: Any) -> Candidates:
        return _expand(head, begin(len(levels)), context.root_ids, levels, **options)

    return _grow(head, shape, context, expand or step_by_step, max_depth)


def _fill_static(head: Predictor, tree: Tree, context: Context, begin: Begin) -> Draft:
    """The best tokens of each node, on a static tree that is the same for all rows."""
    device = context.root_ids.device
    ranks = tree_tensors(tree, device).ranks
    tokens = [context.root_ids[:, None]]
    state = begin(tree.max_depth)
    for level in _levels(tree):
        best = largest(head.predict(state, level.depth), level.top_k)[1]  # (B, W, ranks)
        parents = _on_device(level.parents, device)
        rank = ranks[level.start : level.stop]
        place = parents if head.reads_path else torch.zeros_like(parents)
        children = head.to_target_ids(best[:, place, rank])  # (B, nodes of this depth)
        tokens.append(children)
        if level.expanded:
            chosen = _on_device(level.expanded, device)
            above = parents[chosen].expand(len(children), -1)
            state = head.descend(state, level.depth, above, children[:, chosen])
    return Draft.on_tree(tree, torch.cat(tokens, 1))


def _sample(head: Predictor, shape: Sampled, context: Context, begin: Begin) -> Draft:
    """Draft tokens that are drawn from the head's distribution, with each row's own settings."""
    if context.rows is None or context.draws is None:
        raise ValueError("to draw tokens a context needs rows and draws")
    tree, root = shape.tree, context.root_ids
    batch = torch.arange(len(root), device=root.device)[:, None]
    tokens = [root[:, None]]
    log_probs = [torch.zeros_like(tokens[0], dtype=torch.float32)]
    probs: Tensor | None = None  # (B, N, V)
    state = begin(tree.max_depth)
    at = torch.zeros(1, dtype=torch.long, device=root.device)  # nodes whose children are next
    widest = 0
    for level in _levels(tree):
        parents = _on_device(level.parents, root.device)
        count = len(at)
        drawn = _distributions(head.predict(state, level.depth), context.rows, count)  # (B, W, V') float32
        whole = _over_vocabulary(head, drawn, context.rows)
        if probs is None:
            probs = whole.new_zeros(len(root), tree.num_nodes, whole.shape[-1])
        probs[:, at] = whole
        ids, ids_log_probs = _without_replacement(drawn, level.top_k, context.draws(count * level.top_k))
        rank = tree_tensors(tree, root.device).ranks[level.start : level.stop]
        children = head.to_target_ids(ids[:, parents, rank])
        tokens.append(children)
        log_probs.append(ids_log_probs[:, parents, rank])
        widest = max(widest, level.top_k)
        if level.expanded:
            chosen = _on_device(level.expanded, root.device)
            state = head.descend(state, level.depth, parents[chosen].expand(len(batch), -1), children[:, chosen])
            at = level.start + chosen
    if probs is None:  # a root alone
        probs = torch.zeros(len(root), 1, 1, device=root.device)
    draft = Draft.on_tree(tree, torch.cat(tokens, 1), log_probs=torch.cat(log_probs, 1))
    return replace(draft, probs=probs, max_siblings=widest)


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


def _grow(head: Predictor, shape: BestFirst | BestPaths, context: Context, expand: Expand, max_depth: int) -> Draft:
    """Draft tokens on trees of each row's own, most probable first: the first n nodes are the tree of n nodes."""
    depth = min(shape.depth or max_depth, max_depth)
    if isinstance(shape, BestPaths):
        widths = shape.widths[:depth]
        whole = [(width, None) for width in widths]
        candidates = expand(whole, divisors=shape.temperatures, limit=None)
        priority = _best_path_through(candidates.path_log_probs, widths)
        counts = _nodes_on_paths(priority, shape, depth)
        is_cpu = counts.device.type == "cpu"  # elsewhere the host would wait for the number
        most = int(counts.max()) if is_cpu else min(shape.most_nodes, priority.shape[1])
        draft, _ = best_nodes(candidates, priority, most, depth)
        return draft.filled_up(torch.arange(draft.num_nodes, device=counts.device) >= counts[:, None])
    beams = _beams(shape, depth, reads_path=head.reads_path)
    depth = min(depth, len(beams))
    levels = [(shape.top_k, beam) for beam in beams]
    stops_early = head.reads_path and shape.min_level_probability is not None and context.root_ids.device.type == "cpu"
    limit = (shape.num_nodes, shape.min_level_probability or 0.0) if stops_early else None
    candidates = expand(levels, divisors=shape.temperatures, limit=limit)
    priority = candidates.path_log_probs
    count = likely_enough(priority, shape.num_nodes, shape.threshold)
    return best_nodes(candidates, priority, min(count, priority.shape[1]), depth)[0]


def _beams(shape: BestFirst, depth: int, *, reads_path: bool) -> list[int]:
    """How many nodes of depth 0, 1, … get children, as deep as any child can be among the likeliest.

    A child at depth d+1 brings its d+1 ancestors along, and every node of its parent's depth that is likelier than its
    parent. So of depth d only the N - d - 1 likeliest need children: the tree is the same, and a small one is cheap.
    Where the path does not matter nothing is computed for a node, and that is the only limit.
    """
    limits = [shape.num_nodes - d - 1 for d in range(depth)]
    return [min(limit, shape.beam) if reads_path else limit for limit in limits if limit > 0]


def _expand(
    head: Predictor,
    state: Any,
    root_ids: Tensor,
    levels: Levels,
    *,
    divisors: Sequence[float],
    limit: tuple[int, float] | None = None,
) -> Candidates:
    """All candidates.

    Args:
        head: what predicts.
        state: at the roots.
        root_ids: (B,).
        levels: for each depth d the width and the beam: that many children of each of the most probable nodes of depth
            d, as many as the beam; of all nodes where it is None.
        divisors: of the logits of each depth; depths beyond the last one get that one, and none when empty.
        limit: size and ``min_level_probability`` of the tree (:class:`BestFirst`): nodes whose children it cannot hold
            get none, and levels that are not likely enough are left out. None: nothing is left out.
    """
    widths = [width for width, _ in levels]
    root = root_ids[:, None]  # (B, 1)
    score = torch.zeros_like(root, dtype=torch.float32)  # of the nodes at hand: their paths' log-probability
    node = torch.zeros_like(root)  # and their places in the list
    tokens, parents, total, counts = [root], [node], [score], [1]
    # heads that do not read the path are asked all at once
    ready = (
        None if head.reads_path or not widths else _likeliest(head, state, range(len(widths)), max(widths), divisors)
    )
    for depth, width in enumerate(widths):
        log_probs, ids = ready or _likeliest(head, state, (depth,), width, divisors)
        log_probs, ids = (part[depth if ready else 0, :, :, :width] for part in (log_probs, ids))  # (B, W or 1, R)
        paths = score[:, :, None] + log_probs  # (B, W, R)
        ids = ids.expand(paths.shape)
        offset, count = sum(counts), paths[0].numel()
        tokens.append(ids.flatten(1))
        parents.append(node[:, :, None].expand(paths.shape).flatten(1))
        total.append(paths.flatten(1))
        counts.append(count)
        if depth + 1 < len(widths):
            beam = levels[depth + 1][1]
            if limit is None and (beam is None or beam >= count):
                score, place = total[-1], torch.arange(count, device=root.device).expand(len(root), -1)
            else:
                score, place = total[-1].topk(count if beam is None else min(beam, count), dim=1)
            if limit is not None:
                useful = _with_children(score, total, *limit)
                if not useful:
                    break
                score, place = score[:, :useful], place[:, :useful]
            node = offset + place
            if head.reads_path:
                above = place // paths.shape[2]
                state = head.descend(state, depth, above, tokens[-1].gather(1, place))
    return Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(total, 1))


def _with_children(score: Tensor, total: Sequence[Tensor], num_nodes: int, min_level_probability: float) -> int:
    """How many of the nodes at hand get children; 0 where they are not likely enough.

    A child is never likelier than its parent. So it can be among the N likeliest candidates only if its parent is
    likelier than the last of the N likeliest so far.

    Args:
        score: (B, W) of the nodes at hand, the likeliest first.
        total: (B, …) of the candidates of each depth so far.
        num_nodes: N.
        min_level_probability: the least total probability of the nodes that get children.
    """
    if sum(part.shape[1] for part in total) >= num_nodes:
        last = torch.cat(list(total), 1).topk(num_nodes, dim=1).values[:, -1:]
        useful = score > last  # (B, W)
    else:
        useful = torch.ones_like(score, dtype=torch.bool)
    reach = float(score.detach().exp().mul(useful).sum())
    return int(useful.sum(1).max()) if reach >= min_level_probability else 0


def _likeliest(
    head: Predictor, state: Any, depths: Sequence[int], top_k: int, divisors: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and target ids of the most probable tokens at some depths, each (depths, B, W, R)."""
    log_probs, ids = [], []
    for depth in depths:
        divisor = divisors[min(depth, len(divisors) - 1)] if divisors else 1.0
        values, places, total = largest(head.predict(state, depth), top_k, divisor)
        # rounding must not make a child likelier than its parent; where no token is allowed, all have probability 0
        log_probs.append((values - total.clamp_min(torch.finfo(total.dtype).min)).clamp_max(0.0))
        ids.append(places)
    # a damaged or overflowing head: nothing is drafted where the probabilities are not numbers
    whole = torch.stack(log_probs).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return whole, head.to_target_ids(torch.stack(ids))


def likely_enough(path_log_probs: Tensor, num_nodes: int, threshold: float) -> int:
    """The budget, or what the row with most draft tokens above the threshold needs of it, if the host need not wait."""
    if threshold == 0.0 or path_log_probs.device.type != "cpu":
        return num_nodes
    return min(num_nodes, int((path_log_probs.exp() >= threshold).sum(1).max()))


def _best_path_through(path_log_probs: Tensor, widths: Sequence[int]) -> Tensor:
    """(B, M) for each node of a full tree: the log-probability of the best whole path on which it lies."""
    last = torch.Size(widths).numel()
    leaves = path_log_probs[:, -last:]  # (B, Π widths)
    levels, size = [], 1
    for width in (1, *widths):
        size *= width
        levels.append(leaves.unflatten(1, (size, last // size)).amax(2))
    return torch.cat(levels, 1)


def _nodes_on_paths(priority: Tensor, shape: BestPaths, depth: int) -> Tensor:
    """(B,) how many nodes the best paths have together. Paths of probability 0 are left out."""
    last = torch.Size(shape.widths[:depth]).numel()
    worst = priority[:, -last:].topk(min(shape.num_paths, last), dim=1).values[:, -1:]
    return (priority >= worst.clamp_min(torch.finfo(worst.dtype).min)).sum(1).clamp_min(1)
