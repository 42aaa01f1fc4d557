"""Fused modules: they replace modules of a stock model and use fewer operators.

A stock decoder layer calls about thirty small operators besides its products. At one token per step, these calls take
as long as the products. So a norm becomes one module; the q, k and v products become one product, and so do the gate
and up products. A fused module replaces the original only if both agree on random inputs.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from draftheads.cpu.kernels import stacked

Attention = Callable[..., tuple[Tensor, None]]
# cosines and signed sines by the cosines of a pass; entries go with their tensors
_TURNS: Any = WeakTensorKeyDictionary()
_SILU = ("SiLU", "SiLUActivation")
_LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
# further arguments that transformers passes to layers, and that their results do not depend on
_IGNORED = {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
# errors of modules that are built in another way
_OTHERWISE_BUILT = (AttributeError, KeyError, TypeError, RuntimeError, ValueError)


class Pass(NamedTuple):
    """The inputs that all layers of a forward pass share."""

    batch: int  # b
    nodes: int  # N
    turns: tuple[Tensor, Tensor]  # cosines and sines of the positions, (b or 1, N, d)
    mask: Tensor | None  # (b, 1, N, S)
    cache: Any  # the KV cache, with transformers' interface


class FusedNorm(nn.Module):
    """RMS norm, x / rms(x) · (w + offset), with four operators on a CPU; PyTorch's own has eight there."""

    def __init__(self, weight: Tensor, epsilon: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        size = len(weight)
        self.epsilon, self.scale = epsilon, weight.detach().float() + offset
        # √D · w and √(D · ε), as rms(x) is |x| / √D. A tuple, because attributes of a module are slow to look up
        self.given = size**0.5 * self.scale, torch.tensor((size * epsilon) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        scaled, floor = self.given
        whole = x.float()
        length = torch.hypot(torch.linalg.vector_norm(whole, dim=-1, keepdim=True), floor)
        return (whole / length).mul_(scaled).to(x.dtype)


class HalfEmbedding(nn.Module):
    """An embedding in 16 bits, for a model that computes in fp32 and whose embedding is exact in 16 bits."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """(…) -> (…, D)."""
        return F.embedding(token_ids, self.weight).to(self.dtype)


class FusedMlp(nn.Module):
    """W_down (act(W_gate x) · W_up x) with one product for gate and up."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.size = original.gate_proj.out_features
        self.act_fn = original.act_fn
        self.gate_up_proj = stacked([original.gate_proj, original.up_proj])
        self.gate_up_proj.halves = True
        self.down_proj = stacked([original.down_proj])
        self.fused_parts = {"gate_up_proj": {"gate_proj": self.size, "up_proj": self.size}}  # their outputs
        act = F.silu if type(original.act_fn).__name__ in _SILU else original.act_fn
        self.steps = (self.gate_up_proj.rows, act, self.down_proj.rows)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        return self.rows(x.reshape(-1, x.shape[-1])).view(x.shape)

    def rows(self, rows: Tensor) -> Tensor:
        """(n, D) -> (n, D)."""
        gate_up, act, down = self.steps
        gate, up = gate_up(rows).split(self.size, 1)
        out: Tensor = down(act(gate) * up)
        return out


class FusedAttention(nn.Module):
    """Rotary attention with one product for queries, keys and values."""

    def __init__(self, original: Any, attention: Attention) -> None:
        super().__init__()
        layers = [original.q_proj, original.k_proj, original.v_proj]
        self.head_dim, self.scaling, self.layer_idx = original.head_dim, original.scaling, original.layer_idx
        self.num_heads, self.num_groups = (layer.out_features // self.head_dim for layer in layers[:2])
        self.q_norm, self.k_norm = getattr(original, "q_norm", None), getattr(original, "k_norm", None)
        self.qkv_proj = stacked(layers)
        self.o_proj = stacked([original.o_proj])
        names = ("q_proj", "k_proj", "v_proj")
        self.fused_parts = {"qkv_proj": {n: layer.out_features for n, layer in zip(names, layers, strict=True)}}
        self.steps = (self.qkv_proj.rows, self.o_proj.rows)
        self.sizes = [self.num_heads + self.num_groups, self.num_groups]
        self.query_sizes = [self.num_heads, self.num_groups]
        self.attention = attention

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """(b, N, D) -> (b, N, D), by the interface of transformers' attention modules."""
        batch, nodes, size = hidden_states.shape
        rows = hidden_states.reshape(-1, size)
        given = Pass(batch, nodes, position_embeddings, attention_mask, _cache_in(others))
        return self.rows(rows, given).view(batch, nodes, -1), None

    def rows(self, rows: Tensor, given: Pass) -> Tensor:
        """(b·N, D) -> (b·N, D)."""
        qkv, out = self.steps
        turned, value = qkv(rows).view(given.batch, given.nodes, -1, self.head_dim).split(self.sizes, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split(self.query_sizes, 2)
            turned = torch.cat([self.q_norm(query), self.k_norm(key)], 2)
        cos, sin = _turns(*given.turns)
        turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        query, key = turned.transpose(1, 2).split(self.query_sizes, 1)  # (b, heads, N, d)
        value = value.transpose(1, 2)
        if given.cache is not None:
            key, value = given.cache.update(key, value, self.layer_idx)
        attended, _ = self.attention(self, query, key, value, given.mask, scaling=self.scaling)
        projected: Tensor = out(attended.view(rows.shape[0], -1))
        return projected


class FusedLayer(nn.Module):
    """A pre-norm decoder layer: attention, then the feed-forward part. It calls its parts without module hooks."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = original.input_layernorm, original.self_attn
        self.post_attention_layernorm, self.mlp = original.post_attention_layernorm, original.mlp
        self.steps = (
            self.input_layernorm.forward,
            self.self_attn.rows,
            self.post_attention_layernorm.forward,
            self.mlp.rows,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """(b, N, D) -> (b, N, D), by the interface of transformers' decoder layers."""
        assert position_embeddings is not None, "models with rotary positions pass them"
        norm, attention, middle_norm, mlp = self.steps
        batch, nodes, size = hidden_states.shape
        rows = hidden_states.reshape(-1, size)
        given = Pass(batch, nodes, position_embeddings, attention_mask, _cache_in(others))
        rows = rows + attention(norm(rows), given)
        out: Tensor = rows + mlp(middle_norm(rows))
        return out.view(batch, nodes, size)


def _cache_in(others: dict[str, Any]) -> Any:
    """The KV cache, or None, under the name that this version of transformers gives it: ``cache`` from 5.24 on."""
    cache = others.pop("cache" if "cache" in others else "past_key_values", None)
    if not others.keys() <= _IGNORED:
        raise TypeError(f"a layer was called with {', '.join(sorted(others.keys() - _IGNORED))}, which is not known")
    return cache


def fuse(model: Any, attention: Attention | None) -> None:
    """Replaces modules of a stock model by fused ones that agree; ``attention`` None keeps stock attention."""
    for find in (_fused_norm, lambda child: _fused_part(child, model, attention)):  # norms first
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                fused = find(child)
                if fused is not None:
                    setattr(parent, name, fused)
    layers = getattr(model.get_decoder(), "layers", [])
    for index, layer in enumerate(layers):
        parts = [getattr(layer, name, None) for name in _LAYER_PARTS]
        if [type(part) for part in parts] == [FusedNorm, FusedAttention, FusedNorm, FusedMlp]:
            layers[index] = _fused_layer(layer, model) or layer


def halve_embedding(model: Any) -> None:
    """Stores the embedding in 16 bits, if it is exact in them."""
    original = model.get_input_embeddings()
    if type(original) is not nn.Embedding or original.weight.dtype != torch.float32:
        return
    weight = original.weight.detach()
    for dtype in (torch.bfloat16, torch.float16):
        held = weight.to(dtype)
        if torch.equal(held.float(), weight):
            model.set_input_embeddings(HalfEmbedding(held, weight.dtype))
            return


def _fused_part(child: Any, model: Any, attention: Attention | None) -> nn.Module | None:
    """The fused form of a feed-forward part or of attention; None if there is none."""
    if _has_plain_linears(child, "gate_proj", "up_proj", "down_proj") and hasattr(child, "act_fn"):
        x, exact = _numbers(1, 3, child.gate_proj.in_features), _in_fp32(child)
        mlp = FusedMlp(exact)
        if not _agree(lambda: mlp(x), lambda: exact(x)):
            return None
        return mlp if exact is child else FusedMlp(child)
    if attention is not None and _has_plain_linears(child, "q_proj", "k_proj", "v_proj", "o_proj"):
        return _fused_attention(child, model, attention)
    return None


def _fused_norm(original: Any) -> nn.Module | None:
    """The fused form of a norm. Norms differ in the name of ε, and multiply by w or by 1 + w."""
    if not type(original).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(original, "weight", None)
    epsilon = getattr(original, "variance_epsilon", getattr(original, "eps", None))
    if weight is None or epsilon is None or weight.dim() != 1:
        return None
    x, exact = _numbers(1, 3, len(weight)), _in_fp32(original)
    for offset in (0.0, 1.0):
        fused = FusedNorm(weight.detach(), float(epsilon), offset)
        if _agree(lambda fused=fused: fused(x), lambda: exact(x)):  # type: ignore[misc]
            return fused
    return None


def _fused_attention(original: Any, model: Any, attention: Attention) -> nn.Module | None:
    try:
        exact = _in_fp32(original)
        fused = FusedAttention(exact, attention)
        x, given = _short_text(original.q_proj.in_features, exact.q_proj.weight, model)
    except _OTHERWISE_BUILT:
        return None
    if not _agree(lambda: fused(x, **given)[0], lambda: exact(x, **given)[0]):
        return None
    return fused if exact is original else FusedAttention(original, attention)


def _fused_layer(original: Any, model: Any) -> nn.Module | None:
    fused = FusedLayer(original)
    weight = original.input_layernorm.weight
    x, given = _short_text(len(weight), weight, model)
    return fused if _agree(lambda: fused(x, **given), lambda: original(x, **given)) else None


def _short_text(size: int, like: Tensor, model: Any) -> tuple[Tensor, dict[str, Any]]:
    """Five random hidden states, and a layer's other inputs: the model's own rotary positions, and a mask."""
    x = _numbers(1, 5, size).to(like)
    sees = torch.ones(5, 5, dtype=torch.bool, device=x.device).tril()
    mask = torch.zeros(1, 1, 5, 5).to(x).masked_fill(~sees, torch.finfo(x.dtype).min)
    turns = model.get_decoder().rotary_emb(x, torch.arange(5, device=x.device)[None])
    return x, {"position_embeddings": turns, "attention_mask": mask}


def _in_fp32(module: Any) -> Any:
    """The module itself if it is in fp32, else a copy: with large weights, rounding to 16 bits hides an error."""
    if next(module.parameters()).dtype == torch.float32:
        return module
    config = getattr(module, "config", None)
    return copy.deepcopy(module, {id(config): config}).float()


def _numbers(*shape: int) -> Tensor:
    """Random ones, but the same at each loading."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _agree(fused: Callable[[], Tensor], original: Callable[[], Tensor]) -> bool:
    """Whether both return the same numbers, up to the rounding of their type."""
    try:
        with torch.inference_mode():
            out, expected = fused(), original().float()
    except _OTHERWISE_BUILT:
        return False
    if out.shape != expected.shape:
        return False
    rounding = 1e-4 if out.dtype == torch.float32 else 5e-2
    return float((out.float() - expected).abs().max()) <= rounding * float(expected.abs().max())


def _has_plain_linears(module: Any, *names: str) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (b, N, 1, d), computed once per pass: x · cos + roll(x, d/2) · sin rotates x.

    All layers of the pass share the tensor ``cos``.
    """
    turns: tuple[Tensor, Tensor] | None = _TURNS.get(cos)
    if turns is None:
        half = sin.shape[-1] // 2
        # views of cos itself would keep it, and so the entry, for ever
        turns = cos[:, :, None].clone(), torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]
        _TURNS[cos] = turns
    return turns
