"""JSON lines, plain or zipped, with the file and the line in every error. Knows nothing of what the values mean."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from draftheads.errors import DataError


def check_readable(paths: Iterable[Path]) -> None:
    """Can all of these be read? Asked before long work.

    Raises:
        DataError: one cannot.
    """
    for path in paths:
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path=path) from None


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number (from 1) and value of each line of a ``.jsonl`` or ``.jsonl.gz`` file; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, or a line is not JSON or nested too deeply; names file and line.
    """
    line_number = 0
    try:
        with _open_text(path) as file:
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    yield line_number, json_value(line, path, line_number)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"cannot be read: {error}", path=path, line_number=line_number + 1) from None


def short(text: str) -> str:
    """At most sixty characters of a text, for error messages."""
    return text if len(text) <= 60 else text[:57] + "…"


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def json_value(line: str, path: Path, line_number: int) -> Any:
    """The value in a line.

    Raises:
        DataError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}", path=path, line_number=line_number) from None
    except RecursionError:
        problem = f"nested too deeply to be read: {short(line.strip())!r}; a line is one object with few levels"
        raise DataError(problem, path=path, line_number=line_number) from None
