"""Texts are scored again in fp32: a greedy text has no margin, and a planted token shows its gap."""

import math
from collections.abc import Sequence

import pytest
import torch

from draftheads.bench.demo import Scorer
from draftheads.decode.engine import Engine
from draftheads.models.model import TargetModel
from families import PROMPTS, tiny_model


def logits_of(model: TargetModel, text: Sequence[int]) -> torch.Tensor:
    """Every place by a pass of its own."""
    return torch.stack([model.model(torch.tensor([list(text[: i + 1])])).logits[0, -1] for i in range(len(text))])


def test_a_greedy_text_has_no_margin():
    model = tiny_model("llama")
    scorer = Scorer(model)
    for prompt in PROMPTS:
        answer = Engine(model).generate([prompt], max_new_tokens=20, ignore_eos=True)[0].token_ids
        assert scorer.worst_margin(prompt, answer) < 1e-5
    assert scorer.worst_margin(PROMPTS[0], ()) == 0.0


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_planted_token_shows_its_exact_gap(place: int):
    """Also at the first and at the last place; what follows is chosen greedily, so only the plant counts."""
    model = tiny_model("gemma2")
    prompt = PROMPTS[0]
    answer = list(Engine(model).generate([prompt], max_new_tokens=20, ignore_eos=True)[0].token_ids[:place])
    scores = logits_of(model, [*prompt, *answer])[-1]
    planted = int(scores.topk(3).indices[2])
    gap = float(scores.max() - scores[planted])
    assert gap > 0.01
    rest = Engine(model).generate([[*prompt, *answer, planted]], max_new_tokens=20, ignore_eos=True)[0].token_ids
    found = Scorer(model).worst_margin(prompt, [*answer, planted, *rest][:20])
    assert found == pytest.approx(gap, abs=1e-4)


def test_texts_in_bf16_are_scored_in_fp32():
    """The scorer is a model of its own in fp32, with the rounded weights: not bf16's sums, and not the stock model."""
    stock = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    scorer = Scorer(stock)
    assert scorer.model is not stock.model
    assert {parameter.dtype for parameter in scorer.model.parameters()} == {torch.float32}
    assert not scorer.model.training
    assert {parameter.dtype for parameter in stock.model.parameters()} == {torch.bfloat16}
    for name, parameter in scorer.model.named_parameters():
        assert torch.equal(parameter, stock.model.get_parameter(name).float())
    exact = tiny_model("llama", tie_word_embeddings=True)
    exact.model.load_state_dict({name: value.float() for name, value in stock.model.state_dict().items()})
    prompt, text = PROMPTS[0], [4, 9, 2, 11]
    scores = logits_of(exact, [*prompt, *text])[len(prompt) - 1 : -1]
    gap = max(float(row.max() - row[token]) for row, token in zip(scores, text, strict=True))
    assert scorer.worst_margin(prompt, text) == pytest.approx(gap, abs=1e-5)
    assert math.isfinite(gap)
    assert Scorer(exact).model is exact.model, "fp32 needs no second copy"
