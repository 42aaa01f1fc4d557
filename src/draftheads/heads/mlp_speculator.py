"""IBM's MLP Speculator: stages that each read a state and a draft token (Wertheimer et al. 2024, section 3.1).

Its own way of drafting, the top k of each stage expanded and the likeliest whole candidates kept, is not here: static
trees of as many nodes make 6 to 8 % more tokens per step.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.attention import RmsNorm, scaled_to_unit
from draftheads.heads.base import DraftHead, EmbeddingConfig, Root
from draftheads.heads.layers import linears
from draftheads.speculation.draft import TargetWeights

_EPSILON = 1e-6
_STATE_SQUARE = 0.425  # mean square of states: of GELU(x), x of variance 1 around 0


@dataclass(frozen=True)
class MlpSpeculatorConfig(EmbeddingConfig):
    """MLP Speculator: z_i = GELU(norm_i(w_s P_i z_{i-1} + w_e E_i(x_{t+1+i}))), logits_i = lm_head_i(z_i)."""

    inner_size: int | None = None
    """Numbers in a state; as many as in a hidden state when left out."""
    tie_weights: bool = False
    """One embedding, norm and lm_head for all stages, and one projection for all but the first."""
    scale_input: bool = False
    """Whether h_t is brought to a root mean square of 1/√2 first."""
    embeddings: Literal["own", "target"] = "target"
    """Whose embeddings of tokens: own ones for each stage (IBM's), or the target's, projected."""

    method: ClassVar[str] = "mlp-speculator"
    description: ClassVar[str] = "a stage for each draft token, which reads the state of the stage before it"
    paper: ClassVar[str] = "Wertheimer et al. 2024"
    one_layer: ClassVar[str] = "a stage of the MLP Speculator"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, inner_size=self.inner_size)
        if self.embeddings not in ("own", "target"):
            raise InvalidSettings(f"embeddings is {self.embeddings!r}; choose own or target")

    @property
    def state_size(self) -> int:
        return self.inner_size or self.hidden_size

    @property
    def num_lm_heads(self) -> int:
        return 1 if self.tie_weights else self.num_heads

    @property
    def feature_size(self) -> int:
        """Of what the lm_heads read: the states, but hidden states where the lm_head is the target's."""
        return self.hidden_size if self.lm_head == "shared" else self.state_size


class BiasedRmsNorm(RmsNorm):
    """x / rms(x) · w + b. The paper says LayerNorm; its code's norm subtracts no mean, so neither does this one."""

    def __init__(self, size: int) -> None:
        super().__init__(size, _EPSILON)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """(…, M) -> (…, M)."""
        return super().forward(x) + self.bias


class MlpSpeculatorHead(DraftHead):
    """One stage for each depth.

    State and embedding are weighted such that after n stages of equal variance half of the state's stems from h_t:
    w_s = 2^(-1/(2n)), w_e = √((1 - w_s²) M / 2), M the size of a state; as a norm follows, only w_e / w_s matters.
    All weights start with a standard deviation of M^-1/2 (section 4: both; 4096^-1/2 at the paper's size).
    Scaled embeddings of the target are as large as its hidden states, in general not as large as states behind GELU. So
    with them, layers that read either start such that their outputs are as large as states; then w_e = √(1 - w_s²).
    The paper's lm_heads are each stage's own. Reading them through the target's, a linear layer brings states, which
    GELU leaves hardly any negative numbers, to where hidden states are: ours, which starts as any linear
    layer does.
    """

    predicts_hidden_states: ClassVar[bool] = False

    def __init__(self, config: MlpSpeculatorConfig) -> None:
        super().__init__(config)
        self.options = config
        size, hidden, stages = config.state_size, config.hidden_size, config.num_heads
        state_weight = 0.5 ** (0.5 / stages)
        own = config.embeddings == "own"
        # own ones have a variance of 1/M, the target's are brought to that of states
        self.embedding_weight = math.sqrt((1 - state_weight**2) * (size / 2 if own else 1)) / state_weight
        distinct = 1 if config.tie_weights else stages
        further = min(1, stages - 1) if config.tie_weights else stages - 1
        self.projections = nn.ModuleList([*linears(1, hidden, size), *linears(further, size, size)])
        self.norms = nn.ModuleList(BiasedRmsNorm(size) for _ in range(distinct))
        self.embeddings = nn.ModuleList(nn.Embedding(config.vocab_size, size) for _ in range(distinct if own else 0))
        self.embedding_projections = linears(0 if own else distinct, hidden, size)
        self.outputs = linears(distinct if config.lm_head == "shared" else 0, size, hidden, bias=True)
        for layer in (*self.projections, *self.embeddings, *self.embedding_projections):
            nn.init.normal_(layer.weight, std=size**-0.5)

    def initialise(self, weights: TargetWeights, draft_vocab: Tensor | None = None) -> None:
        """With the target's embeddings, outputs of the layers on these and on h_t start as large as states."""
        super().initialise(weights, draft_vocab)
        if self.options.embeddings == "own":
            return
        large = self.hidden_scale(weights)
        of_hidden = 0.5**0.5 if self.options.scale_input else large
        for i, layer in enumerate((self.projections[0], *self.embedding_projections)):
            inputs = large if i else of_hidden
            nn.init.normal_(layer.weight, std=math.sqrt(_STATE_SQUARE / self.config.hidden_size) / inputs)

    def initialise_lm_heads(self, weights: TargetWeights, draft_vocab: Tensor | None) -> None:
        """They read states, not hidden states: they start small and random instead of as the target's."""
        for parameter in self.lm_heads.parameters():
            nn.init.normal_(parameter, std=self.options.state_size**-0.5)

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, F); the true text replaces the draft tokens above each stage."""
        state = self._input(hidden)
        features = []
        for i in range(self.config.num_heads):
            state = self._advanced(state, i, token_ids.roll(-(i + 1), dims=1))
            features.append(self._features(state, i))
        return torch.stack(features)

    def begin(self, root: Root, depth: int) -> Tensor:
        """State of the first stage, which has read x_{t+1}: (B, 1, M)."""
        state = self._input(root.states)[:, None]
        return self._advanced(state, 0, root.token_ids[:, None])

    def predict(self, state: Tensor, depth: int) -> Tensor:
        """(B, W, M) -> (B, W, V')."""
        return self.logits(self._features(state, depth), depth)

    def descend(self, state: Tensor, depth: int, parents: Tensor, token_ids: Tensor) -> Tensor:
        """(B, W', M), the next stage's."""
        rows = torch.arange(len(state), device=state.device)[:, None]
        return self._advanced(state[rows, parents], depth + 1, token_ids)

    def _input(self, hidden: Tensor) -> Tensor:
        return scaled_to_unit(hidden, _EPSILON) * 0.5**0.5 if self.options.scale_input else hidden

    def _advanced(self, state: Tensor, stage: int, token_ids: Tensor) -> Tensor:
        """The state (…, M) of a stage, from the one before and the token that is read there."""
        tied = self.options.tie_weights
        shared = 0 if tied else stage
        if len(self.embeddings):
            embedded = self.embeddings[shared](token_ids)
        else:
            embedded = self.embedding_projections[shared](self.scaled_embedding(token_ids))
        projected = self.projections[min(stage, 1) if tied else stage](state)
        return F.gelu(self.norms[shared](projected + self.embedding_weight * embedded))

    def _features(self, state: Tensor, stage: int) -> Tensor:
        return self.outputs[0 if self.options.tie_weights else stage](state) if len(self.outputs) else state
