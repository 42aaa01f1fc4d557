"""A server that is audited: its requests, its answers, and what it tells of its drafting.

Drafting is known from ``usage.draft`` of draftheads' answers, from ``timings`` of llama.cpp's, and from ``/metrics`` of
vLLM (counters) and SGLang (a gauge), where other clients' requests are counted, too.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from draftheads.data.records import TextPrompt
from draftheads.errors import EndpointError, InvalidSettings, close_name
from draftheads_audit.options import SCHEMA, TEMPERATURE, CheckName, is_json, is_seeded

_TIMEOUT_SECONDS = 600.0
_NUM_RETRIES = 2  # of a request, when the server is busy, fails or cannot be reached
_NUM_TOPS = 5  # log-probabilities at each place; more are refused by some servers
_METRIC = re.compile(r"^([\w:]+)(?:\{.*\})? (\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$", re.MULTILINE)
_COUNTERS = tuple(f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
_SGLANG = "sglang:spec_accept_length"


class DraftCounts(NamedTuple):
    """How one answer was drafted."""

    steps: int  # passes of the model after the prompt was read
    tokens: int  # that these steps gave
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Drafting:
    """What drafting did for some answers; None where the server does not tell."""

    tokens_per_step: float | None
    accepted_share: float | None  # of the draft tokens


@dataclass(frozen=True)
class Answer:
    """A text and what is known about it."""

    text: str
    is_cut: bool  # it ended because it has as many tokens as were asked for
    num_tokens: int | None = None  # None where the server does not count them
    num_prompt_tokens: int | None = None
    seconds: float = 0.0
    draft: DraftCounts | None = None
    token_ids: tuple[int, ...] | None = None  # of the text, where they are known; some servers can send them
    is_split: bool = False  # the server took parts out of the text, such as reasoning: its tokens are not known


Outcome = Answer | str  # or why there is no answer


@dataclass(frozen=True)
class Place:
    """One token of an answer with log-probabilities."""

    token: bytes
    logprob: float
    tops: dict[bytes, float]  # log-probabilities of the most likely tokens there
    end: float | None = None  # that of the end of the text there, where it is known


class NoAnswer(EndpointError):
    """One request failed; others may succeed."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status  # of the response, if there is one


class Server:
    """One server, to be closed. Threads may share it. No redirection is followed: keys go to no other server.

    Args:
        url: its address.
        option: which argument named it, for messages.
        key_variable: the environment variable with its key, if it has one.
        fields: further ones of each request; ``model`` chooses one.
        max_new_tokens: of each answer.

    Raises:
        InvalidSettings: the address is not one of HTTP.
    """

    def __init__(
        self, url: str, option: str, *, key_variable: str, fields: Mapping[str, Any], max_new_tokens: int
    ) -> None:
        from openai import DefaultHttpxClient, Omit, OpenAI  # noqa: PLC0415 - slow to import

        origin(url, option)  # raises
        self.url, self.option, self.key_variable = url, option, key_variable
        self.base = url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"
        self.model = str(fields.get("model", ""))
        self.owner = ""  # who made the server, by its list of models
        self.others: list[str] = []  # models of the server beside the first, where that one was chosen
        self.is_chat = True  # else texts are continued
        self._fields, self._max_tokens = fields, max_new_tokens
        self._client = OpenAI(
            base_url=self.base,
            api_key=os.environ.get(key_variable) or "EMPTY",  # never the key of OpenAI's own server
            timeout=_TIMEOUT_SECONDS,
            max_retries=_NUM_RETRIES,
            default_headers={
                "OpenAI-Organization": Omit(),  # type: ignore[dict-item]
                "OpenAI-Project": Omit(),  # type: ignore[dict-item]
            },  # of the environment: not for others
            http_client=DefaultHttpxClient(follow_redirects=False),
        )
        self.close = self._client.close
        # as OpenAI's API takes a schema, and as llama.cpp's Python server does; the first form that works is used
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        self._forms = [{"response_format": form} for form in (named, {"type": "json_object", "schema": SCHEMA})]

    def connect(self) -> None:
        """Finds the model's name.

        Raises:
            EndpointError: the server is down, lists no models, or has no model of this name.
        """
        models: list[dict[str, Any]] = []
        problem = ""
        try:
            models = [model for model in json.loads(self._sent(self._client.get, "/models"))["data"] if model["id"]]
        except NoAnswer as error:
            problem = f": {error}"
        except (LookupError, TypeError, ValueError):
            problem = ", but another text"
        names = [str(model["id"]) for model in models]
        if not names and not self.model:
            raise EndpointError(
                f"{self.base}/models lists no models{problem}; is {self.option} {self.url} right? Else name the model "
                'by --fields \'{"model": "NAME"}\''
            )
        self.others = names[1:] if not self.model else []
        self.model = self.model or names[0]
        if names and self.model not in names:
            close = close_name(self.model, names)
            hint = f"did you mean {close}?" if close else f"it has {', '.join(names[:8])}"
            raise EndpointError(f"{self.base} has no model {self.model!r}; {hint}")
        self.owner = next((str(one.get("owned_by")) for one in models if one["id"] == self.model), "")

    def ask(self, prompt: TextPrompt, index: int, check: CheckName) -> Outcome:
        """The answer to prompt number ``index``.

        Raises:
            EndpointError: the server is down, or refuses all requests.
        """
        problems = []
        for form in list(self._forms) if is_json(check) else [{}]:
            start = time.perf_counter()
            try:
                text = self._posted(prompt, index, check, form)
                answer = _answer_in(json.loads(text), time.perf_counter() - start)
            except NoAnswer as error:
                if error.status == 404:
                    raise EndpointError(
                        f"{self.base}{self._route} was not found: {error}; check {self.option} {self.url} and the "
                        f"model's name, {self.model!r}"
                    ) from None
                problems.append(str(error))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"not a valid completion ({type(error).__name__}: {error}): {text[:60]}")
            else:
                self._forms = [form] if problems else self._forms
                return answer
        return problems[0]

    def places(self, prompt: TextPrompt, index: int, check: CheckName) -> list[Place] | None:
        """The tokens of an answer with their log-probabilities; None if the server does not give them."""
        asked = {"logprobs": True, "top_logprobs": _NUM_TOPS} if self.is_chat else {"logprobs": _NUM_TOPS}
        form = self._forms[0] if is_json(check) else {}
        try:
            body = json.loads(self._posted(prompt, index, check, {**form, **asked}))
            return places_of(body["choices"][0]["logprobs"])
        except (NoAnswer, LookupError, TypeError, ValueError, AttributeError):
            return None

    def metrics(self) -> dict[str, float]:
        """The values of ``/metrics``; none if the server has no such route."""
        from openai import OpenAIError  # noqa: PLC0415 - slow to import

        with contextlib.suppress(OpenAIError):
            return read_metrics(self._client.get(f"{self.base.removesuffix('/v1')}/metrics", cast_to=str))
        return {}

    @property
    def _route(self) -> str:
        return "/chat/completions" if self.is_chat else "/completions"

    def _posted(self, prompt: TextPrompt, index: int, check: CheckName, more: Mapping[str, Any]) -> str:
        """The text of the response to one request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": self._max_tokens, "temperature": 0}
        if not self.is_chat:
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if is_seeded(check):
            body |= {"temperature": TEMPERATURE, "top_p": 1.0, "seed": index}
        return self._sent(self._client.post, self._route, body={**body, **more, **self._fields})

    def _sent(self, send: Callable[..., str], route: str, **more: Any) -> str:
        import openai  # noqa: PLC0415 - slow to import

        try:
            return send(route, cast_to=str, **more)
        except openai.APITimeoutError:
            raise NoAnswer(f"no answer in {_TIMEOUT_SECONDS:g} s") from None
        except openai.APIConnectionError as error:
            raise EndpointError(
                f"cannot reach {self.base}{route}: {error.__cause__ or error}; is the server running, and is "
                f"{self.option} {self.url} right?"
            ) from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise EndpointError(
                    f"{self.base} refuses the key ({error.status_code}): it is in the variable {self.key_variable}"
                ) from None
            body: Any = error.body
            said = body.get("message", body) if isinstance(body, Mapping) else body
            raise NoAnswer(f"status {error.status_code}: {str(said)[:300]}", error.status_code) from None


def origin(url: str, option: str = "URL") -> tuple[str, str, int]:
    """Scheme, host and port: a key for one origin is sent to no other.

    >>> origin("https://API.example.com/v1"), origin("http://127.0.0.1:8000/v1")
    (('https', 'api.example.com', 443), ('http', '127.0.0.1', 8000))
    """
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        usual = {"https": 443, "http": 80}.get(parts.scheme)
        port = usual if parts.port is None else parts.port
        if usual and parts.hostname and port:
            return parts.scheme, parts.hostname, port
    raise InvalidSettings(f"{option} is {url!r}; give an address such as http://127.0.0.1:8000/v1")


def _answer_in(body: Any, seconds: float) -> Answer:
    choice, usage = body["choices"][0], body.get("usage") or {}
    message, ids, reasoning = choice.get("message"), choice.get("token_ids"), ""
    if message is None:
        text = choice["text"]
    else:  # some servers take the reasoning out of the text
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        text = message.get("content") or ""
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


def places_of(logprobs: Mapping[str, Any]) -> list[Place]:
    """In the form of chats, or of texts."""
    if "content" in logprobs:
        return [
            Place(
                _bytes_of(one), float(one["logprob"]), {_bytes_of(top): top["logprob"] for top in one["top_logprobs"]}
            )
            for one in logprobs["content"]
        ]
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [
        Place(token.encode(errors="replace"), float(value), {top.encode(errors="replace"): tops[top] for top in tops})
        for token, value, tops in rows
    ]


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    # not bytes() of a number, which has so many zeros
    return str(entry["token"]).encode(errors="replace") if raw is None else bytes(list(raw))


def counts_of(body: Mapping[str, Any]) -> DraftCounts | None:
    """The counts in the JSON of an answer; None where there are none, or not in a form that is known."""
    usage, timings = body.get("usage") or {}, body.get("timings") or {}
    try:
        if draft := usage.get("draft"):
            steps, drafted, accepted = int(draft["steps"]), draft["drafted_by_depth"], draft["accepted_by_depth"]
            return DraftCounts(steps, round(steps * draft["tokens_per_step"]), sum(drafted), sum(accepted))
        if "draft_n" in timings:
            accepted, tokens = int(timings["draft_n_accepted"]), int(timings["predicted_n"])
            return DraftCounts(tokens - accepted, tokens, int(timings["draft_n"]), accepted)
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    return None


def drafting_in(counts: Iterable[DraftCounts | None]) -> Drafting | None:
    """Of all answers that have counts; None if none has."""
    known = [one for one in counts if one is not None]
    if not known:
        return None
    steps, tokens, drafted, accepted = map(sum, zip(*known, strict=True))
    return Drafting(tokens / steps if steps else None, accepted / drafted if drafted else None)


def drafting_between(before: Mapping[str, float], after: Mapping[str, float]) -> Drafting | None:
    """Of what happened between two readings of a server's metrics; None if they do not tell.

    >>> drafting_between(dict.fromkeys(_COUNTERS, 0.0), dict(zip(_COUNTERS, (10.0, 40.0, 12.0))))
    Drafting(tokens_per_step=2.2, accepted_share=0.3)
    """
    if _COUNTERS[0] in after:
        drafts, drafted, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in _COUNTERS)
        return Drafting(1.0 + accepted / drafts, accepted / drafted) if drafts > 0 and drafted > 0 else None
    length = after.get(_SGLANG)
    return Drafting(length, None) if length else None


def read_metrics(text: str) -> dict[str, float]:
    r"""The values of Prometheus's text format by name; those of a name with several labels are added up.

    >>> read_metrics('# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nb 1\n')
    {'a': 5.5, 'b': 1.0}
    """
    values: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values
