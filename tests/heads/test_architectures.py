"""Every architecture: drafting says what training taught, with a history as from scratch; sizes; bad settings."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.errors import InvalidSettings, InvalidTree
from draftheads.heads import HEADS, head_classes
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead, EmbeddingConfig
from draftheads.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from draftheads.heads.stateful import StatefulHead, StatefulSession
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context, TargetWeights
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree
from draftheads.testing import _context, check_head
from draftheads.train.options import TrainOptions
from families import FAMILIES, VOCAB, propose, tiny_head, tiny_model
from slow_heads import slow_attention
from thorough import some_rows

STATEFUL = [method for method in HEADS if issubclass(head_classes(method)[1], StatefulHead)]
LATENT = {"model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4}
LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}  # all are trained
SCALE = 1.7  # of embeddings, in variant()
# of every architecture, its variants: the method stands before the comma
VARIANTS: dict[str, dict[str, Any]] = {
    **{method: {} for method in HEADS},
    "hydra++, deep": {"num_layers": 3},
    "hydra++, grouped": {"num_key_value_heads": 2, "head_size": 6},
    "hydra++, scaled": {"rope_frequencies": [1.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0], "rope_scale": 1.2},
    "amphista, alpha": {"num_auto_embedding_blocks": 2},
    "amphista, no blocks": {"num_auto_embedding_blocks": 0},
    "amphista, no positions": {"head_positions": False},
    "amphista, one stage": {"num_adaptation_layers": 1},
    "amphista, no stage": {"num_adaptation_layers": 0},
    "amphista, no token": {"sampled_token": False},
    "amphista, own": {"lm_head": "own"},
    "amphista, low rank": {"lm_head": "low_rank", "lm_head_rank": 5, "draft_vocab_size": 12},
    "mlp-speculator, own": {"embeddings": "own", "lm_head": "own", "inner_size": 24},
    "mlp-speculator, tied": {"embeddings": "own", "lm_head": "own", "tie_weights": True, "inner_size": 20},
    "mlp-speculator, tied, shared": {"tie_weights": True, "scale_input": True},
    "eagle3, 3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 12, "lm_head": "own"},
    "eagle3, one state": {"layers": [], "num_key_value_heads": 1},
    "eagle3, window": {"window": 3, "norm_heads": True},
    "p-eagle, deep": {"num_layers": 3, "num_key_value_heads": 2, "draft_vocab_size": 12, "norm_heads": True},
    "p-eagle, one state": {"layers": [], "norm_before_residual": True, "mask_token_id": 5},
    "eagle, no bias": {"fusion_bias": False, "num_key_value_heads": 1},
    "eagle, deep": {"num_layers": 2},
    "eagle, own": {"lm_head": "own"},
    "eagle, low rank": {"lm_head": "low_rank", "lm_head_rank": 5},
    "markov-medusa, no gates": {"gated": False, "markov_rank": 3},
    "small-llama, low rank": {"lm_head": "low_rank", "lm_head_rank": 5},
    "small-llama, deep": {"num_layers": 2, "num_key_value_heads": 2, "draft_vocab_size": 12},
    "mtp, own": {"lm_head": "own", "hidden_first": True, "draft_vocab_size": 12},
    "mtp, latent attention": {"layer": LATENT},
    "markov-medusa, own": {"lm_head": "own", "num_layers": 2, "draft_vocab_size": 12},
    "dflash, shifted": {"is_shifted": True, "layers": [], "num_layers": 2},
    "dflash, windows": {"num_layers": 2, "windows": [3, 0], "causal_layers": [1], "own_mask": True},
    "dflash2": {"num_candidates": VOCAB},  # fewer are not all that was taught
    "dflash2, windows": {"num_candidates": VOCAB, "num_layers": 2, "windows": [4, 2], "kernel_taps": 3},
    "dspark, recurrent": {"gated": False, "recurrent": True, "draft_vocab_size": 12},
    "dspark, as published": {"own_embedding": True, "gate_reads_token": True, "draft_vocab_size": 12},
}


def variant(name: str, model: TargetModel, **changes: Any) -> DraftHead:
    method = method_of(name)
    scale = {"embedding_scale": SCALE} if issubclass(head_classes(method)[0], EmbeddingConfig) else {}
    return tiny_head(method, model, **{**scale, **VARIANTS[name], **changes})


def method_of(name: str) -> str:
    return name.partition(",")[0]


def random_text(head: DraftHead, rows: int, length: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states that the head reads (B, T, D or n·D) and tokens (B, T)."""
    chance = torch.Generator().manual_seed(seed)
    size = max(1, len(head.hidden_layers)) * head.config.hidden_size
    hidden = torch.randn(rows, length, size, generator=chance)
    return hidden, torch.randint(0, VOCAB, (rows, length), generator=chance)


def whole(hidden: Tensor, tokens: Tensor, ends: Sequence[int]) -> Context:
    """Contexts of texts of which ``ends[b]`` tokens are accepted and one is the root."""
    return _context(hidden, tokens, [0] * len(ends), ends)


@pytest.mark.few(18)
@pytest.mark.parametrize("name", VARIANTS)
def test_drafting_is_what_was_taught(name: str) -> None:
    """As the public check says, which other packages use."""
    layers = {"layers": [0, 1]} if name.startswith(("eagle3", "p-eagle")) else {}
    check_head(method_of(name), **{**layers, **VARIANTS[name]})


# steps without a draft: now and then, several in a row, from the beginning on, and so many that they must be read
WITHOUT_DRAFT: dict[str, Callable[[int], bool]] = {
    "single": lambda step: step % 5 == 3,
    "in a row": lambda step: step % 7 in {3, 4, 5},
    "at first": lambda step: step < 11 or step % 5 == 3,
    "without room": lambda step: step % 9 > 1,
}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "without_draft"),
    some_rows(
        product([name for name in VARIANTS if method_of(name) in STATEFUL], WITHOUT_DRAFT),
        *[("hydra++", "at first"), ("hydra++, grouped", "without room"), ("amphista", "without room")],
        *[("amphista, no stage", "without room"), ("amphista, alpha", "in a row"), ("eagle", "in a row")],
        *[("eagle", "without room"), ("eagle", "single"), ("eagle3", "single"), ("eagle3, window", "in a row")],
        *[("small-llama", "single"), ("small-llama, deep", "without room"), ("eagle, deep", "without room")],
    ),
)
def test_drafting_with_a_history_is_drafting_from_scratch(
    name: str, without_draft: str, model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join, take different numbers of tokens a step, sometimes without a draft, and leave."""
    if without_draft == "without room":
        monkeypatch.setattr("draftheads.heads.stateful._MOST_PENDING", 6)
    head = variant(name, model)
    # heads without a limit of depth: beyond the depth that they are trained for
    shape = BestFirst(12, top_k=4, beam=3, max_depth=None if head.depth_limit else 6)
    hidden, tokens = random_text(head, 6, 200, seed=3)
    chance = torch.Generator().manual_seed(5)
    session = head.start()
    rows: list[int] = []  # texts at work
    read: dict[int, int] = {}  # tokens of each that are read
    waiting = [0, 1, 2, 3, 4, 5]
    met = set()
    for step in range(40):
        met.add(len(rows))
        new = {row: 1 + int(torch.randint(0, 5, (1,), generator=chance)) for row in rows}
        if waiting and step % 4 == 0:
            for row in waiting[:2]:
                rows.append(row)
                new[row] = 3 + 11 * row  # a prompt
                read[row] = 0
            waiting = waiting[2:]
        starts, ends = [read[row] for row in rows], [read[row] + new[row] for row in rows]
        read |= zip(rows, ends, strict=True)
        context = _context(hidden[rows], tokens[rows], starts, ends)
        if WITHOUT_DRAFT[without_draft](step):
            session.observe(context)
        else:
            found = session.propose(context, shape)
            for place, row in enumerate(rows):
                scratch = propose(head, whole(hidden[[row]], tokens[[row]], [read[row]]), shape)
                assert found.path_log_probs is not None
                assert scratch.path_log_probs is not None
                torch.testing.assert_close(found.path_log_probs[place], scratch.path_log_probs[0], rtol=1e-3, atol=1e-4)
                # nodes of nearly equal probability may change places
                assert sorted(found.token_ids[place].tolist()) == sorted(scratch.token_ids[0].tolist())
        leaving = [place for place, row in enumerate(rows) if read[row] > 120 + 10 * row]
        if leaving:
            kept = [place for place in reversed(range(len(rows))) if place not in leaving]
            rows = [rows[place] for place in kept]
            session.keep(torch.tensor(kept, dtype=torch.long))
            waiting += [] if step > 30 else [row for row in read if row not in rows and row not in waiting][:1]
        if not rows and not waiting:
            break
    assert len(met) > 3


@pytest.mark.parametrize(
    "name",
    [
        *("eagle", "eagle, no bias", "eagle, deep", "eagle3", "eagle3, 3.1", "small-llama", "small-llama, deep"),
        "small-llama, low rank",
    ],
)
def test_a_head_drafts_deeper_than_it_was_trained_as_one_of_that_depth_does(name: str, model: TargetModel) -> None:
    head, deep = variant(name, model), variant(name, model, num_heads=6)
    hidden, tokens = random_text(head, 2, 14)
    context = whole(hidden, tokens, [12, 7])
    assert (head.depth_limit, head.config.num_heads) == (None, 3)
    for shape in (Tree.chain(6), BestFirst(30, top_k=4, beam=3, max_depth=6)):
        found, expected = propose(head, context, shape), propose(deep, context, shape)
        assert found.max_depth == 6
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.parents, expected.parents)
    by_confidence = propose(head, context, BestFirst(30, top_k=4, beam=3, temperatures=(1.0,) * 6))
    assert torch.equal(by_confidence.token_ids, found.token_ids)
    assert propose(head, context, BestFirst(30, top_k=4, beam=3)).max_depth == 3
    deeper = head.with_depth(6)
    assert head.config.num_heads == 3
    torch.testing.assert_close(deeper(hidden, tokens), deep(hidden, tokens))


@pytest.mark.parametrize("name", ["hydra", "eagle, own", "eagle, low rank", "mlp-speculator, tied, shared"])
def test_heads_with_weights_for_each_depth_draft_no_deeper_than_trained(name: str, model: TargetModel) -> None:
    head = variant(name, model)
    for shape in (Tree.chain(4), BestFirst(9, max_depth=4)):
        with pytest.raises(InvalidTree, match="the tree is 4 deep but the head has 3 heads"):
            head.check_shape(shape)
    hidden, tokens = random_text(head, 1, 9)
    shape = BestFirst(9, temperatures=(1.0,) * 5)
    assert propose(head, whole(hidden, tokens, [7]), shape).max_depth == 3


def test_a_single_lm_head_serves_all_depths(model: TargetModel) -> None:
    head = variant("eagle, own", model, num_heads=1)
    assert propose(head, whole(*random_text(head, 1, 9), [7]), Tree.chain(4)).max_depth == 4


def test_rows_of_which_nothing_is_read_yet_move_with_the_others(model: TargetModel) -> None:
    head = tiny_head("eagle", model)
    hidden, tokens = random_text(head, 3, 30)
    session = head.start()
    session.propose(whole(hidden[:2], tokens[:2], [9, 9]), head.default_shape)
    session.observe(Context(hidden[:, 9:11], tokens[:, 9:11], torch.tensor([2, 1, 2]), tokens[:, 11]))
    session.keep(torch.tensor([0, 2]))
    rows = [0, 2]
    part = Context(hidden[rows, 11:12], tokens[rows, 11:12], torch.tensor([1, 1]), tokens[rows, 12])
    found = session.propose(part, head.default_shape)
    for place, (row, start) in enumerate(((0, 0), (2, 9))):
        scratch = propose(head, whole(hidden[row : row + 1, start:], tokens[row : row + 1, start:], [12 - start]))
        assert found.token_ids[place].tolist() == scratch.token_ids[0].tolist()


def test_few_tokens_are_put_aside(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is read at once: its hidden states take more memory than what the head keeps of it."""
    monkeypatch.setattr("draftheads.heads.stateful._MOST_PENDING", 12)
    head = tiny_head("eagle", model)
    hidden, tokens = random_text(head, 1, 60)
    session = head.start()
    session.observe(whole(hidden, tokens, [30]))
    assert isinstance(session, StatefulSession)
    numbers = []
    for start in range(30, 60, 3):
        numbers.append(sum(map(len, session.pending)))
        part = slice(start, start + 3)
        session.observe(Context(hidden[:, part], tokens[:, part], torch.tensor([3]), tokens[:, start]))
    assert numbers == [0, 3, 6, 9, 12, 0, 3, 6, 9, 12]


# --- formulas, one number after the other ---


def test_ibms_weights_start_at_one_over_the_root_of_the_size(model: TargetModel) -> None:
    """Of a state; norms start as no change. After n stages half of the state's variance stems from h_t."""
    torch.manual_seed(0)
    target = MlpSpeculatorHead(MlpSpeculatorConfig(64, VOCAB, num_heads=3))
    assert target.embedding_weight**2 == pytest.approx(2 ** (1 / 3) - 1)  # with embeddings of the target
    options: dict[str, Any] = {"num_heads": 3, "inner_size": 100, "embeddings": "own", "lm_head": "own"}
    head = MlpSpeculatorHead(MlpSpeculatorConfig(model.hidden_size, VOCAB, **options))
    head.initialise(model.weights)
    matrices = {name: weight.detach() for name, weight in head.named_parameters() if weight.dim() == 2}
    assert len(matrices) == 9
    for name, weight in matrices.items():
        assert float(weight.std()) == pytest.approx(0.1, rel=0.1), name
        assert abs(float(weight.mean())) < 0.01, name
    assert {float(weight.detach().mean()) for weight in head.parameters() if weight.dim() == 1} == {0.0, 1.0}


@pytest.mark.parametrize(
    "options",
    [
        {"embeddings": "own", "scale_input": True},
        {},
        {"scale_input": True},
        {"tie_weights": True},
        {"inner_size": 300},
        {"num_heads": 4},
    ],
)
def test_half_of_ibms_last_state_stems_from_h_t_at_the_start(options: dict[str, Any]) -> None:
    """By mean squares in front of each norm, whatever the sizes of hidden states and of the target's embeddings."""
    torch.manual_seed(0)
    config = MlpSpeculatorConfig(200, 400, **{"num_heads": 3, "embedding_scale": 20.0, **options})
    head, embedding = MlpSpeculatorHead(config), 0.1 * torch.randn(400, 200)
    head.initialise(TargetWeights(embedding, embedding))
    of_states, of_tokens = [*head.projections], [*head.embeddings, *head.embedding_projections]
    squares: dict[Any, list[Tensor]] = {part: [] for part in (*of_states, *of_tokens)}
    for part in (*of_states, *of_tokens):
        part.register_forward_hook(lambda part, _, out: squares[part].append(out.detach().square().mean()))
    head(2.0 * torch.randn(20, 50, 200), torch.randint(400, (20, 50)))
    states, tokens = (torch.stack([x for part in parts for x in squares[part]]) for parts in (of_states, of_tokens))
    shares = states / (states + head.embedding_weight**2 * tokens)
    assert float(shares.prod()) == pytest.approx(0.5, abs=0.06)
    assert float(shares.max() - shares.min()) < 0.06  # all stages weigh them in the same way


def numbers(head: DraftHead) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in head.named_parameters()}


def with_text(head: DraftHead, model: TargetModel) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """The head's weights, scaled embeddings (V, D), and of a text of nine tokens hidden states (1, T, D) and tokens."""
    return numbers(head), SCALE * model.weights.embedding, *random_text(head, 1, 9)


def affine(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", torch.zeros(()))


def residual(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x + F.silu(affine(weights, f"{name}.linear", x))


@pytest.mark.few(18)
@pytest.mark.parametrize(
    "name",
    [
        *("amphista", "amphista, alpha", "amphista, no blocks", "amphista, no positions", "amphista, one stage"),
        *("amphista, no stage", "amphista, no token"),
    ],
)
@pytest.mark.parametrize(("num_heads", "from_stage_one"), [(1, 0), (2, 1), (4, 2), (5, 2)])  # ⌊K/2⌋
def test_amphista_follows_its_equations(name: str, model: TargetModel, num_heads: int, from_stage_one: int) -> None:
    """Stages on fc([h; e_{t+1}]), an MLP a head on one of them (equation 2), positions, then all heads see all."""
    head = variant(name, model, num_heads=num_heads)
    config, (weights, embedding, hidden, tokens) = head.config, with_text(head, model)
    assert isinstance(config, LayerConfig)
    stages = [hidden[0]]
    for i, layer in enumerate(head.adaptations):  # type: ignore[arg-type, var-annotated]
        x = stages[-1][:-1]
        if name != "amphista, no token":
            both = [torch.cat([state, embedding[token]]) for state, token in zip(x, tokens[0, 1:], strict=True)]
            x = torch.stack([affine(weights, f"fusions.{i}", pair) for pair in both])
        stages.append(F.pad(slow_attention(layer, x, config), (0, 0, 0, 1)))
    first = {"amphista, no stage": 0}.get(name, 1)
    last = {"amphista, no stage": 0, "amphista, one stage": 1}.get(name, 2)
    reads = [first if i < from_stage_one else last for i in range(num_heads)]
    heads = [residual(weights, f"blocks.{i}.0", stages[stage][4]) for i, stage in enumerate(reads)]
    if name != "amphista, no positions":
        heads = [x + weights["positions"][i] for i, x in enumerate(heads)]
    found = torch.stack(heads)
    for block in head.auto_embedding:  # type: ignore[union-attr]
        found = slow_attention(block, found, config, causal=False, rotary=False)
    assert len(head.auto_embedding) == {"amphista, alpha": 2, "amphista, no blocks": 0}.get(name, 1)  # type: ignore[arg-type]
    torch.testing.assert_close(head(hidden, tokens)[:, 0, 4], found, rtol=1e-4, atol=1e-4)


def test_the_positions_of_full_attention_are_those_of_heads() -> None:
    """Gemma 3 scales those of its layers with full attention only. Of GPT-NeoX, a part of each query is not turned."""
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 77.0}, "full_attention": linear}
    sizes = tiny_model("gemma3_text", rope_parameters=kinds).layer_sizes
    assert sizes["rope_frequencies"] == pytest.approx([0.125, 0.0125, 0.00125, 0.000125])
    partial = tiny_model("gpt_neox", rope_parameters={**linear, "partial_rotary_factor": 0.5})
    assert "rope_frequencies" not in partial.layer_sizes


def test_markov_medusa_follows_its_formula(model: TargetModel) -> None:
    """lm_head(blocks(h_t)) + U (2 σ(G h_t) * A E(x_{t+1+i}))."""
    head = variant("markov-medusa, own", model)
    weights, embedding, hidden, tokens = with_text(head, model)
    features, state = head(hidden, tokens), hidden[0, 2]
    for i in range(head.config.num_heads):
        x = residual(weights, f"blocks.{i}.1", residual(weights, f"blocks.{i}.0", state))
        gate = 2 * torch.sigmoid(affine(weights, f"gates.{i}", state))
        low = gate * (weights[f"down.{i}.weight"] @ embedding[tokens[0, 3 + i]])
        expected = weights[f"lm_heads.heads.{i}.weight"] @ x + weights[f"up.{i}.weight"] @ low
        torch.testing.assert_close(head.logits(features[i, 0, 2], i), expected, rtol=1e-4, atol=1e-4)


def slow_stage(head: DraftHead, embedding: Tensor, state: Tensor, stage: int, token: int, *, tied: bool) -> Tensor:
    """One stage of the MLP Speculator, as its formula has it."""
    weights = numbers(head)
    place = 0 if tied else stage
    z = weights[f"projections.{min(stage, 1) if tied else stage}.weight"] @ state
    embedded = weights[f"embedding_projections.{place}.weight"] @ embedding[token]
    z = z + head.embedding_weight * embedded  # type: ignore[operator]
    z = z / (z.square().mean() + 1e-6).sqrt() * weights[f"norms.{place}.weight"] + weights[f"norms.{place}.bias"]
    return F.gelu(z)


@pytest.mark.parametrize("name", ["mlp-speculator", "mlp-speculator, tied, shared"])
def test_the_mlp_speculator_follows_its_formula(name: str, model: TargetModel) -> None:
    """On the target's embedding and lm_head. With its own: tests/formats/test_published.py."""
    head, tied = variant(name, model), "tied" in name
    weights, embedding, hidden, tokens = with_text(head, model)
    state = hidden[0, 2]
    if head.config.scale_input:  # type: ignore[attr-defined]
        state = state / (state.square().mean() + 1e-6).sqrt() / 2**0.5
    features = head(hidden, tokens)
    for i in range(3):
        state = slow_stage(head, embedding, state, i, int(tokens[0, 3 + i]), tied=tied)
        place = 0 if tied else i
        said = affine(weights, f"outputs.{place}", state)
        torch.testing.assert_close(features[i, 0, 2], said, rtol=1e-4, atol=1e-4)
        logits = model.weights.lm_head @ said
        torch.testing.assert_close(head.logits(features[i, 0, 2], i), logits, rtol=1e-4, atol=1e-4)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("medusa", {"hidden_size": 0}, "hidden_size is 0"),
        ("medusa", {"num_heads": -2}, "num_heads is -2; it must be at least 1"),
        ("medusa", {"lm_head": "tied"}, "lm_head is 'tied'"),
        ("medusa", {"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ("medusa", {"draft_vocab_size": 10}, r"draft_vocab_size is 10; it must lie in 1 … vocab_size \(9\)"),
        ("amphista", {"num_adaptation_layers": 3}, r"num_adaptation_layers is 3; choose 0, 1 or 2"),
        ("amphista", {"num_auto_embedding_blocks": -1}, r"num_auto_embedding_blocks is -1; give 0 for none"),
        ("amphista", {"embedding_scale": 0.0}, r"embedding_scale is 0\.0; it must be above 0"),
        ("eagle3", {"num_layers": 2}, r"num_layers is 2; EAGLE-3 has one layer"),
        ("eagle", {"num_key_value_heads": 3}, r"num_attention_heads is 4; .* multiple of num_key_value_heads \(3\)"),
        ("eagle", {"head_size": 5}, r"head_size is 5; rotary positions need an even number"),
        ("hydra++", {"head_size": 0}, r"head_size is 0; it must be at least 1"),
        ("hydra++", {"rope_frequencies": [1.0]}, r"rope_frequencies has 1 number; head_size 16 needs 8"),
        ("hydra++", {"norm_epsilon": 0.0}, r"norm_epsilon is 0\.0; it must be above 0"),
        ("mlp-speculator", {"inner_size": 0}, r"inner_size is 0; it must be at least 1"),
        ("mlp-speculator", {"embeddings": "mine"}, r"embeddings is 'mine'; choose own or target"),
        ("markov-medusa", {"markov_rank": 0}, r"markov_rank is 0; it must be at least 1"),
    ],
)
def test_impossible_options_are_refused(method: str, options: dict[str, Any], words: str) -> None:
    config_class, _ = head_classes(method)
    with pytest.raises(InvalidSettings, match=words):
        config_class(**{"hidden_size": 8, "vocab_size": 9, **options})


@pytest.mark.parametrize(
    ("method", "option", "words"),
    [
        ("hydra", "depth=2", r"depth=2: hydra has no option 'depth'; choose among lm_head_rank"),
        ("amphista", "num_heads=2", r"amphista has no option 'num_heads'; choose among head_positions, "),
        ("amphista", "sampled_token", r"--head-options sampled_token: it has no value; give sampled_token=VALUE"),
        ("amphista", "sampled_token=1", r"--head-options sampled_token=1: sampled_token must be true or false"),
        ("markov-medusa", "markov_rank=many", r"--head-options markov_rank=many: markov_rank must be int"),
        ("markov-medusa", "markov_rank=1048577", r"markov_rank is 1048577; it must be at most 1048576"),
        ("amphista", "num_auto_embedding_blocks=1025", r"num_auto_embedding_blocks is 1025; it must be at most 1024"),
        ("eagle3", "inner_size=16", r"inner_size is 16 and .*size 64: give own_embedding=true and --lm-head own"),
        ("mlp-speculator", "embeddings=mine", r"embeddings must be 'own' or 'target'"),
    ],
)
def test_unknown_options_are_refused(method: str, option: str, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        TrainOptions(out=Path("out"), data=(Path("x"),), method=method, head_options=(option,))


# --- the target's sizes ---


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_take_the_targets_sizes(family: str) -> None:
    target = tiny_model(family)
    sizes = target.layer_sizes
    config_class, head_class = head_classes("hydra++")
    head = head_class(config_class(hidden_size=32, vocab_size=VOCAB, **sizes))  # type: ignore[arg-type]
    assert sizes["num_attention_heads"] == 4
    assert sizes["num_key_value_heads"] == (4 if family in ("gpt2", "gpt_neox") else 2)
    assert sizes["head_size"] == 8
    assert sizes["intermediate_size"] == (128 if family == "gpt2" else 48)
    assert isinstance(head, DraftHead)
    rope = {"rope_type": "default", "rope_theta": 1234.0}
    of_kinds = {"sliding_attention": {**rope, "rope_theta": 77.0}, "full_attention": rope}
    others: dict[str, dict[str, Any]] = {
        "gpt2": {"layer_norm_epsilon": 3e-4},
        "gpt_neox": {"layer_norm_eps": 3e-4, "rope_parameters": rope},
        "gemma3_text": {"rms_norm_eps": 3e-4, "rope_parameters": of_kinds},
    }
    usual: dict[str, Any] = {"rms_norm_eps": 3e-4, "rope_parameters": rope}
    sizes = tiny_model(family, **others.get(family, usual)).layer_sizes
    assert sizes["norm_epsilon"] == 3e-4
    assert sizes["rope_theta"] == (10000.0 if family == "gpt2" else 1234.0)


def test_the_manual_has_the_table_of_methods() -> None:
    """The table to put there is what the assertion shows."""
    rows = [["`--method`", "idea", "reads the text so far", "paper"], ["---"] * 4]
    for method in HEADS:
        config, head = head_classes(method)
        assert config.description, f"{config.__name__} needs a description in one line"
        reads = "yes" if issubclass(head, StatefulHead) else "no"
        rows.append([f"`{method}`", config.description, reads, config.paper])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert table in (Path(__file__).parents[2] / "docs" / "heads.md").read_text(encoding="utf-8"), f"\n{table}"
