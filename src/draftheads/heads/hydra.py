"""Hydra heads: each head reads the draft tokens before its own on the path (Ankner et al. 2024, section 3)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.heads.base import DraftHead, EmbeddingConfig, Root
from draftheads.heads.layers import ResidualBlock, fusion, zero_linear


@dataclass(frozen=True)
class HydraConfig(EmbeddingConfig):
    """Hydra: head i reads h_t and the embeddings of x_{t+1} … x_{t+1+i}; its first block fuses them."""

    method: ClassVar[str] = "hydra"
    description: ClassVar[str] = "each head also reads the draft tokens before it"
    paper: ClassVar[str] = "Ankner et al. 2024"


class FusionBlock(nn.Module):
    """u -> R u + SiLU(W u), (…, M) -> (…, D): the first block of a Hydra head; R is learned since the sizes differ."""

    def __init__(self, size: int, num_inputs: int) -> None:
        super().__init__()
        # starts as "h_t and nothing else", Medusa's starting point
        self.residual = fusion(size, num_inputs=num_inputs, state_first=True)
        self.linear = zero_linear(num_inputs * size, size)

    def forward(self, u: Tensor) -> Tensor:
        """(…, M) -> (…, D)."""
        return self.residual(u) + F.silu(self.linear(u))


class HydraHead(DraftHead):
    """Grounded Hydra heads, f_i(h_t, x_{t+1}, …, x_{t+1+i}) (section 3)."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config, lm_head_bias=True)  # as in the reference code
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(FusionBlock(size, i + 2), *(ResidualBlock(size) for _ in range(config.num_layers - 1)))
            for i in range(config.num_heads)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D); the true text replaces the draft tokens above each head."""
        embedded = self.scaled_embedding(token_ids)  # (B, T, D)
        inputs = [hidden]
        features = []
        for i, blocks in enumerate(self.blocks):
            inputs.append(embedded.roll(-(i + 1), dims=1))  # the wrapped tail is not used
            features.append(blocks(torch.cat(inputs, -1)))
        return torch.stack(features)

    def layers_of_depths(self) -> list[list[tuple[Any, Any]]]:
        return [[(part.linear, getattr(part, "residual", None)) for part in each] for each in self.blocks]  # type: ignore[attr-defined]

    def begin(self, root: Root, depth: int) -> Tensor:
        """What the children of the root are predicted from: h_t and E(x_{t+1}), (B, 1, 2·D)."""
        return torch.cat([root.states, self.scaled_embedding(root.token_ids)], -1)[:, None]

    def predict(self, state: Tensor, depth: int) -> Tensor:
        """(B, W, M) -> (B, W, V')."""
        return self.logits(self.blocks[depth](state), depth)

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        """The parents' inputs with the child's embedding behind: (B, W', M + D)."""
        rows = torch.arange(len(state), device=state.device)[:, None]
        return torch.cat([state[rows, parents], self.scaled_embedding(token_ids)], -1)
