"""What an audit checks, and how; the sentence under a field is its help on the command line."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from draftheads.errors import InvalidSettings
from draftheads.settings import LoadSettings, SamplingSettings
from draftheads.utils.option_group import ABOVE_0, FROM_0, FROM_1, OptionGroup, Range

CheckName = Literal["greedy", "greedy-parallel", "json", "json-parallel", "seeded", "seeded-parallel"]
Route = Literal["chat", "completions"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
_SEEDS = Range("must be from 0 to 2147483647, as other servers take no larger ones", lambda seed: 0 <= seed < 2**31)

# small enough that a small model ends its answer
DEFAULT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "topic": {"type": "string", "maxLength": 40},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "number": {"type": "integer", "minimum": 0, "maximum": 1000},
        "is_question": {"type": "boolean"},
    },
    "required": ["topic", "words", "number", "is_question"],
    "additionalProperties": False,
}


def is_parallel(check: CheckName) -> bool:
    return check.endswith("-parallel")


def is_json(check: CheckName) -> bool:
    return check.startswith("json")


def is_seeded(check: CheckName) -> bool:
    return check.startswith("seeded")


@dataclass(frozen=True, kw_only=True)
class AuditSettings(OptionGroup):
    """What is checked."""

    checks: tuple[str, ...] = ()
    """Only these checks. greedy: temperature 0; json: the same with a JSON schema; seeded: sampled, each request twice;
    greedy-parallel, json-parallel, seeded-parallel: several requests at the same time, the others one by one. Default:
    all six."""
    max_new_tokens: Annotated[int, FROM_1] = 128
    """Tokens of each answer."""
    tolerance: Annotated[float, ABOVE_0] = 0.25
    """Largest gap of a near-tie in nats. Where two answers differ first, one of their two tokens may be so much less
    likely than the other; beyond, the text is wrong. 0.25 is for servers in bf16, 0.05 for fp16, 0.001 for fp32."""
    parallel: Annotated[int, FROM_1] = 4
    """Requests at the same time in the -parallel checks."""
    temperature: Annotated[float, ABOVE_0] = 0.8
    """Temperature of the seeded checks."""
    seed: Annotated[int, _SEEDS] = 0
    """Seed of the first prompt in the seeded checks. The next prompts have the next seeds."""
    route: Route = "chat"
    """Route of the servers. chat: /v1/chat/completions, or completions if the model has no chat template; completions:
    /v1/completions, which continues texts."""
    request_timeout: Annotated[float, ABOVE_0] = 600.0
    """Seconds to wait for an answer."""
    request_retries: Annotated[int, FROM_0] = 2
    """How often a request is repeated. When the server is busy, fails or cannot be reached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.checks:
            if name not in CHECKS:
                raise InvalidSettings(f"--checks {name}: choose among {', '.join(CHECKS)}")
        SamplingSettings(temperature=self.temperature)  # raises where it is impossible

    @property
    def chosen(self) -> tuple[CheckName, ...]:
        """The checks in the order in which they are made, each once."""
        return tuple(name for name in CHECKS if name in self.checks or not self.checks)


@dataclass(frozen=True)
class AuditOptions(OptionGroup):
    """Check whether a server's speculative decoding is lossless.

    Sends the same prompts to a server that drafts and to a reference that does not, and compares the answers. Where two
    differ first, the gap between their tokens separates near-ties from wrong texts. The exit status is 0 if no text is
    wrong, 1 if one is, and 2 if it could not be checked.
    """

    url: Annotated[str, tyro.conf.Positional]
    """The server with drafting. The address of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    prompts: Path
    """A file of prompts. JSONL with "prompt", "messages" or "turns" in each line, such as MT-Bench's question.jsonl; or
    .txt, where each line is a prompt."""
    baseline: str | None = None
    """The same server without drafting: the reference. It can be the same address with --baseline-fields or
    baseline_name."""
    model: str | None = None
    """The served model, to score differences. Without --baseline its plain decoding is the reference; with it, the
    model is in fp32, unless --precision is given. A name, a folder or a Hugging Face id."""
    limit: Annotated[int | None, FROM_1] = None
    """Use only the first LIMIT prompts."""
    server_name: str | None = None
    """Name of the model on the server. Default: the first one that it lists."""
    baseline_name: str | None = None
    """Name of the model on the baseline. Default: the first one that it lists."""
    fields: str | None = None
    """Further fields of each request to the server, as a JSON object. Also for the baseline, unless it has
    --baseline-fields."""
    baseline_fields: str | None = None
    """Further fields of each request to the baseline. '{"draft_nodes": 0}' switches drafting off in draftheads serve,
    '{"speculative.n_max": 0}' in llama.cpp's server."""
    json_schema: Path | None = None
    """A JSON file with the schema of the json checks. Default: a small built-in one."""
    api_key_env: str | None = None
    """The environment variable with the server's key. Also for a baseline at the same host and port."""
    baseline_key_env: str | None = None
    """The environment variable with the baseline's key."""
    json: str | None = None
    """Write everything as JSON to this file. - writes it to standard output."""
    examples: Annotated[int, FROM_0] = 3
    """Differences to show."""
    settings: tyro.conf.OmitArgPrefixes[AuditSettings] = field(default_factory=AuditSettings)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline is None and self.model is None:
            raise InvalidSettings("nothing to compare with: give --baseline URL, --model MODEL, or both")
        for name in ("baseline_name", "baseline_fields", "baseline_key_env"):
            self._require(name, fine=self.baseline is not None or getattr(self, name) is None, fix="give --baseline")
        _ = self.server_values, self.baseline_values

    @property
    def server_values(self) -> dict[str, Any]:
        return _object("--fields", self.fields)

    @property
    def baseline_values(self) -> dict[str, Any]:
        if self.baseline_fields is None:
            return self.server_values
        return _object("--baseline-fields", self.baseline_fields)


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidSettings(f"{option} {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSettings(f"{option} {text!r} is no JSON object; write it as '{{\"name\": value}}'")
    return value
