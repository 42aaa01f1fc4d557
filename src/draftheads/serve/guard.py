"""Before every request: who asks, from which page, and how much. After it: headers, counts, a line in the log.

An ASGI middleware. Prompts are never logged, nor are query strings.
"""

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftheads.serve.fields import ApiError


@dataclass(frozen=True)
class HttpLimits:
    """Limits of requests. Who sends or reads slowly, but never stops, is limited by a reverse proxy."""

    max_connections: int = 512
    header_bytes: int = 32 << 10
    body_bytes: int = 2 << 20
    keep_alive_seconds: int = 30  # between two requests of a connection
    incoming_seconds: float = 30.0  # without a further byte of a request that is not complete
    stalled_seconds: float = 60.0  # without a step of the model while requests wait: /health fails then

    choices: int = 128  # prompts of a request times n
    logprobs: int = 1 << 18  # log-probabilities of all answers to a request

    max_tokens: int | None = None  # the longest answer that a request may want; None: as long as the model's texts
    request_seconds: float = 600.0  # from the request to the end of its answer
    schema_seconds: float = 2.0  # for a new grammar to be compiled, or a chat template to be rendered
    allow_typical: bool = False  # whether a request may choose typical acceptance, which is not lossless


_ACCESS = logging.getLogger("draftheads.access")
_LOG = logging.getLogger(__name__)
_PROTECTED = ("/v1/", "/metrics")  # need an API key, if there are keys
_ADMIN = "/admin/"
_READ_ON = 16  # times the limit of a body
_POLLED = ("/health", "/ready", "/metrics")  # by machines, every few seconds: their usual answers are not logged
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# the page runs its own script and style only, and talks to this server only
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (  # of every response that does not have them
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _CONTENT_POLICY.encode()),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True)
class Access:
    """Who may send requests.

    Args:
        api_keys: any of them opens the API; none: no key is needed.
        hosts: names in the Host header under which the server is reached, in any case; None: any name.
        admin_keys: any of them opens the routes below /admin; none: nobody may use these.
    """

    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = LOCAL_NAMES
    admin_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts is not None:
            object.__setattr__(self, "hosts", frozenset(map(_name_of, self.hosts)))

    def client_of(self, scope: Scope) -> str:
        """Names the client for the fair queue: its key's number, or its address."""
        headers, path = dict(scope["headers"]), scope["path"]
        # a page whose name was bound to this machine's address after it was loaded sends its own name here
        host = _name_of(headers.get(b"host", b"").decode("latin-1"))
        if self.hosts is not None and host not in self.hosts:
            message = f"Host is {host[:60]!r}, which is not a name of this server: use --allow-host"
            raise ApiError(403, message, code="unknown_host")
        _check_origin(headers)
        if path.startswith(_ADMIN):
            if not self.admin_keys:
                raise ApiError(403, f"{_ADMIN} needs a server with DRAFTHEADS_ADMIN_KEY", code="no_admin_key")
            return f"admin {_key_number(headers, self.admin_keys)}"
        if self.api_keys and path.startswith(_PROTECTED):
            return f"key {_key_number(headers, self.api_keys)}"
        return str((scope.get("client") or ("unknown",))[0])

    def cache_salt_of(self, client: str, given: str) -> str:
        """The requests with the same salt share what was read: those that give the same, else those of one API key."""
        if given:
            return f"given {given}"  # no client has such a name
        return client if self.api_keys else ""


@dataclass(eq=False)
class Guard:
    """Wraps the application."""

    app: ASGIApp
    _: KW_ONLY
    access: Access  # who may send requests
    count: Callable[[str, int], object]  # called after each request with its route and status
    body_bytes: int  # of a request, at most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 0
        # uvicorn sends no body in response to HEAD
        inner = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        inner.setdefault("state", {})["start"] = start

        async def send_safely(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                given = {name for name, _ in headers}
                message["headers"] = headers + [header for header in _HEADERS if header[0] not in given]
            await send(message)

        try:
            _check_connection(scope)
            inner["state"]["client"] = self.access.client_of(scope)
            await self.app(inner, _limited(receive, self.body_bytes), send_safely)
        except Exception as error:
            if not isinstance(error, ApiError):
                _LOG.exception("a request failed")
                error = ApiError(500, "the server could not answer this request")
            if status:  # too late for another answer: uvicorn closes the connection
                raise
            await error.response()(scope, receive, send_safely)
        finally:
            self.count(inner["route"].path if "route" in inner else "other", status)
            if not (scope["path"] in _POLLED and status in (200, 503)):
                path = ascii(scope["path"][:200])[1:-1]
                address = (scope.get("client") or ("-",))[0]
                seconds = time.monotonic() - start
                _ACCESS.info("%s %s %s %s %.3f s", address, scope["method"], path, status or "gone", seconds)


def _check_connection(scope: Scope) -> None:
    """Refuses what must not share a connection with a further request, and closes it."""
    error = None
    if scope.get("state", {}).get("is_full", bool)():
        error = ApiError(503, "the server has too many connections: retry later", code="too_busy", retry_after=1)
    elif {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys():
        # a proxy that reads the other one sees another end of the request (RFC 9112, section 6.3)
        error = ApiError(400, "the request has Content-Length and Transfer-Encoding: send one of them")
    if error is not None:
        error.headers = {**(error.headers or {}), "connection": "close"}
        raise error


def note_unfinished(count: Callable[[str, int], object], address: str) -> None:
    """A request of which no more bytes came, so that its connection is closed."""
    count("other", 408)
    _ACCESS.info("%s closed: the rest of a request did not come", address)


def _limited(receive: Receive, most: int) -> Receive:
    """Receives a body of at most so many bytes."""
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most:
            # read on, to a point: most clients read an answer only after they sent all
            if num_bytes > _READ_ON * most or not message.get("more_body"):
                words = f"the body is larger than {most} bytes: send a shorter request"
                raise ApiError(413, words, code="body_too_large")
            message["body"] = b""
        return message

    return receive_limited


def _key_number(headers: dict[bytes, bytes], keys: tuple[str, ...]) -> int:
    """Which of the keys the request has."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not given.strip():
        needs = "this server needs an API key: send the header Authorization: Bearer KEY"
        raise ApiError(401, needs, code="missing_api_key")
    # all keys are compared, and each in constant time: the time tells nothing
    matches = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]
    if not any(matches):
        raise ApiError(401, "the API key is wrong", code="invalid_api_key")
    return matches.index(True)


def _check_origin(headers: dict[bytes, bytes]) -> None:
    """Browsers name the page that sends a request; only this server's own page may."""
    origin, host = headers.get(b"origin"), headers.get(b"host", b"").lower()
    if origin is not None and (not host or origin.lower().partition(b"://")[2] != host):
        raise ApiError(403, "requests from pages of other servers are not allowed", code="foreign_origin")


def _name_of(host: str) -> str:
    """The name in a Host header, without the port.

    >>> _name_of("LOCALHOST.:8000"), _name_of("[::1]:8000"), _name_of("::1"), _name_of("[bad")
    ('localhost', '::1', '::1', '')
    """
    host = f"[{host}]" if host.count(":") > 1 and "[" not in host else host
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""
