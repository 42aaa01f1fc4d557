"""Medusa heads: K guesses made side by side from one hidden state (Cai et al. 2024, section 3.1.1)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftheads.draft import Context, Draft, tree_tensors
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.layers import ResidualBlock


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Medusa: head i is ``num_layers`` residual blocks on h_t, then an lm_head."""

    method: ClassVar[str] = "medusa"


class MedusaHead(DraftHead):
    """p_i = softmax(lm_head_i(blocks_i(h_t))). Every layer has weights of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D) -> (K, B, T, D); Medusa heads do not look at the tokens."""
        return torch.stack([blocks(hidden) for blocks in self.blocks])

    def propose(self, context: Context) -> Draft:
        """The same ranked guesses at a depth whatever the path above them: one pass, then a look-up by rank."""
        tree = self.tree
        features = [blocks(context.last_hidden) for blocks in self.blocks[: tree.max_depth]]  # each (B, D)
        num_ranks = max(tree.ranks) + 1
        tokens = [context.root_ids[:, None]]
        scores = [torch.zeros_like(tokens[0], dtype=torch.float32)]
        if features:
            logits = self._all_logits(torch.stack(features))  # (depth, B, V')
            top = logits.float().log_softmax(-1).topk(num_ranks, dim=-1)
            ids = self.to_target_ids(top.indices)  # (depth, B, R)
            shape = tree_tensors(tree, ids.device)
            level, rank = shape.depths[0, 1:] - 1, shape.ranks[1:]
            tokens.append(ids[level, :, rank].T)
            scores.append(top.values[level, :, rank].T)
        return Draft.on_tree(tree, torch.cat(tokens, 1), log_probs=torch.cat(scores, 1))

    def _all_logits(self, features: Tensor) -> Tensor:
        """(K, B, D) -> (K, B, V'); with a shared lm_head the K projections are one product."""
        if self.config.lm_head == "shared":
            return self.logits(features, 0)
        return torch.stack([self.logits(feature, i) for i, feature in enumerate(features)])
