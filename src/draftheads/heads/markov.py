"""A bias on the logits of a token that depends on the token before it, through one product of rank r (DSpark, 2026).

bias_i = U_i (gate_i(h) * A_i E(x)), x the token before. All else of a prediction is the same for all nodes of a depth.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftheads.heads.base import DraftHead
from draftheads.heads.layers import linears


class MarkovState(NamedTuple):
    """At W nodes of a depth."""

    logits: Tensor  # (depth, B, V') of what does not depend on the path
    gates: Tensor  # (depth, B, r)
    token_ids: Tensor  # (B, W) of the nodes


class MarkovBias(DraftHead):
    """What heads with such a bias share; ``down``, ``up`` and ``gates`` have a layer for each depth, or one for all."""

    reads_path = True

    def add_bias(self, rank: int, count: int, *, gated: bool) -> None:
        """Makes the layers. The bias starts as zero."""
        size = self.config.hidden_size
        self.down = linears(count, size, rank)
        self.up = linears(count, rank, self.config.num_draft_tokens)
        self.gates = linears(count if gated else 0, size, rank, bias=True)
        for parameter in (*self.up.parameters(), *self.gates.parameters()):
            nn.init.zeros_(parameter)

    def biased(self, features: Tensor, before: Tensor, depth: int) -> Tensor:
        """Features (…, D + r) of features (…, D) and scaled embeddings (…, D) of the tokens before."""
        scores = self.down[self._layer(depth)](before)
        return torch.cat([features, self.gate(depth, features) * scores], -1)

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D + r) -> (…, V')."""
        size = self.config.hidden_size
        base: Tensor = super().logits(features[..., :size], head_index)
        bias: Tensor = self.up[self._layer(head_index)](features[..., size:])
        return base + bias

    def logit_parameters(self) -> list[nn.Parameter]:
        return [*super().logit_parameters(), *self.up.parameters()]

    def lm_head_inputs(self, features: Tensor) -> Tensor:
        return features[..., : self.config.hidden_size]

    def layers_of_depths(self) -> None:
        """The part that reads the path is no layer on the state."""

    def with_gates(self, logits: Tensor, features: list[Tensor], token_ids: Tensor) -> MarkovState:
        """At the roots (B,): logits (depth, B, V') without a bias, and each depth's features (B, D)."""
        gates = [self.gate(depth, part).expand(len(part), -1) for depth, part in enumerate(features)]
        return MarkovState(logits, torch.stack(gates) if gates else logits, token_ids[:, None])

    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits of the tokens of a place with the bias of each node, (B, W, V')."""
        place = self._layer(depth)
        bias: Tensor = self.up[place](
            state.gates[depth][:, None] * self.down[place](self.scaled_embedding(state.token_ids))
        )
        logits: Tensor = state.logits[depth][:, None] + bias
        return logits

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        return state._replace(token_ids=token_ids)

    def gate(self, depth: int, features: Tensor) -> Tensor:
        """(…, D) -> (…, r) around 1, or 1."""
        if not len(self.gates):
            return features.new_ones(1)
        return 2.0 * torch.sigmoid(self.gates[self._layer(depth)](features))

    def _layer(self, depth: int) -> int:
        return depth if len(self.up) > 1 else 0
