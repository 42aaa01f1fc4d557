"""The fast model has the results of the stock model; with exact bits, bits do not depend on shapes."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from draftheads.cpu import optimise
from draftheads.cpu.kernels import PackedLinear, Plain, RoundedEmbedding
from draftheads.cpu.native_library import SequenceBatch, load_library
from draftheads.cpu.optimise import MAX_TREE_ROWS, grouped_attention, kernels_of, speed_up
from draftheads.errors import InvalidSettings
from draftheads.loading import load_target
from draftheads.models.fingerprint import MAX_DIFFERENCE, difference
from draftheads.runners.transformers_runner import as_float_mask
from draftheads.settings import ROUNDED_BITS, Precision
from families import FAMILIES, VOCAB, needs_library, tiny_model

NATIVE = [*FAMILIES, "cohere2", "smollm3", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmo3", "olmoe", "arcee"]


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


# --- modules ---


@needs_library
@pytest.mark.parametrize("family", NATIVE)
def test_layers_of_common_families_are_native(family: str):
    target = tiny_model(family)
    fast = load_target(target.model, tokenizer=target.tokenizer)
    assert fast.native is not None
    assert nn.Linear not in kinds(fast.model)


@pytest.mark.parametrize("family", ["exaone4", "ernie4_5", "helium", "nemotron"])
def test_layers_with_another_computation_are_not_native(family: str):
    """Some have the same names and other positions, and others an activation, an expert or a norm that is not known."""
    target = tiny_model(family)
    assert load_target(target.model, tokenizer=target.tokenizer).native is None


def test_weights_are_stored_once():
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    kept = [
        layer.weight for layer in model.model.modules() if isinstance(layer, nn.Linear)
    ]  # else others get their place
    before = {weight.data_ptr() for weight in kept}
    expected = model.lm_head.weight.clone()
    model = model.sped_up()
    assert kernels_of(model.model) == "fast"
    weights = model.weights
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr(), "a tied lm_head gives the embedding"
    assert torch.equal(model.weights.lm_head, expected)
    packed = [m.product for m in model.model.modules() if isinstance(m, PackedLinear) and type(m.product) is not Plain]
    assert packed or load_library() is None
    tensors = [v for p in packed for v in vars(p).values() if isinstance(v, Tensor) and v.layout == torch.strided]
    assert not {tensor.data_ptr() for tensor in tensors if tensor.numel() > 1} & before
    matrices = [tensor for tensor in model.model.parameters() if tensor.dim() > 1]
    assert [tensor.data_ptr() for tensor in matrices] == [weights.embedding.data_ptr()]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a list of what this process has mapped")
@pytest.mark.parametrize(
    "precision", ["bf16", "fp32", *(pytest.param(name, marks=needs_library) for name in ROUNDED_BITS)]
)
def test_the_file_of_the_weights_is_not_kept_in_memory(precision: Precision, tmp_path: Path):
    """A single small tensor that lies in the mapped file would keep all of it."""
    target = tiny_model("llama", tie_word_embeddings=True)
    target.model.to(torch.bfloat16).save_pretrained(tmp_path)
    backend = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1").save_pretrained(tmp_path)
    loaded = load_target(tmp_path, precision=precision)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert loaded.precision == precision


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_an_embedding_that_is_exact_in_16_bits_is_stored_in_16_bits(family: str):
    exact, inexact = tiny_model(family), tiny_model(family)
    exact.model.get_input_embeddings().weight.copy_(exact.weights.embedding.bfloat16())
    text = torch.arange(20)[None] % VOCAB
    expected = exact.model(text).logits
    for stock, dtype in ((exact, torch.bfloat16), (inexact, torch.float32)):
        model = stock.sped_up()
        assert model.weights.embedding.dtype == dtype
        assert model.dtype == torch.float32
    torch.testing.assert_close(exact.model(text).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_faster_model_has_the_lm_head_the_digest_and_the_sizes_of_the_stock_one():
    model, stock = tiny_model("qwen2").sped_up(), tiny_model("qwen2")
    torch.testing.assert_close(model.weights.lm_head, stock.weights.lm_head, rtol=0, atol=0)
    assert model.weights_fingerprint == stock.weights_fingerprint
    assert (model.hidden_size, model.vocab_size, model.dtype) == (stock.hidden_size, stock.vocab_size, stock.dtype)


def test_other_attention_is_not_replaced():
    target = tiny_model("llama")
    target.model.set_attn_implementation("eager")
    speed_up(target.model)
    assert (target.config._attn_implementation, kernels_of(target.model)) == ("eager", "stock")


def test_a_mask_is_repeated_for_each_number_of_heads_in_a_group():
    torch.manual_seed(0)
    mask = as_float_mask(torch.ones(1, 3, 9, dtype=torch.bool), torch.float32)
    key, value = torch.randn(2, 1, 2, 9, 8)
    for heads in (4, 8, 2):  # layers of one pass that share a mask
        query = torch.randn(1, heads, 3, 8)
        found, _ = grouped_attention(nn.Module(), query, key, value, mask)
        torch.testing.assert_close(found.double(), eager(query, key, value, mask, 8**-0.5), rtol=0, atol=5e-6)


# --- int8 ---


@needs_library
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt2", "mixtral", "gemma2")])
@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_rounded_logits_are_those_of_the_rounded_weights(family: str, bits: int):
    """Up to the rounding of rows. Random weights of so few inputs lose much in 4 bits."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    target, stock = tiny_model(family, **sizes), tiny_model(family, **sizes)
    target = target.sped_up(bits=bits)
    assert target.precision == f"int{bits}"
    layers = [layer for layer in target.model.modules() if isinstance(layer, PackedLinear)]
    lm_head = target.model.get_output_embeddings()
    assert {layer.product.name for layer in layers if layer is not lm_head} == {f"native-int{bits}"}
    assert lm_head.product.name == "native-int8"
    text = torch.arange(20)[None] % VOCAB
    found, exact = target.model(text).logits, stock.model(text).logits
    for name, layer in target.model.named_modules():
        if isinstance(layer, PackedLinear):
            stock.model.get_submodule(name).weight.copy_(layer.weight)
    stock.model.get_input_embeddings().weight.copy_(target.weights.embedding)
    rounded = stock.model(text).logits
    assert float((found - rounded).norm() / rounded.norm()) < 0.2
    assert 0.0 < float((found - exact).norm() / exact.norm()) < (0.2 if bits == 8 else 1.0)


@needs_library
@pytest.mark.parametrize("is_tied", [False, True])
@torch.inference_mode()
def test_an_int4_model_has_its_embedding_once_and_in_8_bits(is_tied: bool):
    stock, target = (tiny_model("llama", tie_word_embeddings=is_tied) for _ in range(2))
    before = stock.fingerprints
    target = target.sped_up(bits=4)
    embedding, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    assert isinstance(embedding, RoundedEmbedding)
    assert (embedding.product is lm_head.product) == is_tied
    assert not [weight for weight in target.model.parameters() if weight.dim() > 1], "there is no other copy"
    text = torch.arange(VOCAB)[None]
    expected = stock.model.get_input_embeddings()(text)
    assert torch.equal(embedding(text)[0], target.weights.embedding)
    assert 0.0 < float((embedding(text) - expected).norm() / expected.norm()) < 0.02
    assert difference(target.fingerprints.embedding, before.embedding) < MAX_DIFFERENCE
    assert difference(target.fingerprints.lm_head, before.lm_head) < MAX_DIFFERENCE
    assert (target.device, target.dtype, target.vocab_size) == (stock.device, stock.dtype, stock.vocab_size)
    native = target.native
    assert native is not None
    memory, depths = native.memory(VOCAB), torch.arange(VOCAB, dtype=torch.int32)
    layers = native.run(text[0], SequenceBatch([memory], [0], [VOCAB], depths), (0,), last_position=VOCAB)[1]
    torch.testing.assert_close(layers, embedding(text)[0], rtol=0, atol=1e-7)


@needs_library
@pytest.mark.parametrize("family", ["dbrx", "jetmoe"])
def test_int8_for_a_model_of_other_layers_is_refused(family: str):
    with pytest.raises(InvalidSettings, match=r"int8 needs nn.Linear layers; only \d+% of the weights of this \w+ "):
        tiny_model(family).sped_up(bits=8)


# --- attention ---


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """(b, N, H, d), by the definition: each query head with the KV head of its group."""
    batch, heads, nodes, _ = query.shape
    groups = key.shape[1]
    out = torch.empty(batch, nodes, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        own = head // (heads // groups)
        scores = query[:, head].double() @ key[:, own].double().transpose(-1, -2) * scaling
        if mask is None:
            ahead = torch.ones(nodes, key.shape[2], dtype=torch.bool).tril()
            scores = scores.masked_fill(~ahead, -torch.inf)
        else:
            scores = scores + mask[:, 0].double()
        out[:, :, head] = scores.softmax(-1) @ value[:, own].double()
    return out


@pytest.fixture
def by_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Texts and slots of each use of batched products; the CPU seems to have bf16."""
    used: list[tuple[int, int]] = []
    original = optimise._by_products

    def spying(rows: Tensor, key: Tensor, *rest: Any) -> Tensor:
        used.append((len(rows), key.shape[2]))
        return original(rows, key, *rest)

    monkeypatch.setattr(optimise, "_by_products", spying)
    monkeypatch.setattr(optimise, "native_bf16", lambda: True)
    return used


@pytest.mark.few(12)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_grouped_attention_equals_stock_attention(heads: int, groups: int, masked: bool, scaling: float | None):
    torch.manual_seed(0)
    for batch, nodes in ((1, 1), (2, 5), (1, MAX_TREE_ROWS + 2)):
        slots = nodes + 7 if masked else nodes
        query = torch.randn(batch, heads, nodes, 8)
        key, value = torch.randn(batch, groups, slots, 8), torch.randn(batch, groups, slots, 6)
        visible = torch.rand(batch, nodes, slots) < 0.6
        visible[:, :, 0] = True
        mask = as_float_mask(visible, torch.float32) if masked else None
        found, weights = grouped_attention(nn.Module(), query, key, value, mask, scaling=scaling)
        assert weights is None
        assert found.shape == (batch, nodes, heads, 6)
        expected = eager(query, key, value, mask, 8**-0.5 if scaling is None else scaling)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_attention_with_many_scores_equals_stock_attention(
    monkeypatch: pytest.MonkeyPatch, by_products: list[tuple[int, int]], heads: int, groups: int, scaling: float | None
) -> None:
    """Many scores in bf16 go another way, if no keys need be copied for it; it is as exact as the usual one."""
    torch.manual_seed(0)
    monkeypatch.setattr(optimise, "_MANY_SCORES", 16 * heads * 2 * 32)
    monkeypatch.setattr(optimise, "_MOST_SCORES", 16 * heads * 4 * 34)
    cases = {
        (15, 2, 0): [],
        (16, 2, 0): [16],
        (16, 2, 3): [],
        (1, 40, 3): [1],  # one text's keys may have gaps behind them
        (2, 129, 0): [],
        (40, 4, 0): [40, 16, 16, 8],  # in parts
    }
    for (batch, nodes, gaps), expected_use in cases.items():
        slots = nodes + 30
        query = torch.randn(batch, heads, nodes, 16).bfloat16()
        buffers = torch.randn(2, batch, groups, slots + gaps, 16).bfloat16()
        key, value = buffers[0, :, :, :slots], buffers[1, :, :, :slots]
        visible = torch.rand(batch, nodes, slots) < 0.6
        visible[:, :, 0] = True
        mask = as_float_mask(visible, torch.bfloat16)
        by_products.clear()
        found, _ = grouped_attention(nn.Module(), query, key, value, mask, scaling=scaling)
        assert [texts for texts, _ in by_products] == expected_use
        assert found.is_contiguous()
        expected = eager(query, key, value, mask, 16**-0.5 if scaling is None else scaling)
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.04)


def test_boolean_masks_are_not_added_to_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives such masks to texts that are padded; 0 and 1 would hide nothing."""
    monkeypatch.setattr(optimise, "native_bf16", lambda: True)
    monkeypatch.setattr(optimise, "_MANY_SCORES", 1)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 16).bfloat16() for _ in range(3))
    seen = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    found, _ = grouped_attention(nn.Module(), query, key, value, seen)
    expected, _ = grouped_attention(nn.Module(), query, key, value, as_float_mask(seen[:, 0], torch.bfloat16))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("variable", "fix"),
    [("off", "unset DRAFTHEADS_KERNELS, which is off"), ("", r"install a C\+\+ compiler, and draftheads again")],
)
def test_int8_needs_the_native_library(variable: str, fix: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftheads.cpu.optimise.load_library", lambda: None)
    monkeypatch.setenv("DRAFTHEADS_KERNELS", variable)
    model = tiny_model("llama").model
    with pytest.raises(InvalidSettings, match=f"precision int8 needs the native library: {fix}$"):
        speed_up(model, bits=8)
    assert kernels_of(model) == "stock", "nothing was changed"


@pytest.mark.few(12)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_whole_texts_and_transformers_generation_stay_correct(family: str):
    """Passes without a mask of ours, past the sliding windows (8); padding on the left; a cache that is not ours."""
    stock, target = tiny_model(family), tiny_model(family)
    speed_up(target.model)
    text = torch.arange(24).view(2, 12) % 20 + 3
    torch.testing.assert_close(target.hidden_states(text), stock.hidden_states(text), rtol=1e-5, atol=2e-5)
    padding = torch.ones_like(text)
    padding[1, :4] = 0
    given = {"attention_mask": padding, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(target.model.generate(text, **given), stock.model.generate(text, **given))
