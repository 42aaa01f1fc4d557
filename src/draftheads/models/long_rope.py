"""LongRoPE (Ding et al. 2024): rotary positions have other factors in texts that are longer than the original length.

Transformers chooses by the greatest position of a pass, so a text would depend on the other rows and on the drafts.
Here each text has the factors of its own greatest length from its first token on.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftheads.models.model_config import long_rope_start

_LONG = 1 << 24  # a position from here on is that of a long text


def use_long_rope(decoder: Any, config: Any) -> None:
    """Replaces a decoder's module for rotary positions, if it has LongRoPE."""
    start, rotary = long_rope_start(config), getattr(decoder, "rotary_emb", None)
    if start and getattr(rotary, "rope_type", None) == "longrope" and not isinstance(rotary, LongRope):
        decoder.rotary_emb = LongRope(rotary, start)


class LongRope(nn.Module):
    """Takes the place of a model's own module for rotary positions.

    Args:
        rotary: the module, of kind ``longrope``.
        original: the length up to which a text is short.
    """

    rope_type = "longrope"

    def __init__(self, rotary: Any, original: int) -> None:
        super().__init__()
        self.original = original
        self.short, self.long = deepcopy(rotary), deepcopy(rotary)
        for rope, length in ((self.short, None), (self.long, original + 1)):
            rope.rope_type = "fixed"  # transformers does not change it any more
            rope.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, rotary.inv_freq.device, seq_len=length)

    def marked(self, positions: Tensor, are_long: Tensor) -> Tensor:
        """The positions in texts of which some are long. Short ones stay at their last position."""
        return torch.where(are_long, positions + _LONG, positions.clamp(max=self.original - 1))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions (b, T). A row of positions without marks is a whole text."""
        are_long = position_ids >= _LONG
        positions = torch.where(are_long, position_ids - _LONG, position_ids)
        are_long = are_long | (position_ids.masked_fill(are_long, 0) >= self.original).any(-1, keepdim=True)
        (cos, sin), (long_cos, long_sin) = self.short(x, positions), self.long(x, positions)
        return torch.where(are_long[..., None], long_cos, cos), torch.where(are_long[..., None], long_sin, sin)
