"""Experts of a mixture (MoE) as native products: the weights of each are packed alone, so only chosen ones are read."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.cpu.kernels import PackedLinear, Plain


class PackedExperts(nn.Module):
    """Takes the place of a transformers module with the weights of all experts in two tensors.

    Args:
        stock: the module, whose own function joins gate and up. It loses its weights.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.num_experts = len(stock.gate_up_proj)
        self.parts = nn.ModuleList(PackedLinear(Plain(*pair)) for pair in _weights(stock))
        self._is_concatenated = stock.is_concatenated
        for name in [name for name, _ in stock.named_parameters(recurse=False)]:
            delattr(stock, name)
        self._stock = (stock,)  # not a module of this one

    @property
    def gate(self) -> tuple[str, float, float]:
        """How gate and up are joined: the activation's class, and α and limit of a clamped one (gpt-oss), or zeros."""
        stock = self._stock[0]
        limits = float(getattr(stock, "alpha", 0.0)), float(getattr(stock, "limit", 0.0))
        return ("Clamped" if any(limits) else type(stock.act_fn).__name__, *limits)

    def expert(self, number: int) -> tuple[Any, Any, Any]:
        """Its layers for gate, up and down."""
        gate, up, down = self.parts[3 * number : 3 * number + 3]
        return gate, up, down

    def forward(self, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum of the chosen experts' outputs: (n, D), numbers (n, k) and shares (n, k) of experts -> (n, D)."""
        out = torch.zeros_like(hidden_states)
        for number in chosen.unique().tolist():
            rows, places = (chosen == number).nonzero(as_tuple=True)
            states = hidden_states[rows]
            gate, up, down = self.expert(number)
            pair = [gate(states), up(states)]
            joined = torch.cat(pair, -1) if self._is_concatenated else torch.stack(pair, -1).flatten(-2)
            added = down(self._stock[0]._apply_gate(joined)) * shares[rows, places, None]  # noqa: SLF001
            out.index_add_(0, rows, added.to(out.dtype))
        return out


def are_experts(module: nn.Module) -> bool:
    """Whether it has the form that :class:`PackedExperts` takes the place of."""
    names = {name for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    return (
        names == {"gate_up_proj", "down_proj"}
        and callable(getattr(module, "_apply_gate", None))
        and getattr(module, "has_gate", False)
        and not getattr(module, "has_post_expert_norm", False)
    )


def replace_experts(model: nn.Module) -> None:
    """Replaces the modules of that form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if are_experts(child):
                setattr(parent, name, PackedExperts(child))


def _weights(stock: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights (out, in) and biases of gate, up and down of each expert."""

    def of(name: str, number: int) -> tuple[Tensor, Tensor | None]:
        weight, bias = getattr(stock, name)[number].detach(), getattr(stock, f"{name}_bias", None)
        return weight.T if stock.is_transposed else weight, None if bias is None else bias[number].detach()

    for number in range(len(stock.gate_up_proj)):
        weight, bias = of("gate_up_proj", number)
        half = len(weight) // 2
        for place in range(2):
            rows = slice(place * half, (place + 1) * half) if stock.is_concatenated else slice(place, None, 2)
            yield weight[rows], None if bias is None else bias[rows].clone()
        yield of("down_proj", number)
