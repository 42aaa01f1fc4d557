"""MTP layers under the names of models' files, with random weights, and what they compute, by their equations.

Nothing here uses the package's heads or the layers of transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.models.model import TargetModel
from families import tiny_model
from slow_heads import turned

D, HEADS, GROUPS, SIZE, EXPERTS, CHOSEN = 32, 4, 2, 8, 4, 2  # as in families.py
NOPE, ROPE, VALUE, LATENT = 8, 8, 12, 16  # of DeepSeek's heads
BASE = 10000.0
Tensors = dict[str, Tensor]


class Kind(NamedTuple):
    """A family, and where its files have an MTP layer."""

    family: str
    fusion: str
    norms: tuple[str, str, str]  # of the embedding and of the hidden state, and the last
    layer: str  # prefix
    hidden_first: bool = False
    gain: float = 0.0  # what is added to the weights of norms
    stacked: bool = False  # the matrices of all experts are one tensor
    changes: Mapping[str, Any] = MappingProxyType({})  # of the model's configuration


_QWEN = ("mtp.fc", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), "mtp.layers.0.")


def _behind(prefix: str, fusion: str, *norms: str) -> Any:
    return prefix + fusion, tuple(prefix + norm for norm in norms), prefix


_MIMO = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
_EXTRA = _behind("model.layers.2.", "eh_proj", "enorm", "hnorm", "shared_head.norm")
KINDS = {
    "qwen3.5": Kind("qwen3_5_text", *_QWEN, gain=1.0),
    "qwen3.5-moe": Kind("qwen3_5_moe_text", *_QWEN, gain=1.0, stacked=True),
    "qwen3-next": Kind("qwen3_next", *_QWEN, gain=1.0),
    "mimo": Kind("qwen2", *_behind("model.mtp_layers.0.", *_MIMO), hidden_first=True),
    "glm-4.5": Kind("glm4_moe", *_EXTRA, changes={"routed_scaling_factor": 1.5}),
    "deepseek-v3": Kind("deepseek_v3", *_EXTRA),
    "speculators": Kind("qwen3_5_text", *_behind("mtp_layers.0.", *_MIMO), gain=1.0),
}


def model_for(kind: str, **changes: Any) -> TargetModel:
    return tiny_model(KINDS[kind].family, **{**KINDS[kind].changes, **changes})


def random_layer(kind: str, seed: int = 0) -> Tensors:
    """Its tensors by name."""
    names, chance = KINDS[kind], torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.fusion}.weight": (D, 2 * D),
        **{f"{norm}.weight": (D,) for norm in names.norms},
        **{names.layer + name: shape for name, shape in _layer_shapes(names).items()},
    }
    made = {name: 0.3 * torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    return {name: 1 - names.gain + made[name] if "norm" in name else made[name] for name in made}


def _layer_shapes(kind: Kind) -> dict[str, tuple[int, ...]]:
    gated = 2 if kind.family.startswith("qwen3_") else 1
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if kind.family == "deepseek_v3":
        own = {"q_a_proj": (16, D), "q_a_layernorm": (16,), "q_b_proj": (HEADS * (NOPE + ROPE), 16)}
        own |= {"kv_a_proj_with_mqa": (LATENT + ROPE, D), "kv_a_layernorm": (LATENT,)}
        own |= {"kv_b_proj": (HEADS * (NOPE + VALUE), LATENT), "o_proj": (D, HEADS * VALUE)}
    else:
        own = {"q_proj": (gated * HEADS * SIZE, D), "o_proj": (D, HEADS * SIZE)}
        own |= {"k_proj": (GROUPS * SIZE, D), "v_proj": (GROUPS * SIZE, D)}
        own |= {"q_norm": (SIZE,), "k_norm": (SIZE,)} if gated == 2 else {}
    shapes |= {f"self_attn.{name}.weight": shape for name, shape in own.items()}
    if kind.family == "qwen2":
        shapes |= {f"self_attn.{part}_proj.bias": own[f"{part}_proj"][:1] for part in "qkv"}
    if kind.family in ("qwen2", "qwen3_5_text"):
        return shapes | _mlp("mlp.", 48)
    shapes["mlp.gate.weight"] = (EXPERTS, D)
    if kind.stacked:
        shapes |= {"mlp.experts.gate_up_proj": (EXPERTS, 32, D), "mlp.experts.down_proj": (EXPERTS, D, 16)}
    else:
        shapes |= {k: v for e in range(EXPERTS) for k, v in _mlp(f"mlp.experts.{e}.", 16).items()}
    if gated == 2:
        return shapes | _mlp("mlp.shared_expert.", 16) | {"mlp.shared_expert_gate.weight": (1, D)}
    return shapes | _mlp("mlp.shared_experts.", 16) | {"mlp.gate.e_score_correction_bias": (EXPERTS,)}


def _mlp(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (size, D), "up": (size, D), "down": (D, size)}
    return {f"{prefix}{part}_proj.weight": shape for part, shape in shapes.items()}


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What each head (H, d) of a query finds at C places, whose keys and values are (C, H, …)."""
    scores = torch.einsum("hd,chd->hc", query, keys) / query.shape[1] ** 0.5
    return torch.einsum("hc,chd->hd", scores.softmax(1), values)


class SlowMtp:
    """An MTP layer that computes one token after the other."""

    def __init__(self, kind: str, tensors: Tensors, model: TargetModel) -> None:
        self.kind, self.tensors, self.model = KINDS[kind], tensors, model
        self.epsilon = model.config.rms_norm_eps

    def logits(self, hidden: Tensor, following: list[int], drafts: list[int]) -> Tensor:
        """(V,) logits of the token behind the last draft token, or behind the root without any.

        Args:
            hidden: (t+1, D) states of x_0 … x_t, after the model's final norm.
            following: x_1 … x_{t+1}, the last of which is the root.
            drafts: tokens behind the root.
        """
        inputs = [self._fused(token, state) for token, state in zip(following, hidden, strict=True)]
        state = self._last(inputs)
        for token in drafts:
            inputs.append(self._fused(token, state))
            state = self._last(inputs)
        return self.model.weights.lm_head @ state

    def _fused(self, token: int, state: Tensor) -> Tensor:
        of_token, of_state, _ = self.kind.norms
        parts = [self._norm(of_token, self.model.weights.embedding[token]), self._norm(of_state, state)]
        return self.tensors[f"{self.kind.fusion}.weight"] @ torch.cat(parts[::-1] if self.kind.hidden_first else parts)

    def _last(self, inputs: list[Tensor]) -> Tensor:
        """h' at the last of the inputs, after the norm."""
        layer = self.kind.layer
        normed = [self._norm(f"{layer}input_layernorm", x) for x in inputs]
        attend = self._latent_attention if self.kind.family == "deepseek_v3" else self._attention
        x = inputs[-1] + attend(normed)
        x = x + self._feed_forward(self._norm(f"{layer}post_attention_layernorm", x))
        return self._norm(self.kind.norms[2], x)

    def _norm(self, name: str, x: Tensor, epsilon: float | None = None) -> Tensor:
        weight = self.tensors[f"{name}.weight"] + self.kind.gain
        return x / (x.square().mean(-1, keepdim=True) + (self.epsilon if epsilon is None else epsilon)).sqrt() * weight

    def _linear(self, name: str, x: Tensor) -> Tensor:
        name = f"{self.kind.layer}{name}"
        return self.tensors[f"{name}.weight"] @ x + self.tensors.get(f"{name}.bias", torch.zeros(()))

    def _attention(self, normed: list[Tensor]) -> Tensor:
        gated, last = self.kind.family.startswith("qwen3_"), len(normed) - 1
        size = {"qwen2": SIZE, "glm4_moe": SIZE // 2}.get(self.kind.family, SIZE // 4)

        def heads(name: str, at: int) -> Tensor:
            return self._linear(f"self_attn.{name}_proj", normed[at]).view(-1, SIZE)

        def own(name: str, x: Tensor, at: int) -> Tensor:
            x = self._norm(f"{self.kind.layer}self_attn.{name}_norm", x) if gated else x
            return torch.cat([turned(x[:, :size], at, BASE), x[:, size:]], 1)

        asked = heads("q", last)
        queries = own("q", asked[::2] if gated else asked, last)
        keys = torch.stack([own("k", heads("k", at), at) for at in range(len(normed))])
        values = torch.stack([heads("v", at) for at in range(len(normed))])
        groups = [head // (HEADS // GROUPS) for head in range(HEADS)]
        attended = attention(queries, keys[:, groups], values[:, groups])
        attended = attended * asked[1::2].sigmoid() if gated else attended
        return self._linear("self_attn.o_proj", attended.flatten())

    def _latent_attention(self, normed: list[Tensor]) -> Tensor:
        prefix = f"{self.kind.layer}self_attn."

        def small(name: str, x: Tensor) -> Tensor:
            return self._norm(f"{prefix}{name}", x, 1e-6)

        asked = small("q_a_layernorm", self._linear("self_attn.q_a_proj", normed[-1]))
        queries = self._linear("self_attn.q_b_proj", asked).view(HEADS, -1)
        query = torch.cat([queries[:, :NOPE], turned(queries[:, NOPE:], len(normed) - 1, BASE, halves=False)], 1)
        keys, values = [], []
        for at, x in enumerate(normed):
            latent = self._linear("self_attn.kv_a_proj_with_mqa", x)
            spread = self._linear("self_attn.kv_b_proj", small("kv_a_layernorm", latent[:LATENT])).view(HEADS, -1)
            common = turned(latent[None, LATENT:], at, BASE, halves=False).expand(HEADS, -1)
            keys.append(torch.cat([spread[:, :NOPE], common], 1))
            values.append(spread[:, NOPE:])
        return self._linear("self_attn.o_proj", attention(query, torch.stack(keys), torch.stack(values)).flatten())

    def _feed_forward(self, x: Tensor) -> Tensor:
        if f"{self.kind.layer}mlp.gate.weight" not in self.tensors:
            return self._mlp("mlp.", x)
        scores = self._linear("mlp.gate", x)
        if self.kind.family.startswith("qwen3_"):
            weights = scores.softmax(0)
            chosen, scale = weights.topk(CHOSEN).indices.tolist(), 1.0
            added = self._linear("mlp.shared_expert_gate", x).sigmoid() * self._mlp("mlp.shared_expert.", x)
        else:
            weights = scores.sigmoid()
            bias = self.tensors[f"{self.kind.layer}mlp.gate.e_score_correction_bias"]
            chosen = (weights + bias).topk(CHOSEN).indices.tolist()
            scale, added = self.model.config.routed_scaling_factor, self._mlp("mlp.shared_experts.", x)
        share = weights[chosen] / weights[chosen].sum() * scale
        return added + sum(part * self._expert(e, x) for e, part in zip(chosen, share, strict=True))

    def _expert(self, number: int, x: Tensor) -> Tensor:
        if not self.kind.stacked:
            return self._mlp(f"mlp.experts.{number}.", x)
        stem = f"{self.kind.layer}mlp.experts."
        gate, up = (self.tensors[f"{stem}gate_up_proj"][number] @ x).chunk(2)
        return self.tensors[f"{stem}down_proj"][number] @ (F.silu(gate) * up)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = F.silu(self._linear(f"{name}gate_proj", x)) * self._linear(f"{name}up_proj", x)
        return self._linear(f"{name}down_proj", inner)
