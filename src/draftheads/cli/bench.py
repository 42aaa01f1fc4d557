"""``draftheads bench``: draft heads, and drafters without a head, side by side with one engine."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from draftheads.bench.compare import MIN_PROMPTS, compare_heads
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Row, columns, markdown
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.cli.show_comparison import print_table
from draftheads.data.records import own_prompts, prompts_in
from draftheads.errors import InvalidSettings, StorageError
from draftheads.files import user_path, write_atomic
from draftheads.loading import Precision


@dataclass(frozen=True)
class BenchOptions:
    """Compare draft heads, and drafters without a head, on the same prompts with trees of the same size.

    Each head drafts on the tree of that size with the most tokens per step, found on built-in prompts. An interrupted
    comparison continues with the same command.
    """

    model: tyro.conf.Positional[str] = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads: bundled ones' names, folders or Hugging Face ids; prompt-lookup and lookahead need no training.
    Default: these two and all bundled heads of the model."""
    chat_template: str | None = None
    """Chat template in place of the heads' or the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    draft_model: str | None = None
    """Also compare a smaller model with the same tokenizer on growing trees: a folder or a Hugging Face id."""
    prompts: Path | None = None
    """A JSONL file of prompts to answer ("prompt", "messages" or "turns" in each line) instead of six built-in ones."""
    limit: int | None = None
    """Use only the first LIMIT prompts."""
    out: Path | None = None
    """Write bench.json, bench.md (the table) and bench.html (with plots) into this folder."""
    settings: tyro.conf.OmitArgPrefixes[BenchSettings] = field(default_factory=BenchSettings)
    precision: Precision = "auto"
    """Number format of the model; auto is bf16 if the machine supports it, else fp32."""
    fresh: bool = False
    """Ignore the tokens per step that an earlier comparison saved. Needed after a change of the code: the saved
    numbers are found again by model, drafter, settings, machine and versions only."""


def run(options: BenchOptions) -> None:
    """Compares and prints; the last line is one JSON object."""
    console = Console(highlight=False)
    quiet_transformers()
    if options.limit is not None and options.limit < MIN_PROMPTS:
        raise InvalidSettings(f"--limit is {options.limit}; it must be at least {MIN_PROMPTS}")
    prompts = prompts_in(options.prompts or own_prompts("demo"))
    out = user_path(options.out) if options.out else None
    if out is not None:
        _make(out)
    with ProgressDisplay(console) as progress:
        comparison = compare_heads(
            options.model,
            options.heads,
            prompts[: options.limit],
            chat_template=options.chat_template,
            draft_model=options.draft_model,
            settings=options.settings,
            precision=options.precision,
            fresh=options.fresh,
            progress=progress,
        )
    show(console, comparison.rows, options.settings)
    record = {**comparison.record, "prompts": "/".join(options.prompts.parts[-2:]) if options.prompts else None}
    if out is not None:
        _write(console, out, record, comparison.rows, options.settings)
    print(json.dumps(record))


def _make(out: Path) -> None:
    """Makes the folder, before the long work.

    Raises:
        StorageError: the folder cannot be made, or not written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror}; choose another --out") from None


def _write(console: Console, out: Path, record: dict[str, Any], rows: Sequence[Row], settings: BenchSettings) -> None:
    write_atomic(out / "bench.json", json.dumps(record, indent=1).encode())
    table = out / "bench.md"
    write_atomic(table, "".join(line + "\n" for line in markdown(rows, settings, record["num_prompts"])).encode())
    console.print(f"wrote {table}", soft_wrap=True)
    write_pages(console, out, "bench")


def show(console: Console, rows: Sequence[Row], settings: BenchSettings) -> None:
    """A table of each kind of columns, so that they fit a terminal. The errors are in the files only."""
    name, *others = columns(settings, first=rows[0].name, errors=False)
    for kind in ("greedy", "sampled", "speed"):
        if chosen := [column for column in others if column.kind == kind]:
            print_table(rows, [name, *chosen], console)
            console.print()
    different = {row.name: row.num_different for row in rows if row.num_different}
    if different:
        numbers = ", ".join(f"{name} {number}" for name, number in different.items())
        console.print(f"answers that differ from plain decoding: {numbers} (near-ties, decided by rounding)")
