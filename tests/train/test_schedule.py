"""Learning rates and loss weights by step, compared with those of ``transformers``."""

import math
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from draftheads.train.schedule import JointSchedule


@pytest.mark.parametrize("rise", ["constant", "sine"])
@pytest.mark.parametrize("num_head_steps", [0, 7])
def test_the_schedule_is_that_of_the_paper(rise: Any, num_head_steps: int) -> None:
    schedule = JointSchedule(num_steps=40, num_head_steps=num_head_steps, peak=0.3, rise=rise, warmup=0.1)
    both = 40 - num_head_steps
    for step in range(40):
        assert schedule.only_heads(step) == (step < num_head_steps)
        done = step - num_head_steps + 1  # of the second stage, this step included
        is_rising = rise == "sine" and done >= 1
        assert schedule.head_weight(step) == pytest.approx(
            0.3 * math.sin(math.pi * done / both / 2) if is_rising else 0.3
        )
        assert schedule.head_rate(step) == pytest.approx(rate_by_transformers(step, 40, 4))
        expected = rate_by_transformers(step - num_head_steps, both, both // 10) if done >= 1 else 0.0
        assert schedule.model_rate(step) == pytest.approx(expected)
    assert schedule.head_weight(39) == pytest.approx(0.3)


def rate_by_transformers(step: int, num_steps: int, num_warmup_steps: int) -> float:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_steps)
    return float(scheduler.lr_lambdas[0](step))
