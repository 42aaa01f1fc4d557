"""Hydra heads: each guess sees the guesses before it on its path (Ankner et al. 2024, section 3)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.draft import Context, Draft, tree_tensors
from draftheads.errors import InvalidSettings
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.layers import ResidualBlock
from draftheads.tree import Tree


@dataclass(frozen=True)
class HydraConfig(HeadConfig):
    """Hydra: head i reads h_t and the embeddings of x_{t+1} … x_{t+1+i}; its first block fuses them."""

    embedding_scale: float = 1.0
    """Embeddings are multiplied by it before a head reads them, so that they weigh as much as hidden states do."""

    method: ClassVar[str] = "hydra"
    reads_embeddings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.embedding_scale > 0:
            raise InvalidSettings(f"embedding_scale is {self.embedding_scale}; it must be above 0")


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth d+1 of a static tree, and how they hang on the expanded nodes of depth d."""

    depth: int  # d: the head that guesses them
    start: int  # their node indices, start … stop-1
    stop: int
    num_ranks: int  # how many ranks the head must give
    parent_slots: tuple[int, ...]  # for each node: its parent's place among the expanded nodes of depth d
    expanded: tuple[int, ...]  # the places in start … stop-1 of nodes that have children


@lru_cache(maxsize=256)
def _levels(tree: Tree) -> tuple[_Level, ...]:
    """The levels below the root, which are guessed one after the other.

    >>> [level.expanded for level in _levels(Tree.from_paths([(0,), (1,), (1, 0)]))]
    [(1,), ()]
    """
    with_children = set(tree.parents)
    levels = []
    for depth in range(tree.max_depth):
        nodes = [node for node, d in enumerate(tree.depths) if d == depth + 1]
        above = [node for node, d in enumerate(tree.depths) if d == depth and node in with_children]
        levels.append(
            _Level(
                depth=depth,
                start=nodes[0],
                stop=nodes[-1] + 1,
                num_ranks=max(tree.ranks[node] for node in nodes) + 1,
                parent_slots=tuple(above.index(tree.parents[node]) for node in nodes),
                expanded=tuple(i for i, node in enumerate(nodes) if node in with_children),
            )
        )
    return tuple(levels)


class FusionBlock(nn.Module):
    """u -> R u + SiLU(W u), (…, M) -> (…, D): the first block of a Hydra head; R is learned since the sizes differ."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.residual = nn.Linear(in_size, out_size)
        self.linear = nn.Linear(in_size, out_size)
        # starts as "h_t and nothing else", Medusa's starting point
        for layer in (self.residual, self.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.residual.weight[:, :out_size] = torch.eye(out_size)

    def forward(self, u: Tensor) -> Tensor:
        """(…, M) -> (…, D)."""
        fused: Tensor = self.residual(u) + F.silu(self.linear(u))
        return fused


class HydraHead(DraftHead):
    """Grounded Hydra heads, f_i(h_t, x_{t+1}, …, x_{t+1+i}) (section 3, equation 2)."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.scale = config.embedding_scale
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(
                FusionBlock((i + 2) * size, size),
                *(ResidualBlock(size) for _ in range(config.num_layers - 1)),
            )
            for i in range(config.num_heads)
        )

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D); the true text stands in for the guesses above each head."""
        embedded = self._embed(token_ids)  # (B, T, D)
        inputs = [hidden]
        features = []
        for i, blocks in enumerate(self.blocks):
            inputs.append(embedded.roll(-(i + 1), dims=1))  # the wrapped tail means nothing, as the contract says
            features.append(blocks(torch.cat(inputs, -1)))
        return torch.stack(features)

    def propose(self, context: Context) -> Draft:
        """Depth by depth: the nodes that have children are expanded with the tokens of their own paths."""
        tree = self.tree
        shape = tree_tensors(tree, context.root_ids.device)
        token_ids = context.root_ids[:, None].expand(-1, tree.num_nodes).clone()  # (B, N)
        log_probs = torch.zeros(token_ids.shape, device=token_ids.device)
        hidden = context.last_hidden
        # inputs[n] is what the children of node n are guessed from: (B, nodes of this depth with children, M)
        inputs = torch.cat([hidden, self._embed(context.root_ids)], -1)[:, None]
        for level in _levels(tree):
            features = self.blocks[level.depth](inputs)
            top = self.logits(features, level.depth).float().log_softmax(-1).topk(level.num_ranks, dim=-1)
            slot = torch.tensor(level.parent_slots, device=token_ids.device)
            rank = shape.ranks[level.start : level.stop]
            children = self.to_target_ids(top.indices[:, slot, rank])  # (B, children)
            token_ids[:, level.start : level.stop] = children
            log_probs[:, level.start : level.stop] = top.values[:, slot, rank]
            if level.expanded:
                chosen = torch.tensor(level.expanded, device=token_ids.device)
                inputs = torch.cat([inputs[:, slot[chosen]], self._embed(children[:, chosen])], -1)
        return Draft.on_tree(tree, token_ids, log_probs=log_probs)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """E(x) times the scale, (…) -> (…, D)."""
        embedded: Tensor = self.target_embedding[token_ids]
        return embedded * self.scale
