"""The distribution of a model's answers, and a test of whether sampled answers have it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftheads.decode.engine import Engine
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings

PROMPT = [5, 6, 7]
LENGTH = 3  # tokens of an answer
SAMPLED = SamplingSettings(max_new_tokens=LENGTH, temperature=0.8, top_k=8, top_p=0.9, ignore_eos=True)
NUM_ANSWERS = 3000
# A right decoder's statistic is as extreme as this for one choice of seeds in a million; these seeds are fixed.
ODDS = 1e-6
Answer = tuple[int, ...]


def next_probabilities(model: TargetModel, text: list[int], penalty: float = 1.0) -> Tensor:
    """(V,) what the model's next token is drawn from, processed by transformers."""
    scores = model.model(torch.tensor([text])).logits[:, -1].double()
    penalised = RepetitionPenaltyLogitsProcessor(penalty)
    for warper in (penalised, TemperatureLogitsWarper(0.8), TopKLogitsWarper(8), TopPLogitsWarper(0.9)):
        scores = warper(torch.tensor([text]), scores)
    probs: Tensor = scores[0].softmax(-1)
    return probs


def joint_distribution(model: TargetModel, penalty: float = 1.0) -> dict[Answer, float]:
    """Of every possible answer, by one pass of the model per context."""
    found: dict[Answer, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Answer, float] = {}
        for answer, mass in found.items():
            probs = next_probabilities(model, PROMPT + list(answer), penalty).tolist()
            longer |= {(*answer, token): mass * p for token, p in enumerate(probs) if p > 0}
        found = longer
    return found


def sampled_answers(
    model: TargetModel, own: SamplingSettings = SAMPLED, *, first_seed: int = 0, **drafting: Any
) -> Counter[Answer]:
    """``drafting``: a drafter and a shape."""
    engine = Engine(model, max_batch_size=NUM_ANSWERS, **drafting)
    seeds = range(first_seed, first_seed + NUM_ANSWERS)
    results = engine.generate([PROMPT] * NUM_ANSWERS, [replace(own, seed=seed) for seed in seeds])
    return Counter(result.token_ids for result in results)


def p_value(counts: Counter[Answer], expected: dict[Answer, float]) -> float:
    """Of Pearson's chi-square test; answers expected less than five times are one cell together."""
    total = counts.total()
    common = {answer: mass * total for answer, mass in expected.items() if mass * total >= 5}
    cells = [(counts[answer], mean) for answer, mean in common.items()]
    rare = total - sum(mean for _, mean in cells)
    cells.append((total - sum(count for count, _ in cells), max(rare, 1e-9)))
    assert len(cells) > 30, "a distribution of few answers tests little"
    return chi_square(cells)


def chi_square(cells: Sequence[tuple[int, float]]) -> float:
    """The chance of counts that differ as much from their means."""
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
