"""Sampling: processing as transformers does it, draws that obey their distribution."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftheads.settings import SamplingSettings
from draftheads.speculation.sampling import RowSettings, SeenTokens, choose, draw, most_likely, penalised, probabilities

CPU = torch.device("cpu")
V = 40
PROMPT = 7  # tokens of each text that belong to the prompt
BELOW_ONE = 1 - 2**-53

sampled_settings = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([None, 1, 2, 7, V, V + 5]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.01]),
    # float32 holds these exactly, so no rounding moves a token over the edge of a nucleus
    repetition_penalty=st.sampled_from([1.0, 1.25, 2.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.75, -0.25]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)


def of(*own: SamplingSettings, vocab_size: int = V) -> RowSettings:
    return RowSettings.of(own, vocab_size=vocab_size, device=CPU)


def seen_in(texts: Tensor) -> SeenTokens:
    prompts, answers = texts[..., :PROMPT], texts[..., PROMPT:]
    nothing = torch.zeros(*texts.shape[:-1], V, dtype=torch.int32)
    counts = nothing.scatter_add(-1, answers, torch.ones_like(answers, dtype=torch.int32))
    return SeenTokens(nothing.bool().scatter(-1, prompts, value=True), counts)


def without_counted(scores: Tensor, text: Tensor, own: SamplingSettings) -> Tensor:
    """OpenAI's formula, which transformers does not have."""
    counts = text[PROMPT:].bincount(minlength=V)
    return scores - own.frequency_penalty * counts - own.presence_penalty * (counts > 0)


def as_transformers(logits: Tensor, text: Tensor, own: SamplingSettings) -> Tensor:
    """(V,) logits of one row -> (V,) probabilities, by transformers' own processors in its order."""
    scores = RepetitionPenaltyLogitsProcessor(own.repetition_penalty)(text[None], logits[None])
    scores = without_counted(scores, text, own)
    scores = TemperatureLogitsWarper(own.temperature)(text[None], scores)
    if own.top_k is not None:
        scores = TopKLogitsWarper(own.top_k)(text[None], scores)
    if own.top_p < 1.0:
        scores = TopPLogitsWarper(own.top_p)(text[None], scores)
    if own.min_p > 0.0:
        scores = MinPLogitsWarper(own.min_p)(text[None], scores)
    probs: Tensor = scores[0].softmax(-1)
    return probs


@settings(deadline=None)
@given(st.lists(sampled_settings, min_size=1, max_size=5), st.integers(0, 2**20))
def test_processing_equals_transformers(own: list[SamplingSettings], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(own), 2, V, generator=generator, dtype=torch.float64)  # of two nodes of a tree
    texts = torch.randint(0, V, (len(own), 2, 12), generator=generator)
    rows = of(*own)
    found = probabilities(penalised(logits, rows, seen_in(texts)), rows)
    for row, each in enumerate(own):
        for node in range(2):
            expected = as_transformers(logits[row, node], texts[row, node], each)
            assert torch.equal(found[row, node] > 0, expected > 0)
            assert torch.allclose(found[row, node], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_are_computed_in_double_precision(dtype: torch.dtype) -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = of(*[SamplingSettings(temperature=0.7)] * 3)
    found = probabilities(logits, rows)
    assert found.dtype == torch.float64
    assert torch.allclose(found, (logits.double() / 0.7).softmax(-1), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("penalty", [1.003, 1.05, 1.1, 0.9])
def test_penalties_are_transformers_own_in_every_type(dtype: torch.dtype, penalty: float) -> None:
    """transformers processes logits in fp32: in bf16 a penalty of 1.003 would be 1."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(20, V, generator=generator)).to(dtype)
    texts = torch.randint(0, V, (20, 12), generator=generator)
    rows = of(*[SamplingSettings(repetition_penalty=penalty)] * 20)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(texts, logits.float())
    assert torch.equal(penalised(logits, rows, seen_in(texts)), expected)
    uniforms = torch.zeros(20, dtype=torch.float64)
    assert torch.equal(choose(logits, rows, seen_in(texts), uniforms), expected.argmax(-1))
    own = SamplingSettings(repetition_penalty=penalty, frequency_penalty=0.3, presence_penalty=0.1)
    expected = torch.stack([without_counted(*row, own) for row in zip(expected, texts, strict=True)])
    assert torch.equal(penalised(logits, of(*[own] * 20), seen_in(texts)), expected)


@pytest.mark.parametrize(
    ("logits", "kept"),
    [
        ([1.0, 2.0, 1.0, 0.0], [0, 1, 2]),  # as likely as the second
        # top-p is off: not even what is too small to be seen beside the likeliest token is left out
        ([60.0, 0.0, -5.0], [0, 1]),
    ],
)
def test_of_top_k_equals_stay_and_tiny_ones(logits: list[float], kept: list[int]) -> None:
    rows = of(SamplingSettings(temperature=1.0, top_k=2), vocab_size=len(logits))
    assert probabilities(torch.tensor([logits]), rows)[0].nonzero()[:, 0].tolist() == kept


# --- choose ---


@settings(deadline=None)
@given(
    st.lists(st.builds(replace, sampled_settings, temperature=st.sampled_from([0.0, 0.8])), min_size=1, max_size=5),
    st.integers(0, 2**20),
)
def test_rows_choose_as_if_alone(own: list[SamplingSettings], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(own), V, generator=generator)
    seen = seen_in(torch.randint(0, V, (len(own), 12), generator=generator))
    uniforms = torch.rand(len(own), generator=generator, dtype=torch.float64)
    chosen = choose(logits, of(*own), seen, uniforms)
    for row, settings_ in enumerate(own):
        one = slice(row, row + 1)
        assert chosen[row] == choose(logits[one], of(settings_), seen[one,], uniforms[one])[0]
        scores = penalised(logits[one], of(settings_), seen[one,])
        if settings_.temperature == 0:
            assert chosen[row] == scores[0].argmax()
        else:
            assert chosen[row] == slow_draw(probabilities(scores, of(settings_))[0].tolist(), float(uniforms[row]))


# --- draw ---


def slow_draw(probs: list[float], uniform: float) -> int:
    """The first token at which the running sum passes the uniform number's share of the total."""
    running = list(accumulate(probs))
    return next(token for token, mass in enumerate(running) if mass > uniform * running[-1])


weights = st.lists(st.sampled_from([0.0, 0.0]) | st.floats(1e-300, 1.0), min_size=1, max_size=12).filter(any)
uniform_numbers = st.floats(0.0, 1.0, exclude_max=True) | st.sampled_from([0.0, BELOW_ONE, 0.5])


@settings(deadline=None)
@given(weights, uniform_numbers)
def test_a_draw_is_the_token_whose_stretch_holds_the_number(probs: list[float], uniform: float) -> None:
    numbers = torch.tensor([uniform], dtype=torch.float64)
    found = int(draw(torch.tensor([probs], dtype=torch.float64), numbers)[0])
    assert found == slow_draw(probs, uniform)
    assert probs[found] > 0


def test_rows_know_what_they_need() -> None:
    off = of(SamplingSettings(), SamplingSettings(top_k=3, top_p=0.5, acceptance="typical"))
    # at temperature 0 there is nothing to filter, and the typical rule is the exact one
    assert not any((off.any_sampled, off.filters, off.any_penalty, off.any_count_penalty, off.any_typical))
    warm = SamplingSettings(temperature=0.5)
    assert not of(replace(warm, acceptance="typical")).any_sampled
    for name, value in {"top_k": 9, "top_p": 0.5, "min_p": 0.1}.items():
        (found,) = of(warm, replace(warm, **{name: value})).filters
        assert found.name == name
    assert not of(SamplingSettings(repetition_penalty=1.5)).any_count_penalty
    assert of(SamplingSettings(), SamplingSettings(presence_penalty=-0.5)).any_count_penalty
    on = of(warm, replace(warm, typical_delta=0.7))
    assert on.epsilon.tolist() == [0.09] * 2
    assert on.delta.tolist() == pytest.approx([0.3, 0.7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [100, 16_384, 16_385, 49_152])
def test_the_most_likely_token_is_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    """Also in vocabularies so large that it is found in two stages; bf16 has many equals."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(2, 3, size, generator=generator).to(dtype)
    assert torch.equal(most_likely(scores), scores.float().argmax(-1))
    scores[0, 0, [size - 1, 7, size // 2]] = 50.0
    assert int(most_likely(scores)[0, 0]) == 7
