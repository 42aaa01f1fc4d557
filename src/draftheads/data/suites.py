"""Suites of questions, for ``draftheads bench``: our own, files, and data sets of the Hugging Face Hub."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from draftheads.data.json_lines import read_json_lines
from draftheads.data.records import OwnPrompts, Record, own_prompts, prompt_of
from draftheads.errors import DataError, InvalidSettings, MissingDependency, first_line, require_at_least

SUITES: tuple[OwnPrompts, ...] = get_args(OwnPrompts)
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}")


def read_suite(source: str) -> list[Record]:
    """All questions of a suite, in their order.

    Args:
        source: ``tasks``, ``demo`` or ``calibration``, our own; a file (.jsonl, .json, .parquet, zipped or not) or a
            folder of such files; or a data set of the Hugging Face Hub as ``OWNER/NAME``, ``OWNER/NAME:CONFIG`` or
            ``OWNER/NAME:CONFIG:SPLIT`` (``openai/gsm8k:main:test``). The default split is ``test``, or the first one.
    """
    records = [record for place in _values(source) if (record := prompt_of(*place)) is not None]
    if not records:
        raise DataError("there is no question in it", path=source)
    return records


def select(records: Sequence[Record], categories: Sequence[str] = (), limit: int | None = None) -> list[Record]:
    """The records of some categories, or of all, in their order; the first ``limit`` of each category."""
    require_at_least(1, limit=limit)
    known = dict.fromkeys(record.category for record in records)
    if unknown := [name for name in categories if name not in known]:
        there = ", ".join(filter(None, known)) or "none: the questions have no category"
        raise InvalidSettings(f"no question has the category {unknown[0]!r}; the categories are {there}")
    counts = Counter[str]()
    chosen = []
    for record in records:
        counts[record.category] += 1
        if record.category in (categories or known) and counts[record.category] <= (limit or len(records)):
            chosen.append(record)
    return chosen


def _values(source: str) -> Iterator[tuple[Any, Path, int]]:
    """The lines of a suite: JSON value, file (or name on the Hub) and number from 1."""
    path = own_prompts(source) if source in SUITES else Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    elif path.exists() or path.name.endswith(_SUFFIXES):
        files = [path]
    elif _HUB_NAME.fullmatch(source):
        yield from ((row, path, number) for number, row in enumerate(_hub_rows(source), 1))
        return
    else:
        fix = f"give {', '.join(SUITES)}, a file, a folder, or OWNER/NAME of a data set on the Hugging Face Hub"
        raise DataError(f"no file, folder or suite has the name {source!r}: {fix}")
    for file in files:
        rows = enumerate(_parquet_rows(file), 1) if file.suffix == ".parquet" else read_json_lines(file)
        yield from ((value, file, number) for number, value in rows)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency("parquet files need pyarrow", pip_install="'draftheads[bench]'") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot be read: {first_line(error)}", path=path) from error


def _hub_rows(source: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets  # noqa: PLC0415 - an extra
    except ImportError:
        problem = f"there is no file {source}, and data sets of the Hugging Face Hub need datasets"
        raise MissingDependency(problem, pip_install="'draftheads[bench]'") from None
    name, config, split = (part or None for part in f"{source}::".split(":")[:3])
    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises errors of half a dozen others
        raise DataError(f"no file, and no data set that can be loaded: {first_line(error)}", path=source) from error
    rows: Iterable[dict[str, Any]] = found if split else found["test" if "test" in found else next(iter(found))]
    return rows
