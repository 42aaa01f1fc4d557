"""Drafts, read node by node."""

from draftheads.speculation.draft import Draft

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
