"""One server for all tests that change none of its limits."""

from collections.abc import Iterator

import openai
import pytest

from serve_world import Running, running, tiny_engines


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """With room for many; tests that change a limit start their own."""
    with running(tiny_engines()) as one:
        yield one


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as one:
        yield one
