"""Hydra and Hydra++: each head reads the draft tokens before its own on the path (Ankner et al. 2024).

Hydra (section 3) reads h_t. Hydra++ (section 3.1 and A.2) has deeper heads, on a layer of their own over the whole
text. The layer, "of the target's own kind", is Llama's kind with the target's sizes, whatever the target's family: what
a layer of GPT-2 or Gemma has beside attention and a feed-forward part (biases, other norms) is not copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.heads.attention import LayerConfig, RmsNorm, TransformerLayer
from draftheads.heads.base import DraftHead, EmbeddingConfig, Root
from draftheads.heads.history import HeadKVCache
from draftheads.heads.layers import ResidualBlock, fusion, zero_linear
from draftheads.heads.stateful import StatefulHead, last_of
from draftheads.speculation.draft import Context, TargetWeights


@dataclass(frozen=True)
class HydraConfig(EmbeddingConfig):
    """Hydra: head i reads h_t and the embeddings of x_{t+1} … x_{t+1+i}; its first block fuses them."""

    method: ClassVar[str] = "hydra"
    description: ClassVar[str] = "each head also reads the draft tokens before it"
    paper: ClassVar[str] = "Ankner et al. 2024"


class FusionBlock(nn.Module):
    """u -> R u + SiLU(W u), (…, M) -> (…, D): the first block of a Hydra head; R is learned since the sizes differ."""

    def __init__(self, size: int, num_inputs: int) -> None:
        super().__init__()
        # starts as "h_t and nothing else", Medusa's starting point
        self.residual = fusion(size, num_inputs=num_inputs, state_first=True)
        self.linear = zero_linear(num_inputs * size, size)

    def forward(self, u: Tensor) -> Tensor:
        """(…, M) -> (…, D)."""
        return self.residual(u) + F.silu(self.linear(u))


class HydraHead(DraftHead):
    """Grounded Hydra heads, f_i(h_t, x_{t+1}, …, x_{t+1+i}) (section 3)."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config, lm_head_bias=True)  # as in the reference code
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(FusionBlock(size, i + 2), *(ResidualBlock(size) for _ in range(config.num_layers - 1)))
            for i in range(config.num_heads)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D); the true text replaces the draft tokens above each head."""
        embedded = self.scaled_embedding(token_ids)  # (B, T, D)
        inputs = [hidden]
        features = []
        for i, blocks in enumerate(self.blocks):
            inputs.append(embedded.roll(-(i + 1), dims=1))  # the wrapped tail is not used
            features.append(blocks(torch.cat(inputs, -1)))
        return torch.stack(features)

    def layers_of_depths(self) -> list[list[tuple[Any, Any]]]:
        return [[(part.linear, getattr(part, "residual", None)) for part in each] for each in self.blocks]  # type: ignore[attr-defined]

    def begin(self, root: Root, depth: int) -> Tensor:
        """What the children of the root are predicted from: h_t and E(x_{t+1}), (B, 1, 2·D)."""
        return torch.cat([root.states, self.scaled_embedding(root.token_ids)], -1)[:, None]

    def predict(self, state: Tensor, depth: int) -> Tensor:
        """(B, W, M) -> (B, W, V')."""
        return self.logits(self.blocks[depth](state), depth)

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        """The parents' inputs with the child's embedding behind: (B, W', M + D)."""
        rows = torch.arange(len(state), device=state.device)[:, None]
        return torch.cat([state[rows, parents], self.scaled_embedding(token_ids)], -1)


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

    def ordered_layers(self) -> Sequence[TransformerLayer]:
        return [self.prefix]

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        return self.prefix_norm(last_of(self.step(context.hidden, rows, history), context.num_accepted))
