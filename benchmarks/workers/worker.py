"""What all workers share: a worker loads one peer and answers requests, a JSON object a line.

Each peer runs in an environment of its own, so a worker imports the peer's library and the standard library only.
The first line on stdout is ``{"versions": {…}}``; then each request ``{"prompts": [[id, …], …], "max_new_tokens": N}``
gets ``{"seconds": S, "token_ids": [[id, …], …]}`` and the other fields of :class:`Answers`.
Whatever fails gets ``{"error": "…"}``.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

Ids = list[int]


@dataclass(frozen=True)
class Answers:
    """The new tokens of each prompt; the one that ended the answer is included."""

    token_ids: list[Ids]
    num_steps: int | None = None  # passes behind the prompts', all rows together; None where the peer does not count
    accepted_by_depth: tuple[int, ...] = ()  # accepted draft tokens at depth 1, 2, …, where the peer counts them
    decode_seconds: float | None = None  # of the tokens after the first one, where the peer measures it
    batch_seconds: tuple[float, ...] = ()  # of a pass of so many tokens as each of the settings' ``nodes`` says


Generate = Callable[[list[Ids], int], Answers]  # prompts and max_new_tokens


def serve(load: Callable[[dict[str, Any]], Generate], packages: tuple[str, ...]) -> None:
    """Load the peer with the settings from the command line, then answer until stdin is closed."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout; it is for answers only

    def reply(line: dict[str, Any]) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    try:
        generate = load(json.loads(sys.argv[1]))
        reply({"versions": {package: version(package) for package in packages}})
        for line in sys.stdin:
            reply(_answered(generate, json.loads(line)))
    except Exception as error:  # noqa: BLE001 - any library may fail in any way; the coordinator shows it
        reply({"error": described(error)})


def _answered(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        answers = generate(request["prompts"], request["max_new_tokens"])
    except Exception as error:  # noqa: BLE001 - the same
        return {"error": described(error)}
    seconds = time.perf_counter() - start
    return {"seconds": seconds, **vars(answers)}


def described(error: Exception) -> str:
    r"""Kind and first line of an error.

    >>> described(ValueError("no such file\nand more"))
    'ValueError: no such file'
    """
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def until_end(ids: Iterable[int], end_ids: set[int]) -> Ids:
    """An answer without what follows its end; no more of it is read.

    >>> until_end([5, 6, 2, 0, 0], {2})
    [5, 6, 2]
    """
    answer: Ids = []
    for token in ids:
        answer.append(token)
        if token in end_ids:
            break
    return answer
