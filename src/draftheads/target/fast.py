"""The same model, faster on a CPU, and if asked with the same bits at every shape. Knows nothing of trees.

Two things cost a small model most of its step on a CPU, and both are mended from outside, on a stock model: products of
few rows (``draftheads.kernels``), and attention, which copies each key and value head once per query head of its group;
here the query heads of a group stand as rows beside each other instead. In a large batch in bf16 two batched products
are up to twice as fast as the fused kernel, as long as keys and values lie without gaps, and as exact.

**Exact bits.** A token that plain decoding checks alone and a tree checks among fifteen would get other last bits from
kernels that sum in another order at another shape. With ``exact_bits`` every product has a multiple of eight rows,
attention is summed in fp64 and rounded once, so that the slots in which the keys lie do not show, and prompts are read
one by one. It covers layers that are ``nn.Linear`` (not GPT-2's Conv1D or Mixtral's experts) and at most 128 rows.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from draftheads.kernels import EXACT_ROWS, MAX_TREE_ROWS, FastLinear, LinearPlan, can_pack, replace_linears

GROUPED_ATTENTION = "draftheads_grouped"
EXACT_ATTENTION = "draftheads_exact"
MANY_TEXTS = 16  # from here on a batch is large; key heads come in groups, so three times as many products or more
FEW_NODES = 16


def speed_up(model: Any, *, exact_bits: bool) -> None:
    """Gives a stock model the kernels of this module. Parameters, their names and the configuration's meaning stay.

    Args:
        model: a transformers causal LM in fp32 or bf16 on a CPU; others are left as they are.
        exact_bits: see the module's text; costs 8 to 17 % of a step (LOG.md), so it is off unless asked for.
    """
    weight = model.get_output_embeddings().weight
    plan = LinearPlan(packed=can_pack(weight.dtype, weight.device), exact_bits=exact_bits)
    if plan.packed or plan.exact_bits:
        replace_linears(model, plan)
    if model.config.get_text_config()._attn_implementation == "sdpa" and weight.device.type == "cpu":
        model.set_attn_implementation(EXACT_ATTENTION if exact_bits else GROUPED_ATTENTION)


def kernels_of(model: Any) -> str:
    """``fast``, ``exact_bits``, or ``stock`` where :func:`speed_up` did nothing."""
    attention = model.config.get_text_config()._attn_implementation
    return {GROUPED_ATTENTION: "fast", EXACT_ATTENTION: "exact_bits"}.get(attention, "stock")


def packs_by_size(model: Any) -> bool:
    """Whether a pass of another number of rows than the last ones first packs all weights anew: MKL's fp32."""
    weight = model.get_output_embeddings().weight
    return weight.dtype == torch.float32 and any(
        isinstance(layer, FastLinear) and layer.plan.packed for layer in model.modules()
    )


@torch.inference_mode()
def rows_keep_their_bits(model: Any) -> bool:
    """Whether this machine's kernels give a row the same bits at every multiple of eight rows, in these layers."""
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
    """Attention of (b, H, N, d) queries over (b, G, S, d) keys and values, mask (b, 1, N, S); G divides H."""
    batch, heads, nodes, size = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * nodes, size)
    mask = None if attention_mask is None else _REPEATED.of(attention_mask, heads // groups)
    has_no_gaps = key.is_contiguous() and value.is_contiguous()
    if mask is not None and has_no_gaps and is_large_batch(batch, nodes, query.dtype, query.device):
        out = _by_products(rows, key, value, mask, size**-0.5 if scaling is None else scaling)
        return out.view(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None
    causal = attention_mask is None and nodes > 1
    if causal:  # a whole text without a mask: the heads of a group must not stand as rows of one causal square
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups < heads
        )
    else:
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


def is_large_batch(num_rows: int, nodes: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether batched products are the faster way to attend, for that many texts and nodes in each."""
    return num_rows >= MANY_TEXTS and nodes <= FEW_NODES and dtype == torch.bfloat16 and device.type == "cpu"


def _by_products(rows: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Softmax in fp32 between two batched products: (b, G, n, d) over (b, G, S, d), mask (b, 1, n, S)."""
    batch, groups, num, _ = rows.shape
    scores = torch.bmm(rows.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(batch, groups, num, -1)
    weights = scores.float().mul_(scaling).add_(mask).softmax(-1).to(value.dtype)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1))


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
    """As :func:`grouped_attention`, summed in fp64 and rounded once: the order of the keys does not show."""
    if attention_mask is None or query.shape[2] > MAX_TREE_ROWS:
        return grouped_attention(module, query, key, value, attention_mask, scaling=scaling)
    batch, heads, nodes, size = query.shape
    groups = key.shape[1]
    rows = query.double().reshape(batch, groups, heads // groups * nodes, size)
    scores = rows @ key.double().transpose(-1, -2)  # (b, G, H/G·N, S)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if attention_mask.dtype == torch.bool:  # transformers' own, in passes that bring none
        lowest = torch.finfo(torch.float32).min  # not infinity: a row of padding sees nothing, and must not become NaN
        attention_mask = torch.zeros_like(attention_mask, dtype=torch.float32).masked_fill(~attention_mask, lowest)
    scores = scores.view(batch, groups, heads // groups, nodes, -1) + attention_mask.double()[:, :, None]
    weights = scores.softmax(-1).view(batch, groups, heads // groups * nodes, -1)
    out = (weights @ value.double()).to(query.dtype)
    return out.view(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


class _LastMask:
    """A mask repeated for the heads of a group: the layers of a pass share it, the next pass brings another."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[Tensor], int] | None = None
        self._repeated: Tensor | None = None

    def of(self, mask: Tensor, times: int) -> Tensor:
        """(b, 1, N, S) -> (b, 1, times · N, S)."""
        if self._key is None or self._key[0]() is not mask or self._key[1] != times or self._repeated is None:
            self._key, self._repeated = (weakref.ref(mask), times), mask.repeat(1, 1, times, 1)
        return self._repeated


_REPEATED = _LastMask()
AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionInterface.register(EXACT_ATTENTION, exact_attention)
for _name in (GROUPED_ATTENTION, EXACT_ATTENTION):  # without one a whole text would be read without its sliding window
    AttentionMaskInterface.register(_name, sdpa_mask)


def _one_of_each_shape(model: nn.Module) -> list[nn.Linear]:
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return list({tuple(layer.weight.shape): layer for layer in layers}.values())
