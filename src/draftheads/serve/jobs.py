"""What the scheduler takes and returns: jobs, limits and counts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from draftheads.decode.core import CoreLimits
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.waiting import Lane


@dataclass(frozen=True, kw_only=True)
class Limits(CoreLimits):
    """What a scheduler may use.

    Raises:
        InvalidSettings: a number below 1.
    """

    kv_bytes: int
    max_waiting: int = 128
    """Requests that wait. One more is refused."""


@dataclass(frozen=True)
class JobFailed:
    """The last event of a job without an answer."""

    reason: Literal["error", "deadline", "shutdown"]
    message: str


@dataclass(eq=False)
class Job:
    """One answer that is wanted. The last event has a ``finish_reason``, or it is a :class:`JobFailed`."""

    request: Request
    lane: Lane
    client: str
    """Clients take turns: an API key or an address."""
    on_event: Callable[[StreamEvent | JobFailed], None]
    """Called on the model thread, and must not block."""
    deadline: float | None = None
    """On the scheduler's clock, ``time.monotonic``."""
    cache_salt: str = ""
    """Prompts with the same salt share what was read of a common beginning."""


@dataclass(frozen=True)
class Snapshot:
    """Counts of a scheduler. Those of the second group only grow."""

    waiting: int = 0
    reading: int = 0  # requests whose prompts are being read
    running: int = 0  # requests that are decoded
    lanes: int = 0
    kv_bytes: int = 0  # keys and values of the requests that are read or decoded
    prefix_bytes: int = 0  # the same of cached prefixes, with their hidden states
    prefix_entries: int = 0

    steps: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens_read: int = 0
    prefix_hits: int = 0
    prefix_tokens_reused: int = 0
