"""EAGLE-3: a layer that reads hidden states of several layers of the target (Li et al. 2025, arXiv 2503.01840).

Entry s of its history is E(x_{s+1}) and g_s at position s, where g_s = fc([a_s; b_s; c_s]) is made of what enters a
low, a middle and a high layer of the target; its size M may be another one than the target's D. Deeper predictions read
the layer's own outputs in place of g. It need not predict hidden states, so its features are trained by the tokens
alone. The layout is that of the published heads: :class:`Eagle3Layer`, a norm behind it, and one lm_head over the draft
vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.attention import RmsNorm, SeveralLayersConfig, TransformerLayer
from draftheads.heads.eagle import FeedbackHead
from draftheads.heads.layers import first_texts, linear_fit
from draftheads.heads.stateful import StatefulHead
from draftheads.speculation.draft import TargetWeights


@dataclass(frozen=True)
class FusedConfig(SeveralLayersConfig):
    """Options of heads whose first layer reads embeddings beside g.

    It norms the embeddings that it reads. ``embedding_scale`` is only how much larger its features are at first.
    """

    fc_norm: bool = False
    """Whether fc reads RMS-normed hidden states (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Whether fc reads all hidden states behind one RMS norm, as heads for gpt-oss do."""
    norm_before_residual: bool = False
    """Whether the first layer's output is added to g after its norm, not before it."""
    inner_size: int | None = None
    """M, numbers in g and in the layer's output; as many as in a hidden state when left out. Another size needs
    own_embedding and an lm_head of its own."""
    own_embedding: bool = False
    """Whether it has an embedding of its own in place of the target's."""
    norm_heads: bool = False
    """Whether each query and key is normed, as in layers of Qwen3."""

    optional = SeveralLayersConfig.optional | {
        *("norm_before_residual", "norm_before_fc", "inner_size", "own_embedding", "norm_heads")
    }
    one_lm_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, inner_size=self.inner_size)
        if self.fc_norm and self.norm_before_fc:
            raise InvalidSettings("fc_norm and norm_before_fc are true: give one of them")
        if self.state_size != self.hidden_size and (not self.own_embedding or self.lm_head == "shared"):
            sizes = f"inner_size is {self.inner_size} and the target's hidden_size {self.hidden_size}"
            raise InvalidSettings(f"{sizes}: give own_embedding=true and --lm-head own")

    @property
    def state_size(self) -> int:
        return self.inner_size or self.hidden_size

    @property
    def feature_size(self) -> int:
        """M: the lm_head reads the layer's output."""
        return self.state_size


@dataclass(frozen=True)
class Eagle3Config(FusedConfig):
    """EAGLE-3: one layer, asked once for each depth; ``num_heads`` is how deep it is trained."""

    norm_output: bool = False
    """Whether deeper predictions read the layer's output after the final norm (EAGLE-3.1), not before it."""
    window: int = 0
    """How many tokens the layer sees, itself included; 0 is the whole text."""

    method: ClassVar[str] = "eagle3"
    description: ClassVar[str] = "as eagle, from hidden states of three layers, without a loss on features"
    paper: ClassVar[str] = "Li et al. 2025"
    optional = FusedConfig.optional | {"window"}
    one_layer: ClassVar[str] = "EAGLE-3"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, window=self.window)


class NormedParts(nn.Module):
    """Vectors side by side, each with an RMS norm of its own."""

    def __init__(self, count: int, size: int, epsilon: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(size, epsilon) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """(…, n·D) -> (…, n·D)."""
        parts = x.chunk(len(self.norms), -1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], -1)


class Eagle3Layer(TransformerLayer):
    """A transformer layer on [e; g]: attention reads both normed, and its output is added to g, normed or not."""

    def __init__(self, config: FusedConfig) -> None:
        super().__init__(config, input_norm=False, num_inputs=2, norm_heads=config.norm_heads)
        self.input_norm = NormedParts(2, config.state_size, config.norm_epsilon)
        self.norm_before_residual = config.norm_before_residual

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """(B, S, M) from inputs (B, S, 2·M) and what attention gave, (B, S, H, d)."""
        state = x.chunk(2, -1)[1]
        if self.norm_before_residual:
            assert isinstance(self.input_norm, NormedParts)
            state = self.input_norm.norms[1](state)
        return super().finish(state, attended)


class FusedHead(StatefulHead):
    """What EAGLE-3 has beside its layer: fc, maybe an embedding of its own, and the final norm."""

    predicts_hidden_states: ClassVar[bool] = False

    def __init__(self, config: FusedConfig, num_layers: int) -> None:
        super().__init__(config, num_layers)
        size, epsilon = config.state_size, config.norm_epsilon
        count = max(1, len(config.layers))  # n, the hidden states of a token that are read
        norm = RmsNorm(count * config.hidden_size, epsilon) if config.norm_before_fc else nn.Identity()
        self.fc_norm = NormedParts(count, config.hidden_size, epsilon) if config.fc_norm else norm
        self.fc = nn.Linear(count * config.hidden_size, size, bias=False)
        self.embedding = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.norm = RmsNorm(size, epsilon)

    def initialise(self, weights: TargetWeights, draft_vocab: Tensor | None = None) -> None:
        """Starts g as the last of the hidden states, and the final norm at the size of h_t; see :meth:`start_near`."""
        super().initialise(weights, draft_vocab)
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight.data[:, -self.config.hidden_size :])
        self.norm.weight.data.fill_(self.hidden_scale(weights))
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=float(weights.embedding.float().std()))
            if self.config.feature_size == self.config.hidden_size:
                self.embedding.weight.data.copy_(weights.embedding)

    def initialise_lm_heads(self, weights: TargetWeights, draft_vocab: Tensor | None) -> None:
        """As the target's where they read vectors of its size, else as any linear layer."""
        if self.config.feature_size == self.config.hidden_size:
            super().initialise_lm_heads(weights, draft_vocab)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Its own embedding of tokens, or the target's: (…) -> (…, M)."""
        return super().embedded(token_ids) if self.embedding is None else self.embedding(token_ids)

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Starts g as the linear approximation of h_t (ridge regression), so that the head starts near EAGLE.

        What enters a layer has a few very large numbers, which would hide the others behind a norm.
        """
        if not self.hidden_layers or self.fc.out_features != self.config.hidden_size:
            return
        if taken := first_texts(texts, self.fc.in_features):
            split = (self.split(hidden) for hidden, _ in taken)
            self.fc.weight.copy_(linear_fit((self.fc_norm(states), last) for states, last in split))

    def states(self, hidden: Tensor) -> Tensor:
        """g, (…, n·D) -> (…, M)."""
        return self.fc(self.fc_norm(hidden))

    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """[e; g], (…, 2·M)."""
        return torch.cat([self.embedded(token_ids), states], -1)

    def outputs(self, features: Tensor) -> Tensor:
        """After the final norm, (…, M)."""
        return self.norm(features)


class Eagle3Head(FusedHead, FeedbackHead):
    """The layer reads [E(x_{t+1}); g_t], and then [E(x); f] with its outputs f."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, num_layers=1)
        self.norm_output = config.norm_output
        self.layer = Eagle3Layer(config)
        self.layer.window = config.window

    def fed_back(self, features: Tensor) -> Tensor:
        """(…, M)."""
        return self.outputs(features) if self.norm_output else features
