"""Keys of servers: environment variables that the user names, one for each address."""

import os
from urllib.parse import urlsplit

from draftheads.errors import InvalidSettings

OPENAI = "https", "api.openai.com", 443  # the only address that has a key by default


def api_key(variable: str | None, option: str = "--api-key-env") -> str | None:
    """The key in an environment variable; None where no variable is named.

    Raises:
        InvalidSettings: the variable is not set.
    """
    if variable is None:
        return None
    if key := os.environ.get(variable):
        return key
    raise InvalidSettings(f"{option} is {variable!r}, but this environment variable is not set: export it")


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: a key for one origin is sent to no other.

    >>> origin("https://API.openai.com/v1") == OPENAI, origin("http://127.0.0.1:8000/v1")
    (True, ('http', '127.0.0.1', 8000))
    """
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)
