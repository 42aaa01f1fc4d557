"""Medusa heads: K predictions side by side from one hidden state (Cai et al. 2024, section 3.1.1)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.heads.base import AllAtOnceHead, HeadConfig, Root
from draftheads.heads.layers import ResidualBlock


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Medusa: head i is ``num_layers`` residual blocks on h_t, then an lm_head."""

    lm_head_bias: bool = False
    """Whether own lm_heads have a bias, as Hydra's heads without draft tokens have."""

    method: ClassVar[str] = "medusa"
    description: ClassVar[str] = "each head predicts one position from the last hidden state; all heads are independent"
    paper: ClassVar[str] = "Cai et al. 2024"
    optional: ClassVar[frozenset[str]] = frozenset({"lm_head_bias"})


class MedusaHead(AllAtOnceHead):
    """p_i = softmax(lm_head_i(blocks_i(h_t))). Every layer has weights of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config, lm_head_bias=config.lm_head_bias)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D) -> (K, B, T, D); Medusa heads do not look at the tokens."""
        return torch.stack([blocks(hidden) for blocks in self.blocks])

    def layers_of_depths(self) -> list[list[tuple[Any, Any]]] | None:
        return [[(block.linear, None) for block in blocks] for blocks in self.blocks]  # type: ignore[attr-defined]

    def begin(self, root: Root, depth: int) -> Tensor:
        """Logits of all heads, (depth, B, V'): one pass, whatever the tree."""
        return self.lm_head_logits(torch.stack([blocks(root.states) for blocks in self.blocks[:depth]]))
