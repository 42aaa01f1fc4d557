"""Tables as data, of the papers and one of our own: what is trained and measured, and the published numbers beside it.

A table is a TOML file in ``tables``; its fields are those of :class:`PaperTable`. Adding one needs no code. A file with
``extends = "medusa-table-1"`` has all fields of that table but those that it names.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from draftheads.bench.quality import Agreement
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import ALL, COLUMNS, Interval, Row, markdown_table, setting_in_words
from draftheads.bench.timing import PLAIN
from draftheads.errors import DataError
from draftheads.heads import head_methods
from draftheads_papers.options import table_path

Measured = Literal["rows", "drafting", "accuracy", "losses"]
Cells = dict[str, dict[str, Any]]  # numbers by row and column
Block = str | tuple[list[str], list[list[str]]]  # sentences, or the headings and lines of a table


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper."""

    name: str
    title: str
    source: str  # the paper, with the number of the table
    needs: str  # models, heads and questions of the paper
    note: str = ""  # how this differs from the paper
    training: str = ""  # how the variants differ from the paper's heads; not shown where none is trained
    heads: tuple[str, ...] = ()  # that are compared; read_table trains those that are variants, and no other variants
    shared: Mapping[str, Any] = field(default_factory=dict)  # settings of training of all variants
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings that differ, see options_of
    all_methods: bool = False  # every architecture is a variant, too; those of other packages included
    prompts: str = "tasks"
    categories: tuple[str, ...] = ()
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})  # settings of each comparison
    draft_model: str = ""  # a smaller model that is compared, too
    transformers: bool = False  # whether transformers is compared, too
    quality: tuple[str, ...] = ()
    judge: Mapping[str, Any] = field(default_factory=dict)  # arguments of Judge
    load: Mapping[str, Any] = field(default_factory=dict)  # of draftheads.load, such as precision
    measured: Measured = "rows"  # what the cells are from: a comparison, times of drafting, accuracy or losses by head
    rows: tuple[str, ...] = ("name",)  # what names a row: name, run, or settings such as tree
    columns: str = "values"  # what names a column: part, a setting such as epsilon, or values
    values: tuple[str, ...] = ("speedup",)  # numbers of a row, or measures of quality
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)  # further columns: of others, their mean
    over_columns: tuple[str, ...] = ()  # values that have one column: of all parts, or their mean over the columns
    beside: tuple[str, ...] = ()  # values that are not in the paper's table, which explain those that are
    relative: tuple[str, ...] = ()  # columns that have another one beside them: their ratio to those of a row
    relative_to: str = ""  # the row
    # of the paper: by model, row and column, the first model's beside ours
    published: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            len(self.runs) > 1 and "run" not in self.rows
        ):  # rows of one would replace those of another, plain decoding too
            raise ValueError("it has several runs, but rows are not named by run")

    @property
    def has_text_stage(self) -> bool:
        """Whether variants are trained on plain text before chats."""
        return self.shared.get("recipe") == "mlp-speculator"

    def settings(self, run: str, **changes: Any) -> BenchSettings:
        return BenchSettings(**{"trees": ("best",), **self.runs[run], **changes})

    @property
    def paper(self) -> str:
        """Whose table it is; its name in :data:`BASELINES`, if it is one of the papers."""
        return self.source.partition(",")[0]

    def row_name(self, label: str) -> str:
        """The name of a row, in the paper's words where it has others."""
        words = _ROWS.get(self.paper, {})
        return ", ".join(filter(None, (words.get(part, part) for part in label.split(", "))))


def read_table(name: str) -> PaperTable:
    """A table by its name, or of a file."""
    path = table_path(name)
    try:
        values = _values(path)
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
        if table.heads:
            trained = {name: table.variants[name] for name in table.heads if name in table.variants}
            table = replace(table, variants=trained, heads=tuple(name for name in table.heads if name not in trained))
        if "speedup" in table.values:  # it is tokens/step divided by the overhead
            beside = (name for name in ("tokens_per_step", "overhead") if name not in table.values)
            table = replace(table, beside=(*beside, *table.beside))
        for run in table.runs:
            table.settings(run)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"is not a table: {error}", path=path) from error
    if table.measured not in get_args(Measured):
        raise DataError(f"measured is {table.measured!r}; choose among {', '.join(get_args(Measured))}", path=path)
    return table


def _values(path: Path) -> dict[str, Any]:
    """The fields in a file, and those of the table that it extends."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return {**_values(table_path(values.pop("extends"))), **values} if "extends" in values else values


def cells_of(table: PaperTable, rows: Sequence[Row], number: Callable[[Row, str], Any] = Row.number) -> Cells:
    """The numbers of a comparison, as the table arranges them; ``number`` finds those of a row.

    Sampled texts differ by chance, so agreement with plain decoding is left out there.
    """
    cells: Cells = {}
    over_columns: dict[tuple[str, str], list[float]] = {}  # by row and value
    by_part = table.columns == "part"
    for row in sorted(rows, key=lambda row: by_part and row.part == ALL):  # all parts together come last
        if row.part != ALL and not by_part:
            continue
        label = ", ".join(filter(None, (_facet(row, name) for name in table.rows)))
        column = "" if table.columns == "values" else _facet(row, table.columns)
        for value in (*table.values, *table.beside):
            found = None if row.settings.get("temperature") and value in Agreement.names else number(row, value)
            if found is None or (row.name == PLAIN and not column and table.columns != "values"):
                continue
            word = WORDS.get(value, value)
            if value in table.over_columns or (by_part and value in table.beside):
                if not by_part or row.part == ALL:
                    over_columns.setdefault((label, word), []).append(found)
                continue
            is_named = len(table.values) > 1 or not column or value in table.beside
            cells.setdefault(label, {})[" ".join(filter(None, (column, word if is_named else "")))] = found
    for (label, name), numbers in over_columns.items():
        cells.setdefault(label, {})[name] = numbers[0] if len(numbers) == 1 else sum(numbers) / len(numbers)
    _add_columns(table, cells)
    return cells


def intervals_of(table: PaperTable, rows: Sequence[Row]) -> Cells:
    """The intervals of :func:`cells_of`; means and ratios of columns have none."""
    plain = replace(table, means={}, relative=())
    over = {value for value in table.over_columns if table.columns != "part"}  # means over the columns
    return cells_of(plain, rows, lambda row, value: None if value in over else row.interval(value))


def _add_columns(table: PaperTable, cells: Cells) -> None:
    """Adds means of columns, and ratios to the row that others are relative to."""
    ends = [f" {WORDS.get(value, value)}" if len(table.values) > 1 else "" for value in table.values]
    for line, (name, of), end in product(cells.values(), table.means.items(), ends):
        if line.keys() >= {column + end for column in of}:
            line[name + end] = sum(line[column + end] for column in of) / len(of)
    of_one = cells.get(table.relative_to, {})
    for line, column in product(cells.values(), table.relative):
        if column in line and column in of_one:
            line[f"{column} ÷ {table.relative_to}"] = line[column] / of_one[column]


# numbers of a row as the papers call them
WORDS = {**{column.name: column.heading for column in COLUMNS}, "accepted_per_step": "accepted/step"}


# what the papers call rows, by the paper; and whose plain decoding their speeds are over
_HEADS = {"medusa": "Medusa", "hydra": "Hydra", "hydra++": "Hydra++", "eagle": "EAGLE", "amphista": "Amphista"}
_ROWS = {
    "Medusa": {**_HEADS, "plain": "Baseline", "medusa-1": "Medusa-1", "medusa-2": "Medusa-2"},
    "Hydra": _HEADS,
    "Amphista": {**_HEADS, "plain": "Vanilla", "draft-model": "Spec-decoding", "lookahead": "Lookahead"},
    "MLP Speculator": {"plain": "k = 0", "mlp-speculator": ""},
}
BASELINES = {
    "Medusa": "vanilla Hugging Face, which is slower",
    "Hydra": "standard autoregressive decoding, whose code is not named",
    "Amphista": "vanilla autoregressive decoding, whose code is not named",
    "MLP Speculator": "IBM's own inference code, compiled and highly optimised",
}
# units of columns, by a word in their names
_UNITS = {"agreement": "%", "ROUGE": "%", "gsm8k": "%", "judge": "of 10", "overhead": "×"}
_UNIT_OF_ALL = {"drafting": "ms", "accuracy": "%"}  # by what is measured


def _facet(row: Row, name: str) -> str:
    """What names a row or a column."""
    if name in ("name", "part"):
        return str(getattr(row, name))
    return setting_in_words(row.settings, name)


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


def blocks_of(
    table: PaperTable, cells: Cells, intervals: Cells | None = None, *, only_measured: bool = False
) -> Iterator[Block]:
    """Sentences and tables: our numbers, with those of the paper in brackets, and then its other numbers.

    With ``only_measured``, no row and no column has numbers of the paper alone.
    """
    (first, own), *others = list(table.published.items()) or [("", {})]
    theirs = list(dict.fromkeys(name for row in own.values() for name in row))
    columns = _in_order_of(list(dict.fromkeys(name for row in cells.values() for name in row)), theirs)
    labels = _in_order_of(list(cells), list(own))
    if only_measured:
        columns = [name for name in columns if any(name in row for row in cells.values())]
        labels = [label for label in labels if label in cells]
    lines = []
    for label in labels:
        ours, bounds, published = (each.get(label, {}) for each in (cells, intervals or {}, own))
        lines.append(
            [
                table.row_name(label),
                *(_cell(ours.get(name), published.get(name), bounds.get(name)) for name in columns),
            ]
        )
    unit = _UNIT_OF_ALL.get(table.measured, "")
    if len(table.values) == 1 and table.columns != "values":
        unit = WORDS.get(table.values[0], table.values[0])
    yield [unit, *map(_with_unit, columns)], lines
    yield f"In brackets: {table.source}, {first}." if own else "No numbers are published that could stand beside these."
    for name, published in others if not only_measured else ():
        names = list(dict.fromkeys(column for row in published.values() for column in row))
        yield f"The paper, {name}:"
        yield (
            [unit, *map(_with_unit, names)],
            [
                [table.row_name(label), *(_number(row.get(column)) for column in names)]
                for label, row in published.items()
            ],
        )
    if table.note:
        yield table.note.strip()


def markdown_of(blocks: Iterable[Block]) -> Iterator[str]:
    """Sentences and tables as lines of Markdown."""
    for block in blocks:
        yield from (block,) if isinstance(block, str) else markdown_table(*block)
        yield ""


def _in_order_of(ours: list[str], papers: list[str]) -> list[str]:
    """Ours, those that a paper has in its order; its others come last.

    >>> _in_order_of(["all", "b", "a", "mean"], ["a", "b", "c"])
    ['all', 'a', 'b', 'mean', 'c']
    """
    common = iter([name for name in papers if name in ours])
    return [next(common) if name in papers else name for name in ours] + [name for name in papers if name not in ours]


def _with_unit(column: str) -> str:
    unit = next((unit for word, unit in _UNITS.items() if word in re.split(r"[ -]", column)), "")
    return ", ".join(filter(None, (column, unit)))


def _cell(ours: Any, theirs: Any, interval: Interval | None = None) -> str:
    """A cell.

    >>> _cell(1.5, 2), _cell(None, "2.1"), _cell(1234.5, None), _cell(1.5, None, (1.25, 1.75))
    ('1.50 (2)', '(2.1)', '1234.5', '1.50 [1.25-1.75]')
    """
    bounds = "" if interval is None or interval[0] == interval[1] else f"[{'-'.join(map(_number, interval))}]"
    return " ".join(filter(None, (_number(ours), bounds, f"({_number(theirs)})" if theirs is not None else "")))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else str(value)
