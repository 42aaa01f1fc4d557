"""Parts of drafting on a CPU, natively: the largest of many logits, a head's candidates, the tree of the best ones.

B rows, W nodes of a depth, R children of each, M candidates, N nodes of a tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftheads.cpu.kernels import Native, NativeInt8, PackedLinear, table_of
from draftheads.cpu.native_library import KINDS, Depth, Growth, HeadLayer, Weight, load_library, native_threads


def first_largest(logits: Tensor) -> Tensor | None:
    """The first of the largest logits of each row, (…, V) -> (…) int64; None where there is no library for it."""
    return None if (found := _top(logits, 1, 1.0)) is None else found[1][..., 0]


def largest(logits: Tensor, count: int, divisor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row, as log-probabilities need them.

    Args:
        logits: (…, V).
        count: k, at most V are returned.
        divisor: of the logits.

    Returns:
        The k largest quotients, the largest first, (…, k) float32; their places (…, k) int64; and the logarithm of
        the sum of all quotients' exponentials (…, 1) float32.
    """
    count = min(count, logits.shape[-1])
    if (found := _top(logits, count, divisor, num_totals=1)) is not None:
        return found
    scaled = logits.float() if divisor == 1.0 else logits.float() / divisor
    top = scaled.topk(count, dim=-1)
    return top.values, top.indices, scaled.logsumexp(-1, keepdim=True)


def _top(logits: Tensor, count: int, divisor: float, num_totals: int = 0) -> tuple[Tensor, Tensor, Tensor] | None:
    """The largest quotients and their places, (…, k), and the sums, (…, 0 or 1). None where there is no library."""
    library = load_library() if logits.device.type == "cpu" and logits.dtype in KINDS else None
    if library is None:
        return None
    shape, logits = logits.shape[:-1], logits.contiguous()
    values, totals = (torch.empty(*shape, size, dtype=torch.float32) for size in (count, num_totals))
    places = torch.empty(*shape, count, dtype=torch.int64)
    given = (KINDS[logits.dtype], logits.data_ptr(), shape.numel(), logits.shape[-1], count, divisor)
    library.draftheads_threads(native_threads())
    library.draftheads_top(*given, values.data_ptr(), places.data_ptr(), totals.data_ptr() if num_totals else None)
    return values, places, totals


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
        beams: Sequence[int],
        *,
        top_k: int,
        divisors: Sequence[float],
        limit: tuple[int, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates as :mod:`draftheads.speculation.growing` finds them.

        Args:
            root_ids: (B,).
            states: h_t (B, D).
            beams: for each depth how many of its nodes get children.
            top_k: so many children each.
            divisors: of the logits of each depth.
            limit: size of the tree, and least probability of the nodes that get children.

        Returns:
            Tokens, parents and the paths' log-probabilities, each (B, M).
        """
        rows, capacity, count, width = len(root_ids), 1, 1, min(top_k, self.num_tokens)
        depths = (Depth * len(beams))()
        for i, (beam, divisor) in enumerate(zip(beams, divisors, strict=True)):
            first, layers, lm_head = self._depths[i]
            depths[i] = Depth(first, layers, divisor / self._logit_scale, width, beam, lm_head)
            count = width * min(count, beam)
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
                num_depths=len(beams),
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
