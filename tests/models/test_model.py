"""The frozen model: unsupported models are refused, logits follow from hidden states, twins share weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftheads.cpu.kernels import PackedLinear
from draftheads.cpu.optimise import speed_up
from draftheads.errors import UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.runners.structure import check_trees
from families import FAMILIES, SMALL, VOCAB, IntegerTokenizer, tiny_model

MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32}
BLOOM, NEO = {**SIZES, "n_layer": 2, "n_head": 4}, {**SMALL, "num_layers": 2, "num_heads": 4, "window_size": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rwkv": ({**SIZES, "num_hidden_layers": 2}, "a recurrent state: drafts are rewound by removing cache entries"),
    "recurrent_gemma": ({**SMALL, "head_dim": 8, "lru_width": 32}, "linear_attention"),
    "minimax": ({**SMALL, "head_dim": 8, "num_local_experts": 2}, "linear_attention"),
    "llama4_text": ({**SMALL, "head_dim": 8, "attention_chunk_size": 8}, "chunked_attention"),
    "bloom": (BLOOM, "from cache slots"),
    "mpt": ({"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, "from cache slots"),
    "falcon": ({**SMALL, "alibi": True}, "from cache slots"),
    "gpt_neo": ({**NEO, "attention_types": [[["global", "local"], 1]]}, "from cache slots"),
}


def built(model_type: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**options), dtype=torch.float32).eval()


def target_of(model: Any, tokenizer: Any = None) -> TargetModel:
    return TargetModel(model, tokenizer or IntegerTokenizer(), "some-model")


# --- models whose drafts cannot be taken back ---


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_cannot_rewind_or_read_trees_are_refused(model_type: str):
    options, reason = REFUSED[model_type]
    with pytest.raises(UnsupportedModel, match=f"some-model.*{reason}"):
        target_of(built(model_type, options))


def test_falcon_without_alibi_is_supported():
    check_trees(target_of(built("falcon", SMALL)))


# --- trees ---


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_are_verified_on_every_family(family: str, dtype: torch.dtype):
    check_trees(tiny_model(family, dtype=dtype))


def test_a_model_that_crashes_on_trees_is_refused():
    target = tiny_model("llama")
    forward = target.decoder.forward

    def no_masks(*args: Any, attention_mask: Tensor | None = None, **rest: Any) -> Any:
        if attention_mask is not None:
            _batch, _length = attention_mask.shape  # as old models do
        return forward(*args, **rest)

    target.decoder.forward = no_masks
    with pytest.raises(UnsupportedModel, match="tiny-llama cannot read a tree of drafts: too many values to unpack"):
        check_trees(target)


@pytest.mark.parametrize("wrong", ["mask", "positions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_other_logits_in_trees_is_refused(wrong: str, dtype: torch.dtype):
    target = tiny_model("llama", dtype=dtype)
    forward = target.decoder.forward

    def careless(*args: Any, **given: Any) -> Any:
        if wrong == "mask" and given.get("attention_mask") is not None:
            given["attention_mask"] = torch.zeros_like(given["attention_mask"])
        if wrong == "positions" and given.get("position_ids") is not None:
            given["position_ids"] = torch.arange(given["position_ids"].shape[1])[None]
        return forward(*args, **given)

    target.decoder.forward = careless
    with pytest.raises(UnsupportedModel, match=r"tiny-llama: logits in a tree of drafts differ .* by [0-9.]+%"):
        check_trees(target)


# --- logits ---


@pytest.mark.parametrize("family", [*FAMILIES, "cohere"])
def test_logits_follow_from_the_hidden_state(family: str):
    target = tiny_model(family) if family in FAMILIES else target_of(built(family, {**SMALL, "logit_scale": 0.25}))
    text = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4]])
    with torch.inference_mode():
        expected = target.model(text).logits
        hidden = target.hidden_states(text)
        found = target.logits(hidden)
    assert hidden.shape == (2, 10, target.hidden_size)
    assert found.shape == (2, 10, target.vocab_size)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not hidden.requires_grad


def test_right_padding_does_not_change_hidden_states():
    text, padded = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 8, 0, 0, 9]])
    for family in ("mistral", "gpt2"):
        target = tiny_model(family)
        torch.testing.assert_close(target.hidden_states(padded)[:, :4], target.hidden_states(text))


@pytest.mark.parametrize(
    ("bend", "fits"),
    [
        (lambda logits: logits, True),
        (lambda logits: logits * 1.001, True),  # rounding, in bf16
        (lambda logits: logits * 1.1, False),
        (lambda logits: logits.tanh(), False),
        (lambda logits: logits + 1.0, False),
        (lambda logits: logits * float("nan"), False),
    ],
)
def test_logits_with_an_unknown_transformation_are_refused(bend: Any, fits: bool):
    model = tiny_model("llama").model
    model.register_forward_hook(lambda _, __, out: SimpleNamespace(logits=bend(out.logits)))
    if fits:
        target_of(model)
    else:
        with pytest.raises(UnsupportedModel, match=r"some-model .* logits .* differ by .* from lm_head\(last"):
            target_of(model)


# --- what is read from configurations ---


def test_end_tokens_are_collected_from_all_configurations():
    model = tiny_model("llama").model
    tokenizer = SimpleNamespace(eos_token_id=9)
    model.generation_config.eos_token_id, model.config.eos_token_id = [2, 5], 7
    assert target_of(model, tokenizer).eos_ids == {2, 5, 7, 9}
    model.generation_config.eos_token_id, model.config.eos_token_id = 3, [4]
    assert target_of(model, tokenizer).eos_ids == {3, 4, 9}
    model.generation_config = model.config.eos_token_id = None
    assert target_of(model).eos_ids == frozenset()


def test_a_window_that_is_not_used():
    unused = tiny_model("qwen2", sliding_window=8, use_sliding_window=False)
    assert (unused.sliding_window, unused.layer_kinds) == (None, ("full_attention",) * 2)


def test_weights_with_a_bias_and_with_a_scale():
    phi = target_of(built("phi", SMALL))
    assert phi.weights.lm_head_bias is phi.model.lm_head.bias is not None
    assert tiny_model("granite").weights.logit_scale == 0.5
    assert target_of(built("cohere", {**SMALL, "logit_scale": 0.25})).weights.logit_scale == 0.25


# --- twins ---


def test_a_twin_shares_weights_and_nothing_else():
    target = tiny_model("llama", tie_word_embeddings=True)
    text = torch.tensor([[5, 6, 7, 8, 9]])
    expected = target.model(text).logits
    twin = target.twin()
    assert (twin.tokenizer, twin.model_id) == (target.tokenizer, target.model_id)
    ours, theirs = ([*each.model.named_parameters(), *each.model.named_buffers()] for each in (target, twin))
    assert [(name, id(tensor)) for name, tensor in ours] == [(name, id(tensor)) for name, tensor in theirs]
    assert not {*target.model.modules()} & {*twin.model.modules()}
    assert torch.equal(twin.model(text).logits, expected)
    speed_up(twin.model)
    assert any(isinstance(module, PackedLinear) for module in twin.model.modules())
    assert not any(isinstance(module, PackedLinear) for module in target.model.modules())
    assert twin.config._attn_implementation != target.config._attn_implementation == "sdpa"
    assert torch.equal(target.model(text).logits, expected)
