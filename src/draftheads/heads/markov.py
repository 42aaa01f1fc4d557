"""The bias of Markov heads: what the token above a draft token adds to its logits, at low rank.

After the gated Markov head of DSpark (2026). There every position has the same two matrices; here each head has its
own, and the first of them reads the target's embedding of the token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftheads.heads.base import DraftHead, Root


class MarkovState(NamedTuple):
    """At W nodes of a depth."""

    logits: Tensor  # (depth, B, V') of what does not depend on the path
    gates: tuple[Tensor, ...]  # of each depth, (B, r) or 1; none without a bias
    token_ids: Tensor  # (B, W) of the nodes


class MarkovHead(DraftHead):
    """A head whose logits can have the bias U_i (gate_i(s_i) * A_i E(x_{t+1+i})), s_i a state of head i.

    It starts as a head without the bias: U_i is zero at first. With rank 0 there is no bias.
    """

    def add_bias(self, rank: int, *, gated: bool = True) -> None:
        """Makes A_i (``down``), U_i (``up``) and the gates, all of rank ``rank``."""
        size, count = self.config.hidden_size, self.config.num_heads if rank else 0
        self.reads_path = rank > 0
        self.down = nn.ModuleList(nn.Linear(size, rank, bias=False) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(rank, self.config.num_draft_tokens, bias=False) for _ in range(count))
        self.gates = nn.ModuleList(nn.Linear(size, rank) for _ in range(count if gated else 0))
        for parameter in (*self.up.parameters(), *self.gates.parameters()):
            nn.init.zeros_(parameter)

    def with_tokens_above(self, features: Tensor, states: Tensor, token_ids: Tensor) -> Tensor:
        """Features for training: behind each head's own stands what U_i reads.

        Args:
            features: (K, B, T, D).
            states: (K, B, T, D) what the gates read.
            token_ids: (B, T) the true text, which replaces the draft token above each head.

        Returns:
            (K, B, T, D + r), or the features if there is no bias.
        """
        if not self.reads_path:
            return features
        embedded = self.scaled_embedding(token_ids)
        low = [
            self._gate(i, states[i]) * self.down[i](embedded.roll(-(i + 1), dims=1))  # the wrapped tail is not used
            for i in range(len(features))
        ]
        return torch.cat([features, torch.stack(low)], -1)

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D + r) -> (…, V'); (…, D) without a bias."""
        if not self.reads_path:
            return super().logits(features, head_index)
        size = self.config.hidden_size
        bias: Tensor = self.up[head_index](features[..., size:])
        return super().logits(features[..., :size], head_index) + bias

    def logit_parameters(self) -> list[nn.Parameter]:
        """The lm_heads' and the U_i."""
        return [*super().logit_parameters(), *self.up.parameters()]

    def lm_head_inputs(self, features: Tensor) -> Tensor:
        """The first D numbers."""
        return features[..., : self.config.hidden_size]

    def at_roots(self, root: Root, logits: Tensor, states: Tensor) -> MarkovState:
        """All that does not depend on the path.

        Args:
            root: the roots.
            logits: (depth, B, V') without the bias.
            states: (depth, B, D) what the gates read.
        """
        gates = tuple(self._gate(i, state) for i, state in enumerate(states)) if self.reads_path else ()
        return MarkovState(logits, gates, root.token_ids[:, None])

    def predict(self, state: MarkovState, depth: int) -> Tensor:
        """(B, W, V'); (B, 1, V') without a bias, since it is the same for all nodes of a depth."""
        logits = state.logits[depth][:, None]
        if not self.reads_path:
            return logits
        low = self.down[depth](self.scaled_embedding(state.token_ids))  # (B, W, r)
        bias: Tensor = self.up[depth](state.gates[depth][..., None, :] * low)
        return logits + bias

    def descend(self, state: MarkovState, depth: int, parents: Tensor, token_ids: Tensor) -> MarkovState:
        """Only the token above matters."""
        return state._replace(token_ids=token_ids)

    def _gate(self, head_index: int, state: Tensor) -> Tensor:
        """(…, D) -> (…, r) around 1, or 1."""
        if not len(self.gates):
            return state.new_ones(1)
        return 2.0 * torch.sigmoid(self.gates[head_index](state))
