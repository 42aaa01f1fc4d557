"""Candidates of a whole tree in one call of the native library, for heads that are layers on one state.

B rows, M candidates, D hidden size, K depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftheads.cpu.kernels import Native, NativeInt8, PackedLinear, table_of
from draftheads.cpu.native_library import Depth, Growth, HeadLayer, Weight, load_library
from draftheads.cpu.threads import native_threads

_MOST_DEPTHS, _MOST_LAYERS = 16, 64


class HeadLayers(NamedTuple):
    """Depth i of a head: layers on the state, each x + SiLU(W x + b), or V x + c + SiLU(W x + b) as W and V."""

    layers: Sequence[tuple[PackedLinear, PackedLinear | None]]
    lm_head: PackedLinear


class NativeGrowth:
    """Grows the candidates of a head.

    Args:
        depths: of the head, K of them.
        reads_path: whether the state is h_t with the embeddings of the path's tokens behind it, and not h_t alone.
        embedding: (V, D) of the target, or its product of 8 bits.
        embedding_scale: of the embeddings in the state.
        logit_scale: of the logits.
        target_ids: (V',) of the draft vocabulary; None: it is the target's.

    Raises:
        TypeError, ValueError: the head is built in another way.
    """

    def __init__(
        self,
        depths: Sequence[HeadLayers],
        *,
        reads_path: bool,
        embedding: Tensor | NativeInt8,
        embedding_scale: float,
        logit_scale: float,
        target_ids: Tensor | None,
    ) -> None:
        parts = [pair for depth in depths for pair in (*depth.layers, (depth.lm_head, None))]
        products = [part.product for pair in parts for part in pair if part is not None]
        if not all(isinstance(product, Native) for product in products):
            raise TypeError("a layer is not a native one")
        self.most_depths = len(depths)
        layers = [_head_layer(*pair) for depth in depths for pair in depth.layers]
        if len(depths) > _MOST_DEPTHS or len(layers) > _MOST_LAYERS:
            raise ValueError("it has more depths or layers than the library takes")
        self._library = load_library()
        embedding = embedding if isinstance(embedding, NativeInt8) else embedding.contiguous()
        self._table = table_of(embedding)
        self._held = products, embedding, target_ids
        self._layers = (HeadLayer * max(1, len(layers)))(*layers)
        self._depths = [
            (sum(len(d.layers) for d in depths[:i]), len(depth.layers), depth.lm_head.product.given)  # type: ignore[attr-defined]
            for i, depth in enumerate(depths)
        ]
        self.num_tokens = depths[0].lm_head.out_features
        self._reads_path, self._logit_scale, self._embedding_scale = reads_path, logit_scale, embedding_scale

    def expand(
        self,
        root_ids: Tensor,
        states: Tensor,
        levels: Sequence[tuple[int, int | None]],
        *,
        divisors: Sequence[float],
        limit: tuple[int, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates as :mod:`draftheads.speculation.growing` finds them.

        Args:
            root_ids: (B,).
            states: h_t (B, D).
            levels: width and beam of each depth.
            divisors: of the logits of each depth.
            limit: size of the tree, and least probability of the nodes that get children.

        Returns:
            Tokens, parents and the paths' log-probabilities, each (B, M).
        """
        rows, capacity, count = len(root_ids), 1, 1
        depths = (Depth * len(levels))()
        for i, (most, beam) in enumerate(levels):
            first, layers, lm_head = self._depths[i]
            width = min(most, self.num_tokens)
            divisor = divisors[min(i, len(divisors) - 1)] if divisors else 1.0
            depths[i] = Depth(first, layers, divisor / self._logit_scale, width, beam or 0, lm_head)
            if i:  # nodes that get children
                count = min(count, beam or count)
            count *= width
            capacity += count
        target_ids, (kind, table, smooth) = self._held[2], self._table
        states, root_ids = states.float().contiguous(), root_ids.contiguous()
        tokens, parents = (torch.zeros(rows, capacity, dtype=torch.int64) for _ in range(2))
        log_probs = torch.zeros(rows, capacity)
        self._library.draftheads_threads(native_threads())
        found = self._library.draftheads_grow(
            Growth(
                rows=rows,
                size=states.shape[1],
                num_depths=len(levels),
                reads_path=self._reads_path,
                embedding_kind=kind,
                nodes=0 if limit is None else limit[0],
                likely=0.0 if limit is None else limit[1],
                embedding_scale=self._embedding_scale,
                embedding=table,
                embedding_smooth=smooth,
                target_ids=None if target_ids is None else target_ids.data_ptr(),
                roots=root_ids.data_ptr(),
                states=states.data_ptr(),
                tokens=tokens.data_ptr(),
                parents=parents.data_ptr(),
                log_probs=log_probs.data_ptr(),
                capacity=capacity,
                head_layers=self._layers,
                depths=depths,
            )
        )
        return tokens[:, :found], parents[:, :found], log_probs[:, :found]


def _head_layer(layer: PackedLinear, base: PackedLinear | None) -> HeadLayer:
    given = [Weight() if part is None else part.product.given for part in (layer, base)]  # type: ignore[attr-defined]
    return HeadLayer(*given, base is not None)


def best_tree(priority: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The tree of the candidates of highest priority; None where there is no library for it.

    Args:
        priority: (B, M) float32, never higher than the parent's.
        parents: (B, M) int64, before their children.
        count: N, at most M.

    Returns:
        The candidates, the highest first and of equals the first, (B, N); their parents in the tree (B, N) and depths
        (B, N) int64; and which of them lie on the path to each (B, N, N) bool.
    """
    library = load_library()
    if library is None or priority.device.type != "cpu" or priority.dtype != torch.float32:
        return None
    priority, parents = priority.contiguous(), parents.contiguous()
    rows, candidates = priority.shape
    order, new_parents, depths = (torch.empty(rows, count, dtype=torch.int64) for _ in range(3))
    ancestors = torch.empty(rows, count, count, dtype=torch.bool)
    out = (part.data_ptr() for part in (order, new_parents, depths, ancestors))
    library.draftheads_best(priority.data_ptr(), parents.data_ptr(), rows, candidates, count, *out)
    return order, new_parents, depths, ancestors
