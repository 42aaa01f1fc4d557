"""How much a client may send to the server, and ask of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """Limits of requests. Time for slow senders and readers is limited by a reverse proxy."""

    max_connections: int = 512
    header_bytes: int = 32 << 10
    body_bytes: int = 2 << 20
    keep_alive_seconds: int = 30  # between two requests of a connection

    choices: int = 128  # prompts of a request times n
    logprobs: int = 1 << 18  # log-probabilities of all answers to a request

    max_tokens: int | None = None  # the longest answer that a request may want; None: as long as the model's texts
    default_tokens: int = 2048  # of a chat's answer, where the request names no limit
    request_seconds: float | None = 600.0  # from the request to the end of its answer
