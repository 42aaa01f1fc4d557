"""Which addresses are the same for a key, and which are none; requests at the same time end together."""

import threading
from contextlib import closing

import pytest

from draftheads.errors import InvalidSettings
from draftheads.utils.openai_client import CHAT, OPENAI, NoAnswer, OpenAIClient, at_once, origin


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://api.openai.com:443", OPENAI),
        ("HTTPS://API.OPENAI.COM/v1", OPENAI),
        ("http://api.openai.com", ("http", "api.openai.com", 80)),
        ("http://[::1]:8000/v1", ("http", "::1", 8000)),
    ],
)
def test_the_port_that_is_meant_counts(url: str, expected: tuple[str, str, int]) -> None:
    assert origin(url) == expected


@pytest.mark.parametrize(
    "url", ["http://x:abc", "http://[::1", "http://x:70000", "http://x:0", "https://", "ftp://x:80", "x:8000", ""]
)
def test_what_is_no_address_of_http_is_named_with_its_option(url: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        origin(url, "--judge")
    assert f"--judge is {url!r}" in str(caught.value)


def test_a_closed_client_asks_nobody() -> None:
    client = OpenAIClient("http://127.0.0.1:1", "URL")
    with client:
        pass
    with pytest.raises(NoAnswer, match="given up"):
        client.post(CHAT, {}, lambda body, _: body)


def test_after_an_error_no_further_item_is_begun() -> None:
    begun: list[int] = []
    others_begun, may_end = threading.Event(), threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if len(begun) == 2:
            others_begun.set()
        others_begun.wait()
        if item == 0:
            raise ValueError
        may_end.wait()

    before = set(threading.enumerate())
    with pytest.raises(ValueError), closing(at_once(work, range(9), 2)) as results:  # noqa: PT011 - of the test
        next(results)
    may_end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert sorted(begun) == [0, 1]
