"""Sampled answers of the whole decoder have the model's own distribution, whoever drafts them."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distribution import NUM_ANSWERS, ODDS, SAMPLED, Answer, joint_distribution, p_value, sampled_answers
from draftheads.decode.engine import Engine
from draftheads.drafters.mixed import Mixed
from draftheads.heads import HEADS
from draftheads.models.model import StepMode, TargetModel
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.settings import SamplingSettings
from draftheads.speculation.accept import accept
from draftheads.speculation.draft import AcceptResult, Draft
from draftheads.speculation.sampling import RowSettings, choose
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree
from families import GROWING, PROMPTS, RECURRENT_FAMILIES, TREES, tiny_head, tiny_model
from thorough import some

WIDE = Tree.cartesian([6, 3])


# the logits of a tiny Granite are so large that it gives few answers
CHANGES: dict[str, dict[str, Any]] = {"granitemoehybrid": {"logits_scaling": 3.0}}


@cache
def exact(family: str = "llama") -> dict[Answer, float]:
    joint = joint_distribution(tiny_model(family, **CHANGES.get(family, {})))
    assert sum(joint.values()) == pytest.approx(1.0)
    return joint


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "method", "shape", "first_seed"),
    [
        ("llama", None, None, 0),
        ("llama", "medusa", WIDE, 10_000),
        ("llama", "hydra", WIDE, 20_000),
        ("llama", "medusa", BestFirst(16, top_k=6), 30_000),
        ("llama", "hydra", BestFirst(16, top_k=6, beam=3, threshold=0.03), 40_000),
        *((family, "hydra", WIDE, 60_000) for family in RECURRENT_FAMILIES),
        *((family, "hydra", BestFirst(16, top_k=6, beam=3), 70_000) for family in RECURRENT_FAMILIES),
    ],
)
def test_answers_have_the_models_distribution(
    family: str, method: str | None, shape: Shape | None, first_seed: int
) -> None:
    model = tiny_model(family, **CHANGES.get(family, {}))
    head = None if method is None else tiny_head(method, model)
    counts = sampled_answers(model, first_seed=first_seed, drafter=head, shape=shape)
    assert counts.total() == NUM_ANSWERS
    assert set(counts) <= set(exact(family)), "an answer that the model cannot give"
    assert p_value(counts, exact(family)) > ODDS


def resampling(draft: Draft, logits: Tensor, rows: RowSettings, uniforms: Tensor, seen: None, **_: Any) -> AcceptResult:
    """A wrong rule: where no guess is right, the next token is drawn anew, as if nothing had been tried."""
    verdict = accept(draft, logits, rows, uniforms, seen)
    batch = torch.arange(len(logits))
    last = verdict.num_accepted - 1
    again = (uniforms[batch, last] * 7919.0) % 1.0
    fresh = choose(logits[batch, verdict.path[batch, last]], rows, seen, again)
    rejected = last < draft.max_depth
    return AcceptResult(verdict.path, verdict.num_accepted, torch.where(rejected, fresh, verdict.next_ids))


def greedy_root(draft: Draft, logits: Tensor, *others: Any, **_: Any) -> AcceptResult:
    """Another: the token after the accepted path is the likeliest."""
    verdict = accept(draft, logits, *others)
    batch = torch.arange(len(logits))
    best = logits[batch, verdict.path[batch, verdict.num_accepted - 1]].argmax(-1)
    return AcceptResult(verdict.path, verdict.num_accepted, best)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wrong", "shape"), [(resampling, WIDE), (greedy_root, WIDE), (resampling, BestFirst(16, top_k=6, beam=3))]
)
def test_wrong_rules_are_detected(
    model: TargetModel, monkeypatch: pytest.MonkeyPatch, wrong: object, shape: Shape
) -> None:
    monkeypatch.setattr("draftheads.decode.batch.accept", wrong)
    head = tiny_head("hydra", model)
    assert p_value(sampled_answers(model, drafter=head, shape=shape), exact()) < ODDS


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", some(["chain", "ragged", "64 nodes", *GROWING], "ragged", "sure ones"))
@pytest.mark.parametrize("method", HEADS)
def test_a_seeds_answer_is_plain_decodings_token_for_token(model: TargetModel, method: str, shape: str) -> None:
    """A random number belongs to a place in the answer, so drafting changes no token (in fp32)."""
    cases = list(itertools.product(PROMPTS, [0.0, 0.5, 1.0], [1.0, 1.25]))
    own = [
        SamplingSettings(max_new_tokens=30, temperature=t, top_p=0.95, repetition_penalty=r, ignore_eos=True, seed=n)
        for n, (_, t, r) in enumerate(cases)
    ]
    prompts = [prompt for prompt, _, _ in cases]
    head = tiny_head(method, model)
    plain = Engine(model).generate(prompts, own)
    drafted = Engine(model, head, shape={**TREES, **GROWING}[shape]).generate(prompts, own)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert max(result.tokens_per_step for result in drafted) > 1.0, "nothing was ever accepted"
    assert len({result.token_ids for result in plain}) == len(cases)


@pytest.mark.parametrize("num_heads", some([3, 6], 6))
@pytest.mark.parametrize("rule", some(GROWING, "fewer nodes than depths"))
@pytest.mark.parametrize("method", some(HEADS, "hydra", "mlp-speculator", "eagle"))
def test_where_everything_is_typical_the_deepest_path_is_the_answer(
    model: TargetModel, method: str, rule: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On grown trees, of which some have fewer nodes than there are heads."""
    head = tiny_head(method, model, num_heads=num_heads)
    shape = GROWING[rule]
    drafts: list[Draft] = []
    verify = TransformersRunner.verify
    monkeypatch.setattr(TransformersRunner, "verify", lambda *args: drafts.append(args[-1]) or verify(*args))
    own = replace(SAMPLED, max_new_tokens=30, top_k=None, top_p=1.0, acceptance="typical", typical_epsilon=1e-200)
    for seed, prompt in enumerate(PROMPTS):
        drafts.clear()
        answer = Engine(model, head, shape=shape).generate([prompt], replace(own, seed=seed))[0].token_ids
        place = 0
        for draft in drafts:
            assert draft.max_depth < draft.num_nodes
            deepest = int(draft.depths.max())
            ends = [node for node in range(draft.num_nodes) if int(draft.depths[0, node]) == deepest]
            paths = [draft.token_ids[0, draft.ancestors[0, node]].tolist() for node in ends]
            assert list(answer[place : place + deepest + 1]) in [path[: len(answer) - place] for path in paths]
            place += deepest + 1
        assert place >= len(answer) - 1, "the last step may add the last token"


@pytest.mark.parametrize("rule", GROWING)
def test_where_nothing_is_typical_the_answer_is_greedy_decodings(model: TargetModel, rule: str) -> None:
    head = tiny_head("hydra", model)
    own = [replace(SAMPLED, max_new_tokens=20, seed=seed) for seed in range(len(PROMPTS))]
    plain = Engine(model).generate(PROMPTS, max_new_tokens=20)
    strict = [replace(each, acceptance="typical", typical_epsilon=1.0, typical_delta=1e9) for each in own]
    found = Engine(model, head, shape=GROWING[rule]).generate(PROMPTS, strict)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert {result.tokens_per_step for result in found} == {1.0}


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_typical_answer_is_the_same_for_every_seed(model: TargetModel, copies: bool, graphs: bool) -> None:
    """Next to rows of other rules, with copies, a penalty and static steps."""
    model = replace(model, step_mode=StepMode(graphs=graphs))
    head = tiny_head("hydra", model)
    engine = Engine(model, Mixed(head) if copies else head, shape=TREES["ragged"], max_batch_size=4)
    own = replace(SAMPLED, max_new_tokens=24, temperature=1.5, top_k=None, top_p=1.0, acceptance="typical", logprobs=0)
    penalised = replace(own, repetition_penalty=1.3)
    others = [replace(SAMPLED, max_new_tokens=9), SamplingSettings(max_new_tokens=15, logprobs=1)]
    found = []
    for seed in (1, 2, 3):
        rows = [replace(each, seed=seed) for each in (own, others[0], others[1], penalised)]
        found.append(engine.generate([PROMPTS[0]] * 4, rows))
    same, _, greedy, with_penalty = ([result.token_ids for result in results] for results in zip(*found, strict=True))
    assert len(set(same)) == len(set(greedy)) == len(set(with_penalty)) == 1
    assert same[0] != greedy[0][:24], "only likely enough draft tokens make a difference"
    assert same[0][0] == greedy[0][0], "the first token is greedy"
    assert max(results[0].tokens_per_step for results in found) > 1.0
    # on its own, at any temperature without drafts, it is greedy decoding
    (alone,) = engine.generate([PROMPTS[0]], replace(own, seed=9))
    assert alone.token_ids == same[0]
    (plain,) = Engine(model).generate([PROMPTS[0]], replace(own, max_new_tokens=15))
    assert plain.token_ids == greedy[0]
