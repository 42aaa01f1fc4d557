"""What a result depends on, as JSON values by name: a run that resumes or reuses it must have the same."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from draftheads.errors import InvalidSettings


def as_json_values(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they are read back from a file: tuples become lists, paths become text."""
    values: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return values


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, names: Collection[str] | None = None) -> list[str]:
    """Differences for a message, one by one; of these names, or of all that either has.

    >>> changes({"seed": 0, "epochs": 2}, {"seed": 1, "epochs": 2})
    ['seed was 0 and is 1']
    """
    compared = {**before, **now} if names is None else names
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in compared
        if before.get(name) != now.get(name)
    ]


def require_same(
    before: Mapping[str, Any], now: Mapping[str, Any], *, problem: str, fix: str, names: Collection[str] | None = None
) -> None:
    """Refuses to mix the results of two different runs.

    Args:
        before: what the result there depends on.
        now: what this run would make it depend on.
        problem: begins the message.
        fix: ends the message.
        names: compare only these; all that either has when left out.

    Raises:
        InvalidSettings: they differ; the message names the values.
    """
    if found := changes(before, now, names=names):
        raise InvalidSettings(f"{problem}: {', '.join(found)}. {fix}")
