"""Tables as data, of the papers and one of our own: what is trained and measured, and the published numbers beside it.

A table is a TOML file in ``assets/tables``; its fields are those of :class:`PaperTable`. Adding one needs no code.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import ALL, Row, markdown_table
from draftheads.bench.timing import PLAIN
from draftheads.errors import DataError, InvalidSettings, close_name
from draftheads.heads import head_methods
from draftheads.train.recipes import RECIPES
from draftheads.utils.files import user_path

Measured = Literal["rows", "drafting", "accuracy", "losses"]
Cells = dict[str, dict[str, Any]]  # numbers by row and column


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper."""

    name: str
    title: str
    source: str  # the paper, with the number of the table
    needs: str  # models, heads and questions of the paper
    note: str = ""  # how this differs from the paper
    heads: tuple[str, ...] = ()  # that are compared, in place of variants that are trained
    shared: Mapping[str, Any] = field(default_factory=dict)  # settings of training of all variants
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings that differ, see options_of
    all_methods: bool = False  # every architecture is a variant, too; those of other packages included
    prompts: str = "tasks"
    categories: tuple[str, ...] = ()
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})  # settings of each comparison
    draft_model: bool = False  # whether a smaller model is compared, too, if one is given
    transformers: bool = False  # whether transformers is compared, too
    quality: tuple[str, ...] = ()
    measured: Measured = "rows"  # what the cells are from: a comparison, times of drafting, accuracy or losses by head
    rows: tuple[str, ...] = ("name",)  # what names a row: name, run, or settings such as tree
    columns: str = "values"  # what names a column: part, a setting such as epsilon, or values
    values: tuple[str, ...] = ("speedup",)  # numbers of a row, or measures of quality
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)  # further columns: of others, their mean
    over_columns: tuple[str, ...] = ()  # values that have one column: of all parts, or their mean over the columns
    relative: tuple[str, ...] = ()  # columns that have another one beside them: their ratio to those of a row
    relative_to: str = ""  # the row
    # of the paper: by model, row and column, the first model's beside ours
    published: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def has_text_stage(self) -> bool:
        """Whether variants are trained on plain text before chats."""
        return "text_part" in RECIPES[self.shared["recipe"]].settings if "recipe" in self.shared else False

    def settings(self, run: str, **changes: Any) -> BenchSettings:
        """The settings of a comparison."""
        return BenchSettings(**{"trees": ("best",), **self.runs[run], **changes})


def table_names() -> list[str]:
    """All tables that the package has."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def read_table(name: str) -> PaperTable:
    """A table by its name, or of a file.

    Raises:
        InvalidSettings: no such table.
        DataError: the file is not one.
    """
    path = _folder() / f"{name}.toml"
    if name not in table_names():
        path = user_path(name)
        if not path.is_file():
            close = close_name(name, table_names())
            hint = f"did you mean {close}?" if close else "`draftheads reproduce` lists them"
            raise InvalidSettings(f"no table {name!r}; {hint}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        known = {each.name: each.type for each in fields(PaperTable)}
        if unknown := next((key for key in values if key not in known), None):
            raise DataError(f"unknown field {unknown!r}; a table has {', '.join(known)}", path=path)
        lists: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        table = PaperTable(**{"name": path.stem, **lists})
        if table.all_methods:
            methods = {method: {"method": method} for method in head_methods()}
            table = replace(table, variants={**methods, **table.variants})
        for run in table.runs:
            table.settings(run)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"is not a table: {error}", path=path) from error
    if table.measured not in get_args(Measured):
        raise DataError(f"measured is {table.measured!r}; choose among {', '.join(get_args(Measured))}", path=path)
    return table


def _folder() -> Path:
    return Path(__file__).parent.parent / "assets" / "tables"


def cells_of(table: PaperTable, rows: Sequence[Row]) -> Cells:
    """The numbers of a comparison, as the table arranges them."""
    cells: Cells = {}
    over_columns: dict[tuple[str, str], list[float]] = {}  # by row and value
    for row in rows:
        if row.part != ALL and table.columns != "part":
            continue
        label = ", ".join(filter(None, (_facet(row, name) for name in table.rows)))
        column = "" if table.columns == "values" else _facet(row, table.columns)
        for value in table.values:
            number = row.quality.get(value) if value in row.quality else getattr(row, value, None)
            if number is None or (row.name == PLAIN and not column and table.columns != "values"):
                continue
            if value in table.over_columns:
                if table.columns != "part" or row.part == ALL:
                    over_columns.setdefault((label, _WORDS.get(value, value)), []).append(number)
                continue
            name = " ".join(filter(None, (column, _WORDS.get(value, value) if _is_named(table, column) else "")))
            cells.setdefault(label, {})[name] = number
    for (label, name), numbers in over_columns.items():
        cells.setdefault(label, {})[name] = sum(numbers) / len(numbers)
    _add_columns(table, cells)
    return cells


def _add_columns(table: PaperTable, cells: Cells) -> None:
    """Adds means of columns, and ratios to the row that others are relative to."""
    ends = [f" {_WORDS.get(value, value)}" if len(table.values) > 1 else "" for value in table.values]
    for line, (name, of), end in product(cells.values(), table.means.items(), ends):
        if line.keys() >= {column + end for column in of}:
            line[name + end] = sum(line[column + end] for column in of) / len(of)
    of_one = cells.get(table.relative_to, {})
    for line, column in product(cells.values(), table.relative):
        if column in line and column in of_one:
            line[f"{column} ÷ {table.relative_to}"] = line[column] / of_one[column]


def _is_named(table: PaperTable, column: str) -> bool:
    return len(table.values) > 1 or not column


# numbers of a row as the papers call them
_WORDS = {
    "speedup": "× plain",
    "decode_speedup": "× plain, decode",
    "tokens_per_step": "tokens/step",
    "accepted_per_step": "accepted/step",
    "tokens_per_second": "tokens/s",
    "token_milliseconds": "ms/token",
    **{f"{part}_milliseconds": f"{part} ms" for part in ("draft", "verify", "rest", "step")},
    "num_parameters": "parameters",
}


def _facet(row: Row, name: str) -> str:
    """What names a row or a column."""
    value = getattr(row, name) if name in ("name", "part") else row.settings.get(name)
    if value is None or value == "":
        return ""
    if isinstance(value, float):
        value = f"{value:g}"
    short = {"batch_size": "batch", "num_nodes": "nodes", "epsilon": "ε", "temperature": "T", "prompt_tokens": "prompt"}
    return f"{short[name]} {value}" if name in short else str(value)


def drafting_cells(drafting: Mapping[str, Mapping[str, Any]]) -> Cells:
    """Milliseconds of each part of drafting, by head (Hydra, table 1)."""
    return {
        name: {"prefix": cost["prefix"], **{f"head {i}": ms for i, ms in enumerate(cost["heads"], 1)}}
        for name, cost in drafting.items()
    }


def by_head(values: Mapping[str, Sequence[float]], word: str) -> dict[str, float]:
    """Numbers of each head as cells: ``word`` with the number of the head.

    >>> by_head({"loss": [2.5, 3.0]}, "head")
    {'loss head 1': 2.5, 'loss head 2': 3.0}
    """
    return {f"{name} {word} {i}": each for name, numbers in values.items() for i, each in enumerate(numbers, 1)}


def lines_of(table: PaperTable, cells: Cells) -> Iterator[str]:
    """The table in Markdown: our numbers, with those of the paper in brackets, and then its other numbers."""
    (first, own), *others = list(table.published.items()) or [("", {})]
    columns = list(dict.fromkeys(name for row in (*cells.values(), *own.values()) for name in row))
    labels = list(dict.fromkeys([*cells, *own]))
    pairs = ((label, cells.get(label, {}), own.get(label, {})) for label in labels)
    lines = ([label, *(_pair(ours.get(name), theirs.get(name)) for name in columns)] for label, ours, theirs in pairs)
    yield from markdown_table(["", *columns], lines)
    yield ""
    yield f"In brackets: {table.source}, {first}." if own else "No numbers are published that could stand beside these."
    for name, published in others:
        names = list(dict.fromkeys(column for row in published.values() for column in row))
        lines = ([label, *(_number(row.get(column)) for column in names)] for label, row in published.items())
        yield from ("", f"The paper, {name}:", "", *markdown_table(["", *names], lines))
    if table.note:
        yield from ("", table.note)


def _pair(ours: Any, theirs: Any) -> str:
    """A cell.

    >>> _pair(1.5, 2), _pair(None, "2.1"), _pair(1234.5, None)
    ('1.50 (2)', '(2.1)', '1234.5')
    """
    return " ".join(filter(None, (_number(ours), f"({_number(theirs)})" if theirs is not None else "")))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else str(value)
