"""Markov-Medusa: Medusa's heads, each with a low-rank bias that depends on the draft token before its own.

Our own architecture, after DSpark's Markov head (2026): a prediction depends on the token above it, as in Hydra,
but only through one product of rank r per node. All else is computed once for all nodes of a depth, as in Medusa.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftheads.errors import require_at_least
from draftheads.heads.base import EmbeddingConfig, Root
from draftheads.heads.dspark import MarkovBias, MarkovState
from draftheads.heads.medusa import MedusaConfig, MedusaHead


@dataclass(frozen=True)
class MarkovMedusaConfig(MedusaConfig, EmbeddingConfig):
    """Markov-Medusa: logits_i = lm_head_i(blocks_i(h_t)) + U_i (gate_i(h_t) * A_i E(x_{t+1+i}))."""

    markov_rank: int = 128
    """r, the rank of what the token before adds to the logits."""
    gated: bool = True
    """Whether h_t weights each of the r numbers."""

    method: ClassVar[str] = "markov-medusa"
    description: ClassVar[str] = "Medusa, plus a term for the previous draft token"
    paper: ClassVar[str] = ""
    extends: ClassVar[str] = "medusa"
    own_embedding: ClassVar[bool] = False  # options of DSpark
    gate_reads_token: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, markov_rank=self.markov_rank)


class MarkovMedusaHead(MarkovBias, MedusaHead):
    """Medusa with a bias from the token before. Starts as Medusa: U_i is zero at first."""

    def __init__(self, config: MarkovMedusaConfig) -> None:
        super().__init__(config)
        self.add_bias(config, config.num_heads)

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D + r); the true text replaces the draft token above each head."""
        before = [token_ids.roll(-(i + 1), dims=1) for i in range(len(self.blocks))]  # the wrapped tails are not used
        return torch.stack([self.biased(part(hidden), hidden, before[i], i) for i, part in enumerate(self.blocks)])

    def begin(self, root: Root, depth: int) -> MarkovState:  # type: ignore[override]  # Medusa's state is its logits
        """All that does not depend on the path, for all depths at once."""
        return self.with_gates(super().begin(root, depth), [root.states] * depth, root.token_ids)
