"""Parameters of proofs that are repeated: ``make test`` runs some of them, ``make test-thorough`` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All values as parameters of a test; ``make test`` runs those named in ``quick``."""
    found = list(values)
    assert all(value in found for value in quick), (quick, found)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.thorough) for value in found]


def some_rows(rows: Iterable[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """The same for tests of several parameters."""
    found = list(rows)
    assert all(row in found for row in quick), (quick, found)
    return [row if row in quick else pytest.param(*row, marks=pytest.mark.thorough) for row in found]
