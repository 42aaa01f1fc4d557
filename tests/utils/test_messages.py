"""Which values are valid chat messages."""

from typing import Any

import pytest

from draftheads.utils.messages import message_problem, short


def test_a_message_has_a_role_and_content():
    assert all(message_problem({"role": role, "content": ""}) is None for role in ("system", "developer", "tool"))
    assert message_problem({"role": "user", "content": "hi", "name": "Ada"}) is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hi", " is 'hi'; it must be an object with role and content"),
        ({"role": 3, "content": "hi"}, ": role is 3; it must be a string"),
        ({"role": "user", "content": "a\ud800"}, ": content holds half a character, '\\ud800' as its number 2"),
        ({"role": "\udfff", "content": "a"}, ": role holds half a character"),
    ],
)
def test_the_problem_of_an_invalid_message_is_described(value: Any, problem: str):
    assert (message_problem(value) or "").startswith(problem)


def test_long_texts_are_shortened_in_errors():
    assert short("a" * 60) == "a" * 60
    assert short("a" * 61) == "a" * 57 + "…"
