"""P-EAGLE: EAGLE-3 with several layers, which predict all tokens of a draft in one pass (arXiv 2602.01469).

Row s of the text is [E(x_{s+1}); g_s] at position s, as in EAGLE-3, and its output predicts x_{s+2}. Behind the last
row t stand rows of the mask: [E(mask); fc(m)] at positions t+1, t+2, …, with a learned vector m in place of the
hidden states, so that row t+d predicts x_{t+2+d}. All rows see the rows before them. Only rows of the text are kept.

The first layer is EAGLE-3's, which reads both vectors; the others are ordinary ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.heads.attention import MaskedConfig, TransformerLayer, attend, through_blocks
from draftheads.heads.base import AllAtOnceHead, Root
from draftheads.heads.eagle3 import Eagle3Layer, FusedConfig, FusedHead
from draftheads.heads.history import HeadKVCache, KeysValues
from draftheads.heads.layers import first_texts, linear_fit, low_rank_fit
from draftheads.heads.stateful import last_of, next_tokens
from draftheads.speculation.draft import Context

_NEARNESS = 32.0  # of a new head: the largest logit of attention, as for DFlash
_RANDOM_PART = 0.1  # of a new head's queries and keys
_CONSTANT = 4.0  # how much larger than h is the number that is the same in all rows
_OF_NEXT = 2.0  # how much larger is what a row adds of the next h than the h that it has
_SCALED_BY = 8  # texts
_KEPT, _LEAST_KEPT = 0.7, 0.2  # of the places, from each depth to the next, and at least


@dataclass(frozen=True)
class PEagleConfig(FusedConfig, MaskedConfig):
    """P-EAGLE: ``num_layers`` layers predict ``num_heads`` tokens in one pass."""

    method: ClassVar[str] = "p-eagle"
    description: ClassVar[str] = "as eagle3 with several layers, which predict all tokens in one pass, from masks"
    paper: ClassVar[str] = "P-EAGLE, 2026"


class PEagleHead(AllAtOnceHead, FusedHead):
    """p_d = softmax(lm_head(norm(f_{t+d}))), with the outputs f of the layers in row t and in the masks behind it."""

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config, num_layers=config.num_layers)
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(self.fc.in_features))  # m
        deeper = (TransformerLayer(config, norm_heads=config.norm_heads) for _ in range(1, config.num_layers))
        self.layers: Any = nn.ModuleList([Eagle3Layer(config), *deeper])

    @property
    def place_shares(self) -> Sequence[float]:
        """Of the K heads (COD sampling): each depth is trained behind some of the places of the depth above."""
        return [max(_KEPT**depth, _LEAST_KEPT) for depth in range(self.config.num_heads)]

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Starts as a linear head: all rows read the last row of the text, and make of it the next h.

        As in DFlash, random queries and keys need far more text to find that row than most users have.
        """
        config: Any = self.config
        taken = [(hidden, ids) for hidden, ids in first_texts(texts, self.fc.in_features) if len(ids) > 1]
        super().start_near(taken)
        if not taken or config.state_size != config.hidden_size:
            return
        layer, groups, size = self.layers[0], config.num_key_value_heads, config.head_size
        read = [(*self.split(hidden), ids) for hidden, ids in taken]
        place = self._make_constant(read)
        rows = torch.cat([layer.read(self.inputs(ids[1:], self.states(states[:-1]))) for states, _, ids in read])
        ahead = torch.cat([last[1:] for _, last, _ in read])
        masks = layer.read(self.mask(rows)).expand_as(rows)
        number = rows.new_full((len(rows), 1), (_NEARNESS * size**-0.5) ** 0.5)
        query = linear_fit([(rows, number), (masks, number)])
        key = linear_fit([(rows, number), (masks, -number)])
        for part, fit in ((layer.q_proj, query), (layer.k_proj, key)):
            part.weight.mul_(_RANDOM_PART).add_(fit.to(rows))
        if config.norm_heads:
            for norm in (layer.q_norm, layer.k_norm):
                norm.weight.fill_(float(number[0]))
        up, down = low_rank_fit(linear_fit([(rows, _OF_NEXT * ahead)]), rows, groups * size)
        layer.v_proj.weight.copy_(down)
        out = layer.o_proj.weight.view(len(up), groups, -1, size)
        out[:, :, 0] = up.unflatten(1, (groups, size)).to(out)  # the first head of each group
        self.norm.weight.fill_(1.0)
        self.norm.weight[place] = 0.0
        made = torch.cat([self(states[None], ids[None])[0, 0, :-1] for states, _, ids in read[:_SCALED_BY]])
        wanted = torch.cat([last[1:] for _, last, _ in read[:_SCALED_BY]])
        self.norm.weight.mul_(float((made * wanted).sum() / made.square().sum()))

    def _make_constant(self, read: Sequence[tuple[Tensor, Tensor, Tensor]]) -> int:
        """Makes one number of g the same and large in all rows of texts, and its negative in masks; returns its place.

        Behind the norm it is then nearly constant, as keys that find the nearest row must be. It is the number of h
        that logits depend on least.
        """
        last = torch.cat([last for _, last, _ in read])
        sizes = last.square().mean(0)
        place = int(sizes.argmin())
        states = [self.fc_norm(states) for states, _, _ in read]
        one = linear_fit((part, part.new_ones(len(part), 1)) for part in states)
        number = _CONSTANT * float(sizes.sum().sqrt())
        self.fc.weight[place] = number * one[0].to(self.fc.weight)
        self.mask_hidden.copy_(-number * torch.linalg.pinv(self.fc.weight.double(), rtol=1e-3)[:, place])
        return place

    def mask(self, like: Tensor) -> Tensor:
        """What the first layer reads in a row of the mask, (1, 2·M)."""
        token_ids = torch.full((1,), self.mask_token_id, device=like.device)
        return self.inputs(token_ids, self.states(self.mask_hidden[None]))

    def masks(self, starts: Tensor, count: int, seen: Sequence[KeysValues], places: Sequence[Tensor]) -> Tensor:
        """Outputs (B, A, count, M) of so many masks behind A places of each text; see :func:`through_blocks`."""
        x = self.mask(starts).expand(len(seen[0].keys), starts.shape[1], count, -1)
        every = range(len(self.layers))
        return through_blocks(self.layers, x, starts, seen, places, windows=[0] * len(every), causal=every)

    def forward(self, hidden: Tensor, token_ids: Tensor, places: Tensor | None = None) -> Tensor:
        """(B, T, D or n·D), (B, T) -> (K, B, T, M).

        With ``places`` (B, A), head i's features are computed behind the first of them, and are 0 elsewhere; head 0's
        are computed everywhere.
        """
        batch, length = token_ids.shape
        steps = torch.arange(length, device=token_ids.device)[None]
        x = self.inputs(token_ids.roll(-1, dims=1), self.states(hidden))
        seen = []
        for layer in self.layers:
            queries, own = layer.project(x, steps)
            x = layer.finish(x, attend(queries, own, causal=True))
            seen.append(own)
        heads = self.config.num_heads
        at = steps.expand(batch, -1) if places is None else places
        numbers = [length] * heads if places is None else self.place_numbers(at.shape[1])
        found: list[Tensor] = []  # (B, A, depth, M) of the places that go so deep, the deepest first
        done = 0
        for depth in range(heads - 1, 0, -1):
            if numbers[depth] > done:
                starts = at[:, done : numbers[depth]] + 1
                found.append(self.masks(starts, depth, seen, [steps] * len(seen)))
                done = numbers[depth]
        features = [x]
        for depth in range(1, heads):
            rows = torch.cat([part[:, :, depth - 1] for part in found if part.shape[2] >= depth], 1)
            index = at[:, : numbers[depth], None].expand_as(rows)
            features.append(torch.zeros_like(x).scatter(1, index, rows))
        return self.outputs(torch.stack(features))

    def ordered_layers(self) -> Sequence[TransformerLayer]:
        return [*self.layers]

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        x = self.inputs(next_tokens(context), self.states(context.hidden))
        return last_of(self.step(x, rows, history), context.num_accepted)

    def begin(self, root: Root, depth: int) -> Any:
        """Logits of all depths, (depth, B, V'): one pass over as many masks as the tree needs."""
        features = root.states[:, None]
        if depth > 1:
            behind = self.masks(root.history.counts[:, None], depth - 1, *root.history.placed())
            features = torch.cat([features, behind[:, 0]], 1)
        return self.lm_head_logits(self.outputs(features).transpose(0, 1))
