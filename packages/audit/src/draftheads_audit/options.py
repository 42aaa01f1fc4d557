"""What an audit checks, and how; the sentence under a field is its help on the command line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from draftheads.errors import InvalidSettings
from draftheads.settings import ABOVE_0, FROM_1, OptionGroup

CheckName = Literal["greedy", "greedy-parallel", "json", "json-parallel", "seeded", "seeded-parallel"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
TEMPERATURE = 0.8  # of the seeded checks
NUM_PARALLEL = 4  # requests at the same time in the -parallel checks
NUM_EXAMPLES = 3  # differences that are shown

# of the answers in the json checks; small enough that a small model ends its answer
SCHEMA: dict[str, Any] = {
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


@dataclass(frozen=True)
class AuditOptions(OptionGroup):
    """Check whether a server's speculative decoding is lossless.

    Sends the same prompts to a server that drafts and to a reference that does not, and compares the answers. Where two
    differ first, the gap between their tokens separates near-ties from wrong texts. The exit status is 0 if no text is
    wrong, 1 if one is, and 2 if it could not be checked. Keys of servers are in the environment variables AUDIT_API_KEY
    and AUDIT_BASELINE_API_KEY.
    """

    url: Annotated[str, tyro.conf.Positional]
    """The server with drafting. The address of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    prompts: Path
    """A file of prompts. JSONL with "prompt", "messages" or "turns" in each line, such as MT-Bench's question.jsonl; or
    .txt, where each line is a prompt."""
    baseline: str | None = None
    """The same server without drafting: the reference. It can be the same address with --baseline-fields."""
    model: str | None = None
    """The served model, to score differences. Without --baseline its plain decoding is the reference; with it, the
    model is in fp32. A name, a folder or a Hugging Face id."""
    checks: tuple[CheckName, ...] = ()
    """Only these checks. greedy: temperature 0; json: the same with a JSON schema; seeded: sampled, each request twice;
    greedy-parallel, json-parallel, seeded-parallel: several requests at the same time, the others one by one. Default:
    all six."""
    max_new_tokens: Annotated[int, FROM_1] = 128
    """Tokens of each answer."""
    tolerance: Annotated[float, ABOVE_0] = 0.25
    """Largest gap of a near-tie in nats. Where two answers differ first, one of their two tokens may be so much less
    likely than the other; beyond, the text is wrong. 0.25 is for servers in bf16, 0.05 for fp16, 0.001 for fp32."""
    fields: str | None = None
    """Further fields of each request, as a JSON object. '{"model": "NAME"}' chooses a model; the default is the first
    one that the server lists. Also for the baseline, unless it has --baseline-fields."""
    baseline_fields: str | None = None
    """Further fields of each request to the baseline. '{"draft_nodes": 0}' switches drafting off in draftheads serve,
    '{"speculative.n_max": 0}' in llama.cpp's server."""
    json: str | None = None
    """Write everything as JSON to this file. - writes it to standard output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline is None and self.model is None:
            raise InvalidSettings("nothing to compare with: give --baseline URL, --model MODEL, or both")
        self._require(
            "baseline_fields", fine=self.baseline is not None or not self.baseline_fields, fix="give --baseline"
        )
        _ = self.server_values, self.baseline_values  # raise

    @property
    def chosen(self) -> tuple[CheckName, ...]:
        """The checks in the order in which they are made, each once."""
        return tuple(name for name in CHECKS if name in self.checks or not self.checks)

    @property
    def server_values(self) -> dict[str, Any]:
        return _object("--fields", self.fields)

    @property
    def baseline_values(self) -> dict[str, Any]:
        if self.baseline_fields is None:
            return self.server_values
        return _object("--baseline-fields", self.baseline_fields)


def _object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidSettings(f"{option} {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSettings(f"{option} {text!r} is no JSON object; write it as '{{\"name\": value}}'")
    return value
