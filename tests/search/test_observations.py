"""What is seen of a head along recorded answers, against slow twins that ask it token by token."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search import replay
from draftheads.search.replay import (
    DIVISORS,
    Answer,
    Observation,
    draft_along,
    fit_confidence,
    observe,
    reached,
    reliability,
)
from draftheads.search.tree_search import NEVER
from draftheads.speculation.draft import Context
from draftheads.speculation.shapes import BestFirst
from families import PROMPTS, tiny_head, tiny_model
from observed_heads import HEADS, K, head_of

pytestmark = pytest.mark.usefixtures("one_thread")


model_of = cache(tiny_model)


@cache
def said(model: TargetModel, *, temperature: float = 0.0, max_new_tokens: int = 14) -> list[Answer]:
    """What the model answers to all prompts."""
    results = Engine(model).generate(
        PROMPTS, max_new_tokens=max_new_tokens, temperature=temperature, seed=0, ignore_eos=True
    )
    return [Answer(tuple(prompt), result.token_ids) for prompt, result in zip(PROMPTS, results, strict=True)]


@cache
def state_before(model: TargetModel, answer: Answer, place: int, layers: tuple[int, ...] = ()) -> Tensor:
    """(D,): the hidden state that the token at ``place`` was chosen from, read from nothing behind it."""
    text = torch.tensor([[*answer.prompt_ids, *answer.token_ids[:place]]])
    return model.run(layers, input_ids=text, use_cache=False)[1][0, -1].detach()


def context_at(model: TargetModel, answer: Answer, place: int, layers: tuple[int, ...] = ()) -> Context:
    before = [*answer.prompt_ids, *answer.token_ids][: len(answer.prompt_ids) + place]
    return Context(
        state_before(model, answer, place, layers)[None, None],
        torch.tensor([before[-1:]]),
        torch.ones(1, dtype=torch.long),
        torch.tensor([answer.token_ids[place]]),
    )


def logits_at(head: DraftHead, model: TargetModel, answer: Answer, place: int) -> list[Tensor]:
    """Each head's logits (V',) when it drafts at a token and all guesses before its own were right."""
    state = head.begin(head.start().root(context_at(model, answer, place)), K)
    found = []
    for depth in range(min(K, len(answer.token_ids) - 1 - place)):
        found.append(head.predict(state, depth)[0, 0])
        token = torch.tensor([[answer.token_ids[place + 1 + depth]]])
        state = head.descend(state, depth, torch.zeros(1, 1, dtype=torch.long), token)
    return found


@cache
def chances_after(model: TargetModel, answer: Answer, place: int, temperature: float) -> Tensor:
    """(V,): what the token after the one at ``place`` was drawn from."""
    text = torch.tensor([[*answer.prompt_ids, *answer.token_ids[: place + 1]]])
    with torch.inference_mode():
        logits = model.model(text).logits[0, -1].double()
    return (logits / temperature).softmax(0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("family", "kind", "chunk"),
    [("granite", "hydra", 1), ("gemma2", "hydra", 5), *(("qwen3", kind, 256) for kind in HEADS)],
)
def test_an_observation_equals_the_head_s_logits_token_by_token(
    family: str, kind: str, chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
):
    """However many of them are held at once."""
    monkeypatch.setattr(replay, "_CHUNK", chunk)
    top_k, misses, model = 5, 0, model_of(family)
    head = head_of(kind, model)
    for answer in said(model, temperature=temperature)[:2]:
        length = len(answer.token_ids)
        seen, hidden = observe(head, model, answer, top_k=top_k, temperature=temperature)
        assert seen.ranks.shape == (length, K)
        assert seen.probs.shape == seen.top_logits.shape == (length, K, top_k)
        assert seen.log_norms.shape == (length, K, len(DIVISORS))
        assert seen.complete.tolist() == [place + K < length for place in range(length)]
        for place in range(length):
            before = hidden[len(answer.prompt_ids) + place - 1]
            torch.testing.assert_close(before, state_before(model, answer, place), atol=1e-4, rtol=1e-4)
            every = logits_at(head, model, answer, place)
            for depth, logits in enumerate(every):
                truth = answer.token_ids[place + 1 + depth]
                best = logits.sort(descending=True, stable=True).indices[:top_k].tolist()
                guesses = [int(head.to_target_ids(torch.tensor(guess))) for guess in best]
                assert seen.ranks[place, depth] == (guesses.index(truth) if truth in guesses else top_k)
                misses += truth not in guesses
                if temperature:
                    chances = chances_after(model, answer, place + depth, temperature)[guesses].float()
                else:
                    chances = torch.tensor([float(guess == truth) for guess in guesses])
                torch.testing.assert_close(seen.probs[place, depth], chances, atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(seen.top_logits[place, depth], logits[best], atol=1e-4, rtol=1e-4)
                norms = (logits[:, None] / DIVISORS).exp().sum(0).log().float()
                is_reached = bool((seen.ranks[place, :depth] < top_k).all())
                expected = norms if is_reached else torch.zeros(len(DIVISORS))
                torch.testing.assert_close(seen.log_norms[place, depth], expected, atol=1e-4, rtol=1e-4)
            assert seen.ranks[place, len(every) :].tolist() == [top_k] * (K - len(every)), "the answer has ended"
            assert not seen.probs[place, len(every) :].any()
    assert 0 < misses < 2 * K * 13, "guesses were both right and wrong"


def test_ranks_beyond_the_draft_vocabulary_are_misses():
    model = model_of("llama")
    head = tiny_head("medusa", model, num_heads=K, draft_vocab_size=4)
    answer = said(model, temperature=0.7)[0]
    seen, _ = observe(head, model, answer, top_k=6, temperature=0.7)
    assert set(seen.ranks.flatten().tolist()) <= {0, 1, 2, 3, 6}
    assert not seen.probs[:, :, 4:].any()
    assert bool((seen.top_logits[:, :, 4:] == -torch.inf).all())
    assert len(fit_confidence([seen], 6)) == K


@pytest.mark.parametrize("length", [1, 2, K, K + 1])
def test_short_answers_are_observed_to_their_end(length: int):
    model = model_of("llama")
    head = tiny_head("hydra", model, num_heads=K)
    answer = said(model, temperature=0.0, max_new_tokens=length)[0]
    seen, hidden = observe(head, model, answer, top_k=24, temperature=0.0)
    assert hidden.shape == (len(answer.prompt_ids) + length, model.hidden_size)
    assert int(seen.complete.sum()) == max(0, length - K)
    known = [[place + 1 + depth < length for depth in range(K)] for place in range(length)]
    assert (seen.ranks < 24).tolist() == known, "all tokens are among 24 ranks where there are some"
    if length <= K:
        assert fit_confidence([seen], 24) == [1.0] * K, "nothing tells of confidence"


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle"])
def test_drafting_at_some_tokens_finds_what_drafting_at_all_finds_there(kind: str):
    """Also where an answer has none of them, or ends before others; what lies between is read."""
    model = model_of("llama")
    head, answers = head_of(kind, model), [replace(one, token_ids=one.token_ids[:8]) for one in said(model)]
    answers[1] = said(model)[1]
    every = [list(range(len(answer.token_ids))) for answer in answers]
    some = [every[0][::3], every[1][1::4], [], *(places[2:5] for places in every[3:])]
    hidden = [observe(head, model, answer, top_k=2, temperature=0.0)[1] for answer in answers]
    shape = BestFirst(40, top_k=6, beam=3)
    whole, parts = (draft_along(head, shape, answers, hidden, places) for places in (every, some))
    for all_sizes, sizes, places in zip(whole, parts, some, strict=True):
        assert torch.equal(sizes[:, places], all_sizes[:, places])
        left = [place for place in range(sizes.shape[1]) if place not in places]
        assert bool((sizes[:, left] == NEVER).all())
    assert any(bool((sizes < NEVER).any()) for sizes in parts)


# --- confidence ---


def made_up(
    sharpness: list[float], *, length: int = 400, top_k: int = 6, vocab: int = 12, seed: int = 0
) -> Observation:
    """A head whose logits are so many times too sharp, and a target that says what they ought to be."""
    chance = torch.Generator().manual_seed(seed)
    ranks, probs, top_logits, norms = [], [], [], []
    for factor in sharpness:
        right = 2.0 * torch.randn(length, vocab, generator=chance, dtype=torch.float64)
        right = right.sort(1, descending=True).values
        chances = right.softmax(1)
        rank = torch.multinomial(chances, 1, generator=chance)[:, 0].clamp_max(top_k)
        ranks.append(rank)
        probs.append(chances[:, :top_k])
        logits = factor * right
        top_logits.append(logits[:, :top_k])
        norms.append(torch.stack([(logits / divisor).logsumexp(1) for divisor in DIVISORS], 1))
    parts = [torch.stack(part, 1) for part in (ranks, probs, top_logits, norms)]
    return Observation(parts[0], *(part.float() for part in parts[1:]))


def test_known_divisors_are_recovered():
    truth = [float(DIVISORS[index]) for index in (5, 16, 30)]
    seen = [made_up(truth, seed=1), made_up(truth, length=90, seed=2)]
    assert fit_confidence(seen, 6) == pytest.approx(truth), "each head has its own"


def test_positions_that_no_tree_reaches_do_not_count():
    right, wrong = made_up([2.0, 2.0], length=300, seed=1), made_up([2.0, 0.5], length=300, seed=2)
    missed = right.ranks[:, 0] >= 6
    assert 0 < int(missed.sum()) < 300
    mixed = Observation(
        right.ranks,
        right.probs,
        torch.where(missed[:, None, None], wrong.top_logits, right.top_logits),
        torch.where(missed[:, None, None], wrong.log_norms, right.log_norms),
    )
    assert fit_confidence([mixed], 6)[1] == fit_confidence([right], 6)[1]
    expected = [place < 298 and int(right.ranks[place, 0]) < 6 for place in range(300)]
    assert reached(right, 1, 6).tolist() == expected
    assert reached(right, 0, 6).tolist() == [place < 298 for place in range(300)]


def test_bins_of_confidence_hold_means_and_counts():
    seen = [made_up([2.0, 1.0], length=60, seed=1), made_up([2.0, 1.0], length=30, seed=2)]
    divisors = [float(DIVISORS[28]), 1.0]
    expected: dict[int, list[tuple[float, float]]] = {}
    for one in seen:
        for place in range(len(one.ranks) - 2):
            for depth, divisor in enumerate(divisors):
                if depth and int(one.ranks[place, 0]) >= 6:
                    continue
                norm = one.log_norms[place, depth, int((DIVISORS - divisor).abs().argmin())]
                for logit, prob in zip(one.top_logits[place, depth], one.probs[place, depth], strict=True):
                    sure = float((logit.double() / divisor - norm.double()).exp())
                    expected.setdefault(min(int(sure * 12), 11), []).append((sure, float(prob)))
    found = reliability(seen, divisors, 6)
    assert len(found) == len(expected) > 8
    for (_, pairs), row in zip(sorted(expected.items()), found, strict=True):
        means = [sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1)]
        assert row == pytest.approx([*means, len(pairs)], rel=1e-6)
