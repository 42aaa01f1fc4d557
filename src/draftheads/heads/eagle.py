"""EAGLE (version 1): a layer that predicts the next hidden states and goes on from its predictions (Li et al. 2024).

Entry s of its history is fc([E(x_{s+1}); h_s]) at position s; from the entries up to t it computes f_{t+1}, a
prediction of h_{t+1}, and the target's lm_head predicts x_{t+2} from that. Deeper predictions use entries with f for h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftheads.heads.attention import HeadKVCache, KeysValues, LayerConfig, TransformerLayer, attend, attend_with_path
from draftheads.heads.base import EmbeddingConfig
from draftheads.heads.layers import fusion
from draftheads.heads.stateful import PathHead, last_of, next_tokens
from draftheads.speculation.draft import Context


@dataclass(frozen=True)
class EagleConfig(LayerConfig, EmbeddingConfig):
    """EAGLE: one layer, asked once for each depth; ``num_heads`` is how deep it is trained."""

    fusion_bias: bool = True
    """Whether fc has a bias."""

    method: ClassVar[str] = "eagle"
    description: ClassVar[str] = "one layer predicts the next hidden states, and continues from its own predictions"
    paper: ClassVar[str] = "Li et al. 2024"
    one_layer: ClassVar[str] = "EAGLE"


class OneLayerHead(PathHead):
    """One layer, used again at each depth: f_{t+1} = layer(E(x_{t+1}), s_t).

    In the text, the state s_t comes from the target. Below the text, no such state is known yet: there s is the layer's
    own output f of the node above. Training does the same on the true text, in K passes: pass i reads as states the
    outputs of pass i - 1.
    """

    layer: TransformerLayer

    def ordered_layers(self) -> Sequence[TransformerLayer]:
        return [self.layer]

    def states(self, hidden: Tensor) -> Tensor:
        """States s (…, D) of the text, from hidden states of the target, (…, D or n·D)."""
        return hidden

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D or n·D), (B, T) -> (K, B, T, D)."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        x = self.inputs(token_ids.roll(-1, dims=1), self.states(hidden))
        queries, seen = self.layer.project(x, positions)
        length, window = token_ids.shape[1], self.layer.window
        mask = torch.ones(1, length, length, dtype=torch.bool, device=x.device).tril()
        first = attend(queries, seen, mask.triu(1 - window)) if window else attend(queries, seen, causal=True)
        features = [self.layer.finish(x, first)]
        path: list[KeysValues] = []
        for i in range(1, self.config.num_heads):
            x = self.inputs(token_ids.roll(-(i + 1), dims=1), self.fed_back(features[-1]))
            queries, own = self.layer.project(x, positions + i)
            path.append(own)
            taken = KeysValues(*(torch.stack(parts, 2) for parts in zip(*path, strict=True)))
            known = mask.triu(1 - window + i) if window else mask
            of_path = (torch.arange(i, 0, -1, device=x.device) <= window)[None] if window else None
            features.append(self.layer.finish(x, attend_with_path(queries, seen, known, taken, of_path)))
        return self.outputs(torch.stack(features))

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        x = self.inputs(next_tokens(context), self.states(context.hidden))
        return last_of(self.layer.step(x, history, 0, rows), context.num_accepted)


class EagleHead(OneLayerHead):
    """The layer reads fc([E(x_{t+1}); h_t]), and then fc([E(x); f]).

    EAGLE's own training makes the first pass only; a loss on that alone is ``depth_decay`` near 0.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, num_layers=1)
        self.fusion = fusion(config.hidden_size, state_first=False, bias=config.fusion_bias)
        self.layer = TransformerLayer(config, input_norm=False)

    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """(…, D)."""
        return self.fusion(torch.cat([self.scaled_embedding(token_ids), states], -1))
