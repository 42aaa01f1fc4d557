"""Transformer layers of heads against attention one query at a time, and the keys and values that they keep."""

from typing import Any

import pytest
import torch

from draftheads.heads import head_classes
from draftheads.heads.attention import LayerConfig, RmsNorm, TransformerLayer, attend, attend_with_path
from draftheads.heads.history import HeadKVCache, KeysValues
from families import VOCAB
from slow_heads import slow_attention


def layer_config(**changes: Any) -> LayerConfig:
    config_class, _ = head_classes("eagle")
    config = config_class(**{"hidden_size": 12, "vocab_size": VOCAB, **changes})
    assert isinstance(config, LayerConfig)
    return config


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_layer_is_llamas(groups: int) -> None:
    config = layer_config(num_attention_heads=4, num_key_value_heads=groups, head_size=6, intermediate_size=10)
    layer = TransformerLayer(config)
    chance = torch.Generator().manual_seed(groups)
    for parameter in layer.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=chance)
    x = torch.randn(7, 12, generator=chance)
    torch.testing.assert_close(layer(x[None])[0], slow_attention(layer, x, config), rtol=1e-4, atol=1e-4)


def test_a_new_layer_changes_nothing() -> None:
    x = torch.randn(2, 5, 12)
    assert torch.equal(TransformerLayer(layer_config())(x), x)


def test_norms_are_computed_in_fp32() -> None:
    norm = RmsNorm(8, 1e-6).to(torch.bfloat16)
    x = (100 + torch.arange(8)).to(torch.bfloat16)[None]
    expected = (x.float() / x.float().square().mean().sqrt()).to(torch.bfloat16)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_with_a_path_is_attention_over_both(groups: int) -> None:
    chance = torch.Generator().manual_seed(groups)
    normal = lambda *shape: torch.randn(*shape, generator=chance)  # noqa: E731
    queries = normal(2, 3, 4, 6)
    seen, path = KeysValues(normal(2, 5, groups, 6), normal(2, 5, groups, 6)), None
    path = KeysValues(normal(2, 3, 2, groups, 6), normal(2, 3, 2, groups, 6))
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])[:, None]
    found = attend_with_path(queries, seen, mask, path)
    for s in range(3):
        both = KeysValues(*(torch.cat([a, b[:, s]], 1) for a, b in zip(seen, path, strict=True)))
        own = torch.cat([mask, torch.ones(2, 1, 2, dtype=torch.bool)], 2)
        torch.testing.assert_close(found[:, s : s + 1], attend(queries[:, s : s + 1], both, own), rtol=1e-4, atol=1e-5)


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


def test_a_window_may_fill_the_slots_that_a_history_grows_by() -> None:
    history, rows = HeadKVCache(1, [128]), slice(0, 1)
    history.join(1, torch.device("cpu"))
    values = torch.arange(130.0)[None, :, None, None]
    positions, longest = history.span(rows, 130)
    history.write(0, rows, KeysValues(values, values), positions, longest, ends=torch.tensor([130]))
    history.accept(rows, torch.tensor([130]), [130])
    (seen,), (places,) = history.placed()
    assert torch.equal(seen.keys[0, :, 0, 0], places[0].float())
    assert sorted(places[0].tolist()) == list(range(2, 130))
