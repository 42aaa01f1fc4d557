"""An attention function for transformers' models, with fewer and faster operators on a CPU.

Stock attention copies each key and value head once per query head of its group. Here the query heads of a group become
rows of one product instead.

Alphabet: b texts, H query heads, G key and value heads, N tokens, S slots, d head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from draftheads.cpu.kernels import native_bf16

GROUPED_ATTENTION = "draftheads_grouped"
MAX_TREE_ROWS = 128  # a pass with more tokens of a text is no tree
_REPEATED: Any = WeakTensorKeyDictionary()  # masks of several query heads by the mask of a pass
# from this number of scores (all texts and heads), batched bf16 products beat PyTorch's fused attention
_MANY_SCORES = 32_000
_MOST_SCORES = 256_000  # per product; the memory of larger results returns to the system after each use


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
    if attention_mask is None and nodes > 1:  # a whole text: the causal mask is for N rows, not H/G · N
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups < heads
        )
        return out.transpose(1, 2).contiguous(), None
    rows = query.reshape(batch, groups, heads // groups * nodes, size)
    mask = None if attention_mask is None else _repeated(attention_mask, heads // groups)
    has_no_gaps = batch == 1 or (key.is_contiguous() and value.is_contiguous())  # else the products would copy them
    is_added = mask is not None and mask.dtype != torch.bool
    if is_added and has_no_gaps and by_products(query.shape, key.shape[2], query.dtype, query.device):
        assert mask is not None
        out = _by_products(rows, key, value, mask, size**-0.5 if scaling is None else scaling)
    else:
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


def by_products(query: Sequence[int], slots: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether batched products are faster than fused attention, for queries of shape (b, H, N, d)."""
    batch, heads, nodes, _ = query
    if nodes > MAX_TREE_ROWS or batch * heads * nodes * slots < _MANY_SCORES:
        return False
    return dtype == torch.bfloat16 and device.type == "cpu" and native_bf16()


def _by_products(rows: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Softmax in fp32 between two batched products: (b, G, n, d) over (b, G, S, d), mask (b, 1, n, S)."""
    batch, groups, num, _ = rows.shape
    texts = max(1, _MOST_SCORES // (groups * num * key.shape[2]))
    if texts < batch:
        parts = zip(rows.split(texts), key.split(texts), value.split(texts), mask.split(texts), strict=True)
        return torch.cat([_by_products(q, k, v, m, scaling) for q, k, v, m in parts])
    scores = torch.bmm(rows.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(batch, groups, num, -1)
    weights = torch.add(mask.float(), scores, alpha=scaling).softmax(-1).to(value.dtype)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(batch, groups, num, -1)


def _repeated(mask: Tensor, times: int) -> Tensor:
    """(b, 1, N, S) -> (b, 1, times · N, S), computed once per pass, whose layers share the mask."""
    repeated: Tensor | None = _REPEATED.get(mask)
    if repeated is None or repeated.shape[2] != times * mask.shape[2]:
        repeated = _REPEATED[mask] = mask.repeat(1, 1, times, 1)
    return repeated


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
# otherwise a whole text would be read without its sliding window
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
