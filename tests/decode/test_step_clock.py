"""Costs are corrected by the time of steps, and what is not done is tried now and then."""

import itertools

import numpy as np
import pytest

from draftheads.decode.step_clock import StepClock

TOKENS = np.array([1.0, 8.0, 16.0])


def test_nothing_is_corrected_before_a_step_is_timed() -> None:
    clock = StepClock()
    assert clock.verifying(TOKENS).tolist() == [1.0, 1.0, 1.0]
    assert clock.drafting == 1.0
    assert not clock.wants_trial


def test_a_machine_that_is_slower_at_everything_changes_no_choice() -> None:
    clock = StepClock()
    for _ in range(50):
        clock.note(1, (10.0, 30.0), None, is_trial=False)
        clock.note(8, (14.0, 42.0), (1.0, 3.0), is_trial=False)
    assert clock.verifying(TOKENS) == pytest.approx([1.0, 1.0, 1.0], rel=1e-3)
    assert clock.drafting == pytest.approx(1.0, rel=1e-3)


def test_costs_that_were_wrong_are_corrected() -> None:
    """Measured in a busy minute: a step of eight tokens would cost four plain ones."""
    clock = StepClock()
    for _ in range(200):
        clock.note(1, (10.0, 10.0), None, is_trial=False)
        clock.note(8, (40.0, 14.0), (4.0, 1.0), is_trial=False)
    factors = clock.verifying(TOKENS)
    assert 40.0 * factors[1] / (10.0 * factors[0]) == pytest.approx(1.4, rel=0.05)
    assert 4.0 * clock.drafting / (10.0 * factors[0]) == pytest.approx(0.1, rel=0.1)
    assert factors[2] == factors[1], "more tokens are as those that were timed"


def test_a_pause_counts_little() -> None:
    clock = StepClock()
    for _ in range(20):
        clock.note(8, (10.0, 10.0), (1.0, 1.0), is_trial=False)
    clock.note(8, (10.0, 100_000.0), (1.0, 1.0), is_trial=False)
    assert clock.verifying(TOKENS)[1] < 1.2


@pytest.mark.parametrize("drafts", [False, True])
def test_what_is_not_done_is_tried_and_half_as_often_each_time(drafts: bool) -> None:
    clock, trials = StepClock(), []
    for step in range(1000):
        is_trial = clock.wants_trial
        trials += [step] * is_trial
        with_draft = drafts != is_trial
        clock.note(8 if with_draft else 1, (10.0, 10.0), (1.0, 1.0) if with_draft else None, is_trial=is_trial)
    gaps = np.diff(trials)
    assert 30 <= trials[0] <= 40
    assert len(trials) >= 4
    assert all(1.8 < after / before < 2.2 for before, after in itertools.pairwise(gaps))


def test_a_new_choice_is_soon_questioned() -> None:
    clock = StepClock()
    for _ in range(1000):
        clock.note(1, (10.0, 10.0), None, is_trial=clock.wants_trial)
    for _ in range(40):
        assert not clock.wants_trial or clock._steps_on_side > 30
        clock.note(8, (10.0, 10.0), (1.0, 1.0), is_trial=False)
    assert clock.wants_trial
