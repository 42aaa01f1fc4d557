"""Results of long work, each saved in a JSON file of its own, so that a run that was stopped or killed continues.

A run has an identity: JSON values of all that its results depend on. Its digest names the folder of the results, so
that another run has another folder.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftheads.utils.files import write_atomic


def identity_digest(identity: Any) -> str:
    """16 hexadecimal digits for JSON values.

    >>> identity_digest({"prompts": [[5, 6]]})
    '83e043214dc2ced8'
    """
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def saved_json(path: Path, find: Callable[[], Any]) -> Any:
    """The JSON value in a file. Where it is missing or damaged, ``find`` is called and its result is saved first.

    Raises:
        StorageError: the file cannot be written.
    """
    found = _read(path)
    if found is None:
        write_atomic(path, json.dumps(find()).encode())
        found = _read(path)  # JSON's own types (lists, not tuples), as the next time
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
