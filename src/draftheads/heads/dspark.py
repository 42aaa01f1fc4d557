"""DSpark: DFlash's body on shifted blocks, and a bias from the token before (arXiv 2607.05147).

The row at each place predicts the token behind it, and a low-rank bias makes the prediction depend on the draft token
before it (:class:`MarkovBias`). In training the text's tokens take the place of draft tokens.
The published head has an embedding of its own, and a gate that reads the row and the token; see the options.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.base import DraftHead, Root
from draftheads.heads.dflash import BlockConfig, DFlashHead
from draftheads.heads.layers import first_texts, linear_fit, linears, low_rank_fit


@dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """DSpark: logits_i = lm_head(f_i) + U (gate(f_i) * A E(x_{t+1+i})), f_i a row of the body."""

    markov_rank: int = 128
    """r, the rank of what the token before adds to the logits."""
    gated: bool = True
    """Whether the row weights each of the r numbers."""
    own_embedding: bool = False
    """Whether an embedding (V, r) of its own takes the place of A E(x), as in the published heads."""
    gate_reads_token: bool = False
    """Whether the gate reads the token before, too, as in the published heads."""
    recurrent: bool = False
    """Whether a state of r numbers follows the path, in place of a gate: the published Markov heads of the kind rnn."""
    is_shifted: bool = True

    method: ClassVar[str] = "dspark"
    description: ClassVar[str] = "as dflash, plus a term for the previous draft token"
    paper: ClassVar[str] = "DSpark, 2026"
    optional = BlockConfig.optional | {"own_embedding", "gate_reads_token", "recurrent"}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, markov_rank=self.markov_rank)
        if self.gate_reads_token and not self.gated:
            raise InvalidSettings("gate_reads_token is true and gated is false: there is no gate; give gated=true")
        if self.recurrent and self.gated:
            raise InvalidSettings("recurrent and gated are true, and a head has one of them; give gated=false")


class MarkovState(NamedTuple):
    """At W nodes of a depth."""

    logits: Tensor  # (depth, B, V') of what does not depend on the path
    gates: Tensor  # (depth, B, r) what the gates read of the rows
    token_ids: Tensor  # (B, W) of the nodes
    memory: Tensor  # (B, W, r) of a recurrent head, r = 0 of others


class MarkovBias(DraftHead):
    """A bias on the logits of a token that depends on the token before it, through one product of rank r.

    bias_i = U_i (gate_i(h) * A_i E(x)), x the token before. All else of a prediction is the same for all nodes of a
    depth. A_i E(x) may be a row of an embedding of its own, and the gate may read it, too. ``down``, ``up`` and
    ``gates`` have a layer for each depth, or one for all.

    A recurrent head has a state s of r numbers, zero at the root (DSpark, arXiv 2607.05147): with
    [g, c, o] = J_s s + J_x A E(x) + J_h h the bias is U tanh(o), and the state of the children is
    σ(g) s + (1 - σ(g)) tanh(c).
    """

    reads_path = True
    has_linear_gate: ClassVar[bool] = False

    def add_bias(self, config: Any, count: int) -> None:
        """Makes so many layers by the options of :class:`DSparkConfig`. The bias starts as zero."""
        rank, size = config.markov_rank, config.hidden_size
        own = nn.ModuleList(nn.Embedding(config.vocab_size, rank) for _ in range(count if config.own_embedding else 0))
        self.down = own if config.own_embedding else linears(count, size, rank)
        self.up = linears(count, rank, config.num_draft_tokens)
        self.is_recurrent = getattr(config, "recurrent", False)
        read = 3 * rank if self.is_recurrent else rank
        self.rank: int = rank
        has_gates = config.gated or self.is_recurrent
        self.gates = linears(count if has_gates else 0, size, read, bias=not self.has_linear_gate)
        self.token_gates = linears(count if config.gate_reads_token or self.is_recurrent else 0, rank, read)
        self.state_gates = linears(count if self.is_recurrent else 0, rank, read)
        gates = (*self.gates.parameters(), *self.token_gates.parameters())
        gates = () if self.is_recurrent or self.has_linear_gate else gates  # or nothing would be learned
        for parameter in (*self.up.parameters(), *gates):
            nn.init.zeros_(parameter)

    def scores(self, token_ids: Tensor, depth: int) -> Tensor:
        """A E(x) of the tokens before, or their rows of the head's own embedding: (…) -> (…, r)."""
        down = self.down[self._layer(depth)]
        return down(token_ids if isinstance(down, nn.Embedding) else self.scaled_embedding(token_ids))

    def biased(self, features: Tensor, rows: Tensor, before: Tensor, depth: int) -> Tensor:
        """Features (…, D + r) of features and what the gate reads, each (…, D), and the tokens before, (…)."""
        return torch.cat([features, self.gated(depth, self.gate(depth, rows), self.scores(before, depth))], -1)

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D + r) -> (…, V')."""
        size = self.config.hidden_size
        return super().logits(features[..., :size], head_index) + self.up[self._layer(head_index)](features[..., size:])

    def logit_parameters(self) -> list[nn.Parameter]:
        return [*super().logit_parameters(), *self.up.parameters()]

    def lm_head_inputs(self, features: Tensor) -> Tensor:
        return features[..., : self.config.hidden_size]

    def with_gates(self, logits: Tensor, features: list[Tensor], token_ids: Tensor) -> MarkovState:
        """At the roots (B,): logits (depth, B, V') without a bias, and each depth's features (B, D)."""
        gates = [self.gate(depth, part).expand(len(part), -1) for depth, part in enumerate(features)]
        memory = gates[0].new_zeros(len(token_ids), 1, self.rank if self.is_recurrent else 0)
        return MarkovState(logits, torch.stack(gates), token_ids[:, None], memory)

    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits of the tokens of a place with the bias of each node, (B, W, V')."""
        before, gate = self.scores(state.token_ids, depth), state.gates[depth][:, None]
        scores = (
            self.turned(depth, gate, before, state.memory)[0] if self.is_recurrent else self.gated(depth, gate, before)
        )
        return state.logits[depth][:, None] + self.up[self._layer(depth)](scores)

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        memory = state.memory
        if self.is_recurrent:
            gate = state.gates[depth][:, None]
            memory = self.turned(depth, gate, self.scores(state.token_ids, depth), memory)[1]
            memory = memory[torch.arange(len(parents), device=parents.device)[:, None], parents]
        return state._replace(token_ids=token_ids, memory=memory)

    def turned(self, depth: int, gate: Tensor, scores: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What the bias is made of and the next state, each (…, r), of a recurrent head's state ``memory`` (…, r)."""
        layer = self._layer(depth)
        g, c, o = (gate + self.token_gates[layer](scores) + self.state_gates[layer](memory)).chunk(3, -1)
        return torch.tanh(o), torch.lerp(torch.tanh(c), memory, torch.sigmoid(g))

    def gate(self, depth: int, features: Tensor) -> Tensor:
        """What a gate reads of rows, before its sigmoid: (…, D) -> (…, r), or one 0 without a gate."""
        return self.gates[self._layer(depth)](features) if len(self.gates) else features.new_zeros(1)

    def gated(self, depth: int, gate: Tensor, scores: Tensor) -> Tensor:
        """Scores (…, r) of tokens, times a gate around 1."""
        if not len(self.gates):
            return scores
        if self.has_linear_gate:
            return gate * scores
        if len(self.token_gates):
            gate = gate + self.token_gates[self._layer(depth)](scores)
        return 2.0 * torch.sigmoid(gate) * scores

    def _layer(self, depth: int) -> int:
        return depth if len(self.up) > 1 else 0


class DSparkHead(MarkovBias, DFlashHead):
    """DFlash with a bias from the token before. It starts without: U is zero at first."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.add_bias(config, 1)

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Also sets A: its r numbers for a token are those that tell most of the next h, with a mean square of 1.

        U starts as zero and learns from them; from the small numbers of a random A it would learn slowly.
        """
        taken = first_texts(texts, self.fc.in_features)
        super().start_near(taken)
        before = [self.scaled_embedding(ids[1:]) for _, ids in taken]
        if not any(map(len, before)):
            return
        told = linear_fit((x, self.split(hidden)[1][1:]) for x, (hidden, _) in zip(before, taken, strict=True))
        config: Any = self.config
        table: Any = self.down[0]
        down = low_rank_fit(told, torch.cat(before), config.markov_rank)[1].to(before[0])
        if isinstance(table, nn.Embedding):
            table.weight.copy_(self.scaled_embedding(torch.arange(self.config.vocab_size, device=down.device)) @ down.T)
        else:
            table.weight.copy_(down)

    def features(self, found: Tensor, token_ids: Tensor, at: Tensor) -> Tensor:
        """(K, B, A, D + r)."""
        before = [token_ids.roll(-(i + 1), dims=1).gather(1, at) for i in range(len(found))]  # no wrapped tail is used
        if not self.is_recurrent:
            return torch.stack([self.biased(rows, rows, before[i], i) for i, rows in enumerate(found)])
        made, memory = [], found.new_zeros(*at.shape, self.rank)
        for i, rows in enumerate(found):
            scores, memory = self.turned(i, self.gate(i, rows), self.scores(before[i], i), memory)
            made.append(torch.cat([rows, scores], -1))
        return torch.stack(made)

    def begin(self, root: Root, depth: int) -> MarkovState:
        """All that does not depend on the path, for all places at once."""
        features = self.block_features(root)[:depth]
        return self.with_gates(self.lm_head_logits(features), list(features), root.token_ids)
