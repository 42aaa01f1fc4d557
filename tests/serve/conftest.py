"""One server for the tests of a module."""

from collections.abc import Iterator

import openai
import pytest

from serve_world import Running, running, tiny_engines


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """With room for many; tests that change a limit start their own."""
    with running(tiny_engines()) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as one:
        yield one
