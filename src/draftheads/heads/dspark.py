"""DSpark: DFlash's body on shifted blocks, and a bias from the token before (arXiv 2607.05147).

The row at each place predicts the token behind it, and a low-rank bias makes the prediction depend on the draft token
before it (:mod:`draftheads.heads.markov`). In training the text's tokens take the place of draft tokens.
The published head has an embedding of its own, and a gate that reads the row and the token; see the options.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.base import Root
from draftheads.heads.dflash import BlockConfig, DFlashHead
from draftheads.heads.layers import first_texts, linear_fit, low_rank_fit
from draftheads.heads.markov import MarkovBias, MarkovState


@dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """DSpark: logits_i = lm_head(f_i) + U (gate(f_i) * A E(x_{t+1+i})), f_i a row of the body."""

    markov_rank: int = 128
    """r, the rank of what the token before adds to the logits."""
    gated: bool = True
    """Whether the row weights each of the r numbers."""
    own_embedding: bool = False
    """Whether an embedding (V, r) of its own takes the place of A E(x), as in the published heads."""
    gate_reads_token: bool = False
    """Whether the gate reads the token before, too, as in the published heads."""
    is_shifted: bool = True

    method: ClassVar[str] = "dspark"
    description: ClassVar[str] = "as dflash, plus a term for the previous draft token"
    paper: ClassVar[str] = "DSpark, 2026"
    optional = BlockConfig.optional | {"own_embedding", "gate_reads_token"}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, markov_rank=self.markov_rank)
        if self.gate_reads_token and not self.gated:
            raise InvalidSettings("gate_reads_token is true and gated is false: there is no gate; give gated=true")


class DSparkHead(MarkovBias, DFlashHead):
    """DFlash with a bias from the token before. It starts without: U is zero at first."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.add_bias(
            config.markov_rank,
            1,
            gated=config.gated,
            own_embedding=config.own_embedding,
            gate_reads_token=config.gate_reads_token,
        )

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Also sets A: its r numbers for a token are those that tell most of the next h, with a mean square of 1.

        U starts as zero and learns from them; from the small numbers of a random A it would learn slowly.
        """
        taken = first_texts(texts, self.fc.in_features)
        super().start_near(taken)
        before = [self.scaled_embedding(ids[1:]) for _, ids in taken]
        if not any(map(len, before)):
            return
        told = linear_fit((x, self.split(hidden)[1][1:]) for x, (hidden, _) in zip(before, taken, strict=True))
        config: Any = self.config
        table: Any = self.down[0]
        down = low_rank_fit(told, torch.cat(before), config.markov_rank)[1].to(before[0])
        if isinstance(table, nn.Embedding):
            table.weight.copy_(self.scaled_embedding(torch.arange(self.config.vocab_size, device=down.device)) @ down.T)
        else:
            table.weight.copy_(down)

    def features(self, found: Tensor, token_ids: Tensor, at: Tensor) -> Tensor:
        """(K, B, A, D + r)."""
        parts = []
        for i, rows in enumerate(found):
            before = token_ids.roll(-(i + 1), dims=1)  # the wrapped tail is not used
            parts.append(self.biased(rows, before.gather(1, at), i))
        return torch.stack(parts)

    def begin(self, root: Root, depth: int) -> MarkovState:
        """All that does not depend on the path, for all places at once."""
        if depth == 0:
            return self.with_gates(self.scaled_embedding(root.token_ids)[None], [], root.token_ids)
        features = self.block_features(root)[:depth]
        return self.with_gates(self.lm_head_logits(features), list(features), root.token_ids)
