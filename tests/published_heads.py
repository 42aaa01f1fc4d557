"""Heads as other projects define them: random tensors under the published names, and what they compute.

Written from the formats' descriptions, with modules of transformers where the projects have them; nothing here uses the
package's heads.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from draftheads.models.model import TargetModel

Tensors = dict[str, Tensor]
HEADS = 3
MASK = 6  # of P-EAGLE
DRAFTED = torch.tensor([4, 9, 2, 20, 21, 23, 7, 10, 12, 13])  # draft tokens, in no order
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
    "vocab_size": 24, "hidden_act": "silu",
}  # fmt: skip


@dataclass
class Published:
    """A head of another project.

    Args:
        method: of ours that it is.
        tensors: by published name.
        config: ``config.json``.
        logits: (B, T, D) or (B, T, n·D) hidden states and (B, T) ids to (B, T, V') logits of the first heads; entry t
            of head i predicts x_{t+2+i}.
        file: in which the project stores it.
        back: the layout in which it can be written again.
    """

    method: str
    tensors: Tensors
    config: dict[str, Any]
    logits: Callable[[Tensor, Tensor], list[Tensor]]
    file: str = "model.safetensors"
    back: str | None = None
    states: int = 1  # hidden states of a token that it reads


def numbers(*shape: int) -> Tensor:
    """Random, and exact in bf16."""
    return (0.3 * torch.randn(*shape)).bfloat16().float()


def shifted(x: Tensor, by: int) -> Tensor:
    return x.roll(-by, dims=1)


def _renamed(head: Published, *names: tuple[str, str], **config: Any) -> Published:
    """With other starts of its tensors' names, and other keys."""
    for theirs, new in names:
        found = head.tensors.items()
        head.tensors = {new + name.removeprefix(theirs) if name.startswith(theirs) else name: t for name, t in found}
    head.config = {name: value for name, value in {**head.config, **config}.items() if value is not None}
    return head


def medusa(target: TargetModel, *, own: bool = True, layers: int = 2) -> Published:
    """Version 0.1, with an lm_head of its own for each head, or version 2."""
    size, vocab = target.hidden_size, target.vocab_size
    tensors: Tensors = {}
    for i in range(HEADS):
        for j in range(layers):
            # the project has one block for all layers of a head
            block = numbers(size, size), numbers(size)
            for part, tensor in zip(("weight", "bias"), block, strict=True):
                tensors[f"{i}.{j}.linear.{part}"] = tensors.get(f"{i}.0.linear.{part}", tensor).clone()
        if own:
            tensors[f"{i}.{layers}.weight"] = numbers(vocab, size)

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        found = []
        for i in range(HEADS):
            x = hidden
            for j in range(layers):
                x = x + F.silu(F.linear(x, tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]))
            found.append(F.linear(x, tensors[f"{i}.{layers}.weight"] if own else target.weights.lm_head))
        return found

    # both wrong, as published
    about = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "base"}
    about |= {} if own else {"version": "2"}
    file = "medusa_lm_head.pt" if own else "medusa_lm_head.safetensors"
    return Published("medusa", tensors, about, logits, file, "medusa")


def vllm_medusa(target: TargetModel, *, biases: bool = True, trimmed: bool = True, one: bool = False) -> Published:
    """vLLM's; ``one`` has a single lm_head, and lm_heads of the whole vocabulary beside a token map."""
    given = medusa(target, layers=1)
    tensors: Tensors = {}
    for i in range(HEADS):
        tensors[f"medusa_heads.blocks.{i}.layers.0.weight"] = given.tensors[f"{i}.0.linear.weight"]
        if biases:
            tensors[f"medusa_heads.blocks.{i}.layers.0.bias"] = given.tensors[f"{i}.0.linear.bias"]
        else:
            given.tensors[f"{i}.0.linear.bias"].zero_()
        if one:
            given.tensors[f"{i}.1.weight"] = given.tensors["0.1.weight"]
        else:
            whole = given.tensors[f"{i}.1.weight"]
            tensors[f"medusa_heads.lm_heads.{i}.weight"] = whole[DRAFTED] if trimmed else whole
    if one:
        tensors["medusa_heads.lm_head.weight"] = given.tensors["0.1.weight"]
    if trimmed or one:
        tensors["medusa_heads.token_map"] = DRAFTED.clone()

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        found = given.logits(hidden, ids)
        return [of_head[..., DRAFTED] for of_head in found] if trimmed or one else found

    about = {"model_type": "medusa", "hidden_size": target.hidden_size, "num_heads": HEADS, "num_hidden_layers": 1}
    return Published("medusa", tensors, about, logits)


def hydra(target: TargetModel, *, grounded: bool = True, prefix: bool = False, layers: int = 2) -> Published:
    """Hydra, Hydra++ (``prefix``), or heads that read no draft tokens."""
    size, vocab = target.hidden_size, target.vocab_size
    embedding = target.weights.embedding.detach().float()
    tensors: Tensors = {}
    place = (lambda j: 2 * j + 1) if prefix else (lambda j: j)
    for i in range(HEADS):
        shared = numbers(size, size), numbers(size)  # the project has one block for all layers but a first that fuses
        for j in range(layers):
            name, fuses, inputs = f"hydra_mlp.{i}.{place(j)}", grounded and j == 0, (i + 2) * size
            weight, bias = (numbers(size, inputs), numbers(size)) if fuses else shared
            tensors |= {f"{name}.linear.weight": weight.clone(), f"{name}.linear.bias": bias.clone()}
            if fuses:
                residual = f"{name}.res_connection"
                tensors |= {f"{residual}.weight": numbers(size, inputs), f"{residual}.bias": numbers(size)}
        head = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
        tensors |= {f"{head}.weight": numbers(vocab, size), f"{head}.bias": numbers(vocab)}
    tensors["input_embed_fn.weight"] = embedding.clone()
    layer = None
    if prefix:
        layer = LlamaModel(LlamaConfig(**SIZES, attn_implementation="eager")).eval()  # type: ignore[arg-type, call-arg]
        for parameter in layer.parameters():
            parameter.data = numbers(*parameter.shape)
        tensors |= {f"prefix_embeding_layer.{name}": tensor for name, tensor in layer.state_dict().items()}
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        states = hidden if layer is None else layer(inputs_embeds=hidden).last_hidden_state
        parts, found = [states], []
        for i in range(HEADS):
            parts.append(shifted(F.embedding(ids, embedding), i + 1))
            x = torch.cat(parts, -1) if grounded else states
            for j in range(layers):
                name = f"hydra_mlp.{i}.{place(j)}"
                kept = x
                if grounded and j == 0:
                    kept = F.linear(x, tensors[f"{name}.res_connection.weight"], tensors[f"{name}.res_connection.bias"])
                x = kept + F.silu(F.linear(x, tensors[f"{name}.linear.weight"], tensors[f"{name}.linear.bias"]))
            head = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
            found.append(F.linear(x, tensors[f"{head}.weight"], tensors[f"{head}.bias"]))
        return found

    about = {"hydra_num_heads": HEADS, "hydra_num_layers": layers, "hydra_head_arch": "prefix-mlp" if prefix else "mlp"}
    about |= {"grounded_heads": grounded, "hidden_state_offset": 0}
    method = "hydra++" if prefix else "hydra" if grounded else "medusa"
    return Published(method, tensors, about, logits, "hydra_lm_head.pt", "hydra")


def accelerator(
    target: TargetModel, *, tied: bool = False, scaled: bool = False, distinct: bool = False, all_stages: bool = False
) -> Published:
    """IBM's. ``distinct``: marked as tied, and yet with different lm_heads. ``all_stages``: tied ones are repeated."""
    size, vocab, inner = target.hidden_size, target.vocab_size, 24
    tensors: Tensors = {}
    for i in range(HEADS):
        own = {
            f"emb.{i}.weight": numbers(vocab, inner),
            f"proj.{i}.weight": numbers(inner, size if i == 0 else inner),
            f"ln.{i}.weight": 1 + numbers(inner),
            f"ln.{i}.bias": numbers(inner),
            f"head.{i}.weight": numbers(vocab, inner),
        }
        for name, tensor in own.items():
            part = name.split(".")[0]
            first = name.replace(f".{i}.", ".1." if part == "proj" else ".0.")
            is_tied = tied and first in tensors and not (distinct and part == "head")
            tensors[name] = tensors[first] if is_tied else tensor
    every = dict(tensors)
    if tied and not all_stages:
        kept = [name for name in tensors if ".0." in name or (distinct and name.startswith("head."))]
        tensors = {name: tensors[name] for name in (*kept, "proj.1.weight")}

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        keep = 0.5 ** (0.5 / HEADS)
        add = ((1 - keep**2) * (inner / 2)) ** 0.5
        state, found = hidden, []
        if scaled:
            state = state * (state.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / 2**0.5
        for i in range(HEADS):
            state = F.linear(state, every[f"proj.{i}.weight"])
            state = state + F.embedding(shifted(ids, i + 1), every[f"emb.{i}.weight"]) * (add / keep)
            state = state * (state.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            state = F.gelu(state * every[f"ln.{i}.weight"] + every[f"ln.{i}.bias"])
            found.append(F.linear(state, every[f"head.{i}.weight"]))
        return found

    about = {"model_type": "mlp_speculator", "emb_dim": size, "inner_dim": inner, "vocab_size": vocab}
    about |= {"n_predict": HEADS, "n_candidates": 5, "top_k_tokens_per_head": [5, 4, 3]}
    about |= {"tie_weights": tied, "scale_input": scaled}
    stored = {f"speculator.{name}": tensor.clone() for name, tensor in tensors.items()}
    return Published("mlp-speculator", stored, about, logits, back="mlp-speculator")


def eagle(
    target: TargetModel, *, fusion_bias: bool = True, qkv_bias: bool = False, scaling: bool = False, num_layers: int = 1
) -> Published:
    """Version 1: layers of Llama's kind, the first without its first norm."""
    size = target.hidden_size
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}} if scaling else {}
    config = LlamaConfig(**{**SIZES, **rope}, attention_bias=qkv_bias, attn_implementation="eager")  # type: ignore[arg-type, call-arg]
    layers: Any = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(num_layers)).eval()
    layers[0].input_layernorm = nn.Identity()
    for layer in layers if qkv_bias else ():
        layer.self_attn.o_proj = nn.Linear(layer.self_attn.o_proj.in_features, size, bias=False)
    fc = nn.Linear(2 * size, size, bias=fusion_bias)
    for parameter in [*layers.parameters(), *fc.parameters()]:
        parameter.data = numbers(*parameter.shape)
    rotary = LlamaRotaryEmbedding(config)
    tensors = {f"layers.{name}": tensor for name, tensor in layers.state_dict().items()}
    tensors |= {f"fc.{name}": tensor for name, tensor in fc.state_dict().items()}
    tensors["embed_tokens.weight"] = target.weights.embedding.detach().float().clone()
    embedding, lm_head = tensors["embed_tokens.weight"], target.weights.lm_head.detach().float()

    def last(embedded: Tensor, states: Tensor) -> Tensor:
        x = fc(torch.cat([embedded, states], -1))[None]
        mask = torch.full((len(states), len(states)), -torch.inf).triu(1)[None, None]
        turns = rotary(x, torch.arange(len(states))[None])
        for layer in layers:
            x = layer(x, attention_mask=mask, position_embeddings=turns)
        return x[0, -1]

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        return unrolled(hidden, ids, embedding, last, lambda state: F.linear(state, lm_head))

    about = {**SIZES, **rope, "model_type": "llama", "bias": fusion_bias, "num_hidden_layers": num_layers}
    return Published("eagle", tensors, about, logits, back="eagle-sglang")


def eagle3(
    target: TargetModel,
    *,
    form: str = "midlayer.",
    trimmed: bool = True,
    layers: list[int] | None = None,
    size: int = SIZES["hidden_size"],  # type: ignore[assignment]
    own_embedding: bool = False,
    rope: Mapping[str, Any] = MappingProxyType({}),
    window: int = 0,
    has_fc: bool = True,
    **flags: bool,
) -> Published:
    """Version 3: SafeAILab's names (``midlayer.``), or speculators' (``layers.0.``); of a size of its own if given."""
    vocab = target.vocab_size
    known = {"fc_norm": False, "norm_output": False, "norm_before_residual": False, "attention_bias": False, **flags}
    known |= {"norm_before_fc": False, "norm_heads": False, **flags, "window": window, "has_fc": has_fc}
    count = len(DRAFTED) if trimmed else vocab
    given: dict[str, Any] = {**SIZES, "hidden_size": size, "draft_vocab_size": count, **known, **rope}
    given["target_hidden_size"] = target.hidden_size
    head = Eagle3(given).eval()
    for parameter in head.parameters():
        parameter.data = numbers(*parameter.shape)
    tensors = {name.replace("midlayer.", form): tensor for name, tensor in head.state_dict().items()}
    ids_of = DRAFTED if trimmed else torch.arange(vocab)
    tensors["d2t"] = ids_of - torch.arange(count)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids_of, value=True)
    embedding = numbers(vocab, size) if own_embedding else target.weights.embedding.detach().float()
    if form == "layers.0." or own_embedding:
        tensors["embed_tokens.weight"] = embedding.clone()

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        return unrolled(head.states(hidden[0])[None], ids, embedding, head, head.logits)

    of_tests = ("norm_heads", "window", "has_fc")  # its tensors, and other keys
    about = {name: value for name, value in given.items() if name not in of_tests}
    about |= {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    about |= {} if has_fc else {"eagle_config": {"use_aux_hidden_state": False}}
    about |= {} if layers is None else {"eagle_aux_hidden_state_layer_ids": layers}
    if form == "layers.0.":
        of_layer = {*SIZES, *rope, "layer_types", "sliding_window"}
        own = {name: about[name] for name in about if name in of_layer}
        about = {name: value for name, value in about.items() if name not in of_layer}
        about |= {"speculators_model_type": "eagle3", "transformer_layer_config": own}
        methods = [{"proposal_type": "greedy", "speculative_tokens": HEADS}]
        about["speculators_config"] = {"algorithm": "eagle3", "proposal_methods": methods}
    back = "speculators" if form == "layers.0." else "eagle3"
    return Published("eagle3", tensors, about, logits, back=back, states=3 if has_fc else 1)


def p_eagle(
    target: TargetModel,
    *,
    form: str = "amazon",
    trimmed: bool = False,
    num_layers: int = 3,
    own_embedding: bool = True,
    **flags: bool,
) -> Published:
    """EAGLE-3 with further layers and a vector for masks, as Amazon, SpecForge or speculators stores it."""
    known = dict.fromkeys(("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias"), False)
    count, sizes = len(DRAFTED) if trimmed else target.vocab_size, {**SIZES, "num_hidden_layers": num_layers}
    known |= {name: value for name, value in flags.items() if name != "norm_heads"}
    given = {**sizes, **known, "draft_vocab_size": count, "target_hidden_size": target.hidden_size}
    head = PEagle({**given, "window": 0, "has_fc": True, "norm_heads": flags.get("norm_heads", False)}).eval()
    for parameter in head.parameters():
        parameter.data = numbers(*parameter.shape)
    first = "midlayer." if form == "amazon" else "layers.0."
    tensors = {name.replace("midlayer.", first): tensor for name, tensor in head.state_dict().items()}
    ids_of = DRAFTED if trimmed else torch.arange(count)
    tensors["d2t"] = ids_of - torch.arange(count)
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids_of, value=True)
    embedding = numbers(target.vocab_size, sizes["hidden_size"]) if own_embedding else target.weights.embedding.float()
    if own_embedding:
        tensors["embed_tokens.weight"] = embedding.clone()

    def logits(hidden: Tensor, ids: Tensor) -> list[Tensor]:
        ends = range(1, ids.shape[1] - HEADS)
        parts = [(hidden[0, :end], embedding[ids[0, 1 : end + 1]], embedding[MASK]) for end in ends]
        return [of_head[None] for of_head in torch.stack([head.predictions(*part) for part in parts]).unbind(1)]

    config: dict[str, Any] = {**given, "ptd_token_id": MASK, "architectures": ["LlamaForCausalLMEagle3"]}
    if form == "specforge":
        config = {**given, "mask_token_id": MASK, "architectures": ["PEagleDraftModel"], "num_depths": HEADS}
    if form == "speculators":
        config = {name: value for name, value in given.items() if name not in SIZES}
        config |= {"speculators_model_type": "peagle", "transformer_layer_config": sizes, "mask_token_id": MASK}
        methods = [{"proposal_type": "greedy", "speculative_tokens": HEADS}]
        config["speculators_config"] = {"algorithm": "peagle", "proposal_methods": methods}
    return Published("p-eagle", tensors, config, logits, back="speculators", states=3)


def unrolled(
    states: Tensor,
    ids: Tensor,
    embedding: Tensor,
    last: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Logits of each head at each place of one text: below the text, a head goes on from its own states."""
    length = ids.shape[1]
    found: list[list[Tensor]] = [[] for _ in range(HEADS)]
    for read in range(1, length - HEADS):
        known = states[0, :read]
        for depth in range(HEADS):
            state = last(embedding[ids[0, 1 : len(known) + 1]], known)
            found[depth].append(logits(state))
            known = torch.cat([known, state[None]])
    return [torch.stack(of_head)[None] for of_head in found]


class Eagle3(nn.Module):
    """The layer of the published heads, of transformers' parts; its tensors have the published names."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        config = LlamaConfig(**{**given, "dtype": torch.float32}, attn_implementation="eager")  # type: ignore[call-arg]
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.midlayer = nn.Module()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(size, epsilon))
        attention: Any = LlamaAttention(config, 0)
        if given["norm_heads"]:  # speculators with draft_arch qwen3
            options: dict[str, Any] = {**given, "head_dim": config.head_dim, "attn_implementation": "eager"}
            attention = Qwen3Attention(Qwen3Config(**options), 0)
        self.midlayer.self_attn = attention
        self.window = given["window"] or given["max_position_embeddings"]
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * size, rows, bias=config.attention_bias))
        # of Qwen2's kind: no bias behind the attention
        attention.o_proj = nn.Linear(attention.o_proj.in_features, size, bias=False)
        self.midlayer.mlp = LlamaMLP(config)
        read = given["target_hidden_size"]
        self.fc = nn.Linear(3 * read, size, bias=False) if given["has_fc"] else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(read, epsilon) for _ in range(3 * given["fc_norm"]))
        if given["norm_before_fc"]:  # as in heads for gpt-oss
            self.input_norm = LlamaRMSNorm(3 * read, epsilon)
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, given["draft_vocab_size"], bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.norm_output: bool = given["norm_output"]
        self.norm_before_residual: bool = given["norm_before_residual"]

    def states(self, hidden: Tensor) -> Tensor:
        """What ``fc`` makes of three hidden states, (…, 3·D) -> (…, M)."""
        if self.fc_norm:
            parts = hidden.chunk(3, -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.fc is None:  # as nvidia's head for short texts of gpt-oss
            return hidden
        fused: Tensor = self.fc(self.input_norm(hidden) if hasattr(self, "input_norm") else hidden)
        return fused

    def logits(self, state: Tensor) -> Tensor:
        """(V',) of what :meth:`forward` returns."""
        logits: Tensor = self.lm_head(state if self.norm_output else self.norm(state))
        return logits

    def rows(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The layer's outputs (T, M) of inputs (T, M)."""
        layer, positions = self.midlayer, torch.arange(len(states))[None]
        normed = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)[None]
        ahead = torch.arange(len(states)) - torch.arange(len(states))[:, None]
        hidden_from = (ahead > 0) | (ahead <= -self.window)
        mask = torch.zeros(len(states), len(states)).masked_fill(hidden_from, -torch.inf)[None, None]
        states = normed if self.norm_before_residual else states
        x = states + layer.self_attn(x, position_embeddings=self.rotary(x, positions), attention_mask=mask)[0][0]
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What the next place reads as its state (M,): inputs are (T, M)."""
        x = self.rows(embedded, states)[-1]
        last: Tensor = self.norm(x) if self.norm_output else x
        return last


class PEagle(Eagle3):
    """The same with further layers of Llama's kind, and a vector in place of the hidden states of masks."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        config = LlamaConfig(**{**given, "dtype": torch.float32}, attn_implementation="eager")  # type: ignore[call-arg]
        options: dict[str, Any] = {**given, "head_dim": config.head_dim, "attn_implementation": "eager"}
        kind: Any = (lambda i: Qwen3DecoderLayer(Qwen3Config(**options), i)) if given["norm_heads"] else None
        kind = kind or (lambda i: LlamaDecoderLayer(config, i))
        deeper = {str(i): kind(i) for i in range(1, given["num_hidden_layers"])}
        for layer in deeper.values():
            layer.self_attn.o_proj = nn.Linear(layer.self_attn.o_proj.in_features, config.hidden_size, bias=False)
        self.layers = nn.ModuleDict(deeper)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def predictions(self, hidden: Tensor, embedded: Tensor, mask: Tensor) -> Tensor:
        """(HEADS, V') behind a text (T, 3·D), (T, M), in one pass over it and a mask for each further token."""
        masks, hidden_of_masks = mask.expand(HEADS - 1, -1), self.mask_hidden[0].expand(HEADS - 1, -1)
        x = self.rows(torch.cat([embedded, masks]), self.states(torch.cat([hidden, hidden_of_masks])))[None]
        causal = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        turns = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers.values():
            x = layer(x, attention_mask=causal, position_embeddings=turns)
        logits: Tensor = self.lm_head(self.norm(x[0, len(hidden) - 1 :]))
        return logits


Make = Callable[[TargetModel], Published]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN = {"rope_theta": 150000.0, "rope_scaling": {**YARN, "original_max_position_embeddings": 128}}  # of gpt-oss
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}  # a text's positions are one
CASES: dict[str, Make] = {
    "medusa v0.1": medusa,
    "medusa v2": lambda target: medusa(target, own=False),
    "vllm-medusa": vllm_medusa,
    "vllm-medusa without biases": lambda target: vllm_medusa(target, biases=False, trimmed=False),
    "vllm-medusa with one lm_head": lambda target: vllm_medusa(target, one=True),
    "hydra": hydra,
    "hydra++": lambda target: hydra(target, prefix=True),
    "hydra without draft tokens": lambda target: hydra(target, grounded=False),
    "accelerator": accelerator,
    "accelerator, tied and scaled": lambda target: accelerator(target, tied=True, scaled=True),
    "accelerator, tied and repeated": lambda target: accelerator(target, tied=True, all_stages=True),
    "accelerator, marked as tied": lambda target: accelerator(target, tied=True, distinct=True),
    "eagle": eagle,
    "eagle without a bias": lambda target: eagle(target, fusion_bias=False, scaling=True),
    "eagle of qwen2": lambda target: eagle(target, qkv_bias=True),
    "eagle of two layers": lambda target: eagle(target, qkv_bias=True, num_layers=2),
    "hass of speculators": lambda target: _renamed(
        eagle(target),
        ("fc.", "fusion_fc."),
        ("layers.0.", "transformer."),
        **dict.fromkeys(SIZES),
        transformer_layer_config=SIZES,
        transformer_layer_architecture="LlamaDecoderLayer",
        speculators_model_type="eagle",
        fusion_bias=True,
        layernorms=False,
    ),
    "eagle3": eagle3,
    "eagle3, residual after the norm": lambda target: eagle3(target, norm_before_residual=True),
    "eagle3.1": lambda target: eagle3(target, fc_norm=True, norm_output=True, trimmed=False),
    "eagle3 of gpt-oss": lambda target: eagle3(target, norm_before_fc=True, layers=[2, 5, 8]),
    "eagle3 with layers of its own": lambda target: eagle3(target, layers=[1, 3, 6], attention_bias=True),
    "eagle3 with an embedding of its own": lambda target: eagle3(target, own_embedding=True),
    "eagle3 of another size": lambda target: eagle3(target, size=24, own_embedding=True, fc_norm=True),
    "eagle3 of a larger size": lambda target: eagle3(
        target, size=48, own_embedding=True, norm_output=True, attention_bias=True, trimmed=False
    ),
    "speculators of another size": lambda target: eagle3(
        target, form="layers.0.", size=40, own_embedding=True, norm_before_residual=True
    ),
    "speculators": lambda target: eagle3(target, form="layers.0.", norm_before_residual=True),
    "p-eagle": p_eagle,
    "p-eagle of specforge": lambda target: p_eagle(
        target, form="specforge", norm_before_residual=True, own_embedding=False, norm_heads=True
    ),
    "speculators p-eagle": lambda target: p_eagle(
        target, form="speculators", trimmed=True, norm_before_fc=True, norm_output=True, attention_bias=True
    ),
    "speculators p-eagle of one layer": lambda target: p_eagle(
        target, form="speculators", num_layers=1, norm_before_residual=True, fc_norm=True
    ),
    "eagle3 with a layer of Qwen3": lambda target: eagle3(target, form="layers.0.", norm_heads=True),
    "eagle3 with a window": lambda target: eagle3(target, window=3, norm_output=True),
    "eagle3 of the last hidden state": lambda target: eagle3(target, has_fc=False, trimmed=False),
    "eagle3 with YaRN": lambda target: eagle3(target, form="layers.0.", rope=YARN, window=4),
    "eagle3 of Llama 3": lambda target: eagle3(target, rope={"rope_scaling": LLAMA3}),
    "eagle3 of Qwen3-VL": lambda target: eagle3(target, rope={"rope_scaling": MROPE}),
}


def written(head: Published, folder: Path) -> Path:
    """Its files, as the project stores them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head.config))
    if head.file.endswith(".pt"):
        torch.save(head.tensors, folder / head.file)
    else:
        save_file(head.tensors, folder / head.file)
    return folder


def made(case: str, target: TargetModel) -> Published:
    torch.manual_seed(0)
    with torch.no_grad():
        return CASES[case](target)
