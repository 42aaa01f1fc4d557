"""Drafts with some of their nodes only, compared with a slow twin."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.speculation.candidates import ancestors_of
from draftheads.speculation.draft import Draft
from draftheads.speculation.masking import with_nodes


@st.composite
def trees(draw: st.DrawFn) -> tuple[Draft, list[list[int]]]:
    """A draft of several rows, and of each row some nodes with all their ancestors."""
    rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    parents = [[0, *(draw(st.integers(0, node - 1)) for node in range(1, size))] for _ in range(rows)]
    kept = []
    for row in parents:
        nodes = [0]
        for node in range(1, size):
            if row[node] in nodes and draw(st.booleans()):
                nodes.append(node)
        kept.append(nodes)
    token_ids = torch.arange(rows * size).view(rows, size) + 5
    ancestors = ancestors_of(torch.tensor(parents), size)
    draft = Draft(
        token_ids,
        torch.tensor(parents),
        ancestors.sum(2) - 1,
        ancestors,
        size - 1,
        log_probs=-token_ids.float(),
        path_log_probs=-2.0 * token_ids.float(),
        probs=torch.rand(rows, size, 4),
        max_siblings=2,
        copied=token_ids % 3 == 0,
    )
    return draft, kept


def paths_of(draft: Draft, row: int) -> list[list[int]]:
    """The tokens on the path to each node, by parents; nodes that fill up the row are left out."""
    paths = [[int(draft.token_ids[row, 0])]]
    for node in range(1, draft.num_nodes):
        above = paths[int(draft.parents[row, node])]
        paths.append([*above, int(draft.token_ids[row, node])] if draft.depths[row, node] else [])
    return paths


@settings(deadline=None)
@given(trees())
def test_kept_nodes_have_their_paths_and_the_others_fill_up(tree: tuple[Draft, list[list[int]]]):
    draft, kept = tree
    deepest = max(int(draft.depths[row, node]) for row, nodes in enumerate(kept) for node in nodes)
    found = with_nodes(draft, kept, max_depth=deepest)
    assert found.num_nodes == max(map(len, kept))
    assert (found.max_depth, found.max_siblings) == (deepest, 2)
    for row, nodes in enumerate(kept):
        before, after = paths_of(draft, row), paths_of(found, row)
        assert after == [before[node] for node in nodes] + [[]] * (found.num_nodes - len(nodes))
        for place, node in enumerate(nodes):
            on_path = found.token_ids[row][found.ancestors[row, place]].tolist()
            assert on_path == before[node]
            assert found.depths[row, place] == len(before[node]) - 1
            for name in ("log_probs", "path_log_probs", "copied"):
                assert getattr(found, name)[row, place] == getattr(draft, name)[row, node], name
            assert torch.equal(found.probs[row, place], draft.probs[row, node])
        for place in range(len(nodes), found.num_nodes):
            assert found.token_ids[row, place] == draft.token_ids[row, 0]
            assert found.ancestors[row, place].nonzero()[:, 0].tolist() == [0, place]
            assert found.log_probs[row, place] == found.path_log_probs[row, place] == -torch.inf
            assert not found.copied[row, place]
