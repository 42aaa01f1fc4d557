"""A client of OpenAI's HTTP API, and the keys of servers: variables that the user names, each for one address.

The only file that knows httpx2.
"""

import contextlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit
from zlib import crc32

from draftheads.errors import DataError, EndpointError, InvalidSettings, MissingDependency, close_name
from draftheads.utils.counts import counted
from draftheads.utils.messages import short

if TYPE_CHECKING:
    from httpx2 import Response

T = TypeVar("T")
R = TypeVar("R")

CHAT, COMPLETIONS, MODELS = "/chat/completions", "/completions", "/models"
OPENAI = "https", "api.openai.com", 443  # the only address that has a key by default
FIRST_WAIT_SECONDS = 1.0  # before a request is repeated; doubled each time
_LONGEST_WAIT_SECONDS = 60.0
_CLOSED = "the request was given up"
_BUSY_STATUSES = frozenset({408, 409, 425, 429})  # these and all from 500 on: worth a repeated request


class NoAnswer(EndpointError):
    """One request failed; others may succeed."""

    def __init__(self, problem: str, *, status: int = 0, text: str = "") -> None:
        super().__init__(problem)
        self.status, self.text = status, text  # of the response, if there is one


@dataclass
class OpenAIClient:
    """Asks one server, inside of a ``with``. Threads may share it. No redirection is followed: keys go to no other.

    Raises:
        MissingDependency: httpx2 is not installed.
        InvalidSettings: the address is not one of HTTP.
    """

    url: str
    option: str  # which argument named it, for messages
    model: str = ""  # its name there; if empty, `connect` takes the first one of /models
    api_key: str | None = field(default=None, repr=False)
    key_option: str = "--api-key-env"  # which argument names the key's variable, for messages
    timeout: float = 600.0  # seconds
    retries: int = 2
    repeats_timeouts: bool = False
    root: str = "/v1"  # where the routes are if the address has no path

    def __post_init__(self) -> None:
        if find_spec("httpx2") is None:
            raise MissingDependency("asking a server needs httpx2", pip_install="'draftheads[endpoint]'")
        origin(self.url, self.option)  # raises
        base = self.url.rstrip("/")
        for route in (CHAT, COMPLETIONS, MODELS):
            base = base.removesuffix(route)
        self.base = base if urlsplit(base).path else base + self.root

    def __enter__(self) -> Self:
        from httpx2 import Client, Limits  # noqa: PLC0415 - an extra

        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        self._http = Client(headers=headers, timeout=self.timeout, limits=Limits())  # of connections: those of threads
        self._closed, self._lock, self._num_users = Event(), Lock(), 1
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._release()

    def _release(self) -> None:
        """The last user closes it, perhaps a thread for whose request nobody waits any more."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._http.close()

    def connect(self) -> list[dict[str, Any]]:
        """Finds the model's name. Returns what the server lists: all models, or nothing if it has no list."""
        try:
            response = self._send("GET", MODELS)
        except NoAnswer as error:
            raise EndpointError(f"{self.base}{MODELS} failed: {error}; is {self.option} {self.url} right?") from None
        models: list[dict[str, Any]] = []
        with contextlib.suppress(LookupError, TypeError, ValueError):
            models = [model for model in response.json()["data"] if model["id"]]
        names = [str(model["id"]) for model in models]
        if not names and not self.model:
            raise EndpointError(
                f"{self.base}{MODELS} lists no models: status {response.status_code}, {short(response.text)!r}; "
                f"is {self.option} {self.url} right? Else give the model's name"
            )
        self.model = self.model or names[0]
        if names and self.model not in names:
            close = close_name(self.model, names)
            hint = f"did you mean {close}?" if close else f"it has {', '.join(names[:8])}"
            raise EndpointError(f"{self.base} has no model {self.model!r}; {hint}")
        return models

    def post(self, route: str, body: Mapping[str, Any], read: Callable[[Any, float], T]) -> T:
        """What ``read`` finds in the JSON of the response, which took so many seconds.

        Raises:
            NoAnswer: this request failed, or ``read`` did.
            EndpointError: the server is down, or refuses all requests.
        """
        response = self._send("POST", route, body)
        if response.status_code == 404:
            raise EndpointError(
                f"{self.base}{route} was not found: {_message_in(response)}; check "
                f"{self.option} {self.url} and the model's name, {self.model!r}"
            )
        if response.status_code != 200:
            problem = f"status {response.status_code}: {_message_in(response)}"
            raise NoAnswer(problem, status=response.status_code, text=response.text)
        try:
            return read(response.json(), response.elapsed.total_seconds())
        except (DataError, LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"not a valid completion ({type(error).__name__}: {error}): {short(response.text)}"
            raise NoAnswer(problem, status=200, text=response.text) from None

    def metrics(self) -> str:
        """The text of ``/metrics``; empty if the server has none."""
        from httpx2 import HTTPError  # noqa: PLC0415 - an extra

        with contextlib.suppress(HTTPError):
            response = self._http.get(f"{self.base.removesuffix('/v1')}/metrics")
            return response.text if response.status_code == 200 else ""
        return ""

    def _send(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> "Response":
        with self._lock:
            if self._closed.is_set():
                raise NoAnswer(_CLOSED)
            self._num_users += 1
        try:
            return self._tried(method, self.base + route, b"" if body is None else json.dumps(body).encode())
        finally:
            self._release()

    def _tried(self, method: str, url: str, content: bytes) -> "Response":
        from httpx2 import ConnectError, InvalidURL, RequestError, TimeoutException  # noqa: PLC0415 - an extra

        headers = {"Content-Type": "application/json"} if content else {}
        problem, is_down = "", False
        for attempt in range(self.retries + 1):
            response = None
            try:
                response = self._http.request(method, url, content=content, headers=headers)
            except InvalidURL as error:
                raise EndpointError(f"{self.option} {self.url} is not a valid address: {error}") from None
            except RequestError as error:
                if isinstance(error, TimeoutException) and not self.repeats_timeouts:
                    raise NoAnswer(f"no answer in {self.timeout:g} s") from None
                problem, is_down = str(error) or type(error).__name__, isinstance(error, ConnectError)
            else:
                if response.status_code in (401, 403):
                    fix = f"name its variable in {self.key_option}"
                    raise EndpointError(f"{url} refuses the key ({response.status_code}): {fix}")
                if response.status_code not in _BUSY_STATUSES and response.status_code < 500:
                    return response
                problem, is_down = f"status {response.status_code}: {_message_in(response)}", False
            if attempt < self.retries and self._closed.wait(wait_seconds(attempt, response, crc32(content))):
                raise NoAnswer(_CLOSED)
        attempts = counted(self.retries + 1, "attempt")
        if is_down:
            raise EndpointError(
                f"cannot reach {url} in {attempts}: {problem}; is the server running, and is "
                f"{self.option} {self.url} right?"
            )
        raise NoAnswer(f"{problem}, in {attempts}")


def wait_seconds(attempt: int, response: "Response | None", spread: int) -> float:
    """How long to wait before the next attempt: as long as the server says, else about twice as long each time.

    Requests of another ``spread`` are repeated at another moment.
    """
    said = "" if response is None else response.headers.get("retry-after", "")
    seconds = float(said) if said.isdecimal() else FIRST_WAIT_SECONDS * 2**attempt * (0.75 + spread % 1000 / 2000)
    return min(seconds, _LONGEST_WAIT_SECONDS)


def _message_in(response: "Response") -> str:
    """The message of an error in the forms of OpenAI and of FastAPI, else the beginning of the text."""
    try:
        body = response.json()
        error = body.get("error") or body["detail"]
        message = error["message"] if isinstance(error, Mapping) else error
    except (LookupError, TypeError, ValueError, AttributeError):
        message = response.text
    return " ".join(str(message).split())[:300] or "no message"


def said_in(choice: Mapping[str, Any]) -> tuple[str, str]:
    """The reasoning of a choice, where the server takes it out of the text; and the text."""
    if "message" not in choice:
        return "", choice["text"]
    message = choice["message"]
    return message.get("reasoning_content") or message.get("reasoning") or "", message.get("content") or ""


def at_once(function: Callable[[T], R], items: Sequence[T], most: int) -> Generator[tuple[int, R], None, None]:
    """Results with the places of their items, as they come from ``most`` threads. The first error ends all.

    These are daemons: after Ctrl-C or an error, nobody waits for requests that have begun.
    """
    todo: SimpleQueue[tuple[int, T]] = SimpleQueue()
    done: SimpleQueue[tuple[int, Future[R]]] = SimpleQueue()
    for task in enumerate(items):
        todo.put(task)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                place, item = todo.get_nowait()
                result = Future[R]()
                try:
                    result.set_result(function(item))
                except Exception as error:  # noqa: BLE001 - raised below
                    result.set_exception(error)
                done.put((place, result))
                if result.exception() is not None:
                    break

    for _ in range(min(most, len(items))):
        Thread(target=work, daemon=True).start()
    try:
        for _ in items:
            place, result = done.get()
            yield place, result.result()
    finally:
        with contextlib.suppress(Empty):
            while True:
                todo.get_nowait()


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
