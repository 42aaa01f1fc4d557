"""DFlash2 (z-lab, 2026): DFlash with convolutions along a block, and a choice among the best tokens of a place.

Convolutions along the rows of a block, whose weights follow from the row, stand around attention and feed-forward part.
And a selector scores the best K tokens of a place by the token before: u(c) + sum_r P[x]_r (W h)_r S[c]_r with the
logits u; it is a Markov bias (see ``dspark.py``) with a linear gate W h. All pairs of a block are known after one pass,
so that its lattice is a tree, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.attention import TransformerLayer
from draftheads.heads.base import Root
from draftheads.heads.dspark import DSparkConfig, DSparkHead
from draftheads.heads.layers import first_texts, zero_linear


@dataclass(frozen=True)
class DFlash2Config(DSparkConfig):
    """DFlash2: as DSpark, with a linear gate, for the best tokens of each place, and convolutions in the body."""

    num_candidates: int = 16
    """K, the best tokens of a place that are drafted at all."""
    kernel_taps: int = 2
    """Rows that a convolution reads, the row itself included."""
    kernel_group: int = 16
    """Numbers of a row that share a weight of the convolution; hidden_size is a multiple of it."""
    is_shifted: bool = False

    method: ClassVar[str] = "dflash2"
    description: ClassVar[str] = "as dflash, with convolutions along a block and a choice among its best tokens"
    paper: ClassVar[str] = "DFlash2, 2026"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, num_candidates=self.num_candidates, kernel_taps=self.kernel_taps)
        if self.hidden_size % self.kernel_group:
            raise InvalidSettings(
                f"kernel_group is {self.kernel_group}; hidden_size ({self.hidden_size}) must be a multiple of it"
            )
        if self.recurrent or self.gate_reads_token or not self.gated:
            raise InvalidSettings("recurrent, gate_reads_token and gated=false are options of dspark, not of dflash2")


class BlockConvolution(nn.Module):
    """y_p = sum_t (base_t + W(n_p)_t) x_{p-t} over the rows of a block, with a weight for each group of numbers.

    Two of them, one for what a part reads and one for what it writes, both with weights by what it reads, n. It starts
    as the identity.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.rows, self.group = config.block_size, config.kernel_group
        taps, size = config.kernel_taps, config.hidden_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = zero_linear(size, 2 * taps * size // self.group, bias=False)
        nn.init.ones_(self.base_kernel.data[:, 0])

    def forward(self, x: Tensor, normed: Tensor, side: int) -> Tensor:
        """(B, A·S, D) of A blocks of S rows; ``side`` 0 for what the part reads, 1 for what it writes."""
        blocks = x.unflatten(1, (-1, self.rows))  # (B, A, S, D)
        taps = self.base_kernel.shape[1]
        weights = self.kernel_projection(normed).view(*blocks.shape[:3], 2, taps, -1)[..., side, :, :]
        out = torch.zeros_like(blocks)
        for tap in range(taps):
            of_rows = self.base_kernel[side, tap] + weights[..., tap, :].repeat_interleave(self.group, -1)
            out = out + of_rows * F.pad(blocks, (0, 0, tap, 0))[..., : self.rows, :]
        return out.flatten(1, 2)


class ConvolvedLayer(TransformerLayer):
    """A layer of the body with convolutions around attention and feed-forward part; the text's keys have none."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config, norm_heads=True)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def read(self, x: Tensor) -> Tensor:
        normed = self.input_norm(x)
        read: Tensor = self.attention_conv(normed, normed, 0)
        return read

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attention_conv(self.o_proj(attended.flatten(2)), self.input_norm(x), 1)
        normed = self.middle_norm(x)
        return x + self.mlp_conv(self.feed_forward(self.mlp_conv(normed, normed, 0)), normed, 1)


_MEASURED = 8  # texts, of which the gate's start is known


class Codebook(nn.Linear):
    """A linear layer whose single rows are read, so that it is not packed."""


class LatticeState(NamedTuple):
    """At W nodes of a depth; K candidates of each place."""

    logits: Tensor  # (depth, B, K) of the candidates, without what depends on the path
    gates: Tensor  # (depth, B, r)
    token_ids: Tensor  # (B, W) of the nodes
    candidates: Tensor  # (depth, B, K) draft tokens


class DFlash2Head(DSparkHead):
    """DFlash with convolutions along the block, and the choice among the best tokens of a place by the token before.

    It is trained as one distribution over all tokens. Drafts are among the best K of the logits without the bias.
    """

    has_linear_gate = True

    def new_layer(self, config: Any) -> TransformerLayer:
        return ConvolvedLayer(config)

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.num_candidates = min(config.num_candidates, config.num_draft_tokens)
        codebook = Codebook(config.markov_rank, config.num_draft_tokens, bias=False)
        nn.init.zeros_(codebook.weight)
        self.up = nn.ModuleList([codebook])

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Also sets W: each of its numbers is about 1 for the rows of a text, as a gate of DSpark is at first.

        With numbers of random signs little would be learned from the pairs on little text.
        """
        taken = first_texts(texts, self.fc.in_features)
        super().start_near(taken)
        rows = [self(self.split(hidden)[0][None], ids[None])[:, 0, :-1] for hidden, ids in taken[:_MEASURED]]
        if any(part.numel() for part in rows):
            size = self.config.hidden_size
            mean = torch.cat([part[..., :size].flatten(0, 1) for part in rows]).mean(0)
            gate: Any = self.gates[0]
            gate.weight.copy_((mean / mean.square().sum()).expand_as(gate.weight))

    def begin(self, root: Root, depth: int) -> Any:
        """All that does not depend on the path."""
        state = super().begin(root, depth)
        best = state.logits.topk(self.num_candidates, dim=-1)
        return LatticeState(best.values, state.gates, state.token_ids, best.indices)

    def predict(self, state: Any, depth: int) -> Tensor:
        """Logits (B, W, V'), minus infinity but for the candidates."""
        scores = self.gated(depth, state.gates[depth][:, None], self.scores(state.token_ids, depth))  # (B, W, r)
        places, codebook = state.candidates[depth], cast("Codebook", self.up[0])
        pairs = torch.einsum("bwr,bkr->bwk", scores, codebook.weight[places])
        logits = pairs + state.logits[depth][:, None]
        whole = logits.new_full((*logits.shape[:2], codebook.out_features), -torch.inf)
        return whole.scatter(-1, places[:, None].expand_as(logits), logits)

    def descend(self, state: Any, depth: int, parents: Tensor, token_ids: Tensor) -> Any:
        return state._replace(token_ids=token_ids)
