"""EAGLE-3: its layer by the published layout, and the hidden states of several layers that it reads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from draftheads.cpu.optimise import speed_up
from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings
from draftheads.models.model_layers import layer_inputs
from draftheads.testing import check_head
from families import FAMILIES, RECURRENT_FAMILIES, tiny_head, tiny_model

TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])


@pytest.mark.few(14)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT_FAMILIES])
def test_states_are_those_of_transformers(family: str, fast: bool) -> None:
    model = tiny_model(family)
    expected = model.model(TEXT, output_hidden_states=True).hidden_states
    if fast:
        speed_up(model.model)
    last, states = model.run((1, 0), input_ids=TEXT, use_cache=False)
    torch.testing.assert_close(states, torch.cat([expected[1], expected[0]], -1), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(last, expected[-1], rtol=1e-5, atol=2e-5)
    assert torch.equal(model.hidden_states(TEXT, (1, 0)), torch.cat([states, last], -1))


def test_other_threads_and_models_are_not_noted() -> None:
    model = tiny_model("llama")
    twin = model.twin()
    with layer_inputs(model.layers) as found:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.hidden_states, TEXT).result()
        twin.hidden_states(TEXT)
        assert found == [None, None]
        model.hidden_states(TEXT)
        assert all(states is not None for states in found)
    assert not any(layer._forward_pre_hooks for layer in model.layers), "no hook remains"


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    model = tiny_model("llama")
    head = tiny_head("eagle3", model, layers=[0, 3])
    with pytest.raises(InvalidSettings, match=r"layer 3 .* tiny-llama has 2 layers: choose among 0 … 2"):
        Engine(model, head).generate([[5, 6]], max_new_tokens=2)


def test_the_start_near_the_last_hidden_state_survives_a_number_that_is_always_zero() -> None:
    """The states are h_t turned, besides one number: fc turns them back."""
    head = tiny_head("eagle3", tiny_model("llama"))
    size = head.config.hidden_size
    torch.manual_seed(0)
    last, turn = torch.randn(40 * size, size), torch.linalg.qr(torch.randn(2 * size, size)).Q
    states = last @ turn.T
    states[:, 3] = 0.0
    head.start_near([(torch.cat([states, last], -1), torch.zeros(len(last)))])  # type: ignore[operator]
    found = head.states(states)  # type: ignore[operator]
    assert float((found - last).square().mean()) < 0.2 * float(last.square().mean())


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_layer_with_a_window_drafts_as_it_was_taught(window: int) -> None:
    """Along paths that are longer than it, and shorter."""
    check_head("eagle3", layers=[0, 1], window=window, norm_heads=True)
