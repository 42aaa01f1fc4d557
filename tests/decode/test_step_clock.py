"""Costs are corrected by the time of steps, and what is not done is tried now and then."""

import itertools
from typing import Any

import numpy as np
import pytest

from draftheads.decode.step_clock import StepClock

ONE: dict[str, Any] = {"rows": 1, "gained": 1, "is_trial": False}
TOKENS = np.array([1.0, 8.0, 16.0])


def test_nothing_is_corrected_before_a_step_is_timed() -> None:
    clock = StepClock()
    assert clock.verifying(TOKENS).tolist() == [1.0, 1.0, 1.0]
    assert clock.drafting == 1.0
    assert not clock.may_try


def test_a_machine_that_is_slower_at_everything_changes_no_choice() -> None:
    clock = StepClock()
    for _ in range(50):
        clock.note(1, (10.0, 30.0), None, **ONE)
        clock.note(8, (14.0, 42.0), (1.0, 3.0), **ONE)
    assert clock.verifying(TOKENS) == pytest.approx([1.0, 1.0, 1.0], rel=1e-3)
    assert clock.drafting == pytest.approx(1.0, rel=1e-3)


def test_costs_that_were_wrong_are_corrected() -> None:
    """Measured in a busy minute: a step of eight tokens would cost four plain ones."""
    clock = StepClock()
    for _ in range(200):
        clock.note(1, (10.0, 10.0), None, **ONE)
        clock.note(8, (40.0, 14.0), (4.0, 1.0), **ONE)
    factors = clock.verifying(TOKENS)
    assert 40.0 * factors[1] / (10.0 * factors[0]) == pytest.approx(1.4, rel=0.05)
    assert 4.0 * clock.drafting / (10.0 * factors[0]) == pytest.approx(0.1, rel=0.1)
    assert factors[2] == factors[1], "more tokens are as those that were timed"


def test_a_pause_counts_little() -> None:
    clock = StepClock()
    for _ in range(20):
        clock.note(8, (10.0, 10.0), (1.0, 1.0), **ONE)
    clock.note(8, (10.0, 100_000.0), (1.0, 1.0), **ONE)
    assert clock.verifying(TOKENS)[1] < 1.2


def run(clock: StepClock, steps: int, *, drafts: bool, loss: float = 5.0) -> list[int]:
    """The steps that were trials, each of which loses so many milliseconds."""
    trials = []
    for step in range(steps):
        is_trial = clock.may_try and clock.affords(loss)
        trials += [step] * is_trial
        with_draft = drafts != is_trial
        given = (8, (10.0, 10.0), (1.0, 1.0)) if with_draft else (1, (10.0, 10.0), None)
        clock.note(*given, rows=1, gained=2 if with_draft else 1, is_trial=is_trial)
    return trials


@pytest.mark.parametrize("drafts", [False, True])
def test_what_is_not_done_is_tried_and_half_as_often_each_time(drafts: bool) -> None:
    trials = run(StepClock(), 2000, drafts=drafts)
    gaps = np.diff(trials)
    assert 45 <= trials[0] <= 60, "a hundredth of 50 steps of 10 milliseconds"
    assert len(trials) >= 4
    assert all(1.7 < after / before < 2.3 for before, after in itertools.pairwise(gaps))


def test_expensive_trials_are_rare() -> None:
    assert len(run(StepClock(), 2000, drafts=False, loss=150.0)) == 1


def test_a_new_choice_is_soon_questioned() -> None:
    clock = StepClock()
    run(clock, 2000, drafts=False)
    assert 45 <= run(clock, 100, drafts=True)[0] <= 60


def test_drafts_that_made_fewer_tokens_per_millisecond_are_worse() -> None:
    clock = StepClock()
    assert not clock.is_worse(1)
    clock.note(1, (10.0, 10.0), None, rows=1, gained=1, is_trial=False)
    for _ in range(12):
        clock.note(8, (14.0, 14.0), (2.0, 2.0), rows=1, gained=2, is_trial=False)
    assert not clock.is_worse(1), "2 tokens in 16 milliseconds, or one in 10"
    for _ in range(40):
        clock.note(8, (14.0, 14.0), (2.0, 2.0), rows=1, gained=1, is_trial=False)
    assert clock.is_worse(1)
    assert not clock.is_worse(4), "of other numbers of rows nothing is known"
