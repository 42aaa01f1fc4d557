"""What a result depends on, as JSON values: a run that resumes or reuses it must have the same.

Each result of long work is saved in a JSON file of its own, so that a run that was stopped or killed continues. The
digest of all that a run's results depend on names their folder, so that another run has another folder.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.utils.files import write_atomic


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
    """Raises :class:`InvalidSettings` with the :func:`changes` between ``problem`` and ``fix``, if there are any."""
    if differences := changes(before, now, names=names):
        raise InvalidSettings(f"{problem}: {', '.join(differences)}. {fix}")


def identity_digest(identity: Any) -> str:
    """16 hexadecimal digits for JSON values.

    >>> identity_digest({"prompts": [[5, 6]]})
    '83e043214dc2ced8'
    """
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def saved_json(path: Path, find: Callable[[], Any]) -> Any:
    """The JSON value in a file. Where it is missing or damaged, ``find`` is called and its result is saved first."""
    value = _read(path)
    if value is None:
        write_atomic(path, json.dumps(find()).encode())
        value = _read(path)  # JSON's own types (lists, not tuples), as the next time
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
