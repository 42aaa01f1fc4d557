"""One server for the tests of a module."""

from collections.abc import Iterator

import pytest

from serve_world import Running, running, tiny_engines


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """With room for many; tests that change a limit start their own."""
    with running(tiny_engines()) as one:
        yield one
