"""A new draft head, from a package outside draftheads: head i is one linear layer on the last hidden state.

K heads, B rows, T tokens, D hidden size, V' draft vocabulary. Head i predicts x_{t+2+i} from the hidden state h_t.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import draftheads
from draftheads.heads.base import DraftHead, HeadConfig, Root


@dataclass(frozen=True)
class LinearConfig(HeadConfig):
    """The settings of all heads, and one more."""

    method: ClassVar[str] = "linear"
    one_layer: ClassVar[str] = "a linear head"  # other values of --num-layers are refused

    scale: float = 1.0
    """Factor of the layer's output. It is set by ``--head-options scale=0.5`` and saved with the head."""


class LinearHead(DraftHead):
    """p_i = softmax(lm_head(h_t + scale · A_i h_t)). A_i starts at zero."""

    config: LinearConfig
    reads_path = False  # a prediction does not depend on the draft tokens before it

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        layers = [nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(config.num_heads)]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            nn.init.zeros_(layer.weight)

    def features(self, states: Tensor, head_index: int) -> Tensor:
        """(…, D) -> (…, D), the input of the lm_head."""
        added: Tensor = self.layers[head_index](states)
        return states + self.config.scale * added

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Training: hidden states (B, T, D) of whole texts -> features (K, B, T, D)."""
        return torch.stack([self.features(hidden, i) for i in range(self.config.num_heads)])

    def begin(self, root: Root, depth: int) -> list[Tensor]:
        """Drafting: the logits (B, V') of the first ``depth`` heads, from the last hidden states (B, D)."""
        return [self.logits(self.features(root.states, i), i) for i in range(depth)]

    def predict(self, state: list[Tensor], depth: int) -> Tensor:
        """Drafting: (B, 1, V'), the logits for all nodes below depth ``depth``."""
        return state[depth][:, None]


def register_heads() -> None:
    """The entry point."""
    draftheads.register(LinearConfig, LinearHead)
