"""``draftheads distill``: runs a distillation and shows how it goes."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from draftheads.cli.show import quiet_transformers
from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.journal import manifest_path
from draftheads.distill.local import EngineSource
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import Outcome, distill
from draftheads.distill.source import Source
from draftheads.loading import load
from draftheads.tree import Tree

_SECONDS_BETWEEN_LINES = 30.0  # where the output is no terminal
_SECONDS_OF_SPEED = 600.0  # that the time left is estimated from: answers end in bursts


def run(options: DistillOptions) -> None:
    """Answers, then prints what came of it."""
    console = Console()
    quiet_transformers()
    with _Display(console) as display:
        outcome = distill(options, lambda: _source(options, display), display)
    if outcome.was_complete:
        console.print(f"{options.out} was complete already; nothing was left to do", soft_wrap=True)
    console.print(_table(outcome))
    console.print(f"wrote {options.out} and {manifest_path(options.out).name}", soft_wrap=True)


def _source(options: DistillOptions, display: "_Display") -> Source:
    if options.endpoint is not None:
        return EndpointSource(options)
    display.stage(f"loading {options.model}")
    engine = load(
        options.model,
        options.head,
        tree=None if options.chain is None else Tree.chain(options.chain),
        precision=options.precision,
        max_batch_size=options.batch_size,
    )
    return EngineSource(engine, options)


class _Display:
    """A bar in a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_SECONDS_OF_SPEED,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=None, speed="")
        self.started = self.last_line = time.monotonic()
        self.first: int | None = None  # conversations that were done when the first progress came

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def stage(self, what: str) -> None:
        """Something new begins."""
        self.started = self.last_line = time.monotonic()
        self.bar.reset(self.task, description=what, total=None, speed="")
        if not self.console.is_terminal:
            self.console.print(what, soft_wrap=True)

    def progress(self, num_done: int, total: int, num_tokens: int) -> None:
        """So many conversations are done, and so many tokens were generated."""
        if self.first is None:
            self.first = num_done
            self.bar.reset(self.task, completed=num_done)  # what was done before says nothing of the speed
        now = time.monotonic()
        seconds = max(now - self.started, 1e-3)
        speed = f"{num_tokens / seconds:,.0f} tokens/s"
        self.bar.update(self.task, completed=num_done, total=total, speed=speed)
        if not self.console.is_terminal and now - self.last_line >= _SECONDS_BETWEEN_LINES:
            self.last_line = now
            left = _time_left(seconds, num_done - self.first, total - num_done)
            self.console.print(f"{num_done:,} of {total:,} conversations, {speed}{left}", soft_wrap=True)


def _time_left(seconds: float, num_done: int, num_left: int) -> str:
    """In words; nothing where nothing is done yet.

    >>> _time_left(60.0, 10, 100), _time_left(60.0, 0, 100)
    (', 10 min left', '')
    """
    return f", {seconds / num_done * num_left / 60:,.0f} min left" if num_done else ""


def _table(outcome: Outcome) -> Table:
    """What came of a run; counts of nothing are left out."""
    counts, found = outcome.counts, outcome.survey
    rows = {
        "conversations": counts.num_records,
        "answers": counts.num_answers,
        "cut off by --max-new-tokens": counts.num_unfinished,
        "shortened: the next turn was too long, or not made up": counts.num_shortened,
        "duplicate prompts left out": found.num_duplicates,
        "made-up questions left out: asked before": counts.num_repeated,
        "prompts left out: longer than the model allows": counts.num_too_long,
        "made-up questions left out: empty or without an end": counts.num_no_question,
        "tokens": counts.num_tokens,
    }
    table = Table("", "number")
    table.columns[1].justify = "right"
    for what, number in rows.items():
        if number or what == "conversations":
            table.add_row(what, f"{number:,}")
    table.add_row("tokens/s", f"{counts.tokens_per_second:,.1f}")
    if counts.num_steps:
        table.add_row("tokens/step", f"{counts.tokens_per_step:.2f}")
    return table
