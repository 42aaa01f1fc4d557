import pickle

import pytest

from draftheads import errors
from draftheads.errors import DataError, DraftHeadsError, MissingDependency

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, DraftHeadsError)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DataError("no messages"), "no messages"),
        (DataError("no messages", line_number=3), "line 3: no messages"),
        (DataError("no messages", path="a.jsonl"), "a.jsonl: no messages"),
        (MissingDependency("x needs y"), "x needs y"),
        (MissingDependency("x", extra="q"), "x; install it with: pip install '.[q]' in a checkout of draftheads"),
    ],
)
def test_messages_have_the_place_and_the_fix(error: DraftHeadsError, text: str) -> None:
    assert str(error) == text


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_can_be_pickled(cls: type[DraftHeadsError]) -> None:
    error = cls("seven is not eight")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), str(copy)) == (cls, "seven is not eight")


def test_a_pickled_data_error_keeps_its_line() -> None:
    copy = pickle.loads(pickle.dumps(DataError("bad", path="a.jsonl", line_number=3)))  # noqa: S301 - our own
    assert (str(copy), copy.path, copy.line_number) == ("a.jsonl, line 3: bad", "a.jsonl", 3)
