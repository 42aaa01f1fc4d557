"""A bias on the logits of a token that depends on the token before it, through one product of rank r (DSpark, 2026).

bias_i = U_i (gate_i(h) * A_i E(x)), x the token before. All else of a prediction is the same for all nodes of a depth.
A_i E(x) may be a row of an embedding of its own, and the gate may read it, too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftheads.heads.base import DraftHead
from draftheads.heads.layers import linears


class MarkovState(NamedTuple):
    """At W nodes of a depth."""

    logits: Tensor  # (depth, B, V') of what does not depend on the path
    gates: Tensor  # (depth, B, r) what the gates read of the rows
    token_ids: Tensor  # (B, W) of the nodes


class MarkovBias(DraftHead):
    """What heads with such a bias share; ``down``, ``up`` and ``gates`` have a layer for each depth, or one for all."""

    reads_path = True

    def add_bias(
        self, rank: int, count: int, *, gated: bool, own_embedding: bool = False, gate_reads_token: bool = False
    ) -> None:
        """Makes the layers. The bias starts as zero."""
        size = self.config.hidden_size
        self.down = (
            nn.ModuleList(nn.Embedding(self.config.vocab_size, rank) for _ in range(count))
            if own_embedding
            else linears(count, size, rank)
        )
        self.up = linears(count, rank, self.config.num_draft_tokens)
        self.gates = linears(count if gated else 0, size, rank, bias=True)
        self.token_gates = linears(count if gated and gate_reads_token else 0, rank, rank)
        for parameter in (*self.up.parameters(), *self.gates.parameters(), *self.token_gates.parameters()):
            nn.init.zeros_(parameter)

    def scores(self, token_ids: Tensor, depth: int) -> Tensor:
        """A E(x) of the tokens before, or their rows of the head's own embedding: (…) -> (…, r)."""
        down = self.down[self._layer(depth)]
        scores: Tensor = down(token_ids if isinstance(down, nn.Embedding) else self.scaled_embedding(token_ids))
        return scores

    def biased(self, features: Tensor, before: Tensor, depth: int) -> Tensor:
        """Features (…, D + r) of features (…, D) and the tokens before, (…)."""
        gate = self.gate(depth, features)
        return torch.cat([features, self.gated(depth, gate, self.scores(before, depth))], -1)

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

    def with_gates(self, logits: Tensor, features: list[Tensor], token_ids: Tensor) -> MarkovState:
        """At the roots (B,): logits (depth, B, V') without a bias, and each depth's features (B, D)."""
        gates = [self.gate(depth, part).expand(len(part), -1) for depth, part in enumerate(features)]
        return MarkovState(logits, torch.stack(gates) if gates else logits, token_ids[:, None])

    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits of the tokens of a place with the bias of each node, (B, W, V')."""
        scores = self.gated(depth, state.gates[depth][:, None], self.scores(state.token_ids, depth))
        bias: Tensor = self.up[self._layer(depth)](scores)
        logits: Tensor = state.logits[depth][:, None] + bias
        return logits

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        return state._replace(token_ids=token_ids)

    def gate(self, depth: int, features: Tensor) -> Tensor:
        """What a gate reads of rows, before its sigmoid: (…, D) -> (…, r), or one 0 without a gate."""
        return self.gates[self._layer(depth)](features) if len(self.gates) else features.new_zeros(1)

    def gated(self, depth: int, gate: Tensor, scores: Tensor) -> Tensor:
        """Scores (…, r) of tokens, times a gate around 1."""
        if not len(self.gates):
            return scores
        if len(self.token_gates):
            gate = gate + self.token_gates[self._layer(depth)](scores)
        return 2.0 * torch.sigmoid(gate) * scores

    def _layer(self, depth: int) -> int:
        return depth if len(self.up) > 1 else 0
