"""What a long search has found so far, a file for each finding, so that it goes on where it was stopped or killed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftheads.files import write_atomic

_IDENTITY = "identity.json"


class Workbook:
    """Findings of one search in a folder of their own; another search in the same place begins anew.

    Args:
        folder: of the findings.
        identity: what they depend on, JSON values.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        known = _read(folder / _IDENTITY)
        if known is None or known != json.loads(json.dumps(identity)):
            shutil.rmtree(folder, ignore_errors=True)
            _write(folder / _IDENTITY, identity)

    def get(self, name: str, find: Callable[[], Any]) -> Any:
        """What was found under that name; found now, and kept, if it was not."""
        path = self.folder / f"{name}.json"
        found = _read(path)
        if found is None:
            _write(path, find())
            found = _read(path)  # JSON's own types, as the next time
        return found

    def forget(self, name: str) -> None:
        """What was found under that name is to be found anew the next time."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or half of it: found anew
        return None


def _write(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value).encode())
