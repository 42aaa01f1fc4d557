"""Building blocks that several draft heads share; nothing here knows what a draft is."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.kernels import PackedLinear, Plain, Product
from draftheads.speculation.draft import TargetWeights

if TYPE_CHECKING:
    from draftheads.heads.base import HeadConfig


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), Medusa section 3.1.1. W and b start at zero, so the block starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = zero_linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        return x + F.silu(self.linear(x))


_TOKENS_PER_NUMBER = 4  # for a start: tokens for each number that is read of a token
_RIDGE = 1e-3  # of each number's own size


def first_texts(texts: Iterable[tuple[Tensor, Tensor]], size: int) -> list[tuple[Tensor, Tensor]]:
    """Texts, hidden states and token ids (T,), until they have enough tokens for a linear fit of that many numbers."""
    taken: list[tuple[Tensor, Tensor]] = []
    for text in texts:
        taken.append(text)
        if sum(len(ids) for _, ids in taken) >= _TOKENS_PER_NUMBER * size:
            break
    return taken


def linear_fit(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The matrix (O, I) that makes outputs (T, O) of inputs (T, I), by ridge regression in fp64.

    It is fitted to all pairs at once, and holds one of them at a time.
    """
    products: Any = 0.0
    towards: Any = 0.0
    for inputs, outputs in pairs:
        x = inputs.double()
        products = products + x.T @ x
        towards = towards + x.T @ outputs.double()
    sizes = products.diagonal()
    ridge = _RIDGE * sizes.clamp_min(1e-6 * float(sizes.mean()))  # a number may be zero everywhere
    return torch.linalg.solve(products + ridge.diag(), towards).T


def low_rank_fit(fit: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The matrices (O, r) and (r, I) whose product is nearest to a matrix (O, I) on inputs (T, I).

    The r numbers between them have a mean square of 1; those beyond O are 0.
    """
    made = inputs.double() @ fit.T
    directions = torch.linalg.eigh(made.T @ made).eigenvectors.flip(1)[:, :rank]
    unit = (made @ directions).square().mean().sqrt()
    missing = rank - directions.shape[1]
    return F.pad(directions * unit, (0, missing)), F.pad(directions.T @ fit / unit, (0, 0, 0, missing))


def zero_linear(in_features: int, out_features: int, *, bias: bool = True) -> nn.Linear:
    """A layer that starts as zero."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def fusion(size: int, *, num_inputs: int = 2, state_first: bool, bias: bool = True) -> nn.Linear:
    """A layer (…, n·D) -> (…, D) on vectors side by side; it starts as the first of them alone, or the last."""
    layer = zero_linear(num_inputs * size, size, bias=bias)
    nn.init.eye_(layer.weight.data[:, :size] if state_first else layer.weight.data[:, -size:])
    return layer


class LmHeads(nn.Module):
    """Features to logits for K heads, in three kinds.

    shared: the target's own lm_head, one frozen matrix that is not saved. own: a matrix per head, and a ``bias`` where
    the architecture has one. low_rank: per head D -> r -> V'.
    """

    def __init__(self, config: "HeadConfig", *, bias: bool) -> None:
        super().__init__()
        self.kind, self.rank, self.bias, count = config.lm_head, config.lm_head_rank, bias, config.num_lm_heads
        self.is_one = self.kind == "shared" or count == 1  # all depths have the same
        size, num_tokens = config.feature_size, config.num_draft_tokens
        self.register_buffer("shared", None, persistent=False)  # (V', D)
        self.register_buffer("shared_bias", None, persistent=False)  # (V',)
        self.logit_scale = 1.0
        self.target_product: Product | None = None  # of the target's whole lm_head, where it is packed
        self.packed: PackedLinear | None = None  # the shared matrix in its kernel's form; then ``shared`` is gone
        if self.kind == "own":
            self.heads = linears(count, size, num_tokens, bias=bias)
        elif self.kind == "low_rank":
            self.down = linears(count, size, self.rank)
            self.up = linears(count, self.rank, num_tokens)

    shared: Tensor | None
    shared_bias: Tensor | None

    def bind(self, weights: TargetWeights, rows: Tensor | None, dtype: torch.dtype) -> None:
        """Takes the target's lm_head (its ``rows``, or all of them) where it is shared."""
        if self.kind != "shared":
            return
        bias, product = weights.lm_head_bias, weights.lm_head_product
        self.packed = None
        self.target_product = product if rows is None and product is not None and product.dtype == dtype else None
        self.shared = _of_rows(weights.lm_head, rows).to(dtype)
        self.shared_bias = None if bias is None else _of_rows(bias, rows).to(dtype)
        self.logit_scale = weights.logit_scale

    def pack(self) -> None:
        """Makes the shared matrix a layer that can be packed; the target's own, where that is packed already."""
        if self.shared is not None:
            self.packed = PackedLinear(self.target_product or Plain(self.shared, self.shared_bias))
            self.shared = None

    def layer(self, head_index: int) -> nn.Module | None:
        """The packed layer of one depth; None of low-rank ones, which have two."""
        if self.kind == "own":
            return self.heads[0 if self.is_one else head_index]
        return self.packed if self.kind == "shared" else None

    def initialise(self, weights: TargetWeights, rows: Tensor | None) -> None:
        """Own heads start as copies of the target's lm_head, low-rank ones as its best approximation of that rank."""
        if self.kind == "shared":
            return
        matrix = _of_rows(weights.lm_head, rows).float() * weights.logit_scale
        if self.kind == "own":
            values = {"weight": matrix}
            if self.bias:
                none = weights.lm_head.new_zeros(len(weights.lm_head))
                bias = none if weights.lm_head_bias is None else weights.lm_head_bias
                values["bias"] = _of_rows(bias, rows).float() * weights.logit_scale
            for head in self.heads:
                head.load_state_dict(values)
            return
        # W ≈ U S Vᵀ through the D x D Gram matrix: V' is large and D small
        squares, vectors = torch.linalg.eigh(matrix.T @ matrix)
        top = vectors[:, squares.argsort(descending=True)[: self.rank]]  # (D, r)
        for down, up in zip(self.down, self.up, strict=True):
            down.load_state_dict({"weight": top.T})
            up.load_state_dict({"weight": matrix @ top})

    def forward(self, features: Tensor, head_index: int) -> Tensor:
        """(…, F) -> (…, V') at one depth."""
        number = 0 if self.is_one else head_index
        if self.kind == "own":
            return self.heads[number](features)
        if self.kind == "low_rank":
            return self.up[number](self.down[number](features))
        if self.packed is not None:
            logits = self.packed(features)
        else:
            assert self.shared is not None, "bind() gives the head its target's lm_head before it is used"
            logits = F.linear(features, self.shared, self.shared_bias)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale


def linears(count: int, in_features: int, out_features: int, *, bias: bool = False) -> nn.ModuleList:
    """So many linear layers, one for each head."""
    return nn.ModuleList(nn.Linear(in_features, out_features, bias=bias) for _ in range(count))


def _of_rows(values: Tensor, rows: Tensor | None) -> Tensor:
    """The target's values (V, …) of some tokens or of all; no parameter, which would become one of the head's."""
    return values.detach() if rows is None else values.detach()[rows].contiguous()
