"""Markov-Medusa: Medusa's heads, each with a low-rank bias that depends on the draft token before its own.

Our own architecture, after DSpark's Markov head (2026): a prediction depends on the token above it, as in Hydra,
but only through one product of rank r per node. All else is computed once for all nodes of a depth, as in Medusa.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from draftheads.errors import require_at_least
from draftheads.heads.base import EmbeddingConfig, Root
from draftheads.heads.markov import MarkovHead, MarkovState
from draftheads.heads.medusa import MedusaConfig, MedusaHead


@dataclass(frozen=True)
class MarkovMedusaConfig(MedusaConfig, EmbeddingConfig):
    """Markov-Medusa: logits_i = lm_head_i(blocks_i(h_t)) + U_i (gate_i(h_t) * A_i E(x_{t+1+i}))."""

    markov_rank: int = 128
    """r, the rank of what the token before adds to the logits."""
    gated: bool = True
    """Whether h_t weights each of the r numbers."""

    method: ClassVar[str] = "markov-medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, markov_rank=self.markov_rank)


class MarkovMedusaHead(MarkovHead, MedusaHead):  # type: ignore[misc]  # the state differs
    """Medusa with a bias from the token before. Starts as Medusa."""

    def __init__(self, config: MarkovMedusaConfig) -> None:
        super().__init__(config)
        self.add_bias(config.markov_rank, gated=config.gated)

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D + r); the true text replaces the draft token above each head."""
        features = super().forward(hidden, token_ids)
        return self.with_tokens_above(features, hidden.expand_as(features), token_ids)

    def begin(self, root: Root, depth: int) -> MarkovState:  # type: ignore[override]
        """All that does not depend on the path, for all depths at once."""
        logits = MedusaHead.begin(self, root, depth)
        return self.at_roots(root, logits, root.states.expand(depth, -1, -1))
