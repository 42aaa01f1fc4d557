"""The default memory of a server."""

import pytest

from draftheads.decode.engine import Engine
from draftheads.serve import load_models
from families import HAS_RECURRENT, tiny_model


@pytest.mark.parametrize("family", ["llama", *(["qwen3_5_text", "mamba2"] if HAS_RECURRENT else [])])
def test_the_default_memory_is_enough_for_all_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model without keys and values, whose memory is in its states."""
    monkeypatch.setattr(load_models, "_free_bytes", lambda _: 1 << 40)
    model = tiny_model(family)
    lengths = [model.max_positions or 4096] * 3
    assert load_models.default_kv_bytes(model, 3) >= Engine(model).num_bytes(lengths, draft_nodes=0)
    monkeypatch.setattr(load_models, "_free_bytes", lambda _: 100)
    assert load_models.default_kv_bytes(model, 3) == 50
