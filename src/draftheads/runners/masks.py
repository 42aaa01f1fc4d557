"""Attention masks for the verification of trees: pure functions of lengths and ancestors.

Row b has ``lengths[b]`` tokens in the cache at slots 0 …; node n of its tree has slot lengths[b]+n and
position lengths[b]+depth(n). A node attends to the text and to its ancestors, itself included.
"""

import torch
from torch import Tensor


def tree_visibility(lengths: Tensor, ancestors: Tensor, span: int) -> Tensor:
    """Boolean (B, N, span): whether node n of row b attends to slot s.

    Args:
        lengths: (B,) int64 tokens of text in the cache.
        ancestors: (1 or B, N, N) bool, [n, m]: m is on n's path.
        span: number of slots that are read, at least max(lengths) + N.

    >>> ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    >>> tree_visibility(torch.tensor([2, 1]), ancestors, 5).int().tolist()[1]
    [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]]
    """
    batch, nodes = len(lengths), ancestors.shape[-1]
    slots = torch.arange(span, device=lengths.device)
    visible = (slots < lengths[:, None])[:, None].repeat(1, nodes, 1)  # (B, N, span)
    index = (lengths[:, None] + torch.arange(nodes, device=lengths.device))[:, None].expand(batch, nodes, nodes)
    return visible.scatter_(2, index, ancestors.expand(batch, nodes, nodes))


def within_window(lengths: Tensor, depths: Tensor, span: int, window: int) -> Tensor:
    """Boolean (B, N, span): whether slot s is less than ``window`` positions before node n; depths (1 or B, N)."""
    batch, nodes = len(lengths), depths.shape[-1]
    depths = depths.expand(batch, nodes)
    # (B, span): a text token's position is its slot
    positions = torch.arange(span, device=lengths.device).repeat(batch, 1)
    index = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    queries = lengths[:, None] + depths
    positions.scatter_(1, index, queries)
    return queries[:, :, None] - positions[:, None, :] < window


def as_float_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, S) bool -> (B, 1, N, S) in ``dtype``: 0 where visible, else the lowest finite number."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
