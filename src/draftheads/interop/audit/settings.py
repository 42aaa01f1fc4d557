"""What an audit checks, and how; the sentence under a field is its help on the command line."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from draftheads.errors import InvalidSettings
from draftheads.settings import SamplingSettings
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
    """Whether several requests run at the same time."""
    return check.endswith("-parallel")


def is_json(check: CheckName) -> bool:
    """Whether answers have a JSON schema; they are greedy, too."""
    return check.startswith("json")


def is_seeded(check: CheckName) -> bool:
    """Whether answers are sampled, with a seed."""
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
