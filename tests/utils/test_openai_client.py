"""Which addresses are the same for a key, and which are none."""

import pytest

from draftheads.errors import InvalidSettings
from draftheads.utils.openai_client import OPENAI, origin


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
