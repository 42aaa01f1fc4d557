"""Standard errors are those of prompts that are drawn again."""

import math

import pytest
import torch

from draftheads.search.tree_search import Share, ratio_with_error


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


@pytest.mark.parametrize(
    ("shares", "others", "ratio"),
    [
        ([], None, 1.0),
        ([(6, 4)], None, 1.5),  # of a single prompt there is no error
        ([(0, 0)] * 3, None, 1.0),  # answers without steps count as one token per step
        ([(0, 0), (0, 0), (9, 9)], None, 1.0),
        ([(0, 0), (0, 0), (18, 9)], [(0, 0), (0, 0), (9, 9)], 2.0),
        ([(3.0, 2.0), (5.0, 0.25)], [(3.0, 2.0), (5.0, 0.25)], 1.0),
    ],
)
def test_ratios_at_the_edge(shares: list[Share], others: list[Share] | None, ratio: float) -> None:
    found, error = ratio_with_error(shares, others)
    assert found == ratio
    assert math.isfinite(error)
    assert error == 0.0 or ratio == 2.0
