"""The history of a stateful head keeps the keys and values of accepted tokens, row by row."""

import torch

from draftheads.heads.kv_cache import HeadKVCache, KeysValues


def test_a_history_grows_and_keeps_what_was_written() -> None:
    history = HeadKVCache(1)
    history.join(2, torch.device("cpu"))
    texts = torch.randn(2, 300, 1, 4)
    done = [0, 0]
    chance = torch.Generator().manual_seed(0)
    while max(done) < 280:
        positions, longest = history.span(slice(0, 2), 4)
        assert positions.tolist() == [[n, n + 1, n + 2, n + 3] for n in done]
        new = torch.stack([texts[row, n : n + 4] for row, n in enumerate(done)])
        history.write(0, slice(0, 2), KeysValues(new, -new), positions, longest)
        counts = torch.randint(1, 5, (2,), generator=chance)
        history.accept(slice(0, 2), counts, counts.tolist())
        done = [n + count for n, count in zip(done, counts.tolist(), strict=True)]
    (seen,), mask = history.accepted()
    for row, count in enumerate(done):
        assert mask[row].sum() == count
        assert torch.equal(seen.keys[row, :count], texts[row, :count])
        assert torch.equal(seen.values[row, :count], -texts[row, :count])
    assert history.lengths == history.counts.tolist() == done
    history.keep(torch.tensor([1]))
    assert torch.equal(history.accepted()[0][0].keys[0, : done[1]], texts[1, : done[1]])


def test_a_history_shrinks_when_its_longest_row_leaves() -> None:
    history = HeadKVCache(1)
    history.join(3, torch.device("cpu"))
    texts = torch.randn(3, 1000, 1, 4)
    for row, count in enumerate((10, 1000, 200)):
        rows = slice(row, row + 1)
        positions, longest = history.span(rows, count)
        history.write(0, rows, KeysValues(texts[rows, :count], -texts[rows, :count]), positions, longest)
        history.accept(rows, torch.tensor([count]), [count])
    assert slots(history) == 3 * 1024
    history.keep(torch.tensor([0, 2]))
    assert slots(history) == 2 * 256
    (seen,), _ = history.accepted()
    assert torch.equal(seen.keys[1], texts[2, :200])
    assert torch.equal(seen.values[0, :10], -texts[0, :10])


def slots(history: HeadKVCache) -> int:
    """Of all rows, by the memory that they take."""
    (kept,) = history.layers
    assert kept is not None
    return sum(part.untyped_storage().nbytes() for part in kept) // sum(part[0, 0].nbytes for part in kept)
