"""EAGLE (version 1): layers that predict the next hidden states and go on from their predictions (Li et al. 2024).

Entry s of its history is fc([E(x_{s+1}); h_s]) at position s; from the entries up to t it computes f_{t+1}, a
prediction of h_{t+1}, and the target's lm_head predicts x_{t+2} from that. Deeper predictions use entries with f for h.
The paper has one layer. The first has no norm of its inputs; the others do, as in EAGLE's code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.heads.attention import LayerConfig, TransformerLayer, attend, attend_with_path
from draftheads.heads.base import EmbeddingConfig
from draftheads.heads.history import HeadKVCache, KeysValues
from draftheads.heads.layers import fusion
from draftheads.heads.stateful import PathHead, last_of, next_tokens
from draftheads.speculation.draft import Context


@dataclass(frozen=True)
class EagleConfig(LayerConfig, EmbeddingConfig):
    """EAGLE: ``num_layers`` layers, asked once for each depth; ``num_heads`` is how deep they are trained."""

    fusion_bias: bool = True
    """Whether fc has a bias."""

    method: ClassVar[str] = "eagle"
    description: ClassVar[str] = "layers predict the next hidden states, and continue from their own predictions"
    paper: ClassVar[str] = "Li et al. 2024"


class FeedbackHead(PathHead):
    """Layers that are used again at each depth: f_{t+1} = layers(E(x_{t+1}), s_t).

    In the text, the state s_t comes from the target. Below the text, no such state is known yet: there s is the layers'
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
        passes = [(layer, list[KeysValues]()) for layer in self.ordered_layers()]
        features: list[Tensor] = []
        for i in range(self.config.num_heads):
            x = self.inputs(token_ids.roll(-(i + 1), dims=1), self.fed_back(features[-1]) if i else self.states(hidden))
            for layer, made in passes:
                queries, own = layer.project(x, positions + i)
                made.append(own)
                x = layer.finish(x, _attended(queries, *made, window=layer.window))
            features.append(x)
        return self.outputs(torch.stack(features))

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        x = self.inputs(next_tokens(context), self.states(context.hidden))
        return last_of(self.step(x, rows, history), context.num_accepted)


def _attended(queries: Tensor, seen: KeysValues, *path: KeysValues, window: int) -> Tensor:
    """Attention of a pass: over all that the first pass made, and over what later ones made at the same place."""
    (_, length, *_), depth, device = queries.shape, len(path), queries.device
    if not path and not window:
        return attend(queries, seen, causal=True)
    known = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
    known = known.triu(1 - window + depth) if window else known
    if not path:
        return attend(queries, seen, known)
    taken = KeysValues(*(torch.stack(parts, 2) for parts in zip(*path, strict=True)))
    of_path = (torch.arange(depth, 0, -1, device=device) <= window)[None] if window else None
    return attend_with_path(queries, seen, known, taken, of_path)


class EagleHead(FeedbackHead):
    """The layers read fc([E(x_{t+1}); h_t]), and then fc([E(x); f]).

    EAGLE's own training makes the first pass only; a loss on that alone is ``depth_decay`` near 0.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, num_layers=config.num_layers)
        self.fusion = fusion(config.hidden_size, state_first=False, bias=config.fusion_bias)
        self.layer = TransformerLayer(config, input_norm=False)
        self.layers: Any = nn.ModuleDict({str(i): TransformerLayer(config) for i in range(1, config.num_layers)})

    def ordered_layers(self) -> Sequence[TransformerLayer]:
        return [self.layer, *self.layers.values()]

    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """(…, D)."""
        return self.fusion(torch.cat([self.scaled_embedding(token_ids), states], -1))
