"""Building blocks that several draft heads share; nothing here knows what a draft is."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.kernels import PackedLinear, Plain, Product
from draftheads.speculation.draft import TargetWeights


@runtime_checkable
class Fusable(Protocol):
    """A module with layers that read the same input."""

    def fuse(self) -> None:
        """Makes one layer of them, for drafting only; the old ones are gone."""


class Block(nn.Module):
    """A layer of a head's MLP, whose inputs may be dropped out in training."""

    dropout = 0.0  # part of the inputs that is set to zero; training sets it, for it is no part of a trained head

    def dropped(self, x: Tensor) -> Tensor:
        """The inputs, with dropout in training."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class ResidualBlock(Block):
    """x + SiLU(W x + b), Medusa section 3.1.1. W and b start at zero, so the block starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        x = self.dropped(x)
        return x + F.silu(self.linear(x))


def fusion(size: int, *, state_first: bool, bias: bool = True) -> nn.Linear:
    """A layer (…, 2·D) -> (…, D) on a state and an embedding, side by side; it starts as the state alone."""
    layer = nn.Linear(2 * size, size, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    nn.init.eye_(layer.weight.data[:, :size] if state_first else layer.weight.data[:, size:])
    return layer


class LmHeads(nn.Module):
    """Features to logits for K heads, in three kinds.

    shared: the target's own lm_head, one frozen matrix that is not saved. own: a matrix per head, and a ``bias`` where
    the architecture has one. low_rank: per head D -> r -> V'.
    """

    def __init__(
        self, num_heads: int, hidden_size: int, num_tokens: int, *, kind: str, rank: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.dropout = 0.0  # part of the inputs that is set to zero; training sets it, for heads that have blocks
        self.register_buffer("shared", None, persistent=False)  # (V', D)
        self.register_buffer("shared_bias", None, persistent=False)  # (V',)
        self.logit_scale = 1.0
        self.target_product: Product | None = None  # of the target's whole lm_head, where it is packed
        self.packed: PackedLinear | None = None  # the shared matrix in its kernel's form; then ``shared`` is gone
        if kind == "own":
            self.heads = _linears(num_heads, hidden_size, num_tokens, bias=bias)
        elif kind == "low_rank":
            self.down = _linears(num_heads, hidden_size, rank)
            self.up = _linears(num_heads, rank, num_tokens)

    shared: Tensor | None
    shared_bias: Tensor | None

    def bind(self, weights: TargetWeights, rows: Tensor | None, dtype: torch.dtype) -> None:
        """Takes the target's lm_head (its ``rows``, or all of them) where it is shared."""
        if self.kind != "shared":
            return
        lm_head, bias = weights.lm_head.detach(), weights.lm_head_bias
        bias = None if bias is None else bias.detach()  # a parameter would become one of the head's
        self.packed = None
        same_type = weights.lm_head_product is not None and weights.lm_head_product.dtype == dtype
        self.target_product = weights.lm_head_product if rows is None and same_type else None
        self.shared = (lm_head if rows is None else lm_head[rows].contiguous()).to(dtype)
        self.shared_bias = None if bias is None else (bias if rows is None else bias[rows]).to(dtype)
        self.logit_scale = weights.logit_scale

    def pack(self) -> None:
        """Makes the shared matrix a layer that can be packed; the target's own, where that is packed already."""
        if self.shared is None:
            return
        plain = Plain(self.shared, self.shared_bias)
        self.packed, self.shared = PackedLinear(self.target_product or plain), None

    def initialise(self, weights: TargetWeights, rows: Tensor | None) -> None:
        """Own heads start as copies of the target's lm_head, low-rank ones as its best approximation of that rank."""
        if self.kind == "shared":
            return
        matrix = (weights.lm_head if rows is None else weights.lm_head[rows]).detach().float() * weights.logit_scale
        with torch.no_grad():
            if self.kind == "own":
                for head in self.heads:
                    _fill(head, matrix)
                    if isinstance(head.bias, Tensor):
                        head.bias.zero_()
                        if (bias := weights.lm_head_bias) is not None:
                            head.bias += (bias if rows is None else bias[rows]).float() * weights.logit_scale
                return
            rank = self.rank
            # W ≈ U S Vᵀ through the D x D Gram matrix: V' is large and D small
            values, vectors = torch.linalg.eigh(matrix.T @ matrix)
            top = vectors[:, values.argsort(descending=True)[:rank]]  # (D, r)
            for down, up in zip(self.down, self.up, strict=True):
                _fill(down, top.T)
                _fill(up, matrix @ top)

    def forward(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D) -> (…, V') for one head."""
        if self.dropout:
            features = F.dropout(features, self.dropout, self.training)
        if self.kind == "shared":
            logits = self._shared_logits(features)
            return logits if self.logit_scale == 1.0 else logits * self.logit_scale
        if self.kind == "own":
            own: Tensor = self.heads[head_index](features)
            return own
        low_rank: Tensor = self.up[head_index](self.down[head_index](features))
        return low_rank

    def _shared_logits(self, features: Tensor) -> Tensor:
        if self.packed is not None:
            packed: Tensor = self.packed(features)
            return packed
        assert self.shared is not None, "bind() gives the head its target's lm_head before it is used"
        return F.linear(features, self.shared, self.shared_bias)


def _linears(count: int, in_features: int, out_features: int, *, bias: bool = False) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(in_features, out_features, bias=bias) for _ in range(count))


def _fill(layer: nn.Module, values: Tensor) -> None:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    weight.copy_(values)
