"""Standard errors are those of prompts that are drawn again; quartiles stay inside the data."""

import math

import pytest
import torch

from draftheads.utils.estimates import Share, quartiles, ratio_with_error


def pairs(above: torch.Tensor, below: torch.Tensor) -> list[Share]:
    return list(zip(above.tolist(), below.tolist(), strict=True))


def test_errors_are_those_of_prompts_that_are_drawn_again() -> None:
    chance = torch.Generator().manual_seed(1)
    steps = torch.randint(20, 60, (80,), generator=chance)
    tokens = (steps * (1.5 + torch.rand(80, generator=chance, dtype=torch.float64))).long()
    slower = (steps * (1.2 + torch.rand(80, generator=chance, dtype=torch.float64))).long()
    drawn = torch.randint(0, 80, (4000, 80), generator=chance)
    ratios = tokens[drawn].sum(1) / steps[drawn].sum(1)
    others = slower[drawn].sum(1) / steps[drawn].sum(1)
    ratio, error = ratio_with_error(pairs(tokens, steps))
    assert ratio == int(tokens.sum()) / int(steps.sum())
    assert error == pytest.approx(float(ratios.std()), rel=0.08)
    over, error = ratio_with_error(pairs(tokens, steps), pairs(slower, steps))
    assert over == pytest.approx(int(tokens.sum()) / int(slower.sum()))
    assert error == pytest.approx(float((ratios / others).std()), rel=0.08)


def test_a_ratio_over_itself_is_one_without_an_error() -> None:
    shares = [(3.0, 2.0), (5.0, 0.25), (1.0, 7.0)]
    assert ratio_with_error(shares, shares) == (1.0, 0.0)


@pytest.mark.parametrize("steps", [(0, 0, 0), (0, 0, 9)])
def test_answers_without_steps_count_as_one_token_per_step(steps: tuple[int, ...]) -> None:
    one = [(0, 0), (0, 0), (steps[2], steps[2])]
    twice = [(0, 0), (0, 0), (2 * steps[2], steps[2])]
    assert ratio_with_error(one) == (1.0, 0.0)
    ratio, error = ratio_with_error(twice, one)
    assert ratio == ratio_with_error(twice)[0]
    assert math.isfinite(error)


def test_a_single_prompt_and_none_have_no_error() -> None:
    assert ratio_with_error([(6, 4)]) == (1.5, 0.0)
    assert ratio_with_error([]) == (1.0, 0.0)


def test_quartiles_stay_inside_the_data() -> None:
    assert quartiles([2.0, 4.0]) == (2.5, 3.0, 3.5)
