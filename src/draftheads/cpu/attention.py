"""Attention functions for transformers' models, with fewer and faster operators on a CPU.

Stock attention copies each key and value head once per query head of its group. Here the query heads of a group become
rows of one product instead. With ``exact`` attention the bits of a token depend neither on the slots of its text nor on
the other tokens of the pass.

Alphabet: b texts, H query heads, G key and value heads, N tokens, S slots, d head size.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from draftheads.cpu.kernels import native_bf16

GROUPED_ATTENTION = "draftheads_grouped"
EXACT_ATTENTION = "draftheads_exact"
MAX_TREE_ROWS = 128  # a pass with more tokens of a text is no tree
_LAYOUTS: Any = WeakTensorKeyDictionary()  # of flat passes, by their mask: see lay_out
_REPEATED: Any = WeakTensorKeyDictionary()  # masks of several query heads by the mask of a pass
# from this number of scores (all texts and heads), batched bf16 products beat PyTorch's fused attention (LOG.md)
_MANY_SCORES = 32_000
_MOST_SCORES = 256_000  # per product; the memory of larger results returns to the system after each use
_EXACT_ROWS, _EXACT_SLOTS = 8, 32  # with fewer rows or keys, other kernels add in another order


def has_own_attention(config: Any) -> bool:
    """Whether a model's attention is one of these functions."""
    return config._attn_implementation in (GROUPED_ATTENTION, EXACT_ATTENTION)  # noqa: SLF001 - no public name


def lay_out(mask: Tensor, tokens: Tensor, places: Tensor) -> None:
    """A pass has M tokens of several texts in one row.

    Args:
        mask: of the pass, (b, 1, N, S), as attention receives it.
        tokens: (b·N,) the token, below M, at each place of the b texts; any token at places that are not used.
        places: (M,) the place of each token.
    """
    _LAYOUTS[mask] = tokens, places


def _takes_flat_tokens(attention: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function that also takes queries (1, H, M, d), see :func:`lay_out`."""

    @wraps(attention)
    def function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if query.shape[0] == key.shape[0]:
            return attention(module, query, key, value, mask, **options)
        assert mask is not None
        tokens, places = _LAYOUTS[mask]
        padded = query[0].transpose(0, 1).index_select(0, tokens)  # whole rows: much faster than other indices
        padded = padded.unflatten(0, (len(key), -1)).transpose(1, 2)  # (b, H, N, d)
        out, _ = attention(module, padded, key, value, mask, **options)  # (b, N, H, d)
        return out.flatten(0, 1).index_select(0, places)[None], None

    return function


@_takes_flat_tokens
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


@_takes_flat_tokens
def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Like :func:`grouped_attention`, but summed in fp64 and rounded once: the order of the keys has no effect.

    In fp32 a score is a sum of d products. With eight rows or more, kernels add them in the same order;
    :func:`scores_keep_their_bits` checks this on the machine. In bf16 the scores are summed in fp64, too. Scores s
    become softcap · tanh(s / softcap), as in Gemma-2.
    """
    if softcap is not None and attention_mask is None:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(key.shape[2] - query.shape[2])[None, None]
    if attention_mask is None or (query.shape[2] > MAX_TREE_ROWS and softcap is None):
        return grouped_attention(module, query, key, value.to(key.dtype), attention_mask, scaling=scaling)
    batch, heads, nodes, size = query.shape
    groups = key.shape[1]
    count = heads // groups * nodes
    rows = query.reshape(batch, groups, count, size)
    if query.dtype == torch.float32:
        rows = F.pad(rows, (0, 0, 0, max(0, _EXACT_ROWS - count)))
        key = F.pad(key, (0, 0, 0, max(0, _EXACT_SLOTS - key.shape[2])))
    else:
        rows, key = rows.double(), key.double()
    scores = (rows @ key.transpose(-1, -2))[:, :, :count, : value.shape[2]].double()  # (b, G, H/G·N, S)
    mask = _repeated(attention_mask, heads // groups)
    if mask.dtype == torch.bool:  # transformers' own mask, in passes without ours: True where visible
        lowest = torch.finfo(torch.float32).min  # not -inf: a padding row has no visible key and would become NaN
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, lowest)
    scaling = size**-0.5 if scaling is None else scaling
    scores = mask + (scores * scaling if softcap is None else (scores * (scaling / softcap)).tanh() * softcap)
    out = (scores.softmax(-1) @ value.double()).to(query.dtype)
    return out.view(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


@torch.inference_mode()
def scores_keep_their_bits(size: int) -> bool:
    """Whether fp32 products of d = ``size`` numbers have the same bits for all numbers of rows and keys here."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = (torch.randn(1, 2, count, size, generator=generator) for count in (96, 600))
    expected = rows @ keys.transpose(-1, -2)
    return all(
        torch.equal(rows[:, :, :count] @ keys[:, :, :slots].transpose(-1, -2), expected[:, :, :count, :slots])
        for count in (8, 9, 12, 24, 30, 48)
        for slots in (_EXACT_SLOTS, 33, 47, 100, 128, 203, 256, 511)
    )


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
AttentionInterface.register(EXACT_ATTENTION, exact_attention)
for _name in (GROUPED_ATTENTION, EXACT_ATTENTION):  # otherwise a whole text would be read without its sliding window
    AttentionMaskInterface.register(_name, sdpa_mask)
