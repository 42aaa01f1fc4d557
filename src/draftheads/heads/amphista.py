"""Amphista: heads that see each other, on layers that adapt hidden states (Li et al. 2024).

The authors have published no code. Where the paper gives no detail, this implementation chooses:

* The adaptation layers are Llama's kind of layer with rotary positions, sized as the target's ("built upon the target
  model").
* MLP_k is ``num_layers`` of Medusa's residual blocks, x + SiLU(W x): "∈ R^{d×d}", and Medusa is what it builds on.
* The auto-embedding block is a transformer encoder layer: normed attention of all heads to all, then a feed-forward
  part, each added to its input; the paper writes the attention alone (equation 5) but calls it an encoder module. There
  is no norm behind it, as Medusa has none before its lm_heads.
* Without staged adaptation no layer is left that would read the sampled token: heads read h_t alone, and the switch
  ``sampled_token`` changes nothing. Table 4's first ablation takes both away here.
* Everything starts such that head k's features are h_t, Medusa's starting point.

``coupling_size`` is not in the paper. Heads that draft at the same time do not know the token of the head before. A
small layer tells them, as DSpark's Markov head (2026) does. There it becomes logits by a matrix of its own, here by the
lm_head: its output is added to a head's features F_i when the draft token above is known.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.attention import LayerConfig, TransformerLayer
from draftheads.heads.base import EmbeddingConfig, Root
from draftheads.heads.kv_cache import HeadKVCache
from draftheads.heads.layers import ResidualBlock, fusion, linears
from draftheads.heads.stateful import StatefulHead, last_of, next_tokens
from draftheads.speculation.draft import Context


@dataclass(frozen=True)
class AmphistaConfig(LayerConfig, EmbeddingConfig):
    """Amphista: staged adaptation layers, MLPs, and attention across heads; the switches of its table 4."""

    num_adaptation_layers: int = 2
    """2: the first ⌊K/2⌋ heads read stage one, the others stage two; 1: all read one; 0: all read h_t."""
    num_auto_embedding_blocks: int = 1
    """Encoder layers across heads; 2 is Amphista-α, 0 leaves the heads apart."""
    head_positions: bool = True
    """Whether learned positions are added to the heads before they attend to each other."""
    sampled_token: bool = True
    """Whether adaptation layers read the embedding of x_{t+1}, too."""
    coupling_size: int = 0
    """r, the size of the layer that tells a head the draft token above; 0 for none, as in the paper."""

    method: ClassVar[str] = "amphista"
    optional: ClassVar[frozenset[str]] = LayerConfig.optional | {"coupling_size"}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, coupling_size=self.coupling_size)
        if self.num_adaptation_layers not in (0, 1, 2):
            raise InvalidSettings(f"num_adaptation_layers is {self.num_adaptation_layers}; choose 0, 1 or 2")
        if self.num_auto_embedding_blocks < 0:
            raise InvalidSettings(f"num_auto_embedding_blocks is {self.num_auto_embedding_blocks}; give 0 for none")


class _State(NamedTuple):
    """At W nodes of a depth."""

    features: Tensor  # (depth, B, D) F_i of each head
    logits: Tensor  # (depth, B, V') of them; of the first head alone if the others read the token above
    token_ids: Tensor  # (B, W) of the nodes


class AmphistaHead(StatefulHead):
    """Equations 1 to 6: all heads' features F_i at once, whatever the path.

    With a ``coupling_size``, the features of head i > 0 become F_i + P_i SiLU(L_i [F_i; E(x_{t+1+i})]). P_i starts at
    zero. The first head reads its token in the adaptation layers.
    """

    def __init__(self, config: AmphistaConfig) -> None:
        super().__init__(config, num_layers=config.num_adaptation_layers)
        self.sampled_token = config.sampled_token
        size, stages = config.hidden_size, config.num_adaptation_layers
        num_fusions = stages if config.sampled_token else 0
        self.fusions = nn.ModuleList(fusion(size, state_first=True) for _ in range(num_fusions))
        self.adaptations = nn.ModuleList(TransformerLayer(config) for _ in range(stages))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        self.positions = nn.Parameter(torch.zeros(config.num_heads, size)) if config.head_positions else None
        self.auto_embedding = nn.ModuleList(
            TransformerLayer(config, rotary=False) for _ in range(config.num_auto_embedding_blocks)
        )
        self.reads_path = config.coupling_size > 0
        r, count = config.coupling_size, config.num_heads - 1 if self.reads_path else 0
        self.coupling_inputs = linears(count, 2 * size, r, bias=True)
        self.coupling_outputs = linears(count, r, size)
        for layer in self.coupling_outputs.parameters():
            nn.init.zeros_(layer)

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D); the true text replaces the draft tokens above each head."""
        embedded = self.scaled_embedding(token_ids.roll(-1, dims=1))  # e_{t+1}; the wrapped tail means nothing
        stages = [hidden]
        for i, layer in enumerate(self.adaptations):
            stages.append(layer(self._fused(i, stages[-1], embedded)))
        features = self._heads(stages)
        if not self.reads_path:
            return features
        scaled = self.scaled_embedding(token_ids)
        coupled = [self._coupled(i, features[i], scaled.roll(-(i + 1), dims=1)) for i in range(1, len(features))]
        return torch.stack([features[0], *coupled])

    def begin(self, root: Root, depth: int) -> _State:
        """All heads in one pass, whatever the tree; their logits, too, as far as the draft tokens do not matter."""
        features = self._heads(list(root.states.unbind(1)))[:depth]  # states are (B, stages, D), features (depth, B, D)
        free = features[:1] if self.reads_path else features
        return _State(features, self.lm_head_logits(free) if depth else features, root.token_ids[:, None])

    def predict(self, state: _State, depth: int) -> Tensor:
        """(B, W, V'); (B, 1, V') of heads that do not read the token above."""
        if depth < len(state.logits):
            return state.logits[depth][:, None].expand(-1, state.token_ids.shape[1] if self.reads_path else 1, -1)
        features = state.features[depth][:, None].expand(-1, state.token_ids.shape[1], -1)
        return self.logits(self._coupled(depth, features, self.scaled_embedding(state.token_ids)), depth)

    def descend(self, state: _State, depth: int, parents: Tensor, token_ids: Tensor) -> _State:
        """Only the token above matters."""
        return state._replace(token_ids=token_ids)

    def _coupled(self, head_index: int, features: Tensor, embedded: Tensor) -> Tensor:
        """Features of a head that knows the token above, from its own and the embedding, (…, D) each: (…, D)."""
        inner = F.silu(self.coupling_inputs[head_index - 1](torch.cat([features, embedded], -1)))
        added: Tensor = self.coupling_outputs[head_index - 1](inner)
        return features + added

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        """h_t and the stages' outputs, (rows, 1 + stages, D)."""
        embedded = self.scaled_embedding(next_tokens(context))
        stages = [context.hidden]
        for i, layer in enumerate(self.adaptations):
            assert isinstance(layer, TransformerLayer)
            stages.append(layer.step(self._fused(i, stages[-1], embedded), history, i, rows))
        return torch.stack([last_of(states, context.num_accepted) for states in stages], 1)

    def _fused(self, stage: int, states: Tensor, embedded: Tensor) -> Tensor:
        """fc([h; e]), (…, D)."""
        if not self.sampled_token:
            return states
        fused: Tensor = self.fusions[stage](torch.cat([states, embedded], -1))
        return fused

    def _heads(self, stages: list[Tensor]) -> Tensor:
        """[h_t, stage one, stage two as far as there are], each (…, D), to features (K, …, D).

        Equation 2: heads 1 … ⌊K/2⌋ read stage one, and ⌊K/2⌋ + 1 … K stage two.
        """
        count = len(self.blocks)
        inputs = [stages[-1] if i >= count // 2 else stages[min(1, len(stages) - 1)] for i in range(count)]
        heads = torch.stack([block(x) for block, x in zip(self.blocks, inputs, strict=True)], -2)  # (…, K, D)
        if self.positions is not None:
            heads = heads + self.positions
        if len(self.auto_embedding):
            flat = heads.reshape(-1, count, heads.shape[-1])
            for layer in self.auto_embedding:
                flat = layer(flat, causal=False)
            heads = flat.view(heads.shape)
        return heads.movedim(-2, 0)
