"""EAGLE (version 1): a layer that guesses the next hidden states themselves, and goes on from its own (Li et al. 2024).

Entry s of its history is fc([E(x_{s+1}); h_s]) at position s; from the entries up to t it makes f_{t+1}, a guess of
h_{t+1}, and the target's lm_head reads a guess of x_{t+2} from that. Deeper guesses stand on entries with f for h.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftheads.draft import Context
from draftheads.errors import InvalidSettings
from draftheads.heads.attention import (
    KeysValues,
    LayerConfig,
    StatefulHead,
    TransformerLayer,
    attend,
    attend_with_path,
    last_of,
    next_tokens,
)


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """EAGLE: one layer, asked once for each depth; ``num_heads`` is how deep it is trained and drafts."""

    embedding_scale: float = 1.0
    """Embeddings are multiplied by it before a head reads them, so that they weigh as much as hidden states do."""
    fusion_bias: bool = True
    """Whether fc has a bias."""

    method: ClassVar[str] = "eagle"
    reads_embeddings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers != 1:
            raise InvalidSettings(f"num_layers is {self.num_layers}; EAGLE has one layer")


class _State(NamedTuple):
    """At W nodes of a depth."""

    features: Tensor  # (B, W, D) f there
    path: KeysValues  # (B, W, depth, G, d) of the guesses on the way there
    seen: KeysValues  # (B, C, G, d) of the text
    mask: Tensor  # (B, C) which of them count


class EagleHead(StatefulHead):
    """f_{t+1} = layer(fc([E(x_{t+1}); h_t])) over the whole text; then the same with f for h, down each path.

    Trained along the true text as deep as it drafts: pass i reads its own features of pass i-1, as it will when
    drafting. EAGLE's own training makes the first pass only; a loss on that alone is ``depth_decay`` near 0.
    """

    has_blocks: ClassVar[bool] = False

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, num_layers=1)
        self.scale = config.embedding_scale
        size = config.hidden_size
        self.fusion = nn.Linear(2 * size, size, bias=config.fusion_bias)
        self.layer = TransformerLayer(config, input_norm=False)
        with torch.no_grad():  # starts as h
            self.fusion.weight.zero_()
            self.fusion.weight[:, size:] = torch.eye(size)
            if self.fusion.bias is not None:
                self.fusion.bias.zero_()

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D)."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embedded = self._embed(token_ids)
        x = self._fused(embedded.roll(-1, dims=1), hidden)
        queries, seen = self.layer.project(x, positions)
        features = [self.layer.finish(x, attend(queries, seen, causal=True))]
        mask = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        path: list[KeysValues] = []
        for i in range(1, self.config.num_heads):
            x = self._fused(embedded.roll(-(i + 1), dims=1), features[-1])
            queries, own = self.layer.project(x, positions + i)
            path.append(own)
            taken = KeysValues(*(torch.stack(parts, 2) for parts in zip(*path, strict=True)))
            features.append(self.layer.finish(x, attend_with_path(queries, seen, mask, taken)))
        return torch.stack(features)

    def begin(self, context: Context, depth: int) -> _State:
        """f_{t+1}, once the new tokens are read."""
        features = self.advance(context)[:, None]
        seen, mask = self.history.accepted(0)
        nothing = KeysValues(*(part[:, None, :0] for part in seen))
        return _State(features, nothing, seen, mask)

    def guess(self, state: _State, depth: int) -> Tensor:
        """(B, W, V')."""
        return self.logits(state.features, depth)

    def descend(self, state: _State, depth: int, parents: Tensor, token_ids: Tensor) -> _State:
        """One pass for all chosen children, each with its own path."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        x = self._fused(self._embed(token_ids), state.features[rows, parents])  # (B, W', D)
        positions = (self.history.counts[:, None] + depth).expand(-1, x.shape[1])
        queries, own = self.layer.project(x, positions)
        path = KeysValues(
            *(torch.cat([above[rows, parents], new[:, :, None]], 2) for above, new in zip(state.path, own, strict=True))
        )
        attended = attend_with_path(queries, state.seen, state.mask[:, None], path)
        return state._replace(features=self.layer.finish(x, attended), path=path)

    def read(self, context: Context, rows: slice) -> Tensor:
        """f_{t+1}, (rows, D)."""
        x = self._fused(self._embed(next_tokens(context)), context.hidden)
        return last_of(self.layer.step(x, self.history, 0, rows), context.num_accepted)

    def _fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """fc([e; h]), (…, D)."""
        fused: Tensor = self.fusion(torch.cat([embedded, states], -1))
        return fused

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.embedded(token_ids) * self.scale
