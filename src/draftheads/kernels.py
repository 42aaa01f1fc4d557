"""Linear layers by the kernels that are fastest for a handful of rows on a CPU; pure functions and one cache.

MKL multiplies a few rows by a plain row-major weight at a fraction of memory speed; with the weight packed once for the
number of rows it is up to four times faster. oneDNN gains likewise in bf16 where the CPU has it.

A kernel may sum in another order when it is given another number of rows. At a multiple of eight rows MKL and oneDNN
give a row the same bits whoever its neighbours are: what ``exact_bits`` makes use of.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Any: an operator, or None in builds without MKL
_MKL_LINEAR: Any = getattr(torch.ops.mkl, "_mkl_linear", None)
ROW_BUCKETS = (8, 12, 16, 24, 32, 64)  # numbers of rows that weights are packed for
FEW_ROWS = 2  # up to here MKL's own kernels read a plain weight at memory speed
EXACT_ROWS = 8  # a multiple of this many rows gives each row the same bits
MAX_TREE_ROWS = 128  # more rows than this are a prompt, whose shape does not depend on the drafter


@dataclass(frozen=True)
class LinearPlan:
    """How linear layers are computed."""

    packed: bool  # weights are packed once for the kernels
    exact_bits: bool  # rows are padded so that their bits do not depend on their number


class WeightPacks:
    """Packed copies of weights, for at most ``max_sizes`` numbers of rows: each is one more copy of the weights."""

    def __init__(self, max_sizes: int = 2) -> None:
        self.max_sizes = max_sizes
        # rows -> weight's identity -> the weight (so that its identity stays its own) and its pack
        self._packs: OrderedDict[int, dict[int, tuple[Tensor, Tensor]]] = OrderedDict()
        self._latest = -1

    def get(self, rows: int, weight: Tensor) -> Tensor:
        """The weight packed for that many rows; the size unused for longest makes room."""
        if rows != self._latest:
            self._turn_to(rows)
        packs = self._packs[rows]
        found = packs.get(id(weight))
        if found is None:
            found = packs[id(weight)] = (weight, _pack(weight, rows))
        return found[1]

    def _turn_to(self, rows: int) -> None:
        if rows not in self._packs:
            while len(self._packs) >= self.max_sizes:
                self._packs.popitem(last=False)
            self._packs[rows] = {}
        self._packs.move_to_end(rows)
        self._latest = rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, packs: WeightPacks) -> Tensor:
    """X Wᵀ + b, (…, in) -> (…, out), by the plan."""
    out_features, in_features = weight.shape
    num_rows = x.numel() // in_features
    mkl = weight.dtype == torch.float32
    fits = num_rows in ROW_BUCKETS and (not plan.exact_bits or num_rows % EXACT_ROWS == 0)
    if fits and plan.packed and mkl and not torch.is_grad_enabled():  # most steps: no detours, they cost as much again
        return _packed_product(x, packs.get(num_rows, weight), weight, bias)
    few = mkl and num_rows <= FEW_ROWS and not plan.exact_bits
    many = num_rows > (MAX_TREE_ROWS if plan.exact_bits else ROW_BUCKETS[-1])
    if few or many or torch.is_grad_enabled() or not (plan.packed or plan.exact_bits):
        return F.linear(x, weight, bias)
    rows = x.reshape(num_rows, in_features)
    chunks = [_chunk(chunk, weight, bias, plan, packs) for chunk in rows.split(ROW_BUCKETS[-1])]
    out = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return out.reshape(*x.shape[:-1], out_features)


class FastLinear(nn.Linear):
    """``nn.Linear`` by :func:`linear`; shares the parameters of the layer it stands for."""

    def __init__(self, layer: nn.Linear, plan: LinearPlan, packs: WeightPacks) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.plan, self.packs = plan, packs

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        return linear(x, self.weight, self.bias, self.plan, self.packs)


class Siblings:
    """Linear layers that are called one after the other with the same input: one product serves them all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        has_bias = any(layer.bias is not None for layer in layers)
        self.bias = torch.cat([bias.detach() for bias in biases]) if has_bias else None
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._num_reads = 0

    def output(self, index: int, x: Tensor, plan: LinearPlan, packs: WeightPacks) -> Tensor:
        """What layer ``index`` makes of x; the last one to ask drops the results."""
        if x is not self._input:
            self._input, self._num_reads = x, 0
            self._outputs = linear(x, self.weight, self.bias, plan, packs).split(self.sizes, -1)
        out = self._outputs[index]
        self._num_reads += 1
        if self._num_reads == len(self.sizes):
            self._input, self._outputs = None, ()
        return out


class SiblingLinear(FastLinear):
    """One of :class:`Siblings`; its weight is a view of theirs."""

    def __init__(self, layer: nn.Linear, plan: LinearPlan, packs: WeightPacks, siblings: Siblings, index: int) -> None:
        super().__init__(layer, plan, packs)
        self.siblings, self.index = siblings, index
        start = sum(siblings.sizes[:index])
        rows = slice(start, start + self.out_features)
        self.weight = nn.Parameter(siblings.weight[rows], requires_grad=False)
        if self.bias is not None and siblings.bias is not None:
            self.bias = nn.Parameter(siblings.bias[rows], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return self.siblings.output(self.index, x, self.plan, self.packs)


# modules that transformers' models (and Hydra heads) call one after the other with the very same tensor
_SIBLING_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("residual", "linear"))


def replace_linears(module: nn.Module, plan: LinearPlan) -> WeightPacks:
    """Puts a :class:`FastLinear` in the place of every plain ``nn.Linear`` below; parameters' names and values stay."""
    packs = WeightPacks()
    for parent in list(module.modules()):
        layers = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in _SIBLING_NAMES:
            if all(name in layers for name in names):
                siblings = Siblings([layers[name] for name in names])
                for index, name in enumerate(names):
                    setattr(parent, name, SiblingLinear(layers.pop(name), plan, packs, siblings, index))
        for name, child in layers.items():
            setattr(parent, name, FastLinear(child, plan, packs))
    return packs


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of PyTorch packs weights of that type on that device, and it is faster there."""
    if device.type != "cpu":
        return False
    if dtype == torch.float32:
        return torch.backends.mkl.is_available() and _MKL_LINEAR is not None
    return dtype == torch.bfloat16 and native_bf16() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def native_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself (otherwise it is emulated and slower than fp32)."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def _chunk(rows: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, packs: WeightPacks) -> Tensor:
    """(n, in) -> (n, out) for n up to the largest bucket."""
    mkl = plan.packed and weight.dtype == torch.float32
    count = len(rows)
    if mkl:
        padded = next(size for size in ROW_BUCKETS if count <= size and not (plan.exact_bits and size % EXACT_ROWS))
    else:
        padded = -(-count // EXACT_ROWS) * EXACT_ROWS if plan.exact_bits else count
    if count < padded:
        rows = F.pad(rows, (0, 0, 0, padded - count))
    if not plan.packed:
        return F.linear(rows, weight, bias)[:count]
    # a pack of MKL's serves one number of rows, oneDNN's serves all
    packed = packs.get(padded if mkl else ROW_BUCKETS[-1], weight)
    return _packed_product(rows, packed, weight, bias)[:count]


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
        out = _MKL_LINEAR(rows, packed, weight, bias, rows.numel() // rows.shape[-1])
    else:
        out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out
