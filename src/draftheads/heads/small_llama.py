"""A small Llama that shares the target's embedding and lm_head: an independent draft model in the form of a head.

It reads the text alone, no hidden states, as the first drafters did (Leviathan et al. 2023; Chen et al. 2023). What a
separate model pays for, a vocabulary of its own, it does not have: the embedding is the target's and frozen, and the
lm_head is the target's rows of the draft vocabulary. For any other small model see
:class:`draftheads.drafters.draft_model.DraftModel`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftheads.draft import Context, TargetWeights
from draftheads.heads.attention import (
    KeysValues,
    LayerConfig,
    RmsNorm,
    StatefulHead,
    TransformerLayer,
    attend_with_path,
    last_of,
    next_tokens,
)


@dataclass(frozen=True)
class SmallLlamaConfig(LayerConfig):
    """Small Llama: ``num_layers`` layers; ``num_heads`` is only how deep it drafts."""

    embedding_scale: float = 1.0
    """How much larger than embeddings the features are at first; training sets it to that of hidden states."""

    method: ClassVar[str] = "small-llama"
    reads_embeddings: ClassVar[bool] = True

    @property
    def num_lm_heads(self) -> int:
        """One for all depths."""
        return 1


class _State(NamedTuple):
    """At W nodes of a depth."""

    features: Tensor  # (B, W, D) there
    paths: tuple[KeysValues, ...]  # of each layer, (B, W, depth, G, d) of the guesses on the way there
    seen: tuple[KeysValues, ...]  # of each layer, (B, C, G, d) of the text
    mask: Tensor  # (B, C) which of them count


class SmallLlamaHead(StatefulHead):
    """What it says after t+1+i tokens is the guess of depth i: the same function at every depth, taught once."""

    guesses_hidden_states: ClassVar[bool] = False
    has_blocks: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False
    is_same_at_all_depths: ClassVar[bool] = True

    def __init__(self, config: SmallLlamaConfig) -> None:
        super().__init__(config, num_layers=config.num_layers)
        self.options = config
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_epsilon)

    def initialise(self, weights: TargetWeights, draft_vocab: Tensor | None = None) -> None:
        """The final norm starts at the size of hidden states: steps of a thousandth would take long to get there."""
        super().initialise(weights, draft_vocab)
        size = weights.embedding.float().square().mean().sqrt() * self.options.embedding_scale
        self.norm.weight.data.fill_(float(size))

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D)."""
        x = self.embedded(token_ids)
        for layer in self.layers:
            x = layer(x)
        features = self.norm(x)
        return torch.stack([features.roll(-(i + 1), dims=1) for i in range(self.config.num_heads)])

    def logits(self, features: Tensor, head_index: int) -> Tensor:
        """(…, D) -> (…, V')."""
        return super().logits(features, 0)

    def begin(self, context: Context, depth: int) -> _State:
        """After the root, once the new tokens are read."""
        features = self.advance(context)[:, None]
        kept = [self.history.accepted(number) for number in range(len(self.layers))]
        seen = tuple(one for one, _ in kept)
        nothing = tuple(KeysValues(*(part[:, None, :0] for part in one)) for one in seen)
        return _State(features, nothing, seen, kept[0][1])

    def guess(self, state: _State, depth: int) -> Tensor:
        """(B, W, V')."""
        return self.logits(state.features, depth)

    def descend(self, state: _State, depth: int, parents: Tensor, token_ids: Tensor) -> _State:
        """One pass for all chosen children, each with its own path."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        x = self.embedded(token_ids)  # (B, W', D)
        positions = (self.history.counts[:, None] + depth).expand(-1, x.shape[1])
        paths = []
        for layer, above, seen in zip(self._layers(), state.paths, state.seen, strict=True):
            queries, own = layer.project(x, positions)
            path = KeysValues(
                *(torch.cat([old[rows, parents], new[:, :, None]], 2) for old, new in zip(above, own, strict=True))
            )
            x = layer.finish(x, attend_with_path(queries, seen, state.mask[:, None], path))
            paths.append(path)
        return state._replace(features=self.norm(x), paths=tuple(paths))

    def read(self, context: Context, rows: slice) -> Tensor:
        """Features after the root, (rows, D). The root is read at once: what was accepted begins behind it."""
        if not self.history.counts[rows].any():  # new rows: the first token of the prompt, too
            self._step(context.token_ids[:, :1], rows)
            self.history.accept(rows, torch.ones_like(context.num_accepted))
        return last_of(self.norm(self._step(next_tokens(context), rows)), context.num_accepted)

    def _step(self, token_ids: Tensor, rows: slice) -> Tensor:
        x = self.embedded(token_ids)
        for number, layer in enumerate(self._layers()):
            x = layer.step(x, self.history, number, rows)
        return x

    def _layers(self) -> list[TransformerLayer]:
        return [layer for layer in self.layers if isinstance(layer, TransformerLayer)]
