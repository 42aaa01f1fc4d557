"""``draftheads demo``: one answer as it is decoded, then a small comparison of speed and text in a time box."""

import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.text import Text

from draftheads.bench.contenders import names_of
from draftheads.bench.demo import Demo, Scorer, load_demo
from draftheads.bench.options import DemoOptions
from draftheads.bench.table import SPEED_COLUMNS, Row
from draftheads.bench.timing import PLAIN, STOCK, Timings, take_turns
from draftheads.bench.verdict import speed_sentence
from draftheads.cli.progress_display import ProgressDisplay, error_console
from draftheads.cli.show import DRAFTED, check_json_path, quiet_transformers, show_stream, write_json
from draftheads.cli.show_comparison import (
    copies_sentence,
    explain_texts,
    print_parts,
    print_table,
    slower_sentences,
    tree_sentence,
)
from draftheads.data.records import TextPrompt, own_prompts, prompts_in
from draftheads.decode.engine import Engine
from draftheads.errors import DataError, InvalidSettings
from draftheads.settings import ROUNDED_BITS
from draftheads.utils.counts import counted
from draftheads.utils.progress import counted_stage
from draftheads.utils.provenance import provenance

# fields of a row in the JSON object
_FIELDS = (
    *("tokens_per_second", "tokens_per_step", "speedup", "speedup_quartiles", "speedup_over_transformers"),
    *("num_different", "worst_margin", "num_drafted", "num_copied"),
)


def run(options: DemoOptions) -> None:
    if not options.seconds > 0:
        raise InvalidSettings(f"seconds is {options.seconds:g}; it must be above 0")
    check_json_path(options.json)
    names_of(options.heads, taken=(PLAIN, STOCK))  # raises now what would fail after minutes
    rounded = options.load.precision in ROUNDED_BITS
    console = Console(highlight=False)
    prompts = prompts_in(options.prompts or own_prompts("demo"))[: options.limit]
    if not prompts:
        raise DataError("holds no prompt", path=options.prompts)
    quiet_transformers()
    with ProgressDisplay(error_console(), transient=True) as progress:
        progress.stage(f"loading {options.model} and {', '.join(options.heads) or 'no head'}")
        demo = load_demo(
            options.model,
            options.heads,
            **options.load.given(),
            copy=options.copy,
        )
    encoded = [demo.plain.encode(prompt) for prompt in prompts]
    start = time.perf_counter()
    if options.stream and demo.heads:
        _show_one(prompts[0], *next(iter(demo.heads.items())), options.max_new_tokens, console)
    timings = _timed(demo, encoded, options, max_seconds=options.seconds - (time.perf_counter() - start))
    rows = demo.rows(timings, encoded, None if rounded else Scorer(demo.stock))
    if heads := [row for row in rows if row.name in demo.heads]:
        best = max(heads, key=lambda row: row.speedup)
        given = "the defaults" if options.copy else "these options"
        first = speed_sentence(best.name, best.speedup, best.speedup_error, given=given)
        console.print(first, end="\n\n", markup=False)
    print_table(rows, SPEED_COLUMNS[:-1] if rounded else SPEED_COLUMNS, console)
    longest = counted(timings.max_new_tokens, "token")
    console.print(
        f"{counted(timings.num_groups, 'prompt')}, answers of at most {longest}, {timings.seconds:.0f} s in all\n"
    )
    explain_texts(rows, console, precision=demo.plain.model.precision, stock_precision=demo.stock.precision)
    shown, sentences = _details(rows, demo)
    print_parts(shown, console)
    sentences += slower_sentences(rows, precision=options.load.precision, copy=options.copy, model=options.model)
    for sentence in sentences:
        console.print(sentence, markup=False)
    if options.json is not None:
        write_json(options.json, _record(options, demo, timings, rows, shown=shown, sentences=sentences))


def _show_one(prompt: TextPrompt, name: str, engine: Engine, max_new_tokens: int, console: Console) -> None:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    colours = Text.assemble("; draft tokens are ", ("green", DRAFTED)) if console.color_system else ""
    console.print(Text.assemble((text, "bold"), f"   ({name}", colours, ")\n"), soft_wrap=True)
    (request,) = engine.requests([prompt], max_new_tokens=max_new_tokens)
    show_stream(engine.run([request]), request, engine.model.tokenizer, console)
    console.print()


def _timed(demo: Demo, prompts: Sequence[list[int]], options: DemoOptions, *, max_seconds: float) -> Timings:
    ways = demo.ways(transformers=options.transformers)
    with ProgressDisplay(error_console(), transient=True) as progress:
        advance = counted_stage(progress, "answering", len(ways) * len(prompts))
        return take_turns(
            ways,
            [[prompt] for prompt in prompts],
            max_new_tokens=options.max_new_tokens,
            max_seconds=max_seconds,
            on_answer=advance,
        )


def _details(rows: Sequence[Row], demo: Demo) -> tuple[list[Row], list[str]]:
    """The rows whose steps are shown by part (plain decoding's, the fastest head's), and sentences about that head."""
    shown = [row for row in rows if row.name == PLAIN]
    heads = [row for row in rows if row.name in demo.heads]
    if not heads:
        return shown, []
    best = max(heads, key=lambda row: row.tokens_per_second)
    return [*shown, best], [tree_sentence(best.name, demo.heads[best.name]), copies_sentence(best)]


def _record(
    options: DemoOptions,
    demo: Demo,
    timings: Timings,
    rows: Sequence[Row],
    *,
    shown: Sequence[Row],
    sentences: list[str],
) -> dict[str, object]:
    rounded = options.load.precision in ROUNDED_BITS
    return {
        "model": options.model,
        "precision": options.load.precision if rounded else demo.stock.precision,
        "threads": torch.get_num_threads(),
        "copy": options.copy,
        "num_prompts": timings.num_groups,
        "max_new_tokens": timings.max_new_tokens,
        "seconds": timings.seconds,
        "rows": [
            {"method": row.name, "identical": row.num_different == 0, **{name: getattr(row, name) for name in _FIELDS}}
            for row in rows
        ],
        "step_milliseconds": {row.name: row.parts for row in shown},
        "sentences": sentences,
        "provenance": provenance(),
    }
