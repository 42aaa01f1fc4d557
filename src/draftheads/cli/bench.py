"""``draftheads bench``: draft heads, and drafters without a head, side by side with one engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from draftheads.bench.compare import MIN_PROMPTS, compare_heads
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Row, columns, defaults_sentence, markdown, remarks, verdict
from draftheads.cli.options.bench import BenchOptions
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import check_json_path, quiet_transformers, write_json
from draftheads.cli.show_comparison import print_table
from draftheads.data.records import own_prompts, prompts_in
from draftheads.errors import InvalidSettings
from draftheads.utils.files import check_writable, write_atomic


def run(options: BenchOptions) -> None:
    """Compares and prints."""
    console = Console(highlight=False)
    quiet_transformers()
    if options.limit is not None and options.limit < MIN_PROMPTS:
        raise InvalidSettings(f"--limit is {options.limit}; it must be at least {MIN_PROMPTS}")
    check_json_path(options.json)
    prompts = prompts_in(options.prompts or own_prompts("demo"))
    out = None if options.out is None else check_writable(options.out / "bench.json").parent
    with ProgressDisplay(console) as progress:
        comparison = compare_heads(
            options.model,
            options.heads,
            prompts[: options.limit],
            draft_model=options.draft_model,
            corpus=options.corpus,
            settings=options.settings,
            **options.load.given(),
            fresh=options.fresh,
            progress=progress,
        )
    show(console, comparison.rows, options.settings, comparison.record["num_prompts"])
    record = {**comparison.record, "prompts": "/".join(options.prompts.parts[-2:]) if options.prompts else None}
    if out is not None:
        _write(console, out, record, comparison.rows, options.settings)
    write_json(options.json, record)


def _write(console: Console, out: Path, record: dict[str, Any], rows: Sequence[Row], settings: BenchSettings) -> None:
    write_atomic(out / "bench.json", json.dumps(record, indent=1).encode())
    table = out / "bench.md"
    first = defaults_sentence(rows)
    lines = [*([] if first is None else [first, ""]), *markdown(rows, settings, record["num_prompts"])]
    write_atomic(table, "".join(line + "\n" for line in lines).encode())
    console.print(f"wrote {table}", soft_wrap=True)
    write_pages(console, out, "bench")


def show(console: Console, rows: Sequence[Row], settings: BenchSettings, num_prompts: int) -> None:
    """The speed with the defaults, a table of each kind of columns, so that they fit a terminal, and the verdict.

    The files have the errors, too.
    """
    if (first := defaults_sentence(rows)) is not None:
        console.print(first, end="\n\n", markup=False)
    name, *others = columns(settings, first=rows[0].name, errors=False)
    for kind in ("greedy", "sampled", "speed"):
        if chosen := [column for column in others if column.kind == kind]:
            print_table(rows, [name, *chosen], console)
            console.print()
    different = {row.name: row.num_different for row in rows if row.num_different}
    if different:
        numbers = ", ".join(f"{name} {number}" for name, number in different.items())
        console.print(f"answers that differ from plain decoding: {numbers}")
    for sentence in (verdict(rows, settings, num_prompts), *remarks(rows, settings)):
        console.print(sentence.replace("`", ""), markup=False)
