"""The same model, faster on a CPU, and if asked with the same bits at every shape. Knows nothing of trees.

Two things cost a small model most of its step on a CPU, and both are mended from outside, on a stock model:

* MKL multiplies a handful of rows by a plain row-major weight at a fraction of memory speed; with the weight packed
  once for the number of rows it is up to four times faster. oneDNN gains likewise in bf16 where the CPU has it.
* Stock attention copies each key and value head once per query head of its group; here the query heads of a group
  stand as rows beside each other instead.

**Exact bits.** A kernel may sum in another order when it is given another number of rows, and then a token that plain
decoding checks alone and a tree checks among fifteen gets other last bits. With ``exact_bits`` every product has a
multiple of eight rows, for which MKL and oneDNN give a row the same bits whoever its neighbours are, and attention is
summed in fp64 and rounded once, so that the slots in which the keys lie do not show.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

GROUPED_ATTENTION = "draftheads_grouped"
EXACT_ATTENTION = "draftheads_exact"
ROW_BUCKETS = (8, 16, 32, 64)  # numbers of rows that weights are packed for
FEW_ROWS = 2  # up to here MKL's own kernels read a plain weight at memory speed
EXACT_ROWS = 8  # a multiple of this many rows gives each row the same bits
MAX_TREE_ROWS = 128  # more query rows than this are a prompt, whose shape does not depend on the drafter


class WeightPacks:
    """How many sizes of packed weights a model may hold at once: each is one more copy of its weights."""

    def __init__(self, max_sizes: int = 2) -> None:
        self.max_sizes = max_sizes
        self._packs: OrderedDict[int, dict[int, Tensor]] = OrderedDict()  # rows -> layer -> packed weight

    def get(self, rows: int, layer: nn.Linear) -> Tensor:
        """The layer's weight packed for that many rows; the size unused for longest makes room."""
        if rows not in self._packs:
            while len(self._packs) >= self.max_sizes:
                self._packs.popitem(last=False)
            self._packs[rows] = {}
        self._packs.move_to_end(rows)
        packs = self._packs[rows]
        key = id(layer)
        if key not in packs:
            packs[key] = _pack(layer.weight, rows)
        return packs[key]


@dataclass(frozen=True)
class LinearPlan:
    """How the linear layers of a model are computed."""

    packed: bool  # weights are packed once for the kernels
    exact_bits: bool  # rows are padded so that their bits do not depend on their number


class FastLinear(nn.Linear):
    """``nn.Linear`` by another kernel; shares the parameters of the layer it stands for."""

    def __init__(self, layer: nn.Linear, plan: LinearPlan, packs: WeightPacks) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.plan, self.packs = plan, packs

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        num_rows = x.numel() // self.in_features
        mkl = self.weight.dtype == torch.float32
        few = mkl and num_rows <= FEW_ROWS and not self.plan.exact_bits
        many = num_rows > (MAX_TREE_ROWS if self.plan.exact_bits else ROW_BUCKETS[-1])
        if few or many or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(num_rows, self.in_features)
        chunks = [self._chunk(chunk) for chunk in rows.split(ROW_BUCKETS[-1])]
        out = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _chunk(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out) for n up to the largest bucket."""
        count, padded = len(rows), self._padded(len(rows))
        if count < padded:
            rows = F.pad(rows, (0, 0, 0, padded - count))
        if not self.plan.packed:
            return F.linear(rows, self.weight, self.bias)[:count]
        # a pack of MKL's serves one number of rows, oneDNN's serves all
        packed = self.packs.get(padded if self.weight.dtype == torch.float32 else ROW_BUCKETS[-1], self)
        return _packed_product(rows, packed, self.weight, self.bias)[:count]

    def _padded(self, count: int) -> int:
        if self.plan.packed and self.weight.dtype == torch.float32:
            return next(size for size in ROW_BUCKETS if count <= size)
        return -(-count // EXACT_ROWS) * EXACT_ROWS if self.plan.exact_bits else count


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of PyTorch packs weights of that type on that device, and it is faster there."""
    if device.type != "cpu":
        return False
    if dtype == torch.float32:
        return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return dtype == torch.bfloat16 and native_bf16() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def native_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself (otherwise it is emulated and slower than fp32)."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def exact_bits_by_default(dtype: torch.dtype, device: torch.device) -> bool:
    """Where exact bits cost under a tenth of a step and are worth it: bf16 on a CPU, where near-ties are common."""
    return device.type == "cpu" and dtype == torch.bfloat16


def speed_up(model: Any, *, exact_bits: bool) -> None:
    """Gives a stock model the kernels of this module. Parameters, their names and the configuration's meaning stay.

    Args:
        model: a transformers causal LM in fp32 or bf16 on a CPU; others are left as they are.
        exact_bits: see the module's text; costs time, most where steps are small.
    """
    weight = model.get_output_embeddings().weight
    plan = LinearPlan(packed=can_pack(weight.dtype, weight.device), exact_bits=exact_bits)
    if plan.packed or plan.exact_bits:
        packs = WeightPacks()
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, FastLinear(child, plan, packs))
    if model.config.get_text_config()._attn_implementation == "sdpa" and weight.device.type == "cpu":
        model.set_attn_implementation(EXACT_ATTENTION if exact_bits else GROUPED_ATTENTION)


@torch.inference_mode()
def rows_keep_their_bits(model: Any) -> bool:
    """Whether this machine's kernels give a row the same bits at every multiple of eight rows, for this model's layers."""
    for layer in _one_of_each_shape(model):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(64, layer.in_features, generator=generator).to(layer.weight.dtype)
        expected = layer(rows[:EXACT_ROWS])
        for count in (16, 24, 40, 64):
            found = layer(torch.cat([rows[EXACT_ROWS:count], rows[:EXACT_ROWS]]))[-EXACT_ROWS:]
            if not torch.equal(found, expected):
                return False
    return True


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (b, H, N, d) queries over (b, G, S, d) keys and values under a mask (b, 1, N, S); H a multiple of G."""
    batch, heads, nodes, size = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * nodes, size)
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, heads // groups, 1)
    causal = attention_mask is None and nodes > 1
    if causal:  # a whole text without a mask: the heads of a group must not stand as rows of one causal square
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups < heads
        )
    else:
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As :func:`grouped_attention`, summed in fp64 and rounded once: the order of the keys does not show in the result."""
    if attention_mask is None or query.shape[2] > MAX_TREE_ROWS:
        return grouped_attention(module, query, key, value, attention_mask, scaling=scaling)
    batch, heads, nodes, size = query.shape
    groups = key.shape[1]
    rows = query.double().reshape(batch, groups, heads // groups * nodes, size)
    scores = rows @ key.double().transpose(-1, -2)  # (b, G, H/G·N, S)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    scores = scores.view(batch, groups, heads // groups, nodes, -1) + attention_mask.double()[:, :, None]
    weights = scores.softmax(-1).view(batch, groups, heads // groups * nodes, -1)
    out = (weights @ value.double()).to(query.dtype)
    return out.view(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionInterface.register(EXACT_ATTENTION, exact_attention)


def _one_of_each_shape(model: nn.Module) -> list[nn.Linear]:
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return list({tuple(layer.weight.shape): layer for layer in layers}.values())


def _pack(weight: Tensor, rows: int) -> Tensor:
    packed: Tensor
    if weight.dtype == torch.float32:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def _packed_product(rows: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor
    if weight.dtype == torch.float32:
        out = torch.ops.mkl._mkl_linear(rows, packed, weight, bias, len(rows))
    else:
        out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out
