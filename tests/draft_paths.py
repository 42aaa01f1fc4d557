"""Drafts, read node by node, and a drafter whose probabilities stand in a table, a line for each path."""

from collections.abc import Iterable
from functools import reduce

from torch import Tensor, cat, full_like

from draftheads.speculation.draft import Draft
from draftheads.speculation.growing import Predictor

Tokens = tuple[int, ...]  # below the root


def paths_of(draft: Draft, row: int) -> list[Tokens]:
    """The tokens on the path to each node of a row. Follows parents only, and holds everything else against them.

    Nodes that only fill up the row stand behind the others and see no more than the root; they are left out.
    """
    parents, depths = (part.expand_as(draft.token_ids)[row].tolist() for part in (draft.parents, draft.depths))
    tokens = draft.token_ids[row].tolist()
    size = 1 + sum(depth > 0 for depth in depths)
    paths: list[Tokens] = [()]
    above = [{0}]
    for node in range(1, size):
        assert parents[node] < node, "a child before its parent"
        paths.append((*paths[parents[node]], tokens[node]))
        above.append(above[parents[node]] | {node})
    filling = range(size, draft.num_nodes)
    assert parents[:1] + parents[size:] == [0] * (1 + len(filling))
    assert depths == [*map(len, paths), *[0] * len(filling)]
    assert max(depths) <= draft.max_depth
    seen = draft.ancestors.expand(len(draft.token_ids), -1, -1)[row]
    assert [set(mask.nonzero()[:, 0].tolist()) for mask in seen] == [*above, *({0, node} for node in filling)]
    return paths


def number_of(path: Iterable[int], base: int) -> int:
    """Of a path: its tokens as digits behind a one."""
    return reduce(lambda number, token: number * base + token, path, 1)


def node_numbers(draft: Draft, base: int, roots: Tensor | None = None) -> Tensor:
    """(B, N) of the path to each node, behind the number (B, 1) of the text up to the root; 1 where left out."""
    numbers = full_like(draft.token_ids[:, :1], 1) if roots is None else roots
    parents = draft.parents.expand_as(draft.token_ids)
    for node in range(1, draft.num_nodes):
        above = numbers.gather(1, parents[:, node, None])
        numbers = cat([numbers, above * base + draft.token_ids[:, node, None]], 1)
    return numbers


class PathTable(Predictor):
    """Logits from a table (lines, V) by the number of the path."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def predict(self, state: Tensor, depth: int) -> Tensor:
        return self.table[state]

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        return state.gather(1, parents) * self.table.shape[1] + token_ids
