"""EAGLE-3: its layer by the published layout, and the hidden states of several layers that it reads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from draftheads.cpu.optimise import speed_up
from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings
from draftheads.models.model_layers import layer_inputs
from draftheads.search.replay import Answer, observe
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from families import FAMILIES, RECURRENT_FAMILIES, VOCAB, propose, tiny_head, tiny_model
from slow_heads import rms_norm, slow_attention

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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fc_norm": True},
        {"norm_output": True},
        {"fc_norm": True, "norm_output": True, "draft_vocab_size": 12, "lm_head": "own", "num_key_value_heads": 2},
        {"layers": []},
        {"own_embedding": True},
        {"own_embedding": True, "inner_size": 20, "lm_head": "own", "fc_norm": True},
        {"own_embedding": True, "inner_size": 48, "lm_head": "low_rank", "lm_head_rank": 48, "norm_output": True},
    ],
)
def test_drafting_follows_the_published_layout(options: dict[str, object]) -> None:
    """A chain of draft tokens, computed token by token."""
    model = tiny_model("llama")
    head = tiny_head("eagle3", model, **options)
    weight = {name: value.detach() for name, value in head.named_parameters()}
    hidden = head.split(model.hidden_states(TEXT, head.hidden_layers))[0]
    embedding = weight["embedding.weight"] if head.config.own_embedding else model.weights.embedding  # type: ignore[attr-defined]
    inputs: list[Tensor] = []  # what attention reads at each position
    states: list[Tensor] = []

    def layer(token: int, state: Tensor) -> Tensor:
        e = rms_norm(embedding[token], weight["layer.input_norm.norms.0.weight"])
        inputs.append(torch.cat([e, rms_norm(state, weight["layer.input_norm.norms.1.weight"])]))
        states.append(state)
        return slow_attention(head.layer, torch.stack(states), head.config, normed=inputs)[-1]  # type: ignore[arg-type]

    text = TEXT[0].tolist()
    for position in range(len(text) - 1):
        parts = hidden[0, position].view(-1, 32)
        if head.config.fc_norm:
            parts = torch.stack([rms_norm(part, weight[f"fc_norm.norms.{i}.weight"]) for i, part in enumerate(parts)])
        output = layer(text[position + 1], weight["fc.weight"] @ parts.flatten())
    lm_head = weight["lm_heads.heads.0.weight"] if head.config.lm_head == "own" else model.weights.lm_head
    if head.config.lm_head == "low_rank":
        lm_head = weight["lm_heads.up.0.weight"] @ weight["lm_heads.down.0.weight"]
    last = len(text) - 2
    for depth in range(3):
        # training along the text that this chain drafts; what stands beyond the last position is not read
        longer = torch.cat([hidden, hidden[:, :depth]], 1)
        features = head(longer, torch.tensor([text]))[depth, 0, last]
        normed = rms_norm(output, weight["norm.weight"])
        logits = lm_head @ normed
        torch.testing.assert_close(head.logits(features, depth), logits, rtol=5e-6, atol=5e-6)
        token = int(head.to_target_ids(logits.argmax()))
        text.append(token)
        output = layer(token, normed if head.config.norm_output else output)
    context = Context(hidden[:, :-1], TEXT[:, :-1], torch.tensor([last + 1]), TEXT[:, -1])
    assert propose(head, context, Tree.chain(3)).token_ids[0].tolist() == text[last + 1 :]


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    model = tiny_model("llama")
    head = tiny_head("eagle3", model, layers=[0, 2])
    with pytest.raises(InvalidSettings, match=r"layer 2 .* tiny-llama has 2 layers: choose among 0 … 1"):
        Engine(model, head).generate([[5, 6]], max_new_tokens=2)


def test_observed_probabilities_are_the_targets_own() -> None:
    model = tiny_model("llama")
    answer = Answer((5, 6, 7), (8, 9, 10, 11, 12))
    seen, _ = observe(tiny_head("eagle3", model), model, answer, top_k=VOCAB, temperature=1.0)
    logits = model.model(torch.tensor([answer.prompt_ids + answer.token_ids])).logits[0]
    for head, place in ((0, 0), (0, 3), (1, 2), (2, 1)):
        expected = logits[3 + place + head].softmax(-1).sort().values
        torch.testing.assert_close(seen.probs[place, head].sort().values, expected)


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
