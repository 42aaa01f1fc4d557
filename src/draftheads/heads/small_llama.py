"""A small Llama that shares the target's embedding and lm_head: an independent draft model in the form of a head.

It reads the text alone, no hidden states, as the first drafters did (Leviathan et al. 2023; Chen et al. 2023). What a
separate model pays for, a vocabulary of its own, it does not have: the embedding is the target's and frozen, and the
lm_head is the target's rows of the draft vocabulary. For any other small model see
:class:`draftheads.drafters.draft_model.DraftModel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftheads.heads.attention import LayerConfig, RmsNorm, TransformerLayer
from draftheads.heads.base import EmbeddingConfig
from draftheads.heads.history import HeadKVCache
from draftheads.heads.stateful import PathHead, last_of, next_tokens
from draftheads.speculation.draft import Context, TargetWeights


@dataclass(frozen=True)
class SmallLlamaConfig(LayerConfig, EmbeddingConfig):
    """Small Llama: ``num_layers`` layers; ``num_heads`` is how deep it drafts where nothing was measured.

    It reads embeddings as they are. ``embedding_scale`` is how much larger than these its features are at first.
    """

    method: ClassVar[str] = "small-llama"
    description: ClassVar[str] = "a small Llama with the target's embedding and lm_head; reads no hidden states"
    one_lm_head: ClassVar[bool] = True


class SmallLlamaHead(PathHead):
    """Its prediction after t+1+i tokens is that of depth i: the same function at every depth, trained once."""

    predicts_hidden_states: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False
    is_same_at_all_depths: ClassVar[bool] = True

    def __init__(self, config: SmallLlamaConfig) -> None:
        super().__init__(config, num_layers=config.num_layers)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_epsilon)

    def initialise(self, weights: TargetWeights, draft_vocab: Tensor | None = None) -> None:
        """The final norm starts at the size of hidden states: steps of a thousandth would take long to get there."""
        super().initialise(weights, draft_vocab)
        self.norm.weight.data.fill_(self.hidden_scale(weights))

    def ordered_layers(self) -> Sequence[TransformerLayer]:
        return [layer for layer in self.layers if isinstance(layer, TransformerLayer)]

    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """The embeddings, (…, D)."""
        return self.embedded(token_ids)

    def outputs(self, features: Tensor) -> Tensor:
        """After the final norm, (…, D)."""
        return self.norm(features)

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D)."""
        x = self.embedded(token_ids)
        for layer in self.layers:
            x = layer(x)
        features = self.outputs(x)
        return torch.stack([features.roll(-(i + 1), dims=1) for i in range(self.config.num_heads)])

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        """After the root, (rows, D). The root is read at once: what was accepted begins behind it."""
        if not any(history.lengths[rows]):  # new rows: the first token of the prompt, too
            self.step(self.embedded(context.token_ids[:, :1]), rows, history)
            history.accept(rows, torch.ones_like(context.num_accepted), [1] * len(context.num_accepted))
        return last_of(self.step(self.embedded(next_tokens(context)), rows, history), context.num_accepted)
