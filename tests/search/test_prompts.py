"""The questions on which trees are tuned."""

from draftheads.search.prompts import _KINDS, CALIBRATION_PROMPTS


def test_there_are_64_questions_and_none_twice():
    assert len(CALIBRATION_PROMPTS) == len(set(CALIBRATION_PROMPTS)) == 64


def test_each_eight_in_a_row_are_of_all_kinds():
    kind_of = {prompt: kind for kind, prompts in _KINDS.items() for prompt in prompts}
    for start in range(0, 64, 8):
        assert {kind_of[prompt] for prompt in CALIBRATION_PROMPTS[start : start + 8]} == set(_KINDS)


def test_lengths_are_those_of_first_turns():
    for kind, prompts in _KINDS.items():
        low, high = (80, 190) if kind == "extraction" else (15, 120)
        assert all(low <= len(prompt.split()) <= high for prompt in prompts), kind
        assert all(prompt == prompt.strip() for prompt in prompts), kind
