"""Tiny heads with random weights, and their slow twins from the papers' formulas."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.heads import head_classes
from draftheads.heads.attention import LayerConfig, TransformerLayer
from draftheads.heads.base import DraftHead
from draftheads.speculation.draft import Context, TargetWeights

D, V, K = 12, 20, 3
METHODS = ["medusa", "hydra"]
# not the first tokens, and not in order
DRAFT_VOCAB = torch.tensor([19, 3, 7, 4, 11, 0, 16, 5])
KINDS: dict[str, dict[str, Any]] = {
    "shared": {},
    "own": {"lm_head": "own"},
    "low rank": {"lm_head": "low_rank", "lm_head_rank": 5},
    "deep": {"num_layers": 3},
    "trimmed": {"draft_vocab_size": len(DRAFT_VOCAB)},
    "trimmed, own, deep": {"draft_vocab_size": len(DRAFT_VOCAB), "lm_head": "own", "num_layers": 2},
    "trimmed, low rank": {"draft_vocab_size": len(DRAFT_VOCAB), "lm_head": "low_rank", "lm_head_rank": 5},
}


def normal(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 9) -> Tensor:
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def random_weights(*, bias: bool = True, scale: float = 0.5, seed: int = 0) -> TargetWeights:
    return TargetWeights(
        normal(V, D, seed=seed), normal(V, D, seed=seed + 1), normal(V, seed=seed + 2) if bias else None, scale
    )


def fresh_head(method: str, weights: TargetWeights | None = None, **options: Any) -> DraftHead:
    """As training starts."""
    config_class, head_class = head_classes(method)
    head = head_class(config_class(hidden_size=D, vocab_size=V, **{"num_heads": K, **options}))
    weights = random_weights() if weights is None else weights
    head.initialise(weights, DRAFT_VOCAB if head.config.draft_vocab_size else None)
    return head


def random_head(method: str, **options: Any) -> DraftHead:
    """As after training: no parameter is what it was."""
    head = fresh_head(method, **options)
    for seed, parameter in enumerate(head.parameters()):
        parameter.data += 0.3 * normal(*parameter.shape, seed=seed)
    return head


def random_context(num_rows: int, width: int = 3) -> Context:
    """Rows that accepted different numbers of tokens."""
    num_accepted = torch.tensor([1 + row % width for row in range(num_rows)])
    return Context(normal(num_rows, width, D), tokens(num_rows, width), num_accepted, tokens(num_rows, seed=1))


def slow_features(head: DraftHead, i: int, hidden: Tensor, following: list[int]) -> Tensor:
    """(D,) features of head i; ``following`` are x_{t+1}, x_{t+2}, … as far as they are known."""
    weights = {name: parameter.detach() for name, parameter in head.named_parameters()}
    prefix = f"blocks.{i}"

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{prefix}.{name}.weight"] @ x + weights[f"{prefix}.{name}.bias"]

    start = 0
    x = hidden
    if head.config.method == "hydra":
        u = torch.cat([hidden, *(head.target_embedding[token] for token in following[: i + 1])])
        x = linear("0.residual", u) + F.silu(linear("0.linear", u))
        start = 1
    for j in range(start, head.config.num_layers):
        x = x + F.silu(linear(f"{j}.linear", x))
    return x


def slow_logits(head: DraftHead, i: int, features: Tensor) -> Tensor:
    """(V',) logits over the draft vocabulary."""
    target = random_weights()
    weights = {name: parameter.detach() for name, parameter in head.named_parameters()}
    if head.config.lm_head == "own":
        bias = weights.get(f"lm_heads.heads.{i}.bias", torch.zeros(()))
        return weights[f"lm_heads.heads.{i}.weight"] @ features + bias
    if head.config.lm_head == "low_rank":
        return weights[f"lm_heads.up.{i}.weight"] @ (weights[f"lm_heads.down.{i}.weight"] @ features)
    assert target.lm_head_bias is not None
    logits = (target.lm_head @ features + target.lm_head_bias) * target.logit_scale
    return logits[DRAFT_VOCAB] if head.config.draft_vocab_size else logits


def turned(x: Tensor, position: int, base: float, *, halves: bool = True) -> Tensor:
    """(heads, d) by a position: numbers j and j + d/2 are a pair, or 2j and 2j + 1."""
    size, out = x.shape[1], x.clone()
    for j in range(size // 2):
        angle = torch.tensor(position * base ** (-2 * j / size))
        one, two = (j, j + size // 2) if halves else (2 * j, 2 * j + 1)
        a, b = x[:, one], x[:, two]
        out[:, one], out[:, two] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def rms_norm(v: Tensor, weight: Tensor) -> Tensor:
    """One vector, with the usual epsilon."""
    return v / (v.square().mean() + 1e-5).sqrt() * weight


def slow_attention(
    layer: TransformerLayer,
    x: Tensor,
    config: LayerConfig,
    *,
    causal: bool = True,
    rotary: bool = True,
) -> Tensor:
    """The layer's output (T, D) one query and one head at a time."""
    size, heads, groups = config.head_size, config.num_attention_heads, config.num_key_value_heads

    def part(product: nn.Linear, number: int, at: int) -> Tensor:
        return product.weight[number * size : (number + 1) * size] @ normed[at]

    def placed(product: nn.Linear, number: int, at: int) -> Tensor:
        vector = part(product, number, at)
        return turned(vector[None], at, config.rope_theta)[0] if rotary else vector

    normed = [rms_norm(v, layer.input_norm.weight) for v in x]  # type: ignore[arg-type]
    outputs = []
    for t, v in enumerate(x):
        attended = []
        for h in range(heads):
            g = h // (heads // groups)
            seen = range(t + 1 if causal else len(x))
            keys = torch.stack([placed(layer.k_proj, g, s) for s in seen])
            values = torch.stack([part(layer.v_proj, g, s) for s in seen])
            attended.append((keys @ placed(layer.q_proj, h, t) / size**0.5).softmax(0) @ values)
        middle = v + layer.o_proj.weight @ torch.cat(attended)
        inner = rms_norm(middle, layer.middle_norm.weight)
        mlp = layer.feed_forward
        gated = F.silu(mlp.gate_proj.weight @ inner) * (mlp.up_proj.weight @ inner)
        outputs.append(middle + mlp.down_proj.weight @ gated)
    return torch.stack(outputs)


def _each_normed(x: Tensor, weight: Tensor) -> Tensor:
    """Every head (heads, d) by itself."""
    return torch.stack([rms_norm(head, weight) for head in x])


def slow_block(
    weight: dict[str, Tensor],
    rows: list[Tensor],
    hidden: list[Tensor],
    *,
    heads: int,
    groups: int,
    base: float,
    windows: Sequence[int] = (),
    causal: Sequence[int] = (),
    halves: bool = True,
) -> Tensor:
    """DFlash's block (S, D) after the final norm, row by row, by the names of z-lab's files.

    ``rows`` are the embeddings of the block, behind a text with these hidden states, each (n·D,). ``windows`` of the
    layers are in tokens, 0 without one; in ``causal`` layers no row sees a later one; ``halves`` as for ``turned``.
    """
    start = len(hidden)
    context = [rms_norm(weight["fc.weight"] @ h, weight["hidden_norm.weight"]) for h in hidden]
    layer = 0
    while f"layers.{layer}.input_layernorm.weight" in weight:
        of = {name.removeprefix(f"layers.{layer}."): value for name, value in weight.items()}

        def key_value(x: Tensor, position: int, of: dict[str, Tensor] = of) -> tuple[Tensor, Tensor]:
            key = _each_normed((of["self_attn.k_proj.weight"] @ x).view(groups, -1), of["self_attn.k_norm.weight"])
            return turned(key, position, base, halves=halves), (of["self_attn.v_proj.weight"] @ x).view(groups, -1)

        norms = [rms_norm(x, of["input_layernorm.weight"]) for x in rows]
        normed = slow_convolution(of, "attention_conv", norms, norms, 0)
        seen = [key_value(c, i) for i, c in enumerate(context)]
        seen += [key_value(x, start + i) for i, x in enumerate(normed)]
        wrote = []
        for i, x in enumerate(normed):
            query = _each_normed((of["self_attn.q_proj.weight"] @ x).view(heads, -1), of["self_attn.q_norm.weight"])
            query = turned(query, start + i, base, halves=halves)
            last = start + (i if layer in causal else len(rows) - 1)
            first = max(0, start + i - windows[layer] + 1) if windows and windows[layer] else 0
            attended = []
            for h in range(heads):
                group = h // (heads // groups)
                here = seen[first : last + 1]
                scores = torch.stack([query[h] @ key[group] for key, _ in here]) / query.shape[1] ** 0.5
                weights = scores.softmax(0)
                attended.append(sum(w * value[group] for w, (_, value) in zip(weights, here, strict=True)))
            wrote.append(of["self_attn.o_proj.weight"] @ torch.cat(attended))  # type: ignore[arg-type]
        middle = [x + y for x, y in zip(rows, slow_convolution(of, "attention_conv", wrote, norms, 1), strict=True)]
        norms = [rms_norm(y, of["post_attention_layernorm.weight"]) for y in middle]
        wrote = []
        for z in slow_convolution(of, "mlp_conv", norms, norms, 0):
            inner = F.silu(of["mlp.gate_proj.weight"] @ z) * (of["mlp.up_proj.weight"] @ z)
            wrote.append(of["mlp.down_proj.weight"] @ inner)
        rows = [x + y for x, y in zip(middle, slow_convolution(of, "mlp_conv", wrote, norms, 1), strict=True)]
        layer += 1
    return torch.stack([rms_norm(x, weight["norm.weight"]) for x in rows])


def slow_convolution(
    of: dict[str, Tensor], name: str, x: list[Tensor], normed: list[Tensor], side: int
) -> list[Tensor]:
    """DFlash2's, number by number; the rows as they are where the layer has none."""
    if f"{name}.base_kernel" not in of:
        return x
    base, projection = of[f"{name}.base_kernel"], of[f"{name}.kernel_projection.weight"]
    _, taps, size = base.shape
    groups = len(projection) // (2 * taps)
    out = []
    for p in range(len(x)):
        kernel = (projection @ normed[p]).view(2, taps, groups)[side]
        row = []
        for j in range(size):
            group = j // (size // groups)
            terms = [(base[side, t, j] + kernel[t, group]) * x[p - t][j] for t in range(taps) if p >= t]
            row.append(sum(terms[1:], terms[0]))
        out.append(torch.stack(row))
    return out


def slow_block_log_probs(
    tensors: dict[str, Tensor],
    rows: Tensor,
    lm_head: Tensor,
    text: list[int],
    *,
    is_shifted: bool,
    num_candidates: int | None = None,
) -> Tensor:
    """(K, V') of a block's rows, with the bias of a Markov head if there is one, by the names of published files.

    ``text`` has the block's first token, and the tokens that stand where draft tokens would. Of DFlash2 only the best
    ``num_candidates`` tokens of a place count, if they are given.
    """
    weight = {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items()}
    found, state = [], torch.zeros(weight["markov_w1.weight"].shape[1] if "markov_w1.weight" in weight else 0)
    for i, row in enumerate(rows if is_shifted else rows[1:]):
        logits = lm_head @ row
        if "markov_w1.weight" in weight:
            e = weight["markov_w1.weight"][text[i]]
            if "gate_proj.weight" in weight:
                e = torch.sigmoid(weight["gate_proj.weight"] @ torch.cat([row, e]) + weight["gate_proj.bias"]) * e
            if "joint_proj.weight" in weight:
                joint = weight["joint_proj.weight"] @ torch.cat([state, e, row]) + weight["joint_proj.bias"]
                gate, candidate, output = joint.view(3, -1)
                kept = torch.sigmoid(gate)
                state, e = kept * state + (1 - kept) * torch.tanh(candidate), torch.tanh(output)
            logits = logits + weight["markov_w2.weight"] @ e
        if "candidate_selector.hidden_projection.weight" in weight:
            before, after = (
                next(
                    weight[name]
                    for name in (f"candidate_selector.{part}", f"candidate_selector.{part}.weight")
                    if name in weight
                )
                for part in ("predecessor_codebook", "successor_codebook")
            )
            pairs = after @ (before[text[i]] * (weight["candidate_selector.hidden_projection.weight"] @ row))
            few = logits.topk(num_candidates or len(logits)).indices
            logits = torch.full_like(logits, -torch.inf).scatter(0, few, (logits + pairs)[few])
        found.append(logits.log_softmax(-1))
    return torch.stack(found)
