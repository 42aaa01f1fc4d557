"""Drafts with some of their nodes only, compared with a slow twin."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_paths import paths_of
from draftheads.speculation.candidates import ancestors_of
from draftheads.speculation.draft import Draft, with_nodes


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


@settings(deadline=None)
@given(trees())
def test_kept_nodes_have_their_paths_and_the_others_fill_up(tree: tuple[Draft, list[list[int]]]):
    draft, kept = tree
    deepest = max(int(draft.depths[row, node]) for row, nodes in enumerate(kept) for node in nodes)
    found = with_nodes(draft, kept, max_depth=deepest)
    assert found.num_nodes == max(map(len, kept))
    assert (found.max_depth, found.max_siblings) == (deepest, 2)
    for row, nodes in enumerate(kept):
        before = paths_of(draft, row)
        assert paths_of(found, row) == [before[node] for node in nodes]
        size = len(nodes)
        for name in ("log_probs", "path_log_probs", "copied", "probs"):
            assert torch.equal(getattr(found, name)[row, :size], getattr(draft, name)[row, nodes]), name
        assert (found.token_ids[row, [0, *range(size, found.num_nodes)]] == draft.token_ids[row, 0]).all()
        assert (found.log_probs[row, size:] == -torch.inf).all()
        assert (found.path_log_probs[row, size:] == -torch.inf).all()
        assert not found.copied[row, size:].any()
