"""Keys of servers: environment variables that the user names, one for each address."""

import contextlib
import os
from urllib.parse import urlsplit

from draftheads.errors import InvalidSettings

OPENAI = "https", "api.openai.com", 443  # the only address that has a key by default


def api_key(variable: str | None, option: str = "--api-key-env") -> str | None:
    """The key in an environment variable; None where no variable is named."""
    if variable is None:
        return None
    if key := os.environ.get(variable):
        return key
    raise InvalidSettings(f"{option} is {variable!r}, but this environment variable is not set: export it")


def origin(url: str, option: str = "URL") -> tuple[str, str, int]:
    """Scheme, host and port: a key for one origin is sent to no other.

    >>> origin("https://API.openai.com/v1") == OPENAI, origin("http://127.0.0.1:8000/v1")
    (True, ('http', '127.0.0.1', 8000))
    """
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        usual = {"https": 443, "http": 80}.get(parts.scheme)
        port = usual if parts.port is None else parts.port
        if usual and parts.hostname and port:
            return parts.scheme, parts.hostname, port
    raise InvalidSettings(f"{option} is {url!r}; give an address such as http://127.0.0.1:8000/v1")
