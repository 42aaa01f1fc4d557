"""The values of files, one by one: ``READERS`` has a reader for each kind of file, by its suffix; ``.gz`` may follow.

A reader gives objects with the fields of a line: a text file is one object, and a CSV file has one for each row. Every
error names the file and the line.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, Any

from draftheads.errors import DataError, MissingDependency, first_line
from draftheads.utils.messages import short

MOST_CHARACTERS = 1 << 26  # of a line; a small zipped file may expand to an endless line

_RULE = "each line must be one JSON object"
_BEFORE_ELEMENT = re.compile(r"\s*[\[,]\s*(?=[^\s\]])")
_END_OF_ARRAY = re.compile(r"\s*\]\s*")


def read_values(path: Path) -> Iterator[tuple[Path, int, Any]]:
    """File, line number (from 1) and value of each line, row or element in a file, or in all files of a folder.

    Files of an unknown kind are read as JSON lines. Empty lines are skipped, and in a folder also a last line that is
    incomplete: a server may be writing it.
    """
    for file in files_in(path):
        yield from _values_of(file, in_folder=path.is_dir())


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

    def lines(self, text: IO[str]) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(iter(partial(text.readline, MOST_CHARACTERS + 1), ""), start=1):
            if len(line) > MOST_CHARACTERS:
                raise self.error(f"the line has more than {MOST_CHARACTERS:,} characters; {_RULE}", number)
            yield number, line

    def error(self, problem: str, line_number: int) -> DataError:
        return DataError(problem, path=self.path, line_number=line_number)


def _values_of(path: Path, *, in_folder: bool) -> Iterator[tuple[Path, int, Any]]:
    line_number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file, ExitStack() as held:
            for line_number, value in READERS.get(_kind(path), _json_values)(_Source(file, path, in_folder, held)):
                yield path, line_number, value
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: byte 0x{error.object[error.start]:02x}; give a file of a known kind ({KINDS})"
        raise DataError(problem, path=path, line_number=line_number + 1) from None
    except (OSError, EOFError, zlib.error) as error:
        place = line_number + 1 if line_number else None
        raise DataError(f"cannot be read: {error}", path=path, line_number=place) from None


def _json_values(source: _Source) -> Iterator[tuple[int, Any]]:
    """JSON lines, or the elements of one JSON array, which may have several lines."""
    is_first, text = True, source.text()
    for number, line in source.lines(text):
        if is_first and line.lstrip().startswith("["):
            yield from _elements(source, line + text.read(), number)
            return
        if line.strip():
            try:
                value = _json(source, line.rstrip("\n"), number)
            except DataError:
                if source.in_folder and not line.endswith("\n"):
                    return
                raise
            is_first = False
            yield number, value


def _elements(source: _Source, text: str, first_line: int) -> Iterator[tuple[int, Any]]:
    """The elements of an array, each with the line in which it begins."""
    place, line_number, decode = 0, first_line, json.JSONDecoder().raw_decode
    while begin := _BEFORE_ELEMENT.match(text, place):
        try:
            value, end = decode(text, begin.end())
        except (ValueError, RecursionError):
            break
        line_number += text.count("\n", place, begin.end())
        yield line_number, value
        line_number += text.count("\n", begin.end(), end)
        place = end
    if not _END_OF_ARRAY.fullmatch(text, place):  # an empty array, or an error
        _json(source, text, first_line, rule="a file that begins with [ must be one JSON array")


def _json(source: _Source, text: str, line_number: int, *, rule: str = _RULE) -> Any:
    """The JSON value of a text that begins in a line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at character {error.colno}; {rule}"
        raise source.error(problem, line_number + error.lineno - 1) from None
    except ValueError as error:
        raise source.error(f"not JSON: {error}", line_number) from None
    except RecursionError:
        problem = f"nested too deeply to be read: {short(text.strip())!r}; {_RULE} with few levels"
        raise source.error(problem, line_number) from None


def _csv_rows(source: _Source) -> Iterator[tuple[int, Any]]:
    """Rows by the names in the header. All cells are texts; an empty one is null."""
    csv.field_size_limit(MOST_CHARACTERS)
    rows = csv.DictReader((line for _, line in source.lines(source.text(newline=""))), strict=True)
    try:
        for row in rows:
            if None in row:
                raise source.error("the row has more cells than the header", rows.line_num)
            yield rows.line_num, {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise source.error(f"not CSV: {error}", rows.reader.line_num) from None


def _parquet_rows(source: _Source) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency("parquet files need pyarrow", pip_install="'draftheads[bench]'") from None
    try:
        batches = parquet.ParquetFile(source.file).iter_batches()
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except ArrowException as error:
        raise DataError(f"cannot be read: {first_line(error)}", path=source.path) from error


def _text(source: _Source) -> Iterator[tuple[int, Any]]:
    yield 1, {"text": source.text().read()}


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
