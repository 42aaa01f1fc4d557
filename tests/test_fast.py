"""The faster kernels: the same numbers as the plain ones, and with exact bits the same bits at every shape."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.draft import Draft
from draftheads.kernels import (
    EXACT_ROWS,
    MAX_TREE_ROWS,
    ROW_BUCKETS,
    FastLinear,
    LinearPlan,
    SiblingLinear,
    WeightPacks,
    can_pack,
    replace_linears,
)
from draftheads.target import fast as fast_module
from draftheads.target import target as target_module
from draftheads.target.fast import (
    EXACT_ATTENTION,
    GROUPED_ATTENTION,
    exact_attention,
    grouped_attention,
    kernels_of,
    packs_by_size,
    rows_keep_their_bits,
    speed_up,
)
from draftheads.target.kv_cache import BLOCK_SLOTS
from draftheads.target.masks import as_float_mask
from draftheads.target.target import Target
from draftheads.tree import Tree
from families import FAMILIES, VOCAB, tiny_model

CPU = torch.device("cpu")
COUNTS = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200]
BF16_PACKS = pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="this CPU multiplies no bf16 itself")


def linear(in_features: int = 48, out_features: int = 40, *, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(requires_grad=False)


def fast(layer: nn.Linear, *, packed: bool, exact_bits: bool) -> FastLinear:
    return FastLinear(layer, LinearPlan(packed=packed, exact_bits=exact_bits), WeightPacks())


@pytest.mark.parametrize("exact_bits", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_fast_layer_is_the_layer(packed: bool, exact_bits: bool, bias: bool):
    if packed and not can_pack(torch.float32, CPU):
        pytest.skip("this build of PyTorch has no MKL")
    layer = linear(bias=bias, dtype=torch.float32)
    quick = fast(layer, packed=packed, exact_bits=exact_bits)
    x = torch.randn(200, 48)
    for count in COUNTS:
        expected = F.linear(x[:count], layer.weight, layer.bias)
        # 48 products of about 1 · 0.1: what fp32 can differ by in another order
        torch.testing.assert_close(quick(x[:count]), expected, rtol=0, atol=2e-6)
        for shape in ((1, count, 48), (count, 1, 48)):
            found = quick(x[:count].reshape(shape))
            assert found.shape == (*shape[:-1], 40)
            torch.testing.assert_close(found.reshape(count, 40), expected, rtol=0, atol=2e-6)
    assert quick(x[:0]).shape == (0, 40)
    every_other = x[:40].reshape(2, 20, 48).transpose(0, 1)  # not contiguous
    torch.testing.assert_close(quick(every_other), F.linear(every_other, layer.weight, layer.bias), rtol=0, atol=2e-6)


@BF16_PACKS
@pytest.mark.parametrize("exact_bits", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_fast_layer_in_bf16(exact_bits: bool, bias: bool):
    layer = linear(bias=bias, dtype=torch.bfloat16)
    quick = fast(layer, packed=True, exact_bits=exact_bits)
    x = torch.randn(200, 48, dtype=torch.bfloat16)
    for count in COUNTS:
        expected = F.linear(x[:count], layer.weight, layer.bias)
        torch.testing.assert_close(quick(x[:count]), expected, rtol=2**-7, atol=1e-3)


def test_training_takes_the_plain_product():
    """Packed products have no gradient."""
    layer = linear(bias=True, dtype=torch.float32).requires_grad_()
    quick = fast(layer, packed=can_pack(torch.float32, CPU), exact_bits=False)
    x = torch.randn(12, 48, requires_grad=True)
    quick(x).square().sum().backward()
    found, x.grad = x.grad, None
    F.linear(x, layer.weight, layer.bias).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(found, x.grad)


# --- which rows are padded to what ---


def counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Products as they are asked for: by which kernel, of how many rows."""
    asked: list[tuple[str, int]] = []

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        asked.append(("plain", x.numel() // x.shape[-1]))
        return torch.addmm(torch.zeros(()) if bias is None else bias, x.reshape(-1, x.shape[-1]), weight.T)

    def packed(x: Tensor, pack: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(("packed", len(x)))
        return x @ weight.T

    monkeypatch.setattr("draftheads.kernels.F.linear", plain)
    monkeypatch.setattr("draftheads.kernels._packed_product", packed)
    monkeypatch.setattr("draftheads.kernels._pack", lambda weight, rows: weight)
    return asked


@pytest.mark.parametrize(
    ("packed", "exact_bits", "count", "expected"),
    [
        (True, False, 1, [("plain", 1)]),  # MKL's own kernels are as fast here
        (True, False, 2, [("plain", 2)]),
        (True, False, 3, [("packed", 8)]),
        (True, False, 9, [("packed", 12)]),
        (True, False, 33, [("packed", 64)]),
        (True, False, 65, [("plain", 65)]),  # a prompt
        (True, True, 1, [("packed", 8)]),
        (True, True, 9, [("packed", 16)]),  # twelve rows are no multiple of eight
        (True, True, 12, [("packed", 16)]),
        (True, True, 64, [("packed", 64)]),
        (True, True, 65, [("packed", 64), ("packed", 8)]),
        (True, True, 128, [("packed", 64), ("packed", 64)]),
        (True, True, 129, [("plain", 129)]),
        (False, True, 1, [("plain", 8)]),
        (False, True, 20, [("plain", 24)]),
        (False, True, 70, [("plain", 64), ("plain", 8)]),
        (False, False, 20, [("plain", 20)]),
    ],
)
@torch.inference_mode()
def test_rows_go_in_sizes_that_kernels_like(
    monkeypatch: pytest.MonkeyPatch, packed: bool, exact_bits: bool, count: int, expected: list[tuple[str, int]]
):
    quick = fast(linear(bias=False, dtype=torch.float32), packed=packed, exact_bits=exact_bits)
    asked = counting(monkeypatch)
    quick(torch.randn(count, 48))
    assert asked == expected


# --- siblings ---


class Attention(nn.Module):
    """As transformers' models name and call their projections."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(48, 40, bias=bias)
        self.k_proj = nn.Linear(48, 8, bias=bias)
        self.v_proj = nn.Linear(48, 8, bias=bias)
        self.o_proj = nn.Linear(40, 48, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q) + k.sum(-1, keepdim=True) - 2 * v.sum(-1, keepdim=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_siblings_share_one_product(monkeypatch: pytest.MonkeyPatch, packed: bool, bias: bool):
    attention = Attention(bias)
    inputs = [torch.randn(1, count, 48) for count in (1, 5, 12, 100)]
    expected = [attention(x) for x in inputs]
    names, values = zip(*attention.state_dict().items(), strict=True)
    plan = LinearPlan(packed=packed and can_pack(torch.float32, CPU), exact_bits=False)
    replace_linears(attention, plan)
    for x, value in zip(inputs, expected, strict=True):
        torch.testing.assert_close(attention(x), value, rtol=0, atol=1e-5)
    assert tuple(attention.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(attention.state_dict().values(), values, strict=True))
    assert attention.q_proj.siblings._input is None, "nothing is held when the last one has asked"
    asked = counting(monkeypatch)
    attention(inputs[1])
    assert len(asked) == 2, "one product for three projections, and one for the fourth"


@pytest.mark.parametrize("biased", ["k_proj", "q_proj v_proj"])
@torch.inference_mode()
def test_siblings_of_which_some_have_a_bias(biased: str):
    attention = Attention(bias=True)
    for name in {"q_proj", "k_proj", "v_proj"} - set(biased.split()):
        getattr(attention, name).bias = None
    x = torch.randn(1, 5, 48)
    expected, names = attention(x), tuple(attention.state_dict())
    replace_linears(attention, LinearPlan(packed=can_pack(torch.float32, CPU), exact_bits=False))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-5)
    assert tuple(attention.state_dict()) == names


@torch.inference_mode()
def test_a_sibling_asked_with_another_input_answers_for_that():
    attention = Attention(bias=True)
    x, y = torch.randn(1, 4, 48), torch.randn(1, 4, 48)
    expected = attention.k_proj(y)
    replace_linears(attention, LinearPlan(packed=False, exact_bits=False))
    attention.q_proj(x)
    torch.testing.assert_close(attention.k_proj(y), expected, rtol=0, atol=1e-5)


# --- packs ---


@torch.inference_mode()
def test_packs_are_kept_for_a_few_sizes_only(monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[int, int]] = []
    layers = [linear(out_features=size, bias=False, dtype=torch.float32) for size in (40, 41)]
    monkeypatch.setattr("draftheads.kernels._pack", lambda weight, rows: made.append((rows, len(weight))) or weight)
    packs = WeightPacks(max_sizes=2)
    for rows in (8, 16, 8, 16):
        assert [packs.get(rows, layer.weight) for layer in layers] == [layer.weight for layer in layers]
    assert made == [(8, 40), (8, 41), (16, 40), (16, 41)], "packed once for each size and layer"
    packs.get(8, layers[0].weight)
    packs.get(32, layers[0].weight)  # 16 was unused for longest
    assert set(packs._packs) == {8, 32}
    packs.get(8, layers[0].weight)
    assert len(made) == 5
    packs.get(16, layers[0].weight)
    assert made[5:] == [(16, 40)]
    assert set(packs._packs) == {8, 16}


@torch.inference_mode()
def test_a_model_holds_few_packs():
    if not can_pack(torch.float32, CPU):
        pytest.skip("this build of PyTorch has no MKL")
    model = tiny_model("llama").model
    speed_up(model, exact_bits=False)
    layers = [module for module in model.modules() if isinstance(module, FastLinear)]
    packs = layers[0].packs
    assert all(layer.packs is packs for layer in layers)
    for count in (8, 16, 32, 60, 3):
        model(torch.arange(count)[None] % 20)
        assert len(packs._packs) <= packs.max_sizes == 2
        used = (layer.siblings if isinstance(layer, SiblingLinear) else layer for layer in layers)
        assert set(next(reversed(packs._packs.values()))) == {id(layer.weight) for layer in used}


# --- speed_up ---


@pytest.mark.parametrize("exact_bits", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_parameters_and_their_names_stay(family: str, exact_bits: bool):
    target = tiny_model(family)
    state = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    modules = [name for name, _ in target.model.named_modules()]
    text = torch.arange(20)[None] % 20
    expected = target.model(text).logits
    speed_up(target.model, exact_bits=exact_bits)
    after = target.model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert [name for name, _ in target.model.named_modules()] == modules
    assert target.config._attn_implementation == (EXACT_ATTENTION if exact_bits else GROUPED_ATTENTION)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(text).logits, expected, rtol=1e-5, atol=1e-5)
    changed = [module for module in target.model.modules() if type(module) is nn.Linear]
    assert not changed or not (can_pack(torch.float32, CPU) or exact_bits)


def test_attention_of_another_kind_is_left_alone():
    target = tiny_model("llama")
    target.model.set_attn_implementation("eager")
    speed_up(target.model, exact_bits=True)
    assert target.config._attn_implementation == "eager"


def test_where_weights_are_packed():
    assert not can_pack(torch.float32, torch.device("cuda"))
    assert not can_pack(torch.float16, CPU)


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


@pytest.mark.parametrize("attention", [grouped_attention, exact_attention])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_attention_is_attention(attention: Any, heads: int, groups: int, masked: bool, scaling: float | None):
    torch.manual_seed(0)
    module = nn.Module()
    for batch, nodes in ((1, 1), (2, 5), (1, MAX_TREE_ROWS + 2)):
        slots = nodes + 7 if masked else nodes
        query = torch.randn(batch, heads, nodes, 8)
        key, value = torch.randn(batch, groups, slots, 8), torch.randn(batch, groups, slots, 6)
        visible = torch.rand(batch, nodes, slots) < 0.6
        visible[:, :, 0] = True
        mask = as_float_mask(visible, torch.float32) if masked else None
        found, weights = attention(module, query, key, value, mask, scaling=scaling)
        assert weights is None
        assert found.shape == (batch, nodes, heads, 6)
        expected = eager(query, key, value, mask, 8**-0.5 if scaling is None else scaling)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_attention_in_large_batches(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, scaling: float | None
) -> None:
    """Many texts in bf16 go another way, as long as their keys lie without gaps; it is as exact as the usual one."""
    torch.manual_seed(0)
    module = nn.Module()
    used: list[int] = []
    by_products = fast_module._by_products

    def spying(rows: Tensor, *rest: Any) -> Tensor:
        used.append(len(rows))
        return by_products(rows, *rest)

    monkeypatch.setattr(fast_module, "_by_products", spying)
    for batch, nodes, gaps in ((15, 2, 0), (16, 2, 0), (16, 2, 3), (16, 17, 0), (40, 1, 0)):
        slots = nodes + 30
        query = torch.randn(batch, heads, nodes, 16).bfloat16()
        buffers = torch.randn(2, batch, groups, slots + gaps, 16).bfloat16()
        key, value = buffers[0, :, :, :slots], buffers[1, :, :, :slots]
        visible = torch.rand(batch, nodes, slots) < 0.6
        visible[:, :, 0] = True
        mask = as_float_mask(visible, torch.bfloat16)
        used.clear()
        found, _ = grouped_attention(module, query, key, value, mask, scaling=scaling)
        assert used == ([batch] if (batch, nodes, gaps) in {(16, 2, 0), (40, 1, 0)} else [])
        assert found.is_contiguous()
        expected = eager(query, key, value, mask, 16**-0.5 if scaling is None else scaling)
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.04)


def test_large_batches_in_bf16_read_keys_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    speed_up(model.model, exact_bits=False)
    spans: list[int] = []
    by_products = fast_module._by_products

    def spying(rows: Tensor, key: Tensor, *rest: Any) -> Tensor:
        spans.append(key.shape[2])
        return by_products(rows, key, *rest)

    monkeypatch.setattr(fast_module, "_by_products", spying)
    target = Target(model)
    target.prefill([[token % VOCAB for token in range(3 + row)] for row in range(20)])
    spans.clear()
    draft = Draft.on_tree(Tree.chain(1), torch.full((20, 2), 5))
    logits, _ = target.verify(draft)
    assert spans == [BLOCK_SLOTS] * len(model.layer_kinds)
    for row in (0, 7, 19):
        alone = Target(model)
        alone.prefill([[token % VOCAB for token in range(3 + row)]])
        expected, _ = alone.verify(Draft.on_tree(Tree.chain(1), torch.full((1, 2), 5)))
        # the widest rounding of logits of 8 and more is 0.06, and CPUs without bf16 of their own round in other places
        torch.testing.assert_close(logits[row], expected[0], rtol=0.05, atol=0.13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_attention_does_not_see_where_keys_lie(dtype: torch.dtype):
    """The same keys in other slots, among others that the mask hides, and other nodes beside: not a bit changes."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 16).to(dtype) for heads in (4, 2, 2))
    visible = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    whole, _ = exact_attention(nn.Module(), query, key, value, as_float_mask(visible, dtype))
    for _ in range(20):
        order = torch.randperm(30)[:9]  # slot of each key
        scattered = [torch.randn(1, 2, 30, 16).to(dtype) for _ in range(2)]
        for buffer, own in zip(scattered, (key, value), strict=True):
            buffer[:, :, order] = own
        seen = torch.zeros(1, 1, 30, dtype=torch.bool)
        seen[:, :, order] = visible[:, -1:]
        alone, _ = exact_attention(nn.Module(), query[:, :, -1:], *scattered, as_float_mask(seen, dtype))
        assert torch.equal(alone[:, 0], whole[:, -1])


# --- exact bits ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(packed: bool, dtype: torch.dtype):
    """Sizes of smollm2-135m, where kernels do sum in another order for few rows."""
    if packed and not can_pack(dtype, CPU):
        pytest.skip(f"nothing packs {dtype} here")
    layer = linear(576, 192, bias=False, dtype=dtype)
    quick = fast(layer, packed=packed, exact_bits=True)
    if not rows_keep_their_bits(nn.Sequential(quick)):
        pytest.skip("this CPU's kernels change a row's bits with the number of rows")
    x = torch.randn(MAX_TREE_ROWS, 576).to(dtype)
    whole = quick(x)
    for count in COUNTS:
        if count <= MAX_TREE_ROWS:
            assert torch.equal(quick(x[:count]), whole[:count]), count
            assert torch.equal(quick(x[-count:]), whole[-count:]), count
            assert torch.equal(quick(x[:count].flip(0)), whole[:count].flip(0)), count


class Shifty(nn.Linear):
    """Rounds otherwise when it is given many rows."""

    def __init__(self, from_rows: int) -> None:
        super().__init__(16, 16)
        self.from_rows = from_rows

    def forward(self, x: Tensor) -> Tensor:
        out = torch.stack([F.linear(row, self.weight, self.bias) for row in x])  # each row by itself
        return out * (1 + 1e-6) if len(x) >= self.from_rows else out


class Neighbourly(Shifty):
    """Rounds otherwise in the second half of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out[32:] *= 1 + 1e-6
        return out


def test_rows_that_change_are_noticed():
    torch.manual_seed(0)
    assert rows_keep_their_bits(nn.Sequential(Shifty(65)))
    for from_rows in (16, 24, 40, 64):
        assert not rows_keep_their_bits(nn.Sequential(Shifty(from_rows)))
    assert not rows_keep_their_bits(nn.Sequential(Neighbourly(65)))


def test_every_shape_of_layer_is_asked():
    torch.manual_seed(0)
    good = nn.Linear(8, 8, bias=False).requires_grad_(requires_grad=False)
    good.weight.fill_(0.5)
    bad = Shifty(16)
    assert not rows_keep_their_bits(nn.Sequential(good, bad))
    assert not rows_keep_their_bits(nn.Sequential(bad, good))


def test_the_largest_bucket_is_a_multiple_of_the_exact_rows():
    assert ROW_BUCKETS[-1] % EXACT_ROWS == 0
    assert MAX_TREE_ROWS % ROW_BUCKETS[-1] == 0


@pytest.mark.parametrize("exact_bits", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_whole_texts_and_transformers_own_generation_stay_right(family: str, exact_bits: bool):
    """Passes without a mask of ours, past the sliding windows (8); padding on the left; a cache that is not ours."""
    stock, target = tiny_model(family), tiny_model(family)
    speed_up(target.model, exact_bits=exact_bits)
    text = torch.arange(24).view(2, 12) % 20 + 3
    torch.testing.assert_close(target.hidden_states(text), stock.hidden_states(text), rtol=1e-5, atol=2e-5)
    padding = torch.ones_like(text)
    padding[1, :4] = 0
    given = {"attention_mask": padding, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(target.model.generate(text, **given), stock.model.generate(text, **given))


@torch.inference_mode()
def test_with_exact_bits_a_prompt_is_read_alone(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama")
    speed_up(model.model, exact_bits=True)
    prompts = [[token % VOCAB for token in range(length)] for length in (40, 7, 200)]
    read: list[tuple[int, ...]] = []
    forward = Target._forward

    def spying(target: Target, rows: slice, starts: Any, tokens: Tensor, *rest: Any) -> Tensor:
        read.append(tuple(tokens.shape))
        return forward(target, rows, starts, tokens, *rest)

    monkeypatch.setattr(Target, "_forward", spying)
    target = Target(model)
    logits, hidden = target.prefill(prompts)
    assert read == [(1, 40), (1, 7), (1, 200)]
    assert target.lengths == [40, 7, 200]
    assert hidden.shape[:2] == (3, 200)
    for row, prompt in enumerate(prompts):
        alone, states = Target(model).prefill([prompt])
        assert torch.equal(alone[0], logits[row])
        assert torch.equal(states[0], hidden[row, : len(prompt)])


def test_prompts_are_read_in_groups_of_like_length(monkeypatch: pytest.MonkeyPatch):
    """Neighbours share a pass until it is full; a prompt that is longer than that has one of its own."""
    monkeypatch.setattr(target_module, "PREFILL_TOKENS", 60)
    model = tiny_model("llama")
    prompts = [[(3 * token + row) % VOCAB for token in range(length)] for row, length in enumerate((9, 10, 20, 21, 70))]
    read: list[tuple[int, ...]] = []
    forward = Target._forward

    def spying(target: Target, rows: slice, starts: Any, tokens: Tensor, *rest: Any) -> Tensor:
        read.append(tuple(tokens.shape))
        return forward(target, rows, starts, tokens, *rest)

    target = Target(model)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "_forward", spying)
        logits, hidden = target.prefill(prompts)
    assert read == [(3, 20), (1, 21), (1, 70)]
    assert target.lengths == [9, 10, 20, 21, 70]
    assert hidden.shape[:2] == (5, 70)
    for row, prompt in enumerate(prompts):
        alone, states = Target(model).prefill([prompt])
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(hidden[row, : len(prompt)], states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact_bits", [False, True])
def test_a_model_says_which_kernels_it_has_and_whether_they_are_packed_for_a_size(
    dtype: torch.dtype, *, exact_bits: bool
) -> None:
    model = tiny_model("llama", dtype=dtype).model
    assert kernels_of(model) == "stock"
    assert not packs_by_size(model)
    speed_up(model, exact_bits=exact_bits)
    assert kernels_of(model) == ("exact_bits" if exact_bits else "fast")
    assert packs_by_size(model) is (dtype == torch.float32 and can_pack(torch.float32, CPU))
