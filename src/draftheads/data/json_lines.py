"""The JSON values of a file, one by one: JSON lines, plain (``.jsonl``) or zipped (``.jsonl.gz``), or one JSON array.

Every error names the file and the line.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from draftheads.errors import DataError
from draftheads.utils.messages import short

MOST_CHARACTERS = 1 << 26  # of a line or of an array; a small zipped file may expand to an endless line

_RULE = "each line must be one JSON object"
_BEFORE_ELEMENT = re.compile(r"\s*[\[,]\s*(?=[^\s\]])")


def read_json_lines(path: Path, *, may_be_torn: bool = False) -> Iterator[tuple[int, Any]]:
    """Line number (from 1) and value of each line, or of each element of a JSON array; empty lines are skipped.

    ``may_be_torn`` also skips a last line without a line break: it may be incomplete.

    Raises:
        DataError: the file cannot be read; or a line is not JSON, nested too deeply, or longer than
            :data:`MOST_CHARACTERS`, as an array may not be either.
    """
    line_number, is_first = 0, True
    try:
        with _open_text(path) as file:
            for line_number, line in enumerate(iter(partial(file.readline, MOST_CHARACTERS + 1), ""), start=1):
                if is_first and line.lstrip().startswith("["):
                    text = line + file.read(MOST_CHARACTERS + 1 - len(line))
                    _check_length("the JSON array", text, path, line_number)
                    yield from _elements(text, path, line_number)
                    return
                _check_length("the line", line, path, line_number)
                if line.strip() and not (may_be_torn and not line.endswith("\n")):
                    is_first = False
                    yield line_number, _value(line.rstrip("\n"), path, line_number)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: byte 0x{error.object[error.start]:02x}; give a .jsonl or .jsonl.gz file"
        raise DataError(problem, path=path, line_number=line_number + 1) from None
    except (OSError, EOFError, zlib.error) as error:
        place = line_number + 1 if line_number else None
        raise DataError(f"cannot be read: {error}", path=path, line_number=place) from None


@contextmanager
def at_line(path: Path, line_number: int) -> Iterator[None]:
    """Errors of a line's value name the file and the line."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error), path=path, line_number=line_number) from error


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")  # editors of Windows begin files with a byte order mark


def _elements(text: str, path: Path, line_number: int) -> Iterator[tuple[int, Any]]:
    """The elements of an array whose text begins in a line, each with the line in which it begins."""
    _value(text, path, line_number, rule="a file that begins with [ must be one JSON array")  # all of it is valid
    decode = json.JSONDecoder().raw_decode
    end, seen = 0, 0
    while begin := _BEFORE_ELEMENT.match(text, end):
        line_number, seen = line_number + text.count("\n", seen, begin.end()), begin.end()
        value, end = decode(text, begin.end())
        yield line_number, value


def _value(text: str, path: Path, line_number: int, *, rule: str = _RULE) -> Any:
    """The JSON value of a text that begins in a line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at character {error.colno}; {rule}"
        raise DataError(problem, path=path, line_number=line_number + error.lineno - 1) from None
    except ValueError as error:
        raise DataError(f"not JSON: {error}", path=path, line_number=line_number) from None
    except RecursionError:
        problem = f"nested too deeply to be read: {short(text.strip())!r}; {_RULE} with few levels"
        raise DataError(problem, path=path, line_number=line_number) from None


def _check_length(what: str, text: str, path: Path, line_number: int) -> None:
    if len(text) > MOST_CHARACTERS:
        problem = f"{what} has more than {MOST_CHARACTERS:,} characters; {_RULE}"
        raise DataError(problem, path=path, line_number=line_number)
