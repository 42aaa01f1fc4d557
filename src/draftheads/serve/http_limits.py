"""How much a client may send to the server, and how long it may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """Limits of connections and bodies. Beyond them a client gets an error, or its connection is closed."""

    max_connections: int = 512
    header_bytes: int = 32 << 10
    header_seconds: float = 10.0  # from the first byte of a request, or the connection, to the end of its headers
    body_seconds: float = 30.0  # to send the whole body
    write_seconds: float = 30.0  # in which a client must read something
    keep_alive_seconds: float = 30.0  # between two requests of a connection

    body_bytes: int = 2 << 20
    json_depth: int = 64
    choices: int = 128  # prompts of a request times n
    logprobs: int = 1 << 18  # log-probabilities of all answers to a request

    max_tokens: int | None = None  # the longest answer that a request may want; None: as long as the model's texts
    default_tokens: int = 2048  # of a chat's answer, where the request names no limit
    request_seconds: float | None = 600.0  # from the request to the end of its answer
