"""A comparison on a terminal: the table, a bar of the parts of a step, and sentences."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.bench.table import PARTS, Column, Row
from draftheads.bench.timing import PLAIN, STOCK
from draftheads.decode.engine import Engine
from draftheads.settings import ROUNDED_BITS
from draftheads.utils.counts import counted

NEAR_TIES = """\
In bf16, adding numbers in another order changes their last bits. Then one of
two tokens that are nearly as likely can replace the other: with heads, and
also between transformers and plain. "worst margin" is the largest such gap
(in fp32 logits). --precision fp32 prevents this."""
ROUNDED = "transformers computes in {}, another model than {}: its texts may differ."
DIFFERENT = "Texts differ. They should be equal in this precision: please report it."
_BAR_CELLS = 32
_NAME_CELLS = 30  # of a table's first column; longer names are folded
_LEAST_NAME_CELLS = 12
_BAR_NAME_CELLS = 12
_TREE_CELLS = 14  # of a description of a tree, which is folded
_BREAKS = re.compile(r"(?<=\S) (?=\S)|(?<=[/_])(?=\w)")  # where a heading goes on in the next line
# each part has a sign of its own, so that bars can be read without colours
_SIGNS = dict(zip(PARTS, (("▒", "green"), ("█", "blue"), ("░", "yellow")), strict=True))


def print_table(rows: Sequence[Row], columns: Sequence[Column], console: Console) -> None:
    print_lines(
        [column.heading for column in columns], [[column.cell(row) for column in columns] for row in rows], console
    )


def print_lines(headings: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> None:
    """Tables that fit the terminal, each with the first column, the names of the rows, and as many others as fit.

    Headings break at blanks, and long cells of text are folded.
    """
    broken = [_BREAKS.sub("\n", heading) for heading in headings]
    widths = [
        max(map(len, "\n".join([heading, *(line[column] for line in lines)]).splitlines()))
        for column, heading in enumerate(broken)
    ]
    widths[0] = min(_NAME_CELLS, widths[0])
    widths = [
        min(_TREE_CELLS, width) if heading == "tree" else width for heading, width in zip(headings, widths, strict=True)
    ]
    room = console.width - 2 - sum(2 + width for width in widths[1:])
    if room >= _LEAST_NAME_CELLS:  # one table, if only names have to be folded for it
        widths[0] = min(widths[0], room)
    columns = list(range(1, len(headings)))
    while columns:
        shown = [0]
        room = console.width - widths[0] - 2
        while columns and (len(shown) == 1 or room >= 2 + widths[columns[0]]):
            column = columns.pop(0)
            room -= 2 + widths[column]
            shown.append(column)
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for column in shown:
            justify: Literal["right", "left"] = "right" if column else "left"
            table.add_column(broken[column], justify=justify, overflow="fold", vertical="bottom", width=widths[column])
        for line in lines:
            table.add_row(*(Text(line[column]) for column in shown))
        console.print(table)
        if columns:
            console.print()


def print_parts(rows: Sequence[Row], console: Console) -> None:
    """A bar for each row: the parts of its step, in milliseconds."""
    longest = max(sum(row.parts.values()) for row in rows)
    console.print("Parts of a step, milliseconds")
    for row in rows:
        label = row.name if len(row.name) <= _BAR_NAME_CELLS else f"…{row.name[1 - _BAR_NAME_CELLS :]}"
        parts = row.parts.values()
        numbers = f"{sum(parts):.1f} = {' + '.join(f'{part:.1f}' for part in parts)}"
        console.print(Text(f"{label:<{_BAR_NAME_CELLS}} ").append(bar(row.parts, longest)).append(f" {numbers}"))
    legend = Text(" " * (_BAR_NAME_CELLS + 1))
    for part, (sign, style) in _SIGNS.items():
        legend.append(sign, style).append(f" {part}  ")
    legend.rstrip()
    console.print(legend)
    console.print()


def bar(parts: Mapping[str, float], longest: float, *, cells: int = _BAR_CELLS) -> Text:
    """The parts side by side; one of ``longest`` milliseconds fills all cells.

    >>> bar({"drafting": 2.0, "verification": 5.0, "accept and rest": 1.0}, 8.0, cells=8).plain
    '▒▒█████░'
    """
    text, end = Text(), 0.0
    for part, milliseconds in parts.items():
        sign, style = _SIGNS[part]
        end += milliseconds
        text.append(sign * (round(cells * end / max(longest, 1e-9)) - len(text)), style)
    return text


def explain_texts(table: Sequence[Row], console: Console, *, precision: str, stock_precision: str) -> None:
    """Why texts differ, where they do."""
    different = {row.name for row in table if row.num_different}
    if precision in ROUNDED_BITS and STOCK in different:
        different.remove(STOCK)
        console.print(ROUNDED.format(stock_precision, precision) + "\n")
    if different:
        console.print((NEAR_TIES if precision == "bf16" else DIFFERENT) + "\n")


def tree_sentence(name: str, engine: Engine) -> str:
    """Which tree is drafted for one request, and why."""
    planner = engine.planner
    if planner is None:
        return f"{name} always drafts the same tree."
    way, nodes, rate = planner.choose(1, follows=False)
    if way is None:
        copies = ", but copies from the text" if planner.extra_nodes else ""
        return (
            f"With one request {name} drafts nothing{copies}: on this machine verifying draft tokens takes more time "
            "than it saves."
        )
    kind = "a fixed tree" if way.kind == "static" else "growing trees"
    tokens = 1 + way.gains[nodes - 1]
    steps = tokens / rate / float(planner.costs.passes(1))
    return (
        f"With one request {name} drafts {kind} of {counted(nodes, 'node')}: a step then costs "
        f"{steps:.1f} plain steps and gives about {tokens:.1f} tokens."
    )


def copies_sentence(row: Row) -> str:
    """How many accepted draft tokens were copied."""
    were = "was" if row.num_copied == 1 else "were"
    accepted = counted(row.num_drafted, "accepted draft token")
    return f"Of its {accepted}, {row.num_copied} {were} copied from the text so far."


def slower_sentences(table: Sequence[Row], *, precision: str, copy: bool, model: str) -> list[str]:
    """A sentence for each head that is slower than plain decoding, with what to try."""
    other = [*(["--precision int8"] if precision not in ROUNDED_BITS else []), *(["--no-copy"] if copy else [])]
    trials = f"Try {' or '.join(other)}, or" if other else "To change that,"
    return [
        f"{row.name} is slower than plain decoding here ({row.speedup:.2f} ×). {trials} measure its trees on your "
        f"own prompts: draftheads tune {model} {row.name} --prompts FILE"
        for row in table
        if row.name not in (STOCK, PLAIN) and round(row.speedup, 2) < 1
    ]
