"""Penalties, min-p and shortest lengths: plain decoding is the formula's, and every draft tree gives plain's tokens."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.errors import InvalidSettings
from draftheads.models.model import StepMode, TargetModel
from draftheads.settings import Grammar, SamplingSettings
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import Sampled, Shape
from families import GROWING, PROMPTS, TREES, VOCAB, PlantedDrafter, PlantedRandomTrees, tiny_head, tiny_model

EIGHT = [*PROMPTS, [4, 5], [22, 3, 9, 4], [8, 8, 8, 8, 8, 8], [20, 19, 18], [6, 21]]
LENGTH = 28
ENDS = tuple(range(3, VOCAB, 2))  # half of all tokens: without a shortest length an answer soon has one of them
CASES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 2.0},
    "the reverse": {"frequency_penalty": -0.4, "presence_penalty": -1.5},
    "all three": {"frequency_penalty": 0.3, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    "min-p": {"temperature": 1.3, "min_p": 0.15},
    "all, sampled": {"temperature": 0.9, "min_p": 0.02, "top_k": 9, "frequency_penalty": 1.1, "presence_penalty": -0.3},
    "shortest": {"min_new_tokens": 17, "stop_token_ids": ENDS},
    "shortest, sampled": {"temperature": 1.1, "min_new_tokens": 9, "stop_token_ids": ENDS, "presence_penalty": 1.0},
    "shortest, with stop strings": {"min_new_tokens": 7, "stop": [f"<{token}>" for token in ENDS]},
    "neither": {},
}
FAMILIES = ["llama", "gemma3_text"]
some_model = cache(tiny_model)


def settings_of(case: str, **changes: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": LENGTH, "seed": 5, "ignore_eos": True, **CASES[case], **changes})


def rows_of(offset: int, **changes: Any) -> list[SamplingSettings]:
    """Another case for each prompt."""
    cases = list(CASES)
    return [settings_of(cases[(row + offset) % len(cases)], **changes) for row in range(len(EIGHT))]


def shown(results: Sequence[GenerationResult]) -> list[tuple[Any, ...]]:
    return [(result.token_ids, result.text, result.finish_reason) for result in results]


@cache
def plain(family: str, offset: int) -> list[GenerationResult]:
    return Engine(some_model(family), max_batch_size=1).generate(EIGHT, rows_of(offset))


# --- plain decoding ---


def by_hand(model: TargetModel, prompt: list[int], own: SamplingSettings) -> list[int]:
    """Greedy decoding, token by token, with vLLM's formulas."""
    answer: list[int] = []
    penalty = own.repetition_penalty or 1.0
    while len(answer) < own.max_new_tokens:
        logits = model.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].float()
        for token in {*prompt, *answer}:
            value = logits[token]
            logits[token] = value * penalty if value < 0 else value / penalty
        for token in set(answer):
            logits[token] -= own.frequency_penalty * answer.count(token) + own.presence_penalty
        ends = {*own.stop_token_ids, *(() if own.ignore_eos else model.eos_ids)}
        if len(answer) < (own.min_new_tokens or 0):
            logits[list(ends)] = -torch.inf
        answer.append(int(logits.argmax()))
        if answer[-1] in ends:
            break
    return answer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ["frequency", "presence", "the reverse", "all three", "shortest"])
def test_plain_decoding_is_the_formulas(family: str, case: str) -> None:
    own, model = settings_of(case), some_model(family)
    found = Engine(model).generate(EIGHT, own)
    assert [list(result.token_ids) for result in found] == [by_hand(model, prompt, own) for prompt in EIGHT]
    without = Engine(model).generate(EIGHT, settings_of("neither"))
    assert shown(found) != shown(without)


def test_the_models_own_end_is_masked_like_a_stop_token() -> None:
    model = tiny_model("llama")
    (first,) = Engine(model).generate([[5, 6, 7]], max_new_tokens=1, ignore_eos=True)
    eager = tiny_model("llama", eos_token_id=first.token_ids[0])
    for least in (0, 1, 6):
        own = SamplingSettings(min_new_tokens=least, max_new_tokens=12)
        (result,) = Engine(eager).generate([[5, 6, 7]], own)
        assert list(result.token_ids) == by_hand(eager, [5, 6, 7], own)
        assert first.token_ids[0] not in result.token_ids[:least]
        assert (len(result.token_ids) == 1) == (least == 0)
        (ignoring,) = Engine(eager).generate([[5, 6, 7]], own, ignore_eos=True)
        assert ignoring.token_ids[0] == first.token_ids[0], "what does not end the answer is not masked"


def test_log_probabilities_are_those_of_the_model_before_all_of_it() -> None:
    model = some_model("llama")
    for case in CASES:
        own = settings_of(case, logprobs=2)
        for drafter in (None, tiny_head("hydra", model)):
            (result,) = Engine(model, drafter).generate([[5, 6, 7]], own)
            text = torch.tensor([[5, 6, 7, *result.token_ids]])
            scores = model.model(text).logits[0, 2:-1].log_softmax(-1)
            expected = scores.gather(1, text[0, 3:, None])[:, 0].tolist()
            assert result.logprobs == pytest.approx(expected, abs=1e-4)
            assert result.top_logprobs is not None
            assert [top[0][0] for top in result.top_logprobs] == scores.argmax(1).tolist()


# --- drafted like plain ---


def drafters_of(family: str, offset: int) -> dict[str, tuple[Drafter, Shape | None]]:
    """Planted ones know the answers, so that paths of all lengths are accepted."""
    model = some_model(family)
    texts = zip(EIGHT, plain(family, offset), strict=True)
    answers = {tuple(prompt): result.token_ids for prompt, result in texts}
    return {
        "planted, ragged": (PlantedDrafter(TREES["ragged"], answers), None),
        "planted, 64 nodes": (PlantedDrafter(TREES["64 nodes"], answers), None),
        "planted, random trees": (PlantedRandomTrees(answers, max_nodes=24), None),
        "hydra, a chain": (tiny_head("hydra", model), TREES["chain"]),
        "medusa, growing": (tiny_head("medusa", model), GROWING["best first"]),
        "eagle, growing": (tiny_head("eagle", model), GROWING["sure ones"]),
        "hydra, drawn": (tiny_head("hydra", model), Sampled(TREES["cartesian"])),
        "medusa, with copies": (Mixed(tiny_head("medusa", model)), TREES["ragged"]),
        "prompt lookup": (Mixed(None), None),
        "lookahead": (Lookahead(), None),
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("offset", range(0, len(CASES), 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tree_gives_plains_text_in_mixed_batches(family: str, offset: int) -> None:
    expected = shown(plain(family, offset))
    assert len(set(expected)) == len(EIGHT)
    longest = 0.0
    for name, (drafter, shape) in drafters_of(family, offset).items():
        found = Engine(some_model(family), drafter, shape=shape, max_batch_size=3).generate(EIGHT, rows_of(offset))
        assert shown(found) == expected, name
        longest = max(longest, *(result.tokens_per_step for result in found))
    assert longest > 2.0, "drafts of several tokens are accepted"


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_one_case_gives_plains_text(case: str) -> None:
    """Also beside no other settings, with static steps, and where one pass reads trees of different sizes."""
    model, own = some_model("llama"), settings_of(case)
    expected = shown(Engine(model, max_batch_size=1).generate(EIGHT, own))
    answers = {tuple(prompt): ids for prompt, (ids, _, _) in zip(EIGHT, expected, strict=True)}
    for mode in (StepMode(), StepMode(graphs=True)):
        target = TargetModel(model.model, model.tokenizer, model.model_id, step_mode=mode)
        planted = PlantedDrafter(TREES["ragged"], answers)
        assert shown(Engine(target, planted, max_batch_size=4).generate(EIGHT, own)) == expected
        head = tiny_head("hydra", target)
        assert shown(Engine(target, head, shape=TREES["64 nodes"], max_batch_size=8).generate(EIGHT, own)) == expected


# --- shortest lengths ---


def test_what_cannot_be_asked_for_together_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="min_new_tokens is 9; it must be at most max_new_tokens, 8"):
        SamplingSettings(min_new_tokens=9, max_new_tokens=8)
    with pytest.raises(InvalidSettings, match="min_new_tokens is 2, but an answer with a grammar ends where"):
        SamplingSettings(min_new_tokens=2, grammar=Grammar.regex("a*"))
    # stop tokens that the model does not have are no error
    (result,) = Engine(some_model("llama")).generate([[5]], stop_token_ids=[10**6], min_new_tokens=3, max_new_tokens=4)
    assert len(result.token_ids) in (3, 4)
