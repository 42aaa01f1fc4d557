"""Markov-Medusa: Medusa's heads, each with a low-rank bias that depends on the draft token before its own.

Our own architecture, after DSpark's Markov head (2026): a prediction depends on the token above it, as in Hydra,
but only through one product of rank r per node. All else is computed once for all nodes of a depth, as in Medusa.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftheads.errors import require_at_least
from draftheads.heads.base import EmbeddingConfig, Root
from draftheads.heads.layers import linears
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


class _State(NamedTuple):
    """At W nodes of a depth."""

    logits: Tensor  # (depth, B, V') of what does not depend on the path
    gates: Tensor  # (depth, B, r)
    token_ids: Tensor  # (B, W) of the nodes


class MarkovMedusaHead(MedusaHead):
    """Medusa with a bias from the token before. Starts as Medusa: U_i is zero at first."""

    reads_path = True

    def __init__(self, config: MarkovMedusaConfig) -> None:
        super().__init__(config)
        size, rank, count = config.hidden_size, config.markov_rank, config.num_heads
        self.down = linears(count, size, rank)
        self.up = linears(count, rank, config.num_draft_tokens)
        self.gates = linears(count if config.gated else 0, size, rank, bias=True)
        for parameter in (*self.up.parameters(), *self.gates.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D + r); the true text replaces the draft token above each head."""
        embedded = self.scaled_embedding(token_ids)
        features = []
        for i, blocks in enumerate(self.blocks):
            before = embedded.roll(-(i + 1), dims=1)  # the wrapped tail is not used
            features.append(torch.cat([blocks(hidden), self._gate(i, hidden) * self.down[i](before)], -1))
        return torch.stack(features)

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D + r) -> (…, V')."""
        size = self.config.hidden_size
        base: Tensor = super().logits(features[..., :size], head_index)
        bias: Tensor = self.up[head_index](features[..., size:])
        return base + bias

    def logit_parameters(self) -> list[nn.Parameter]:
        return [*super().logit_parameters(), *self.up.parameters()]

    def lm_head_inputs(self, features: Tensor) -> Tensor:
        return features[..., : self.config.hidden_size]

    def layers_of_depths(self) -> None:
        """The part that reads the path is no layer on the state."""

    def begin(self, root: Root, depth: int) -> _State:  # type: ignore[override]  # Medusa's state is its logits
        """All that does not depend on the path, for all depths at once."""
        hidden = root.states
        gates = [self._gate(i, hidden) for i in range(depth)]
        return _State(
            logits=super().begin(root, depth),
            gates=torch.stack([gate.expand(len(hidden), -1) for gate in gates]) if gates else hidden[None],
            token_ids=root.token_ids[:, None],
        )

    def predict(self, state: _State, depth: int) -> Tensor:  # type: ignore[override]
        """(B, W, V')."""
        bias: Tensor = self.up[depth](
            state.gates[depth][:, None] * self.down[depth](self.scaled_embedding(state.token_ids))
        )
        return state.logits[depth][:, None] + bias

    def descend(self, state: _State, depth: int, parents: Tensor, token_ids: Tensor) -> _State:
        return state._replace(token_ids=token_ids)

    def _gate(self, head_index: int, hidden: Tensor) -> Tensor:
        """(…, D) -> (…, r) around 1, or 1."""
        if not len(self.gates):
            return hidden.new_ones(1)
        return 2.0 * torch.sigmoid(self.gates[head_index](hidden))
