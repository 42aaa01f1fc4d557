"""A server with OpenAI's API. The only file of the audit that knows HTTP."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from draftheads.data.records import TextPrompt
from draftheads.errors import EndpointError, MissingDependency, close_name
from draftheads.interop.audit.answer import Answer, Failure, Outcome, Place
from draftheads.interop.audit.drafting import counts_of, read_metrics
from draftheads.interop.audit.settings import AuditSettings, CheckName, is_json, is_seeded
from draftheads.utils.api_keys import origin
from draftheads.utils.counts import counted
from draftheads.utils.messages import short

if TYPE_CHECKING:
    from httpx2 import Client, Response

FIRST_WAIT_SECONDS = 1.0  # before a request is repeated; doubled each time
_LONGEST_WAIT_SECONDS = 60.0
_BUSY_STATUSES = frozenset({408, 409, 425, 429})  # these and all from 500 on: worth a repeated request
_ROUTES = {"chat": "/chat/completions", "completions": "/completions"}
_NUM_TOPS = 5  # log-probabilities at each place; more are refused by some servers


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, and how it is asked."""

    url: str
    option: str = "URL"  # which argument named it, for messages
    model: str | None = None  # its name there; None: the first one of /v1/models
    fields: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    api_key: str | None = None
    key_option: str = "--api-key-env"  # which argument names the key's variable, for messages


class Server:
    """Asks one server. Threads may share it.

    Args:
        address: of the server.
        settings: of the audit.
        schema: of the answers in JSON checks.

    Raises:
        MissingDependency: httpx2 is not installed.
        InvalidSettings: the address is not one of HTTP.
    """

    def __init__(self, address: ServerAddress, settings: AuditSettings, schema: Mapping[str, Any]) -> None:
        try:
            import httpx2  # noqa: PLC0415 - an extra
        except ImportError:
            raise MissingDependency("audit needs httpx2", pip_install="'draftheads[endpoint]'") from None
        self.address = address
        self.base = api_base(address.url, address.option)
        self.model = address.model or ""
        self.owner = ""  # who made the server, by its list of models
        self.others: tuple[str, ...] = ()  # models of the server beside the first, where that one was chosen
        self.use(settings)
        self._forms = _json_forms(schema)  # the first one that the server takes is used
        headers = {} if address.api_key is None else {"Authorization": f"Bearer {address.api_key}"}
        self._client: Client = httpx2.Client(headers=headers, timeout=settings.request_timeout)

    def use(self, settings: AuditSettings) -> None:
        """Asks with these settings from now on."""
        self._settings, self.url = settings, self.base + _ROUTES[settings.route]

    def close(self) -> None:
        self._client.close()

    def connect(self) -> None:
        """Finds the model's name. Call it first."""
        response = self._send("GET", f"{self.base}/models")
        if isinstance(response, Failure):
            raise EndpointError(f"{self.base}/models failed: {response.problem}; is {self.address.option} right?")
        models = _models_in(response)
        if not models:
            if self.model:
                return  # some servers have no such list
            raise EndpointError(
                f"{self.base}/models lists no models: status {response.status_code}, {short(response.text)!r}; is "
                f"{self.address.option} {self.address.url} right? Else give the model's name"
            )
        names = [str(model["id"]) for model in models]
        if not self.model:
            self.model, self.others = names[0], tuple(names[1:])
        elif self.model not in names:
            close = close_name(self.model, names)
            hint = f"did you mean {close}?" if close else f"it has {', '.join(names[:8])}"
            raise EndpointError(f"{self.base} has no model {self.model!r}; {hint}")
        self.owner = str(next(model for model in models if model["id"] == self.model).get("owned_by") or "")

    def ask(self, prompt: TextPrompt, index: int, check: CheckName) -> Outcome:
        """The answer to prompt number ``index``."""
        form = self._forms[0] if is_json(check) else None
        outcome = self._ask(prompt, index, check, form)
        if form is None or isinstance(outcome, Answer) or len(self._forms) == 1:
            return outcome
        second = self._ask(prompt, index, check, self._forms[1])
        if isinstance(second, Answer):
            self._forms = self._forms[1:]
            return second
        return outcome

    def places(self, prompt: TextPrompt, index: int, check: CheckName) -> list[Place] | None:
        """The tokens of an answer with their log-probabilities; None if the server does not give them."""
        body = self._body(prompt, index, check, self._forms[0] if is_json(check) else None)
        is_chat = self._settings.route == "chat"
        body |= {"logprobs": True, "top_logprobs": _NUM_TOPS} if is_chat else {"logprobs": _NUM_TOPS}
        response = self._send("POST", self.url, body)
        if isinstance(response, Failure) or response.status_code != 200:
            return None
        try:
            logprobs = response.json()["choices"][0]["logprobs"]
            return _places_of_chat(logprobs["content"]) if is_chat else _places_of_text(logprobs)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None

    def metrics(self) -> dict[str, float]:
        """The values of ``/metrics``; none if the server has none."""
        from httpx2 import HTTPError  # noqa: PLC0415 - an extra

        try:
            response = self._client.get(f"{self.base.removesuffix('/v1')}/metrics")
            return read_metrics(response.text) if response.status_code == 200 else {}
        except HTTPError:
            return {}

    def _ask(self, prompt: TextPrompt, index: int, check: CheckName, form: dict[str, Any] | None) -> Outcome:
        response = self._send("POST", self.url, self._body(prompt, index, check, form))
        if isinstance(response, Failure):
            return response
        if response.status_code == 404:
            raise EndpointError(
                f"{self.url} was not found: {_message_in(response)}; is {self.address.option} {self.address.url} "
                f"right, and does the server have the model {self.model!r}?"
            )
        if response.status_code != 200:
            return Failure(f"status {response.status_code}: {_message_in(response)}")
        try:
            return _answer_in(response.json(), response.elapsed.total_seconds())
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return Failure(f"not a valid completion ({type(error).__name__}: {error}): {short(response.text)}")

    def _body(self, prompt: TextPrompt, index: int, check: CheckName, form: dict[str, Any] | None) -> dict[str, Any]:
        settings = self._settings
        if settings.route == "chat":
            asked: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            body = {"model": self.model, "messages": asked, "max_tokens": settings.max_new_tokens}
        else:
            body = {"model": self.model, "prompt": prompt, "max_tokens": settings.max_new_tokens}
        if is_seeded(check):
            body |= {"temperature": settings.temperature, "top_p": 1.0, "seed": settings.seed + index}
        else:
            body["temperature"] = 0
        return {**body, **({} if form is None else {"response_format": form}), **self.address.fields}

    def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> "Response | Failure":
        """The server's response; a request that failed for now is repeated after growing waits."""
        from httpx2 import ConnectError, RequestError, TimeoutException  # noqa: PLC0415 - an extra

        content = None if body is None else json.dumps(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        problem, is_down = "", False
        for attempt in range(self._settings.request_retries + 1):
            if attempt:
                time.sleep(min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _LONGEST_WAIT_SECONDS))
            try:
                response = self._client.request(method, url, content=content, headers=headers)
            except TimeoutException:  # to wait as long again is of no use
                return Failure(f"no answer in {self._settings.request_timeout:g} s")
            except RequestError as error:
                problem, is_down = str(error) or type(error).__name__, isinstance(error, ConnectError)
                continue
            if response.status_code in (401, 403):
                named = self.address.key_option
                raise EndpointError(f"{url} refuses the key ({response.status_code}): name its variable in {named}")
            if response.status_code not in _BUSY_STATUSES and response.status_code < 500:
                return response
            problem, is_down = f"status {response.status_code}: {_message_in(response)}", False
        attempts = counted(self._settings.request_retries + 1, "attempt")
        if is_down:
            raise EndpointError(
                f"cannot reach {url} in {attempts}: {problem}; is the server running, and is "
                f"{self.address.option} {self.address.url} right?"
            )
        return Failure(f"{problem}, in {attempts}")


def api_base(url: str, option: str = "URL") -> str:
    """The address under which a server's routes are.

    >>> api_base("http://localhost:8000"), api_base("http://localhost:8000/v1/chat/completions")
    ('http://localhost:8000/v1', 'http://localhost:8000/v1')
    """
    base = url.rstrip("/")
    for route in (*_ROUTES.values(), "/models"):
        base = base.removesuffix(route)
    origin(url, option)  # raises
    return base if urlsplit(base).path else f"{base}/v1"


def _json_forms(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A schema as OpenAI's API takes it, and as llama.cpp's Python server does."""
    named = {"name": "answer", "schema": dict(schema), "strict": True}
    return [{"type": "json_schema", "json_schema": named}, {"type": "json_object", "schema": dict(schema)}]


def _models_in(response: "Response") -> Sequence[Mapping[str, Any]]:
    try:
        return [model for model in response.json()["data"] if model["id"]]
    except (LookupError, TypeError, ValueError):
        return []


def _message_in(response: "Response") -> str:
    """The message of an error in the forms of OpenAI and of FastAPI, else the beginning of the text."""
    try:
        body = response.json()
        error = body.get("error") or body["detail"]
        message = error["message"] if isinstance(error, Mapping) else error
    except (LookupError, TypeError, ValueError, AttributeError):
        message = response.text
    return " ".join(str(message).split())[:300] or "no message"


def _answer_in(body: Any, seconds: float) -> Answer:
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    reasoning = ""
    if "message" in choice:
        message = choice["message"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    else:
        text = choice["text"]
    ids = choice.get("token_ids")
    return Answer(
        f"{reasoning}{text}",
        is_cut=choice.get("finish_reason") == "length",
        num_tokens=usage.get("completion_tokens"),
        num_prompt_tokens=usage.get("prompt_tokens"),
        seconds=seconds,
        draft=counts_of(body),
        token_ids=None if ids is None else tuple(map(int, ids)),
        is_split=bool(reasoning),
    )


def _places_of_chat(content: Sequence[Mapping[str, Any]]) -> list[Place]:
    return [
        Place(
            _bytes_of(entry), float(entry["logprob"]), {_bytes_of(top): top["logprob"] for top in entry["top_logprobs"]}
        )
        for entry in content
    ]


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    return (
        str(entry["token"]).encode(errors="replace") if raw is None else bytes(list(raw))
    )  # not of a number: so many zeros


def _places_of_text(logprobs: Mapping[str, Any]) -> list[Place]:
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [
        Place(token.encode(errors="replace"), float(value), {top.encode(errors="replace"): tops[top] for top in tops})
        for token, value, tops in rows
    ]
