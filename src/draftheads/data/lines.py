"""Which fields of a line were read, and which lines were left out: what nothing reads is named, once for each file."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from draftheads.errors import DataError, DataWarning
from draftheads.utils.counts import counted

T = TypeVar("T")
Row = tuple[Path, int, Any]  # a file, a line number from 1 on, and the value there
LeftOut = dict[str, list[str]]  # FILE:LINE of the lines that cannot be used, by the reason

_MOST_NAMED = 20  # columns, or reasons


class Line(dict[str, Any]):
    """The fields of a line or of an object in it, and which of them were read.

    >>> line = Line({"prompt": "hi", "score": 1, "model": None})
    >>> line["prompt"], line.get("tools"), line.unread()
    ('hi', None, ['score'])
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()
        self.inner_lines: list[tuple[str, Line]] = []

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def changed(self, fields: Mapping[str, Any]) -> "Line":
        """The line with other fields; what is read of it is read of this line, too."""
        line = Line(_given({**self, **fields}))
        line.read = self.read
        return line

    def inner(self, name: str, fields: Mapping[str, Any]) -> "Line":
        """An object in the field ``name``, which was read."""
        self.inner_lines.append((name, Line(fields)))
        return self.inner_lines[-1][1]

    def unread(self) -> list[str]:
        """The names of fields that were not read."""
        inner = (f"{name}.{unread}" for name, line in self.inner_lines for unread in line.unread())
        return [*(name for name in _given(self) if name not in self.read), *inner]


def _given(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that are not null, for which tables have NaN."""
    return {name: value for name, value in fields.items() if value is not None and value == value}  # noqa: PLR0124


def leave_out(value: Any) -> None:
    """Marks all fields of a line as read. The line is left out with a reason, so no field of it is named as unread."""
    if isinstance(value, Line):
        value.read |= {*value}
        value.inner_lines.clear()


def noted(rows: Iterable[Row], source: object, *, says: bool) -> Iterator[Row]:
    """The rows of one file or data set, with a :class:`Line` for each object, without its nulls.

    Warns:
        DataWarning: at the end, with the columns that were not read while their lines were used; not without ``says``.
    """
    unread: dict[str, None] = {}
    line = Line({})
    try:
        for path, number, value in rows:
            unread |= dict.fromkeys(line.unread())
            line = Line(_given(value) if isinstance(value, Mapping) else {})
            yield path, number, line if isinstance(value, Mapping) else value
    finally:  # the caller may need no more lines
        if says and (names := _some([*(unread | dict.fromkeys(line.unread()))])):
            warnings.warn(f"{source}: {names} not read", DataWarning, stacklevel=2)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(map(str, names[:_MOST_NAMED]))
    return listed and (f"column {listed} is" if len(names) == 1 else f"columns {listed}{more} are")


def left_out_lines(left_out: LeftOut, what: str = "chat") -> list[str]:
    """What to tell of lines that were left out, the most frequent reason first.

    >>> left_out_lines({"no answer": ["a.jsonl:3", "a.jsonl:7"]})
    ['2 chats were left out: no answer (the first is a.jsonl:3)']
    """
    ordered = sorted(left_out.items(), key=lambda item: -len(item[1]))
    told = [(len(places), f"{reason} (the first is {places[0]})") for reason, places in ordered[:_MOST_NAMED]]
    if rest := ordered[_MOST_NAMED:]:
        told.append((sum(len(places) for _, places in rest), f"{len(rest):,} other reasons"))
    return [f"{counted(n, what)} {'was' if n == 1 else 'were'} left out: {why}" for n, why in told]


def usable(
    rows: Iterable[Row],
    convert: Callable[[Any], T],
    *,
    what: str,
    sources: Iterable[object],
    left_out: LeftOut | None,
    says: bool,
) -> Iterator[tuple[Path, int, T]]:
    """The rows with their values converted; those for which that raises DataError are left out.

    They are added to ``left_out``. If that is None, they are told in warnings at the end; not without ``says``.

    Raises:
        DataError: all rows are left out.
    """
    lost: LeftOut = {} if left_out is None else left_out
    is_used = False
    for path, number, value in rows:
        try:
            if isinstance(value, DataError):
                raise value
            converted = convert(value)
        except DataError as error:
            lost.setdefault(str(error), []).append(f"{path}:{number}")
            leave_out(value)
            continue
        is_used = True
        yield path, number, converted
    if lost and not is_used:
        raise none_left(lost, sources, what)
    for sentence in left_out_lines(lost, what) if left_out is None and says else ():
        warnings.warn(sentence, DataWarning, stacklevel=2)


def none_left(left_out: LeftOut, sources: Iterable[object], what: str) -> DataError:
    """The error of files without a line that can be used."""
    return DataError(": ".join([f"no {what} in {', '.join(map(str, sources))}", *left_out_lines(left_out, what)]))
