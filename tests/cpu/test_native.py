"""The native library is right, and the bits of a token depend neither on other tokens nor on the shape of its tree."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu import native_library
from draftheads.cpu.drafts import largest
from draftheads.cpu.kernels import Native, NativeInt4, NativeInt8, smoothing
from draftheads.cpu.native_library import SequenceBatch, load_library, native_threads, sets_here, single_torch_thread
from draftheads.cpu.native_step import NativeStep
from draftheads.decode.engine import Engine
from draftheads.drafters.lookahead import Lookahead
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.runners.structure import check_trees, checked
from draftheads.settings import ROUNDED_BITS
from draftheads.speculation.draft import Draft
from draftheads.speculation.tree import Tree
from families import (
    ALL_FAMILIES,
    HAS_RECURRENT,
    PROMPTS,
    TREES,
    PlantedRandomTrees,
    needs_library,
    tiny_head,
    tiny_model,
)
from target_rows import Target

pytestmark = needs_library
LOGITS = TargetModel.logits
Choose = Callable[[str], None]
# families, with what the sizes of tests/families.py do not have: heads of 64 to 256 numbers, of which some turn, inner
# sizes that are no whole blocks, windows shorter than the text, all multipliers and caps
HYBRIDS: dict[str, dict[str, Any]] = {  # heads that are no whole vectors, and several parts of a state
    "qwen3_5_text": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_num_value_heads": 6,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "granitemoehybrid": {
        "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
        "mamba_n_heads": 4, "mamba_d_head": 40, "mamba_expand": 5, "mamba_d_state": 24, "residual_multiplier": 0.5,
        "shared_intermediate_size": 64,
    },
    "qwen3_next": {
        "num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_num_value_heads": 6,
    },
    "qwen3_5_moe_text": {"num_experts": 5, "moe_intermediate_size": 72, "linear_num_value_heads": 2},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "conv"], "num_experts": 5},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "mamba_head_dim": 40, "n_routed_experts": 5,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5,
    },
    "mamba2": {"num_hidden_layers": 3},
    "bamba": {"num_hidden_layers": 3, "mamba_n_groups": 1, "mamba_d_state": 40},
    "falcon_h1": {
        "mamba_n_heads": 4, "mamba_d_head": 40, "mamba_d_ssm": 160, "mamba_d_state": 24, "mamba_proj_bias": True,
        "attention_in_multiplier": 0.7, "attention_out_multiplier": 0.6, "key_multiplier": 0.8, "attention_bias": True,
        "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.9, "ssm_multipliers": [1.2, 0.8, 1.1, 0.7, 1.5],
        "mlp_multipliers": [1.2, 0.7], "mlp_bias": True, "embedding_multiplier": 2.0, "projectors_bias": True,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_num_value_heads": 6,
        "linear_allow_neg_eigval": True,
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"head_dim": 256, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
    "gemma3_text": {"head_dim": 80, "num_key_value_heads": 1},
    "phi3": {"hidden_size": 256, "intermediate_size": 64, "partial_rotary_factor": 0.75, "sliding_window": 8},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "olmo2": {"head_dim": 128, "num_key_value_heads": 1},
    "cohere2": {"head_dim": 96},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "qwen3_moe": {"num_experts": 5, "num_hidden_layers": 3, "mlp_only_layers": [1], "moe_intermediate_size": 24},
    "mixtral": {"sliding_window": 8},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 5, "num_experts_per_tok": 3, "initializer_range": 0.2},
    "gpt2": {},
    "gpt_neox": {"hidden_size": 64, "rotary_pct": 0.25},
    "stablelm": {"use_qkv_bias": True},
    "gpt_bigcode": {"multi_query": True},
    "glm4_moe": {"n_routed_experts": 5, "routed_scaling_factor": 1.5, "use_qk_norm": True, "moe_intermediate_size": 24},
    "granitemoeshared": {"num_local_experts": 5, "residual_multiplier": 0.5, "shared_intermediate_size": 64},
    **{name: {} for name in ("arcee", "cohere", "dots1", "gemma", "olmo3", "olmoe", "persimmon", "qwen2_moe")},
    **{name: {} for name in ("seed_oss", "starcoder2")},
    **(HYBRIDS if HAS_RECURRENT else {}),
}
MIXTURES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "nemotron_h"),
    *("dots1", "glm4_moe", "granitemoeshared", "olmoe", "qwen2_moe"),
)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- products ---


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 7), (64, 48), (100, 65), (100, 192)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_right(instructions: str, dtype: torch.dtype, outputs: int, inputs: int, has_bias: bool) -> None:
    weight = numbers(outputs, inputs, dtype=dtype)
    bias = numbers(outputs, dtype=dtype, seed=1) if has_bias else None
    product = Native(weight, bias)
    assert torch.equal(product.weight, weight)
    for count in (1, 2, 11, 29, 45):
        rows = numbers(count, inputs, dtype=dtype, seed=count)
        expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        gap = (product(rows).double() - expected).abs().max() / expected.abs().max()
        assert gap < ROUNDING[dtype], (instructions, count)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("inputs", [50, 96])
def test_a_rows_bits_depend_on_no_other_row(instructions: str, threads: int, dtype: torch.dtype, inputs: int) -> None:
    product = Native(numbers(70, inputs, dtype=dtype), None)
    rows = numbers(64, inputs, dtype=dtype, seed=1)
    alone = torch.cat([product(row[None]) for row in rows])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for count in range(1, 65):
        assert torch.equal(product(rows[order[:count]]), alone[order[:count]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_weights_that_are_exact_in_16_bits_take_half_the_memory(dtype: torch.dtype) -> None:
    held = Native(numbers(40, 30, dtype=dtype).float(), None)
    whole = Native(numbers(40, 30), None)
    assert held._packed.nbytes == whole._packed.nbytes // 2
    rows = numbers(3, 30, seed=1)
    assert (held(rows).double() - rows.double() @ held.weight.double().T).abs().max() < 1e-5


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 7), (64, 48), (100, 65), (100, 192)])
@pytest.mark.parametrize("is_smooth", [False, True])
def test_int8_products_are_right_and_have_the_same_bits_with_all_instructions(
    choose: Choose, threads: int, outputs: int, inputs: int, is_smooth: bool
) -> None:
    weight, bias = numbers(outputs, inputs), numbers(outputs, seed=1)
    rows = numbers(45, inputs, seed=2)
    rows[3] = 0.0
    product = NativeInt8(weight, bias, smoothing(rows.abs().amax(0), [weight]) if is_smooth else None)
    if not is_smooth:  # rounded to the nearest of 255 numbers
        assert ((product.weight - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 * 1.001).all()
        scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        rounded = (rows / scales).round() * scales
        expected = rounded.double() @ product.weight.double().T + bias.double()
        assert torch.allclose(product(rows).double(), expected, atol=1e-5, rtol=1e-5)
    whole = rows.double() @ weight.double().T + bias.double()
    assert (product(rows).double() - whole).abs().max() < 0.03 * whole.abs().max()
    bits = product(rows)
    for name in sets_here(load_library()):
        choose(name)
        assert torch.equal(product(rows), bits), name
        assert torch.equal(torch.cat([product(row[None]) for row in rows]), bits), name


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("outputs", [1, 31, 1000])
def test_the_largest_outputs_are_those_of_the_product(
    instructions: str, threads: int, dtype: torch.dtype, scale: float, outputs: int
) -> None:
    """The first of equal ones, also of those that rounding makes equal; what is no number is never the largest."""
    weight = numbers(outputs, 40, dtype=dtype)
    weight[outputs // 2 :] = weight[: outputs - outputs // 2].clone()  # each twice
    weight[-1, 0] = float("nan")
    rows = numbers(9, 40, dtype=dtype, seed=1)
    rows[3] = 0.0
    for product in (Native(weight, numbers(outputs, seed=2).to(dtype) / 8), NativeInt8(weight.nan_to_num(), None)):
        logits = product(rows) * scale if scale != 1.0 else product(rows)
        is_same = torch.equal(product.largest(rows, scale), logits.nan_to_num(-torch.inf).argmax(-1))
        assert is_same or (scale != 1.0 and dtype != torch.float32)


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_greedy_steps_need_no_logits_that_grow_with_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 caps its logits. A request that asks for more has them, and greedy ones beside it the same text."""
    model, _ = sped_up(family)
    settings: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    drafters = (None, tiny_head("hydra", model), Lookahead())
    plain = Engine(model).generate(PROMPTS, logprobs=1, **settings)
    calls = []
    monkeypatch.setattr(type(model), "logits", lambda *given: calls.append(given[1].shape) or LOGITS(*given))
    for drafter in drafters:
        calls.clear()
        found = Engine(model, drafter).generate(PROMPTS, **settings)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        assert bool(calls[1:]) == (family == "gemma2"), "prompts give the first token"
    for more in (
        {"temperature": 1.0, "seed": 1},
        {"logprobs": 2},
        {"repetition_penalty": 1.5},
        {"logit_bias": {5: 1.0}},
    ):
        calls.clear()
        Engine(model).generate(PROMPTS[:1], **more, **settings)
        assert calls[1:], more


def test_smoothing_makes_outliers_cheaper(instructions: str) -> None:
    """One input that is much larger than the others takes the steps of all."""
    weight, rows = numbers(64, 64), numbers(32, 64, seed=1)
    rows[:, 5] *= 100.0
    expected = rows @ weight.T
    loss = [
        (NativeInt8(weight, None, given)(rows) - expected).pow(2).mean()
        for given in (None, smoothing(rows.abs().amax(0), [weight]))
    ]
    assert loss[1] < 0.5 * loss[0]


@pytest.mark.parametrize("kind", [NativeInt8, NativeInt4])
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none_when_rounded(
    instructions: str, kind: type[NativeInt8 | NativeInt4], strange: float
) -> None:
    rows, weight = numbers(3, 40), numbers(20, 40, seed=1)
    rows[1, 7] = strange
    out = kind(weight, None)(rows)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    weight[3, 35] = strange
    out = kind(weight, None)(rows)
    assert out[:, 3].isnan().all()
    assert out[0, [0, 1, 2, *range(4, 20)]].isfinite().all()


# --- int4 ---


def by_definition(rows: Tensor, product: NativeInt4) -> Tensor:
    """Rows whose groups of 32 inputs are rounded to 255 numbers, times the rounded weights."""
    groups = F.pad(rows, (0, -rows.shape[1] % 32)).view(len(rows), -1, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    rounded = ((groups / scales.clamp_min(1e-30)).round() * scales).view(len(rows), -1)[:, : rows.shape[1]]
    bias = 0.0 if product.bias is None else product.bias.double()
    return rounded.double() @ product.weight.double().T + bias


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 7), (64, 48), (100, 65), (100, 192)])
def test_int4_products_have_the_same_bits_everywhere(choose: Choose, threads: int, outputs: int, inputs: int) -> None:
    weight, bias, rows = numbers(outputs, inputs), numbers(outputs, seed=1), numbers(45, inputs, seed=2)
    rows[3] = 0.0
    rows[:, : inputs // 2] *= 100.0  # its groups have scales of their own
    product = NativeInt4(weight, bias)
    bits, expected = product(rows), by_definition(rows, product)
    assert (bits.double() - expected).abs().max() < 3e-6 * expected.abs().max().clamp_min(1.0)
    for name in sets_here(load_library()):
        choose(name)
        alone = torch.cat([product(row[None]) for row in rows])
        for count in (1, 2, 3, 4, 5, 7, 8, 13, 45):
            assert torch.equal(product(rows[:count]), bits[:count]), (name, count)
        assert torch.equal(alone, bits), name


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 7), (70, 96), (40, 75)])
def test_weights_that_int4_can_hold_stay_exact(outputs: int, inputs: int) -> None:
    whole = torch.randint(-8, 8, (outputs, inputs), generator=torch.Generator().manual_seed(0))
    whole[:, ::32], whole[:, 1::32] = -8, 7
    scales = 2.0 ** torch.arange(-4, 4).repeat(-(-outputs * inputs // 8))[: outputs * inputs].view(outputs, inputs)
    scales = scales[:, torch.arange(inputs) // 32]  # one for each output and 32 inputs
    weight = whole * scales
    weight[-1] = 0.0
    product = NativeInt4(weight, None)
    assert torch.equal(product.weight, weight)
    assert product.nbytes == -(-outputs // 32) * -(-inputs // 32) * 640


def test_int4_scales_have_less_error_than_those_of_the_range() -> None:
    weight = numbers(64, 256)
    groups = weight.view(64, 8, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    plain = (((groups - low) * 15 / (high - low)).round() * (high - low) / 15 + low).view_as(weight)

    def error(rounded: Tensor, sizes: Tensor) -> float:
        return float(((rounded - weight).square() * sizes).sum())

    sizes = torch.ones(256)
    assert error(NativeInt4(weight, None).weight, sizes) < 0.9 * error(plain, sizes)
    sizes = numbers(256, seed=1).exp()  # of the inputs
    weighted = NativeInt4(weight, None, sizes).weight
    assert error(weighted, sizes) < 0.95 * error(NativeInt4(weight, None).weight, sizes)
    unseen = NativeInt4(weight, None, torch.zeros(256)).weight
    assert error(unseen, torch.ones(256)) < 1.1 * error(plain, torch.ones(256)), "a typical text without some inputs"


def test_the_largest_sums_of_int4_fit_into_16_bits(instructions: str) -> None:
    """16 products of at most 15 times 127 are added there."""
    weight = torch.full((32, 64), 7.0)
    weight[:16] = -8.0
    weight[:, ::32], weight[:, 1::32] = -8.0, 7.0
    product = NativeInt4(weight, None)
    assert torch.equal(product.weight, weight)
    signs = numbers(8, 64).sign()
    rows = 127.0 * torch.cat([torch.ones(1, 64), -torch.ones(1, 64), signs, signs * weight[:1].sign()])
    assert torch.equal(product(rows), rows @ weight.T)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 7), (64, 48), (100, 65)])
@pytest.mark.parametrize("is_smooth", [False, True])
def test_rows_of_a_packed_int8_weight(outputs: int, inputs: int, is_smooth: bool) -> None:
    product = NativeInt8(numbers(outputs, inputs), None, numbers(inputs, seed=1).exp() if is_smooth else None)
    places = torch.tensor([[0, outputs - 1], [outputs // 2, 0]])
    assert torch.equal(product.rows_of(places), product.weight[places])


# --- passes ---

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32, "int4": torch.float32}


def sped_up(family: str, precision: str = "fp32", model: TargetModel | None = None) -> tuple[TargetModel, Tensor]:
    """A native model, and the logits of its stock modules in a tree."""
    model = model or tiny_model(family, dtype=PRECISIONS[precision], **FAMILIES[family])
    stock = check_trees(model)
    used = load_library().draftheads_kernels(b"")
    load_library().draftheads_kernels(None)  # the portable kernels are not chosen when a model is loaded
    native = model.sped_up(bits=ROUNDED_BITS.get(precision))
    load_library().draftheads_kernels(used)
    assert native.native is not None, "this family has a native form"
    return native, stock


@pytest.mark.few(24)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-5), ("bf16", 0.1), ("int8", 0.2), ("int4", 0.8)])
def test_passes_have_the_logits_of_stock_modules(instructions: str, family: str, precision: str, most: float) -> None:
    model, stock = sped_up(family, precision)
    if (
        family in HYBRIDS and precision in ROUNDED_BITS
    ):  # rounding changes decays: what is compared has the same weights
        stock, most = check_trees(replace(model, native=None)), 0.05
    # in a tree, as in plain texts
    found = check_trees(model, stock=None if precision in ROUNDED_BITS else stock).float()
    # rounding changes who the best experts are, and LFM2 has sigmoids, which are alike
    chooses_others = precision in {"int4", "int8" if family == "lfm2_moe" else ""} and family in MIXTURES
    assert chooses_others or (found - stock.float()).abs().max() / stock.float().abs().max() < most


def test_weights_of_one_input_in_several_forms(instructions: str) -> None:
    """Some are exact in 16 bits, and the library reads their rows in another form."""
    model = tiny_model("llama")
    for layer in model.model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.o_proj, layer.mlp.up_proj):
            part.weight.data = part.weight.bfloat16().float()
    native, stock = sped_up("llama", "fp32", model)
    found = check_trees(native, stock=stock)
    assert (found - stock).abs().max() / stock.abs().max() < 1e-5


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.few(24)
@pytest.mark.parametrize("family", sorted({*ALL_FAMILIES} - {*FAMILIES}))
@pytest.mark.usefixtures("choose")
def test_other_families_have_no_native_pass(family: str) -> None:
    """Some have parts with known names that compute something else, which their layers' logits show."""
    load_library().draftheads_kernels(None)
    model = checked(tiny_model(family), lambda: tiny_model(family), fast=True)
    assert model.native is None, "name the family in FAMILIES and in docs/native.md"


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **rope}}) for kind, rope in ROPES.items()),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.1}),
    ("llama", {"hidden_act": "relu", "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("mistral", {"sliding_window": 4}),
    ("gemma2", {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}),
    ("granite", {"attention_multiplier": 0.9, "logits_scaling": 7.0, "embedding_multiplier": 3.0}),
    ("granite", {"residual_multiplier": 0.3, "attention_bias": True, "mlp_bias": True}),
    ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    ("cohere2", {"logit_scale": 0.3, "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}}),
    ("glm", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    ("gpt_neox", {"rotary_pct": 0.5, "use_parallel_residual": False, "attention_bias": False}),
    ("bamba", {"time_step_limit": [0.4, 0.9], "mamba_proj_bias": True, "num_hidden_layers": 3}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False}),
    ("granitemoehybrid", {"num_local_experts": 5, "shared_intermediate_size": 40, "residual_multiplier": 0.4}),
    ("qwen2_moe", {"num_experts": 5, "norm_topk_prob": True}),
    ("arcee", {"mlp_bias": True}),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "layers_block_type": ["mlp", "mamba", "attention"]}),
    ("lfm2", {"conv_L_cache": 2, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda value: str(value)[:60])
def test_settings_change_the_native_pass_as_they_change_transformers(family: str, changes: dict[str, Any]) -> None:
    """The native pass has the logits of transformers, or is not taken. Biases and norms are not their usual values."""
    stock = tiny_model(family, **changes)
    for weight in stock.model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    text = [(3 + 7 * place) % stock.vocab_size for place in range(24)]
    expected = stock.model(torch.tensor([text])).logits[:, -1]
    model = checked(stock, lambda: stock, fast=True)
    torch.testing.assert_close(
        runner_for(model).prefill([text])[1], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def states_of(model: TargetModel, prompt: Sequence[int], layers: Sequence[int]) -> Tensor:
    """h_t and the inputs of layers of a text that is read in one pass."""
    target = Target(model, layers)
    [(last, hidden)] = _read(target, [prompt])
    return torch.cat([last, hidden], 1)


def _read(target: Target, prompts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    target.open(*[100] * len(prompts))
    return target.read(prompts)


@pytest.mark.few(48)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_are_those_of_one_token_at_a_time(instructions: str, threads: int, family: str, precision: str) -> None:
    """In a whole text, in a tree, and beside other rows."""
    model, _ = sped_up(family, precision)
    prompt = [5 + n % 17 for n in range(40)]
    layers = (0, 1)
    target = Target(model, layers)
    target.open(100)
    one_by_one = torch.cat([torch.cat(target.read([[token]])[0], 1) for token in prompt])
    assert torch.equal(states_of(model, prompt, layers), one_by_one)

    # two texts beside each other, and behind the second one a tree that has the rest of the prompt as a path
    target = Target(model, layers)
    _read(target, [[3, 9, 4], prompt[:30]])
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
    tokens = torch.tensor([[7, 7, 7, 7, 7, 7], [prompt[30], 9, prompt[31], 8, prompt[32], prompt[33]]])
    on_path = [tree.paths.index(path) for path in ((), (1,), (1, 0), (1, 0, 0))]
    draft = Draft.on_tree(tree, tokens)
    _, hidden = target.verify(draft)
    assert torch.equal(hidden[1, on_path], one_by_one[30:34, model.hidden_size :])


def test_a_draft_that_was_cut_to_its_roots_has_its_own_tokens(instructions: str) -> None:
    """Its tokens have gaps between them in memory."""
    model, _ = sped_up("llama")
    tree = Tree.from_paths([(0,)])
    found = []
    for cuts in (False, True):
        target = Target(model)
        _read(target, [[3, 9, 4], [5, 6]])
        draft = Draft.on_tree(tree, torch.tensor([[7, 8], [9, 10]])) if cuts else None
        roots = Draft.on_tree(Tree.from_paths([]), torch.tensor([[7], [9]]))
        found.append(target.verify(roots if draft is None else draft.first(1))[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("drafter", ["hydra", "eagle3"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_drafted_texts_are_plain_texts(drafter: str, settings: dict[str, Any], precision: str) -> None:
    """Elsewhere bf16 texts may differ: a step rounds in another order than a pass of one token."""
    model, _ = sped_up("qwen3", precision)
    options = {"max_new_tokens": 60, **settings}
    plain = Engine(model).generate(PROMPTS, **options)
    drafted = Engine(model, tiny_head(drafter, model), shape=TREES["ragged"]).generate(PROMPTS, **options)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_all_families_are_those_of_transformers(family: str) -> None:
    """Plain, in trees of any shape beside other rows, sampled, and with a head that reads the inputs of layers."""
    stock = tiny_model(family, **FAMILIES[family])
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [stock.model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]
    expected = {tuple(prompt): tuple(text[len(prompt) :]) for prompt, text in zip(PROMPTS, texts, strict=True)}
    layers = (0, 1)
    states = stock.hidden_states(torch.tensor([texts[1]]), layers)[0]
    model, _ = sped_up(family)
    found = states_of(model, texts[1], layers)
    torch.testing.assert_close(
        found.roll(-stock.hidden_size, -1), states, rtol=1e-4, atol=1e-4 * float(states.abs().max())
    )
    settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    drafters = (None, PlantedRandomTrees(expected, max_nodes=12), tiny_head("eagle3", model))
    for drafter in drafters:
        answers = Engine(model, drafter).generate(PROMPTS, **settings)
        assert [answer.token_ids for answer in answers] == [*expected.values()], drafter
    sampled = [Engine(model, head).generate(PROMPTS, temperature=1.0, seed=3, **settings) for head in drafters[::2]]
    assert [answer.token_ids for answer in sampled[0]] == [answer.token_ids for answer in sampled[1]]


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_weight_of_several_parts_is_read_in_place_where_they_are_whole_blocks(precision: str) -> None:
    whole, odd = (
        tiny_model("phi3", intermediate_size=size).sped_up(bits=ROUNDED_BITS.get(precision)) for size in (64, 48)
    )
    assert whole.native is not None
    product = whole.model.model.layers[0].mlp.gate_up_proj.product
    half = product.part(64, 64)
    assert half._packed is product._packed
    rows = numbers(3, 32)
    assert torch.equal(half(rows), product(rows)[:, 64:])
    assert (odd.native is not None) == (precision == "fp32"), "other rounded weights would be rounded again"


@pytest.mark.parametrize(("chosen", "bias"), [(3, 0.0), (1, float("nan"))])
def test_experts_of_any_scores_are_among_those_that_there_are(chosen: int, bias: float) -> None:
    """Scores that are no numbers give the first experts, and their texts are no numbers."""
    model = tiny_model("gpt_oss", num_local_experts=4, num_experts_per_tok=chosen)
    model.model.model.layers[0].mlp.router.bias.data += bias
    native = model.sped_up()
    assert native.native is not None
    last = states_of(native, [5, 6, 7], ())
    assert bool(last.isfinite().all()) == (bias == 0.0)
    router = native.model.model.layers[0].mlp.router
    router.top_k = 5
    with pytest.raises(ValueError, match="experts differ"):
        NativeStep(native.model, native.windows)


@pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("family", ["lfm2_moe", "nemotron_h"])
def test_a_bias_may_change_which_experts_are_chosen_and_not_their_shares(
    instructions: str, family: str, norms: bool
) -> None:
    model = tiny_model(family, **{**HYBRIDS[family], "routed_scaling_factor": 0.7, "norm_topk_prob": norms})
    biases = [bias for name, bias in model.model.named_buffers() if "bias" in name]
    assert biases
    for bias in biases:
        bias.add_(numbers(5))
    native, stock = sped_up(family, "fp32", model)
    assert (check_trees(native, stock=stock) - stock).abs().max() / stock.abs().max() < 1e-5


@pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")
@pytest.mark.parametrize("gates_first", [True, False])
def test_outputs_of_a_recurrence_may_be_normed_in_groups_before_their_gates(gates_first: bool) -> None:
    norms = {"mamba_rms_norm": True, "mamba_norm_before_gate": not gates_first}
    native, stock = sped_up("falcon_h1", "fp32", tiny_model("falcon_h1", seed=1, **HYBRIDS["falcon_h1"], **norms))
    assert (check_trees(native, stock=stock) - stock).abs().max() / stock.abs().max() < 1e-5


@pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")
@pytest.mark.parametrize("family", HYBRIDS)
def test_biases_norms_and_decays_of_recurrent_models_count(family: str) -> None:
    """In a new model they are zeros or ones, or equal in all layers. Logits may differ as much as at loading."""
    model = tiny_model(family, **HYBRIDS[family])
    for place, weight in enumerate(model.model.parameters()):
        if weight.dim() == 1:
            weight.add_(0.3 * numbers(len(weight), seed=place))
    native, stock = sped_up(family, "fp32", model)
    assert (check_trees(native, stock=stock) - stock).abs().max() / stock.abs().max() < 1e-4


@pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")
@pytest.mark.parametrize("limits", [(0.9, 100.0), (0.0, 0.3)])
def test_steps_of_a_recurrence_have_limits(limits: tuple[float, float]) -> None:
    texts = [
        sped_up("mamba2", "fp32", tiny_model("mamba2", **HYBRIDS["mamba2"], time_step_limit=some))
        for some in (limits, (0.0, float("inf")))
    ]
    [limited, stock], [_, free] = texts
    assert (check_trees(limited, stock=stock) - stock).abs().max() / stock.abs().max() < 1e-5
    assert (free - stock).abs().max() / stock.abs().max() > 1e-2, "the limits change something"


@pytest.mark.skipif(not HAS_RECURRENT, reason="transformers is too old")
def test_experts_that_are_chosen_among_those_of_some_groups_are_not_native() -> None:
    options = {**HYBRIDS["nemotron_h"], "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    assert tiny_model("nemotron_h", **options).sped_up().native is None


MISFITS: dict[str, tuple[str, str, Any]] = {  # a part of a model, its attribute, and the value
    "heads, as if queries had a gate": ("config", "num_attention_heads", 2),
    "no groups": ("config", "num_attention_heads", 3),
    "a short norm": ("model.layers.1.post_attention_layernorm", "weight", nn.Parameter(torch.ones(31))),
    "another inner size": ("model.layers.0.mlp", "down_proj", nn.Linear(40, 32, bias=False)),
    "other outputs": ("model.layers.0.self_attn", "o_proj", nn.Linear(24, 32, bias=False)),
}


@pytest.mark.parametrize("case", MISFITS)
def test_sizes_that_do_not_fit_have_no_native_pass(case: str) -> None:
    """The library would read and write other memory."""
    target, (part, name, value) = tiny_model("llama"), MISFITS[case]
    setattr(target.model.config if part == "config" else target.model.get_submodule(part), name, value)
    assert target.sped_up().native is None


def test_fewer_windows_than_layers_are_an_error() -> None:
    model, _ = sped_up("llama")
    with pytest.raises(ValueError, match="zip"):
        NativeStep(model.model, model.windows[:1])


@pytest.mark.parametrize("threads", [4], indirect=True)
@pytest.mark.parametrize("drafter", [None, "hydra"])
def test_models_of_other_sizes_take_turns(drafter: str | None, threads: int) -> None:
    """A thread that comes late from one model's pass takes no task of the other's."""
    models = [sped_up("llama")[0], sped_up("mixtral")[0], tiny_model("llama", hidden_size=256).sped_up()]
    engines = [Engine(model, drafter and tiny_head(drafter, model)) for model in models]
    first = [engine.generate(PROMPTS, max_new_tokens=8) for engine in engines]
    for _ in range(10):
        for engine, expected in zip(engines, first, strict=True):
            found = engine.generate(PROMPTS, max_new_tokens=8)
            assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


def test_positions_without_an_entry_are_an_error() -> None:
    for family in ("gpt2", "llama"):
        model, _ = sped_up(family)
        assert model.native is not None
        memory, depths = model.native.memory(8192), torch.zeros(1, dtype=torch.int32)
        for length, depth in ((0, -1), (256 if family == "gpt2" else 4096, 0 if family == "gpt2" else 9000)):
            texts = SequenceBatch([memory], [length], [1], depths + depth)
            with pytest.raises(IndexError, match=f"a position of {length} \\+ {depth} has no entry"):
                model.native.run(torch.tensor([3]), texts, last_position=99999)


def test_tokens_that_do_not_fit_are_an_error() -> None:
    model, _ = sped_up("llama")
    assert model.native is not None
    memory, depths = model.native.memory(4), torch.zeros(1, dtype=torch.int32)
    other = memory.new_zeros(*memory.shape[:4], 1)
    for part, length, count, drafted in (
        (memory, 4, 1, 0),
        (memory, 1, 1, 3),
        (memory, 0, 2, 0),
        (memory[:1], 0, 1, 0),
        (other, 0, 1, 0),
        (memory.half(), 0, 1, 0),
    ):
        with pytest.raises(ValueError, match="do not fit into memory"):
            model.native.run(torch.tensor([3]), SequenceBatch([part], [length], [count], depths, drafted=drafted))
    target = Target(model)
    target.open(9)
    for token in (model.vocab_size, -1):
        with pytest.raises(IndexError, match=f"vocabulary, 0 to {model.vocab_size - 1}"):
            target.read([[token]])


def test_a_forked_process_computes(tmp_path: Any) -> None:
    """The threads of the parent are not in the child."""
    program = """
import os, torch
from draftheads.cpu.kernels import Native
torch.set_num_threads(3)
product, rows = Native(torch.randn(64, 32), None), torch.randn(4, 32)
before = product(rows)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(product(rows), before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(product(rows), before)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("value", "has_library"), [("off", False), ("portable", True)])
@pytest.mark.usefixtures("choose")
def test_the_environment_names_the_instructions(value: str, has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEADS_KERNELS", value)
    found = load_library.__wrapped__()
    assert (found is not None) == has_library
    assert found is None or found.draftheads_kernels(b"") == value.encode()
    monkeypatch.setenv("DRAFTHEADS_KERNELS", "avx1024")
    with pytest.raises(native_library.InvalidSettings, match=r"avx1024.*portable"):
        load_library.__wrapped__()


def test_without_the_library_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    native, _ = sped_up("llama")
    expected = Engine(native).generate(PROMPTS, max_new_tokens=20)
    for module in ("kernels", "native_step"):
        monkeypatch.setattr(f"draftheads.cpu.{module}.load_library", lambda: None)
    pure = tiny_model("llama").sped_up()
    assert pure.native is None
    found = Engine(pure).generate(PROMPTS, max_new_tokens=20)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


def test_rows_of_another_type_or_size_are_an_error() -> None:
    product = Native(numbers(8, 6), None)
    for rows in (numbers(2, 6, dtype=torch.bfloat16), numbers(2, 5), numbers(6)):
        with pytest.raises(RuntimeError, match=r"takes \(n, 6\) of torch.float32"):
            product(rows)


def changed(structure: type[Structure], change: str) -> type[Structure]:
    fields = list(structure._fields_)
    names = [name for name, *_ in fields]
    if change == "exchanged":
        at, other = names.index("tokens"), names.index("texts")
        fields[at], fields[other] = fields[other], fields[at]
    else:
        fields.append(("more", native_library.c_int64)) if change == "longer" else fields.pop()
    return type(structure.__name__, (Structure,), {"_fields_": fields})


@pytest.mark.parametrize("change", ["exchanged", "longer", "shorter"])
def test_a_library_of_another_version_is_not_used(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two fields of one size were exchanged."""
    others = [changed(each, change) if each is native_library.Pass else each for each in native_library.STRUCTURES]
    monkeypatch.setattr(native_library, "STRUCTURES", others)
    assert load_library.__wrapped__() is None


def test_a_thread_that_begins_during_native_passes_has_all_threads_of_torch(threads: int) -> None:
    seen: list[int] = []

    def other() -> None:
        torch.set_num_threads(1)  # as a new thread inherits it
        with single_torch_thread():
            seen.append(native_threads())

    with single_torch_thread():
        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert native_threads() == threads
    assert seen == [threads]
    assert (native_threads(), torch.get_num_threads()) == (threads, threads)


# --- the largest logits ---


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("size", "count", "divisor"), [(1, 1, 1.0), (19, 19, 0.7), (1000, 10, 1.5), (777, 64, 1.0)])
def test_the_largest_logits(instructions: str, dtype: torch.dtype, size: int, count: int, divisor: float) -> None:
    logits = numbers(2, 3, size, dtype=dtype)
    values, places, totals = largest(logits, count, divisor)
    scaled = logits.float() / divisor
    order = scaled.sort(dim=-1, descending=True, stable=True)  # of equal ones the first
    assert torch.equal(places, order.indices[..., :count])
    assert torch.allclose(values, order.values[..., :count], atol=1e-6, rtol=1e-6)
    assert torch.allclose(totals, scaled.logsumexp(-1, keepdim=True), atol=1e-5)


def test_the_largest_of_impossible_logits_are_different_places(instructions: str) -> None:
    nan, none = float("nan"), -float("inf")
    values, places, totals = largest(torch.tensor([[none, 1.0, nan, none], [none] * 4, [nan] * 4]), 3)
    assert places[0, 0] == 1
    assert values.tolist() == [[1.0, none, none], [none] * 3, [none] * 3]
    assert all(len(set(row)) == 3 for row in places.tolist())
    assert totals[0].isnan()
    assert totals[2].isnan()
