"""Muon for a head's matrices and AdamW for its other parameters, as one optimizer.

Muon (Jordan et al. 2024) makes the momentum of a matrix nearly orthogonal, so that all its directions move equally far.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from draftheads.heads.base import DraftHead


class MuonAdamW(Optimizer):
    """Three groups: matrices by Muon, then other matrices (which may decay) and vectors (which do not) by AdamW.

    Muon's steps are scaled to the size of AdamW's ("Muon is scalable", Liu et al. 2025), so one learning rate and one
    weight decay serve all groups.
    """

    def __init__(self, head: DraftHead, *, lr: float, weight_decay: float, **adamw: Any) -> None:
        """For all trained parameters of a head; ``adamw`` are further arguments of :class:`torch.optim.AdamW`."""
        matrices = hidden_matrices(head)
        taken = set(map(id, matrices))
        others = [weight for weight in head.parameters() if weight.requires_grad and id(weight) not in taken]
        wide, vectors = ([weight for weight in others if (weight.ndim > 1) == is_wide] for is_wide in (True, False))
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: tuple[Optimizer, ...] = (
            Muon([{"params": matrices}], **shared, adjust_lr_fn="match_rms_adamw"),
            AdamW([{"params": wide}], **shared, **adamw),
            AdamW([{"params": vectors}], **{**shared, "weight_decay": 0.0}, **adamw),
        )
        super().__init__([part.param_groups[0] for part in self._parts], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Each group by its own rule. Groups and state are this optimizer's own, so they are saved and loaded whole."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


def hidden_matrices(head: DraftHead) -> list[Tensor]:
    """The trained weights of a head's linear layers, without those that lead to the vocabulary."""
    outputs = {id(weight) for weight in (*head.lm_heads.parameters(), *head.logit_parameters())}
    layers = (module for module in head.modules() if isinstance(module, nn.Linear))
    return [layer.weight for layer in layers if layer.weight.requires_grad and id(layer.weight) not in outputs]
