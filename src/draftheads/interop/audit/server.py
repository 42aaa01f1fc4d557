"""A server that is audited: its requests, its answers, and what it tells of its drafting.

Drafting is known from ``usage.draft`` of draftheads' answers, from ``timings`` of llama.cpp's, and from ``/metrics`` of
vLLM (counters) and SGLang (a gauge), where other clients' requests are counted, too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftheads.data.records import TextPrompt
from draftheads.interop.audit.settings import AuditSettings, CheckName, is_json, is_seeded
from draftheads.utils.openai_client import CHAT, COMPLETIONS, NoAnswer, OpenAIClient, said_in

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


class Server:
    """One server. Threads may share it; ``fields`` are further ones of each request, ``schema`` is of JSON checks."""

    def __init__(
        self, client: OpenAIClient, settings: AuditSettings, schema: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        self.client, self.settings, self._fields = client, settings, fields
        self.owner = ""  # who made the server, by its list of models
        self.others: list[str] = []  # models of the server beside the first, where that one was chosen
        # as OpenAI's API takes a schema, and as llama.cpp's Python server does; the first form that works is used
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        self._forms = [{"response_format": form} for form in (named, {"type": "json_object", "schema": schema})]

    def connect(self) -> None:
        is_named = bool(self.client.model)
        models = self.client.connect()
        self.owner = next((str(one.get("owned_by")) for one in models if one["id"] == self.client.model), "")
        self.others = [] if is_named else [str(model["id"]) for model in models[1:]]

    def ask(self, prompt: TextPrompt, index: int, check: CheckName) -> Outcome:
        """The answer to prompt number ``index``."""
        problems = []
        for form in list(self._forms) if is_json(check) else [{}]:
            try:
                answer = self.client.post(self._route, self._body(prompt, index, check, form), _answer_in)
            except NoAnswer as error:
                problems.append(str(error))
            else:
                self._forms = [form] if problems else self._forms
                return answer
        return problems[0]

    def places(self, prompt: TextPrompt, index: int, check: CheckName) -> list[Place] | None:
        """The tokens of an answer with their log-probabilities; None if the server does not give them."""
        body = self._body(prompt, index, check, self._forms[0] if is_json(check) else {})
        body |= {"logprobs": True, "top_logprobs": _NUM_TOPS} if self._route == CHAT else {"logprobs": _NUM_TOPS}
        try:
            return self.client.post(self._route, body, lambda found, _: places_of(found["choices"][0]["logprobs"]))
        except NoAnswer:
            return None

    @property
    def _route(self) -> str:
        return CHAT if self.settings.route == "chat" else COMPLETIONS

    def _body(self, prompt: TextPrompt, index: int, check: CheckName, form: Mapping[str, Any]) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {"model": self.client.model, "max_tokens": settings.max_new_tokens, "temperature": 0}
        if self._route == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt
        if is_seeded(check):
            body |= {"temperature": settings.temperature, "top_p": 1.0, "seed": settings.seed + index}
        return {**body, **form, **self._fields}


def _answer_in(body: Any, seconds: float) -> Answer:
    choice, usage = body["choices"][0], body.get("usage") or {}
    (reasoning, text), ids = said_in(choice), choice.get("token_ids")
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
