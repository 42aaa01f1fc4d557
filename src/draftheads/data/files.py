"""The values of files, one by one: ``READERS`` has a reader for each kind of file, by its suffix; ``.gz`` may follow.

A reader gives objects with the fields of a line: a text file is one object, and a CSV file has one for each row. Every
error names the file and the line. No file is in memory as a whole.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, TextIOWrapper
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from draftheads.data.lines import noted
from draftheads.errors import DataError, MissingDependency, first_line
from draftheads.utils.messages import short
from draftheads.utils.strict_json import unique

MOST_CHARACTERS = 1 << 26  # of a line; a small zipped file may expand to an endless line
_ROWS = 256  # of a table, that are read at once
PART = 1 << 16  # characters that are read at once of a long text or a JSON array
_RULE = "each line must be one JSON object"
_BEFORE_ELEMENT = re.compile(r"\s*[\[,]\s*(?=[^\s\]])")
_AFTER_ELEMENT = re.compile(r"\s*[,\]]")
_END_OF_ARRAY = re.compile(r"\s*\]\s*")


def read_values(path: Path) -> Iterator[tuple[Path, int, Any]]:
    """File, line number (from 1) and value of each line, row or element in a file, or in all files of a folder.

    Files of an unknown kind are read as JSON lines. Empty lines are skipped, and in a folder also a last line that is
    incomplete: a server may be writing it.
    """
    for file in files_in(path):
        for row in _values_of(file, in_folder=path.is_dir()):
            if isinstance(row[-1], DataError):
                raise row[-1].__cause__ or row[-1]
            yield row


def read_lines(*paths: Path, says: bool = True) -> Iterator[tuple[Path, int, Any]]:
    """As :func:`read_values`, of several paths, with a :class:`Line` for each object.

    A line that cannot be read is a :class:`DataError` in place of its value; the first one of a file is raised.

    Warns:
        DataWarning: once for each file, with the columns that were not read while its lines were used; not if ``says``
            is False.
    """
    for path in paths:
        for file in files_in(path):
            yield from noted(_values_of(file, in_folder=path.is_dir()), file, says=says)


def files_in(path: Path) -> list[Path]:
    """The files of the known kinds in a folder, by name; a file stands for itself."""
    if not path.is_dir():
        return [path]
    if files := sorted(path for path in path.iterdir() if is_known(path) and not path.name.startswith(".")):
        return files
    inside = sorted({file.parent.name for file in path.glob("*/*") if is_known(file)})
    fix = f"; give a folder in it: {', '.join(inside)}" if inside else ""
    raise DataError(f"cannot be read: the folder has no file of a known kind ({KINDS}){fix}", path=path)


def is_known(path: Path) -> bool:
    """Whether a file's name has the suffix of a known kind, and it is not the manifest of another file."""
    return _kind(path) in READERS and not path.name.endswith(".manifest.json")


def check_readable(paths: Iterable[Path]) -> None:
    """Opens all files, to fail before long work."""
    for path in chain.from_iterable(map(files_in, paths)):
        try:
            with path.open("rb") as file:
                is_empty = not file.read(1)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path=path) from None
        if is_empty:
            raise DataError("the file is empty", path=path)


@contextmanager
def at_line(path: Path, line_number: int) -> Iterator[None]:
    """Errors of a line's value name the file and the line."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error), path=path, line_number=line_number) from error


@dataclass(frozen=True)
class _Source:
    """An open file."""

    file: gzip.GzipFile | BufferedReader
    path: Path
    in_folder: bool  # one of all files in a folder
    held: ExitStack  # closes what is open

    def text(self, newline: str | None = None) -> IO[str]:
        # editors of Windows begin files with a byte order mark
        return self.held.enter_context(TextIOWrapper(self.file, encoding="utf-8-sig", newline=newline))

    def lines(self, text: IO[str], begun: str = "", first: int = 1) -> Iterator[tuple[int, str]]:
        """The lines and their numbers; ``begun`` is what was read of the first one."""
        for number in count(first):
            line = begun if begun.endswith("\n") else begun + text.readline(MOST_CHARACTERS + 1 - len(begun))
            if len(line) > MOST_CHARACTERS:
                raise self.error(f"the line has more than {MOST_CHARACTERS:,} characters; {_RULE}", number)
            if not line:
                return
            yield number, line
            begun = ""

    def error(self, problem: str, line_number: int) -> DataError:
        return DataError(problem, path=self.path, line_number=line_number)


def _values_of(path: Path, *, in_folder: bool) -> Iterator[tuple[Path, int, Any]]:
    read = [0]  # the number of the last line
    with (
        _named_errors(path, read),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
        ExitStack() as held,
    ):
        for read[0], value in READERS.get(_kind(path), _json_values)(_Source(file, path, in_folder, held)):
            yield path, read[0], value


@contextmanager
def _named_errors(path: Path, read: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: byte 0x{error.object[error.start]:02x}"
        problem = f"{what}; save it as UTF-8, or give a file of a known kind ({KINDS})"
        raise DataError(problem, path=path, line_number=read[0] + 1) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read: {error}", path=path, line_number=read[0] + 1 if read[0] else None) from None


def _json_values(source: _Source) -> Iterator[tuple[int, Any]]:
    """JSON lines, or the elements of one JSON array, which may have several lines."""
    text, first, begun = source.text(), 0, "\n"
    while begun and not begun.strip():  # up to the first value
        first, begun = first + 1, text.readline(PART)
    if begun.lstrip().startswith("["):
        yield from _elements(source, text, begun, first)
        return
    for number, line in source.lines(text, begun, first):
        if (plain := line.lstrip("\ufeff").rstrip("\n")).strip():  # joined files have byte order marks inside
            try:
                value = _json(source, plain, number)
            except DataError as error:
                if source.in_folder and not line.endswith("\n"):
                    return
                if number == first:
                    raise
                value = _unreadable(f"not JSON: {_RULE}", error)
            yield number, value


def _unreadable(reason: str, error: DataError) -> DataError:
    """What stands for a line that cannot be read: the reason, because of the error that names the place."""
    value = DataError(reason)
    value.__cause__ = error
    return value


def _elements(source: _Source, file: IO[str], text: str, number: int) -> Iterator[tuple[int, Any]]:
    """The elements of an array, each with the line in which it begins; ``text`` is the beginning of the file."""
    place = before = 0  # in the text, and characters of its first line that come before it
    start, is_all, decode = "", False, json.JSONDecoder(object_pairs_hook=_object).raw_decode
    while True:
        begin, value, end = _BEFORE_ELEMENT.match(text, place), None, -1
        with suppress(ValueError, RecursionError):
            value, end = decode(text, begin.end()) if begin else (None, -1)
        if not is_all and (end < 0 or not _AFTER_ELEMENT.match(text, end)):  # there may be more of it
            before = _column(text, place, before)
            more = file.read(max(PART, len(text) - place))
            text, place, is_all = text[place:] + more, 0, not more
            if len(text) > 2 * MOST_CHARACTERS:
                raise source.error(f"an element has more than {MOST_CHARACTERS:,} characters", number)
        elif begin is None or end < 0:
            break
        else:
            number += text.count("\n", place, begin.end())
            yield number, value
            number += text.count("\n", begin.end(), end)
            place, start = end, "[0"  # stands for the elements so far
    if not _END_OF_ARRAY.fullmatch(text, place):  # an empty array, or an error
        rule = "a file that begins with [ must be one JSON array"
        _json(source, start + text[place:], number, rule=rule, before=_column(text, place, before) - len(start))


def _column(text: str, place: int, before: int) -> int:
    """Characters of the line of a place that come before it; of the text's first line there were some before it."""
    line_end = text.rfind("\n", 0, place)
    return place - 1 - line_end if line_end >= 0 else before + place


def _json(source: _Source, text: str, line_number: int, *, rule: str = _RULE, before: int = 0) -> Any:
    """The JSON value of a text that begins in a line, after so many characters of it."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        column = error.colno + (before if error.lineno == 1 else 0)
        problem = f"not JSON: {error.msg} at character {column}; {rule}"
        raise source.error(problem, line_number + error.lineno - 1) from None
    except ValueError as error:
        raise source.error(f"not JSON: {error}", line_number) from None
    except RecursionError:
        problem = f"nested too deeply to be read: {short(text.strip())!r}; {_RULE} with few levels"
        raise source.error(problem, line_number) from None


def _object(pairs: Sequence[tuple[str, Any]]) -> Any:
    """A JSON object, or in its place the error of a line that cannot be used."""
    try:
        return unique(pairs)
    except ValueError as error:
        return DataError(str(error))


def _csv_rows(source: _Source) -> Iterator[tuple[int, Any]]:
    """Rows by the names in the header. All cells are texts; an empty one is null."""
    csv.field_size_limit(MOST_CHARACTERS)
    rows = csv.DictReader((line for _, line in source.lines(source.text(newline=""))), strict=True)
    try:
        names = rows.fieldnames or ()
        if twice := [name for name in names if names.count(name) > 1]:
            raise source.error(f"the header has {twice[0]!r} twice", 1)
        for row in rows:
            if None in row:
                problem = "the row has more cells than the header"
                yield rows.line_num, _unreadable(problem, source.error(problem, rows.line_num))
            else:
                yield rows.line_num, {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise source.error(f"not CSV: {error}", rows.reader.line_num) from None


def _parquet_rows(source: _Source) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency("parquet files need pyarrow", extra="bench") from None
    try:
        batches = parquet.ParquetFile(source.file).iter_batches(batch_size=_ROWS)
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except ArrowException as error:
        raise DataError(f"cannot be read: {first_line(error)}", path=source.path) from error


def _text(source: _Source) -> Iterator[tuple[int, Any]]:
    yield 1, {"text": _parts(source)}


def _parts(source: _Source) -> Iterator[str]:
    """The parts of a text, to be read before the next value."""
    with _named_errors(source.path, (0,)):
        yield from iter(partial(source.text().read, PART), "")


READERS: Mapping[str, Callable[[_Source], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _json_values,
    ".json": _json_values,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".txt": _text,
}
KINDS = f"{', '.join(READERS)}, or zipped: .gz"


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix
