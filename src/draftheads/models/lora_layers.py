"""LoRA beside its base model: the layers share their weights with the base, and each adds its own low-rank product.

The layers keep their kernels, also packed and quantised ones. So a pass of the base does not change, and an
adapter needs memory for its own matrices only.
"""

import hashlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.kernels import Native, PackedLinear, Plain, Product
from draftheads.cpu.native_step import native_step
from draftheads.errors import UnsupportedModel
from draftheads.models.adapter import LowRank, check_base, read_lora
from draftheads.models.model import TargetModel, WeightFacts, sharing_weights
from draftheads.models.model_names import find_adapter
from draftheads.models.pretrained import adapter_tokenizer
from draftheads.utils.files import user_path


class WithLora(Product):
    """X Wᵀ + b + (X Aᵀ) Bᵀ; the product by W is the base model's own, and the others are native ones if it is."""

    name = "lora"

    def __init__(self, base: Product, a: Tensor, b: Tensor) -> None:
        self.out_features, self.in_features, self.dtype = base.out_features, base.in_features, base.dtype
        self.bias = base.bias
        self.base = base
        self.low_rank = a, b  # (r, in) and (out, r) in fp32, which native passes read
        kind = Native if isinstance(base, Native) else Plain
        self._a, self._b = (kind(matrix.to(self.dtype), None) for matrix in (a, b))  # (r, in) and (out, r)

    @property
    def weight(self) -> Tensor:
        """(out, in): W + B A."""
        return torch.addmm(self.base.weight, self._b.weight, self._a.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, in) -> (n, out)."""
        return self.base(rows).add_(self._b(self._a(rows)))


def with_lora(target: TargetModel, folder: str | PathLike[str]) -> TargetModel:
    """A model with a LoRA adapter (peft) on top. It shares all weights with the given one, which does not change.

    Args:
        target: the base model.
        folder: of the adapter. Its own tokenizer is used, if it has one.

    Raises:
        ModelNotFound: no adapter there.
        CheckpointMismatch: it was tuned for another model.
        CheckpointCorrupt: it does not fit the layers, or is damaged.
        UnsupportedModel: it changes more than linear layers, or adds tokens: merge it.
        MissingDependency: no peft.
    """
    place = user_path(folder)
    place = find_adapter(place) or place
    matrices = read_lora(target.model, place)
    check_base(place, target.model_id, target.fingerprints)
    tokenizer = adapter_tokenizer(place) or target.tokenizer
    num_embeddings = len(target.model.get_input_embeddings().weight)
    if hasattr(tokenizer, "__len__") and len(tokenizer) > num_embeddings:
        raise UnsupportedModel(
            f"{place} adds tokens: its tokenizer has {len(tokenizer)} and {target.model_id} has embeddings for "
            f"{num_embeddings}. Merge it: `draftheads merge --adapter {place} --out …`"
        )
    model = sharing_weights(target.model)
    add_lora(model, matrices)
    digest = hashlib.sha256(target.weights_fingerprint.encode())
    for name, pair in sorted(matrices.items()):
        digest.update(name.encode() + pair.a.numpy().tobytes() + pair.b.numpy().tobytes())
    facts = WeightFacts(target.dtype, target.precision, digest.hexdigest()[:16], None)  # not the base's
    native = None if target.native is None else native_step(model, target.windows)
    return target.changed(model, facts, native=native, tokenizer=tokenizer, model_id=str(place.resolve()))


def add_lora(model: Any, matrices: Mapping[str, LowRank]) -> None:
    """Adds low-rank products to the layers of a model, stock or with faster modules, in place; no weight changes.

    The matrices have the names of the stock model's layers.
    """
    modules = dict(model.named_modules())
    for name, pair in matrices.items():
        layer = modules[name]
        if isinstance(layer, PackedLinear):
            layer.product = WithLora(layer.product, pair.a, pair.b)
            layer.tied = None  # the adapter changes the lm_head, but not the embedding
        else:
            _hook(layer, pair)


def _hook(layer: nn.Module, pair: LowRank) -> None:
    weight = next(layer.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    a, b = (matrix.to(weight.device, dtype) for matrix in (pair.a, pair.b))

    def added(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + F.linear(F.linear(inputs[0].to(dtype), a), b).to(out.dtype)

    layer.register_forward_hook(added)
