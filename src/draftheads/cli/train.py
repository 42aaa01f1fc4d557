"""``draftheads train`` and what ``train-joint`` shares with it: defaults, and tables of the results."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.report import write_pages
from draftheads.cli.show import quiet_transformers
from draftheads.train import processes
from draftheads.train.options import RunOptions, TrainOptions
from draftheads.train.recipes import recipe
from draftheads.train.report import Report, mean_loss
from draftheads.train.run import train
from draftheads.train.summary import verdict_of
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress


def run(options: TrainOptions) -> None:
    """Trains, then prints a table of the heads' accuracy."""
    run_and_print(options, train, lambda _: [f"saved in {options.out}"])


def run_and_print(
    options: RunOptions, train: Callable[[Any, Progress], Report | None], more: Callable[[Any], Sequence[str | Table]]
) -> None:
    """Trains, prints the results and writes the page; of several processes only the first one prints.

    ``train`` returns the report, in the first process at least; ``more`` is printed after the table of the heads.
    """
    quiet_transformers()
    console = Console(quiet=not processes.is_first())
    if options.recipe is not None:
        console.print(recipe_table(options))
    with ProgressDisplay(console) as display:
        report = train(options, display)
    if report is not None and processes.is_first():
        print_results(console, report)
        for part in more(report):
            console.print(part, soft_wrap=isinstance(part, str))
        write_pages(console, options.out, "training")


def print_results(console: Console, report: Report) -> None:
    """Loss, accuracy and expected tokens per step on held-out text, speed of the training, and what to make of it."""
    title = f"{report.method} for {report.model_id}: held-out text"
    table = Table("head", "held-out loss", "top-1", "top-3", "top-10", title=title)
    rows = zip(report.losses, report.top1, report.top3, report.top10, strict=True)
    for i, (loss, *accuracies) in enumerate(rows):
        table.add_row(str(i + 1), f"{loss:.3f}", *(f"{accuracy:.1%}" for accuracy in accuracies))
    if len(report.losses) > 1:
        table.add_section()
        table.add_row("mean", f"{mean_loss(report.losses):.3f}", "", "", "")
    console.print(table)
    console.print(
        f"expected tokens per step on held-out text: chain {report.tokens_per_step_chain:.2f}, "
        f"tree of {counted(len(report.tree) + 1, 'node')} {report.tokens_per_step_tree:.2f}"
    )
    reading, training = report.reading_seconds, report.training_seconds
    console.print(
        f"{counted(report.num_steps, 'step')}; {report.tokens_per_second:,.0f} tokens of text per second; this run "
        f"took {reading + training:,.0f} s: {reading:,.0f} s for hidden states, {training:,.0f} s for training",
        soft_wrap=True,
    )
    for line in report.left_out:
        console.print(line, soft_wrap=True, markup=False)
    console.print(verdict_of(vars(report)), soft_wrap=True)


def recipe_table(options: RunOptions) -> Table:
    """All settings of the recipe with their sources, and the values that replace them."""
    assert options.recipe is not None
    chosen = recipe(options.recipe, tunes_model=not isinstance(options, TrainOptions))
    table = Table("option", "value", "source", title=f"recipe {options.recipe}: {chosen.source}")
    values = options.flat()
    for name, value in chosen.settings.items():
        now = values[name]
        table.add_row(name, str(value) if now == value else f"{now} (the recipe has {value})", chosen.sources[name])
    return table
