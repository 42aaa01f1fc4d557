"""Hydra++: deeper Hydra heads on a layer of their own over the whole text (Ankner et al. 2024, 3.1 and A.2).

The layer, "of the target's own kind", is Llama's kind with the target's sizes, whatever the target's family: what a
layer of GPT-2 or Gemma has beside attention and a feed-forward part (biases, other norms) is not copied.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from draftheads.heads.attention import LayerConfig, RmsNorm, TransformerLayer
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.heads.kv_cache import HeadKVCache
from draftheads.heads.stateful import StatefulHead, last_of
from draftheads.speculation.draft import Context, TargetWeights


@dataclass(frozen=True)
class HydraPlusPlusConfig(LayerConfig, HydraConfig):
    """Hydra++: as Hydra, with s_t of a prefix attention layer for h_t; one block in each head makes it PrefixMLP."""

    method: ClassVar[str] = "hydra++"
    description: ClassVar[str] = "Hydra with deeper heads and a prefix attention layer"
    paper: ClassVar[str] = "Ankner et al. 2024"
    extends: ClassVar[str] = "hydra"


class HydraPlusPlusHead(StatefulHead, HydraHead):
    """f_i(s_t, x_{t+1}, …, x_{t+1+i}) with s_t = norm(layer(h_1 … h_t)).

    The layer reads each accepted hidden state once and is asked once a step. The norm behind it, which the reference
    code has and the paper does not speak of, starts at the size that hidden states have, so that s_t starts as h_t
    brought to that size.
    """

    layers_of_depths = HydraHead.layers_of_depths  # on s_t

    def __init__(self, config: HydraPlusPlusConfig) -> None:
        super().__init__(config, num_layers=1)
        self.prefix = TransformerLayer(config)
        self.prefix_norm = RmsNorm(config.hidden_size, config.norm_epsilon)

    def initialise(self, weights: TargetWeights, draft_vocab: Tensor | None = None) -> None:
        """Also the norm, from the size of the target's hidden states."""
        super().initialise(weights, draft_vocab)
        self.prefix_norm.weight.data.fill_(self.hidden_scale(weights))

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D)."""
        return super().forward(self.prefix_norm(self.prefix(hidden)), token_ids)

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        states = self.prefix.step(context.hidden, history, 0, rows)
        return self.prefix_norm(last_of(states, context.num_accepted))
