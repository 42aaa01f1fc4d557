"""Which values are valid chat messages."""

from typing import Any

import pytest

from draftheads.utils.messages import message_problem, short


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"role": "tool", "content": "hi", "name": "Ada"}, ""),
        ("hi", " is 'hi'"),
        ({"role": 3, "content": "hi"}, ": role is 3"),
        ({"role": "user", "content": "a\ud800"}, ": content holds half a character, '\\ud800' as its number 2"),
        ({"role": "\udfff", "content": "a"}, ": role holds half a character"),
    ],
)
def test_the_problem_of_an_invalid_message_is_described(value: Any, problem: str):
    found = message_problem(value)
    assert found is None if not problem else found.startswith(problem)


def test_long_texts_are_shortened_in_errors():
    assert (short("a" * 60), short("a" * 61)) == ("a" * 60, "a" * 57 + "…")
