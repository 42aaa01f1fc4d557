"""Building blocks that several draft heads share; nothing here knows what a draft is."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.draft import TargetWeights


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), (…, D) -> (…, D): Medusa section 3.1.1. W and b start at zero, so the block starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        return x + F.silu(self.linear(x))


class LmHeads(nn.Module):
    """Features to logits for K heads, in three kinds.

    shared: the target's own lm_head, one frozen matrix that is not saved. own: a matrix per head. low_rank: D -> r -> V' per head.
    """

    def __init__(self, num_heads: int, hidden_size: int, num_tokens: int, *, kind: str, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("shared", None, persistent=False)  # (V', D)
        self.register_buffer("shared_bias", None, persistent=False)  # (V',)
        self.logit_scale = 1.0
        if kind == "own":
            self.heads = nn.ModuleList(nn.Linear(hidden_size, num_tokens, bias=False) for _ in range(num_heads))
        elif kind == "low_rank":
            self.down = nn.ModuleList(nn.Linear(hidden_size, rank, bias=False) for _ in range(num_heads))
            self.up = nn.ModuleList(nn.Linear(rank, num_tokens, bias=False) for _ in range(num_heads))

    shared: Tensor | None
    shared_bias: Tensor | None

    def bind(self, weights: TargetWeights, rows: Tensor | None) -> None:
        """Takes the target's lm_head (its ``rows``, or all of them) where it is shared."""
        if self.kind != "shared":
            return
        lm_head = weights.lm_head.detach()
        self.shared = lm_head if rows is None else lm_head[rows].contiguous()
        bias = weights.lm_head_bias
        self.shared_bias = bias if bias is None or rows is None else bias.detach()[rows]
        self.logit_scale = weights.logit_scale

    def initialise(self, weights: TargetWeights, rows: Tensor | None) -> None:
        """Own heads start as copies of the target's lm_head, low-rank ones as its best approximation of that rank."""
        if self.kind == "shared":
            return
        matrix = (weights.lm_head if rows is None else weights.lm_head[rows]).detach().float() * weights.logit_scale
        with torch.no_grad():
            if self.kind == "own":
                for head in self.heads:
                    head.weight.copy_(matrix)
                return
            rank = self.down[0].weight.shape[0]
            # W ≈ U S Vᵀ through the D x D Gram matrix: V' is large and D small
            values, vectors = torch.linalg.eigh(matrix.T @ matrix)
            top = vectors[:, values.argsort(descending=True)[:rank]]  # (D, r)
            for down, up in zip(self.down, self.up, strict=True):
                down.weight.copy_(top.T)
                up.weight.copy_(matrix @ top)

    def forward(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D) -> (…, V') for one head."""
        if self.kind == "shared":
            assert self.shared is not None, "bind() gives the head its target's lm_head before it is used"
            logits = F.linear(features, self.shared, self.shared_bias)
            return logits if self.logit_scale == 1.0 else logits * self.logit_scale
        if self.kind == "own":
            return self.heads[head_index](features)
        return self.up[head_index](self.down[head_index](features))
