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
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.errors import InvalidSettings
from draftheads.heads.attention import LayerConfig, TransformerLayer
from draftheads.heads.base import AllAtOnceHead, EmbeddingConfig, Root
from draftheads.heads.history import HeadKVCache
from draftheads.heads.layers import ResidualBlock, fusion
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

    method: ClassVar[str] = "amphista"
    description: ClassVar[str] = "heads attend to each other, on layers that adapt the hidden states"
    paper: ClassVar[str] = "Li et al. 2024"
    extends: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_adaptation_layers not in (0, 1, 2):
            raise InvalidSettings(f"num_adaptation_layers is {self.num_adaptation_layers}; choose 0, 1 or 2")
        if self.num_auto_embedding_blocks < 0:
            raise InvalidSettings(f"num_auto_embedding_blocks is {self.num_auto_embedding_blocks}; give 0 for none")


class AmphistaHead(AllAtOnceHead, StatefulHead):
    """Equations 1 to 6: all heads' features at once, whatever the path."""

    def __init__(self, config: AmphistaConfig) -> None:
        super().__init__(config, num_layers=config.num_adaptation_layers)
        size, stages = config.hidden_size, config.num_adaptation_layers
        num_fusions, num_blocks = stages if config.sampled_token else 0, config.num_auto_embedding_blocks
        self.fusions = nn.ModuleList(fusion(size, state_first=True) for _ in range(num_fusions))
        self.adaptations: Any = nn.ModuleList(TransformerLayer(config) for _ in range(stages))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        self.positions = nn.Parameter(torch.zeros(config.num_heads, size)) if config.head_positions else None
        self.auto_embedding = nn.ModuleList(TransformerLayer(config, rotary=False) for _ in range(num_blocks))

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D); the true text replaces the draft tokens above each head."""
        embedded = self.scaled_embedding(token_ids.roll(-1, dims=1))  # e_{t+1}; the wrapped tail means nothing
        stages = [hidden]
        for i, layer in enumerate(self.adaptations):
            stages.append(layer(self._fused(i, stages[-1], embedded)))
        return self._heads(stages)

    def begin(self, root: Root, depth: int) -> Tensor:
        """All heads in one pass, whatever the tree: their logits (depth, B, V')."""
        return self.lm_head_logits(self._heads(list(root.states.unbind(1)))[:depth])  # states are (B, stages, D)

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        """h_t and the stages' outputs, (rows, 1 + stages, D)."""
        embedded = self.scaled_embedding(next_tokens(context))
        stages = [context.hidden]
        for i, layer in enumerate(self.adaptations):
            stages.append(layer.step(self._fused(i, stages[-1], embedded), history, i, rows))
        return torch.stack([last_of(states, context.num_accepted) for states in stages], 1)

    def _fused(self, stage: int, states: Tensor, embedded: Tensor) -> Tensor:
        """fc([h; e]), (…, D)."""
        return self.fusions[stage](torch.cat([states, embedded], -1)) if len(self.fusions) else states

    def _heads(self, stages: list[Tensor]) -> Tensor:
        """[h_t, stage one, stage two as far as there are], each (…, D), to features (K, …, D).

        Equation 2: heads 1 … ⌊K/2⌋ read stage one, and ⌊K/2⌋ + 1 … K stage two.
        """
        count = len(self.blocks)
        inputs = [stages[-1] if i >= count // 2 else stages[min(1, len(stages) - 1)] for i in range(count)]
        heads = torch.stack([block(x) for block, x in zip(self.blocks, inputs, strict=True)], -2)  # (…, K, D)
        if self.positions is not None:
            heads = heads + self.positions
        flat = heads.reshape(-1, count, heads.shape[-1])
        for layer in self.auto_embedding:
            flat = layer(flat, causal=False)
        return flat.view(heads.shape).movedim(-2, 0)
