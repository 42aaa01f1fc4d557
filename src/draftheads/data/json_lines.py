"""The JSON values of a file, one by one: JSON lines, plain (``.jsonl``) or zipped (``.jsonl.gz``), or one JSON array.

Every error names the file and the line.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from draftheads.errors import DataError
from draftheads.utils.messages import short

MOST_CHARACTERS = 1 << 26  # of a line or of an array's element; a small zipped file may expand to an endless line

_PIECE = 1 << 20  # characters of an array that are read at once
_RULE = "each line must be one JSON object"
_BEFORE_ELEMENT = re.compile(r"\s*[\[,]\s*(?=[^\s\]])")
_AFTER_ELEMENT = re.compile(r"\s*[,\]]")


def read_json_lines(path: Path, *, may_be_torn: bool = False) -> Iterator[tuple[int, Any]]:
    """Line number (from 1) and value of each line, or of each element of a JSON array; empty lines are skipped.

    ``may_be_torn`` also skips a last line without a line break: it may be incomplete.
    """
    line_number, is_first = 0, True
    try:
        with _open_text(path) as file:
            for line_number, line in enumerate(iter(partial(file.readline, MOST_CHARACTERS + 1), ""), start=1):
                if is_first and line.lstrip().startswith("["):
                    yield from _elements(file, line, path, line_number)
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


def _elements(file: IO[str], text: str, path: Path, line_number: int) -> Iterator[tuple[int, Any]]:
    """The elements of an array that begins with a text in a line, each with the line in which it begins.

    Of a long array only some elements are in memory.
    """
    decode = json.JSONDecoder().raw_decode
    place = 0  # in ``text``: what comes before it was read
    before = ""  # what makes the rest an array, as long as what its first line had before it
    while True:
        value, end = None, len(text)  # the element may go on in the rest of the file
        if begin := _BEFORE_ELEMENT.match(text, place):
            with suppress(ValueError, RecursionError):
                value, end = decode(text, begin.end())
        if begin and _AFTER_ELEMENT.match(text, end):  # without it, "6." may be the beginning of 6.5
            line_number += text.count("\n", place, begin.end())
            yield line_number, value
            line_number += text.count("\n", begin.end(), end)
            place = end
            continue
        _check_length("an element of the JSON array", text[place:], path, line_number)
        if place:
            before = "[" + "0".rjust(place - text.rfind("\n", 0, place) - 2)
        more = file.read(max(_PIECE, len(text) - place))
        text, place = text[place:] + more, 0
        if not more:  # what is left is the end of an array, or an error
            _value(before + text, path, line_number, rule="a file that begins with [ must be one JSON array")
            return


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
