"""Transformer layers for draft heads, sized as the target's.

Alphabet: B rows, S queries, C slots of a history, H query heads, G key-value heads,
d their size, D hidden size.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.layer_parts import SILU, Heads, LayerParts, Outputs, Sizes
from draftheads.cpu.native_step import DescribedLayers, NativeStep, native_step
from draftheads.errors import InvalidSettings, require_at_least
from draftheads.heads.base import EmbeddingConfig, HeadConfig
from draftheads.heads.history import HeadKVCache, KeysValues, Places
from draftheads.heads.layers import zero_linear
from draftheads.utils.counts import counted


@dataclass(frozen=True)
class LayerConfig(HeadConfig):
    """Options of heads with transformer layers, which training takes from the target."""

    num_attention_heads: int = 4
    """H, query heads of a transformer layer."""
    num_key_value_heads: int = 4
    """G, its key-value heads; each serves H/G query heads."""
    head_size: int = 16
    """d, numbers in a query, key or value."""
    intermediate_size: int = 128
    """Numbers in the middle of a transformer layer's feed-forward part."""
    rope_theta: float = 10000.0
    """Base of the rotary positions."""
    rope_frequencies: list[float] | None = None
    """Radians per position of each pair of numbers, d/2 of them, of a target with scaled rotary positions. By default
    they follow from rope_theta."""
    rope_scale: float = 1.0
    """Factor of turned queries and keys, of a target with scaled rotary positions."""
    norm_epsilon: float = 1e-5
    """Added to mean squares by RMS norms."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in heads for Qwen2."""

    optional: ClassVar[frozenset[str]] = frozenset({"rope_frequencies", "rope_scale", "qkv_bias"})

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("num_attention_heads", "num_key_value_heads", "head_size", "intermediate_size")
        require_at_least(1, **{name: getattr(self, name) for name in names})
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidSettings(
                f"num_attention_heads is {self.num_attention_heads}; "
                f"it must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_size % 2:
            raise InvalidSettings(f"head_size is {self.head_size}; rotary positions need an even number")
        if self.rope_frequencies is not None and len(self.rope_frequencies) != self.head_size // 2:
            raise InvalidSettings(
                f"rope_frequencies has {counted(len(self.rope_frequencies), 'number')}; "
                f"head_size {self.head_size} needs {self.head_size // 2}"
            )
        for name in ("rope_theta", "rope_scale", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def state_size(self) -> int:
        """Numbers in what the layers pass on."""
        return self.hidden_size


@dataclass(frozen=True)
class SeveralLayersConfig(LayerConfig, EmbeddingConfig):
    """The option of heads that read hidden states of several layers of the target."""

    layers: list[int] = field(default_factory=list)
    """Layers of the target whose inputs are read, from 0; index 0 is the embedding, and index L what leaves the last
    of L layers. If empty, the last hidden state h_t is read. Training takes 2, L // 2 and L - 3 where it is not
    given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(layer < 0 for layer in self.layers) or len(set(self.layers)) < len(self.layers):
            raise InvalidSettings(f"layers is {self.layers}; give different numbers from 0 on")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return tuple(self.layers)


@dataclass(frozen=True)
class MaskedConfig(SeveralLayersConfig):
    """The option of heads that predict several tokens in one pass, from masks in their places."""

    mask_token_id: int = 0
    """The token in the places that are predicted. Training takes one that no text has where it is not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InvalidSettings(
                f"mask_token_id is {self.mask_token_id}; it must lie in 0 … vocab_size - 1 ({self.vocab_size - 1})"
            )


class RmsNorm(nn.Module):
    """x / rms(x) · w, computed in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        return scaled_to_unit(x, self.eps) * self.weight


def scaled_to_unit(x: Tensor, epsilon: float) -> Tensor:
    """Divides by the root mean square, in fp32: (…, D) -> (…, D)."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=epsilon).to(x.dtype)


class FeedForward(nn.Module):
    """W_down (SiLU(W_gate x) · W_up x)."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = zero_linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerLayer(nn.Module):
    """Attention, then a feed-forward part, each on RMS-normed inputs and added to them, as Llama's layers are.

    What is added starts as zero, so that a new layer is the identity: a head that reads through it starts as one that
    does not have it.

    Args:
        config: sizes.
        rotary: turn queries and keys by their positions; off where positions are added to the inputs.
        input_norm: norm the inputs of attention; off where they come normed (EAGLE).
        num_inputs: how many vectors of the layer's size attention reads, side by side.
        norm_heads: norm each query and key (Qwen3).
    """

    window: int = 0  # tokens that a row sees, itself included; 0 is all. For heads that draft along paths

    def __init__(
        self,
        config: LayerConfig,
        *,
        rotary: bool = True,
        input_norm: bool = True,
        num_inputs: int = 1,
        norm_heads: bool = False,
    ) -> None:
        super().__init__()
        size, heads, groups = config.state_size, config.num_attention_heads, config.num_key_value_heads
        inputs = num_inputs * size
        self.config, self.rotary = config, rotary
        self.input_norm: nn.Module = RmsNorm(size, config.norm_epsilon) if input_norm else nn.Identity()
        self.q_proj = nn.Linear(inputs, heads * config.head_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, groups * config.head_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, groups * config.head_size, bias=config.qkv_bias)
        norms = [RmsNorm(config.head_size, config.norm_epsilon) if norm_heads else nn.Identity() for _ in range(2)]
        self.q_norm, self.k_norm = norms
        self.o_proj = zero_linear(heads * config.head_size, size, bias=False)
        self.middle_norm = RmsNorm(size, config.norm_epsilon)
        self.feed_forward = FeedForward(size, config.intermediate_size)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, KeysValues]:
        """Queries (B, S, H, d), keys and values (B, S, G, d) of inputs (B, S, D) at positions (1 or B, S)."""
        normed = self.read(x)
        every = torch.cat([self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)], -1)
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        q, k, v = every.view(*x.shape[:2], -1, self.config.head_size).split([heads, groups, groups], 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = _rotated(torch.cat([q, k], 2), positions, self.config).split([heads, groups], 2)
        return q, KeysValues(k, v)

    def read(self, x: Tensor) -> Tensor:
        """What attention reads of the layer's inputs (B, S, D)."""
        normed: Tensor = self.input_norm(x)
        return normed

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """Keys and values (B, S, G, d) alone, of inputs (B, S, D) as they are, without the norm of inputs."""
        k, v = (part(x).view(*x.shape[:2], -1, self.config.head_size) for part in (self.k_proj, self.v_proj))
        return KeysValues(_rotated(self.k_norm(k), positions, self.config), v)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (B, S, D) from its inputs and what attention gave, (B, S, H, d)."""
        x = x + self.o_proj(attended.flatten(2))
        return x + self.feed_forward(self.middle_norm(x))

    def parts(self) -> LayerParts:
        """What it computes, for the native library."""
        own, middle = self.config, self.feed_forward
        norms = (self.input_norm, self.q_norm, self.k_norm)
        norm, *head_norms = (None if isinstance(norm, nn.Identity) else norm for norm in norms)
        sizes = own.num_attention_heads, own.num_key_value_heads, own.head_size
        return LayerParts(
            norms=(norm, None, self.middle_norm, None),
            qkv=tuple(map(Outputs, (self.q_proj, self.k_proj, self.v_proj))),
            out=Outputs(self.o_proj),
            heads=Heads(*sizes, scaling=own.head_size**-0.5),
            head_norms=tuple(head_norms),
            feed_forward=tuple(map(Outputs, (middle.gate_proj, middle.up_proj, middle.down_proj))),
            sizes=Sizes(gate=(SILU, 0.0, 0.0)),
            turns=self.rotary,
        )

    def step(self, x: Tensor, history: HeadKVCache, layer: int, rows: slice, places: Places | None = None) -> Tensor:
        """(B, P, D) -> (B, P, D), the next tokens of some rows; their keys and values go into the history."""
        at = places or history.places(rows, x.shape[1])
        q, new = self.project(x, at.positions)
        seen = history.write(layer, rows, new, at.slots, at.longest)
        mask = (at.back >= 0) & (at.back < self.window) if self.window else at.back >= 0
        return self.finish(x, attend(q, seen, mask))

    def forward(self, x: Tensor, *, causal: bool = True) -> Tensor:
        """(B, S, D) -> (B, S, D), whole texts from position 0 on; ``causal`` off lets all see all."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        q, seen = self.project(x, positions)
        return self.finish(x, attend(q, seen, causal=causal))


def native_layers(layers: Sequence[TransformerLayer]) -> NativeStep | None:
    """Layers whose products are packed, one after the other, for the native library; None if it has no such layers."""
    if not layers or any(type(layer) is not TransformerLayer or layer.window for layer in layers):
        return None
    config, norm = layers[0].config, layers[0].middle_norm  # as the final norm, whose outputs are not used
    described = DescribedLayers([layer.parts() for layer in layers], norm, _Rotary(config))
    return native_step(described, [0] * len(layers))


def attend(queries: Tensor, seen: KeysValues, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """Attention of queries (B, S, H, d) over (B, C, G, d) keys and values, by a mask (B, S, C), True where seen.

    The query heads of a key-value head are laid out as further queries: kernels with grouped heads are slower.
    """
    batch, length, heads, size = queries.shape
    groups = seen.keys.shape[2]
    if causal:  # kernels know this mask
        q, k, v = (part.transpose(1, 2) for part in (queries, seen.keys, seen.values))
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    grouped = queries.view(batch, length, groups, heads // groups, size)
    q = grouped.permute(0, 2, 1, 3, 4).flatten(2, 3)  # (B, G, S·H/G, d)
    k, v = (part.transpose(1, 2) for part in seen)  # (B, G, C, d)
    if mask is not None:
        mask = mask.repeat_interleave(heads // groups, dim=1)[:, None]  # (B, 1, S·H/G, C)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attended.view(batch, groups, length, heads // groups, size).permute(0, 2, 1, 3, 4).flatten(2, 3)


def attend_with_path(
    queries: Tensor, seen: KeysValues, mask: Tensor, path: KeysValues, path_mask: Tensor | None = None
) -> Tensor:
    """Attention where each query has some keys and values of its own besides those that all of its row see.

    Args:
        queries: (B, S, H, d).
        seen: (B, C, G, d), by the mask (1 or B, S or 1, C).
        mask: True where seen.
        path: (B, S, L, G, d).
        path_mask: (S, L), True where the path is seen; all of it when left out.
    """
    batch, length, heads, size = queries.shape
    groups = seen.keys.shape[2]
    q = queries.view(batch, length, groups, heads // groups, size) * size**-0.5
    common = torch.einsum("bsgrd,bcgd->bgsrc", q, seen.keys)
    own = torch.einsum("bsgrd,bslgd->bgsrl", q, path.keys)
    common = common.masked_fill(~mask[:, None, :, None], -torch.inf)
    if path_mask is not None:
        own = own.masked_fill(~path_mask[:, None], -torch.inf)
    weights = torch.cat([common, own], -1).float().softmax(-1).to(q.dtype)
    shared, private = weights.split([common.shape[-1], own.shape[-1]], -1)
    attended = torch.einsum("bgsrc,bcgd->bsgrd", shared, seen.values)
    attended = attended + torch.einsum("bgsrl,bslgd->bsgrd", private, path.values)
    return attended.flatten(2, 3)


def through_blocks(
    layers: Iterable[Any],
    x: Tensor,
    starts: Tensor,
    seen: Sequence[KeysValues],
    places: Sequence[Tensor],
    *,
    windows: Sequence[int],
    causal: Collection[int],
) -> Tensor:
    """The last layer's outputs for blocks of rows behind places of texts: rows see the text before and their block.

    Args:
        layers: of the head, L of them.
        x: (B, A, S, n·D) what the first layer reads, of blocks behind A places of each text.
        starts: (1 or B, A) positions of their first rows.
        seen: of each layer, (B, C, G, d) of the text.
        places: of each layer, (1 or B, C) positions of these, below 0 where there is nothing.
        windows: of each layer, how many tokens a row sees, itself included; 0 is all.
        causal: layers, from 0, whose rows see no later rows of the block.

    Returns:
        (B, A, S, D).
    """
    count, rows = x.shape[1:3]
    steps = torch.arange(rows, device=starts.device)
    positions = (starts[..., None] + steps).flatten(1)
    x = x.flatten(1, 2)
    for number, (layer, text, at) in enumerate(zip(layers, seen, places, strict=True)):
        visible = ((at >= 0)[:, None] & (at[:, None] < starts[..., None])).repeat_interleave(rows, dim=1)
        back = steps[:, None] - steps  # (S, S)
        of_block = back >= 0 if number in causal else None
        if window := windows[number]:
            visible = visible & (positions[..., None] - at[:, None] < window)  # (1 or B, A·S, C)
            of_block = (back < window) if of_block is None else of_block & (back < window)
        queries, own = layer.project(x, positions)
        block = KeysValues(
            *(part.unflatten(1, (count, 1, rows)).expand(-1, -1, rows, -1, -1, -1).flatten(1, 2) for part in own)
        )
        of_block = None if of_block is None else of_block.repeat(count, 1)
        x = layer.finish(x, attend_with_path(queries, text, visible, block, of_block))
    return x.unflatten(1, (count, rows))


def _turns(positions: Tensor, config: LayerConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (1 or B, S), each (1 or B, S, d/2) in fp32 (RoPE, Su et al. 2021)."""
    size, device = config.head_size, positions.device
    if config.rope_frequencies is None:
        speeds = config.rope_theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    else:
        speeds = _on_device(tuple(config.rope_frequencies), device)
    angles = positions[..., None].float() * speeds
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if config.rope_scale == 1.0 else (cos * config.rope_scale, sin * config.rope_scale)


def _rotated(x: Tensor, positions: Tensor, config: LayerConfig) -> Tensor:
    """(B, S, heads, d) with rotary positions (1 or B, S), computed in fp32."""
    cos, sin = (part[:, :, None] for part in _turns(positions, config))
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class _Rotary:
    """The same in the form of transformers' modules."""

    rope_type = "default"

    def __init__(self, config: LayerConfig) -> None:
        self._config = config

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat([part, part], -1) for part in _turns(positions, self._config))


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # so that training can use the cached tensor
        return torch.tensor(numbers, device=device)
